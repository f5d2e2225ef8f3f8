"""Products in INT8 on CPUs: weights by a scale for each channel of the output, inputs each token by
its own.

One integer for each value of the input is too coarse: a few values of a token are a hundred times
as large as the others and take the range for themselves. So inputs are two terms, integers and what
they leave over in integers of a finer scale, and both are multiplied at once as rows of one matrix.
A product of few rows waits for its weights, so the second row of each token costs little.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.config import CPU
from penstock.errors import ConfigError
from penstock.llm.models.products import AnyProduct, Small

# Of weights, and of inputs, which have one bit less and are kept without a sign: CPUs without VNNI
# add two products in 16 bits, and 2 x 127 x (63 + 64) fit.
MOST, MOST_OF_INPUTS, ZERO = 127.0, 63.0, 64
# By how much the second term is finer. It is what rounding leaves, so one half at most.
FINER_BY = 2 * MOST_OF_INPUTS
# The least that a range is taken for: of all zeros there is none.
SMALLEST = 1e-30
# The same as tensors, which torch takes sooner than numbers.
RANGE_OF_INPUTS, FINER, LEAST = map(torch.tensor, (MOST_OF_INPUTS, FINER_BY, SMALLEST))


@dataclass(frozen=True, slots=True)
class Int8Product:
    """x W^T + b, in FP32 outside."""

    # As torch packs it for this CPU, scales included.
    packed: Any
    bias: Tensor | None

    def __call__(self, x: Tensor | Small) -> Tensor:
        assert isinstance(x, Tensor)
        ranges = torch.maximum(x.abs().amax(1, keepdim=True), LEAST)
        scaled = x * (RANGE_OF_INPUTS / ranges)
        first = scaled.round()
        terms = torch.cat([first, scaled.sub_(first).mul_(FINER)])
        found, rest = _multiplied(terms, self.packed).chunk(2)
        found = found.add_(rest, alpha=1 / FINER_BY).mul_(ranges)
        return found if self.bias is None else found.add_(self.bias)


def int8_product(weight: Tensor, bias: Tensor | None) -> AnyProduct:
    ranges = weight.abs().amax(1, keepdim=True).clamp(min=SMALLEST)
    whole = (weight * (MOST / ranges)).round().to(torch.int8)
    # What inputs are divided by is multiplied in here; their ranges are when they are known.
    scales = ranges[:, 0].double() / (MOST * MOST_OF_INPUTS)
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    with warnings.catch_warnings():
        # That torch will have another type for these one day.
        warnings.simplefilter("ignore")
        small = torch._make_per_channel_quantized_tensor(whole, scales, zeros, 0)
        packed = torch.ops.quantized.linear_prepack(small, None)
    return Int8Product(packed, bias)


def check_int8(device: str, dtype: str = "int8") -> None:
    """ConfigError where torch cannot multiply so; logits beside INT4 are multiplied so as well."""
    if device != CPU:
        raise ConfigError([f"dtype {dtype}: '{device}' is no CPU; expected another one there"])
    try:
        found = int8_product(torch.eye(2), None)(torch.tensor([[1.0, -0.5]]))
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError([f"dtype {dtype}: torch cannot on this CPU: {reason}"]) from None
    assert torch.allclose(found, torch.tensor([[1.0, -0.5]]), atol=0.01), found


def _multiplied(terms: Tensor, packed: Any) -> Tensor:
    """Of integers, though they lie in FP32."""
    found: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
        terms, 1.0, ZERO, packed
    )
    return found
