"""INT8 linear layers on CPUs: weights with a scale per output channel, inputs with a scale per
token.

One integer per input value is too coarse: a few values of a token are a hundred times as large as
the others and take up the range. So inputs are the sum of two terms, integers and their rounding
errors as integers of a finer scale; both are multiplied at once, as rows of one matrix. With few
rows a GEMM is bound by reading weights, so the second row of each token costs little.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.config import CPU
from penstock.errors import ConfigError
from penstock.llm.models.linear import AnyLinear, Small

# Largest integers of weights and of inputs. Inputs have one bit less and are stored unsigned: CPUs
# without VNNI add two products in 16 bits, and 2 x 127 x (63 + 64) fits.
MOST, MOST_OF_INPUTS, ZERO = 127.0, 63.0, 64
# How much finer the second term is. It is a rounding error, so at most one half.
FINER_BY = 2 * MOST_OF_INPUTS
# Lower bound of a range, for inputs that are all zero.
SMALLEST = 1e-30
# The same as tensors, which torch takes faster than numbers.
RANGE_OF_INPUTS, FINER, LEAST = map(torch.tensor, (MOST_OF_INPUTS, FINER_BY, SMALLEST))


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """x W^T + b, with FP32 inputs and outputs."""

    # Weights as torch packs them for this CPU, scales included.
    packed: object
    bias: Tensor | None

    def __call__(self, x: Tensor | Small) -> Tensor:
        assert isinstance(x, Tensor)
        ranges = torch.maximum(x.abs().amax(1, keepdim=True), LEAST)
        scaled = x * (RANGE_OF_INPUTS / ranges)
        first = scaled.round()
        terms = torch.cat([first, scaled.sub_(first).mul_(FINER)])
        # Integers that are stored as FP32.
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        found, rest = multiply(terms, 1.0, ZERO, self.packed).chunk(2)
        whole: Tensor = found.add_(rest, alpha=1 / FINER_BY).mul_(ranges)
        return whole if self.bias is None else whole.add_(self.bias)


def int8_linear(weight: Tensor, bias: Tensor | None) -> AnyLinear:
    ranges = weight.abs().amax(1, keepdim=True).clamp(min=SMALLEST)
    whole = (weight * (MOST / ranges)).round().to(torch.int8)
    # Includes the inputs' constant divisor; their ranges are multiplied in at run time.
    scales = ranges[:, 0].double() / (MOST * MOST_OF_INPUTS)
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    with warnings.catch_warnings():
        # torch warns that this type is deprecated.
        warnings.simplefilter("ignore")
        small = torch._make_per_channel_quantized_tensor(whole, scales, zeros, 0)
        packed = torch.ops.quantized.linear_prepack(small, None)
    return Int8Linear(packed, bias)


def check_int8(device: str, dtype: str = "int8") -> None:
    """Raise ConfigError if torch has no INT8 GEMM here; the logits of INT4 need one too."""
    if device != CPU:
        text = f"dtype {dtype} runs on CPUs only; on {device} use bfloat16 or fp8"
        raise ConfigError([text])
    try:
        found = int8_linear(torch.eye(2), None)(torch.tensor([[1.0, -0.5]]))
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError([f"dtype {dtype}: torch cannot on this CPU: {reason}"]) from None
    assert torch.allclose(found, torch.tensor([[1.0, -0.5]]), atol=0.01), found
