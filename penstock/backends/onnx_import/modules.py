"""Layers with constant weights as modules of torch.nn, which fusion and the profiler know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

# Constant inputs; for others their rank, or None if it is unknown.
Known = Sequence[torch.Tensor | int | None]
IMAGE_RANK = 4


def build_module(op_type: str, attributes: Mapping[str, object], known: Known) -> nn.Module | None:
    """Return a module that computes the operator from its first input, or None."""
    build = BUILDERS.get(op_type)
    is_constant = all(isinstance(each, torch.Tensor) for each in known[1:])
    return build(dict(attributes), known) if build is not None and is_constant else None


def _weight(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _same_pads(attributes: Mapping[str, object], num: int) -> tuple[int, ...] | None:
    """Return the padding if it is the same before and after."""
    auto = attributes.get("auto_pad", "NOTSET")
    if auto not in ("NOTSET", "VALID"):
        return None
    pads = attributes.get("pads") if auto == "NOTSET" else None
    pads = pads or [0] * (2 * num)
    assert isinstance(pads, list)
    return tuple(pads[:num]) if pads[:num] == pads[num:] else None


def _pair(attributes: Mapping[str, object], name: str) -> tuple[int, int]:
    found = attributes.get(name) or (1, 1)
    assert isinstance(found, list | tuple)
    return found[0], found[1]


def _conv_pads(attributes: Mapping[str, object], weight: torch.Tensor) -> tuple[int, ...] | None:
    """Return the padding if it is the same before and after, whatever the size of the image."""
    size = weight.shape[2:]
    is_same = str(attributes.get("auto_pad", "")).startswith("SAME")
    if not is_same or any(length % 2 == 0 for length in size):
        return _same_pads(attributes, len(size))
    strides, dilations = (attributes.get(name) or [1] for name in ("strides", "dilations"))
    assert isinstance(strides, list) and isinstance(dilations, list)
    is_plain = {*strides, *dilations} == {1}
    return tuple(length // 2 for length in size) if is_plain else None


def _conv(attributes: dict[str, object], known: Known) -> nn.Module | None:
    weight, bias = known[1], known[2] if len(known) > 2 else None
    assert isinstance(weight, torch.Tensor)
    pads = _conv_pads(attributes, weight)
    if weight.dim() != IMAGE_RANK or pads is None or not weight.is_floating_point():
        return None
    groups = attributes.get("group", 1)
    assert isinstance(groups, int)
    with torch.device("meta"):
        conv = nn.Conv2d(
            weight.shape[1] * groups,
            weight.shape[0],
            tuple(weight.shape[2:]),
            _pair(attributes, "strides"),
            pads,
            _pair(attributes, "dilations"),
            groups,
            bias is not None,
        )
    conv.weight = _weight(weight)
    conv.bias = _weight(bias) if isinstance(bias, torch.Tensor) else None
    return conv


def _norm(attributes: dict[str, object], known: Known) -> nn.Module | None:
    scale, bias, mean, var = known[1:5]
    assert isinstance(mean, torch.Tensor)
    is_training = attributes.get("training_mode") or not attributes.get("spatial", 1)
    if known[0] != IMAGE_RANK or is_training or attributes.get("num_outputs", 1) != 1:
        return None
    with torch.device("meta"):
        norm = nn.BatchNorm2d(len(mean), attributes.get("epsilon", 1e-5))
    norm.weight, norm.bias = _weight(scale), _weight(bias)
    norm.running_mean, norm.running_var = mean, var
    norm.num_batches_tracked = torch.zeros((), dtype=torch.int64)
    return norm


def _max_pool(attributes: dict[str, object], known: Known) -> nn.Module | None:
    window = attributes["kernel_shape"]
    assert isinstance(window, list)
    pads = _same_pads(attributes, len(window))
    is_plain = not attributes.get("ceil_mode") and attributes.get("num_outputs", 1) == 1
    # torch takes at most half a window of padding.
    if len(window) != 2 or not is_plain or pads is None:
        return None
    if any(2 * pad > size for pad, size in zip(pads, window, strict=True)):
        return None
    return nn.MaxPool2d(
        tuple(window), _pair(attributes, "strides"), pads, _pair(attributes, "dilations")
    )


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    linear.weight = _weight(weight)
    linear.bias = None if bias is None else _weight(bias)
    return linear


def _matmul(attributes: dict[str, object], known: Known) -> nn.Module | None:
    weight = known[1]
    assert isinstance(weight, torch.Tensor)
    is_plain = weight.dim() == 2 and weight.is_floating_point()
    return _linear(weight.t(), None) if is_plain else None


def _gemm(attributes: dict[str, object], known: Known) -> nn.Module | None:
    weight, bias = known[1], known[2] if len(known) > 2 else None
    assert isinstance(weight, torch.Tensor)
    if attributes.get("transA") or not weight.is_floating_point():
        return None
    weight = weight if attributes.get("transB") else weight.t()
    if isinstance(bias, torch.Tensor) and tuple(bias.shape) != (weight.shape[0],):
        return None
    bias = bias if isinstance(bias, torch.Tensor) else None
    return _linear(
        _scaled(weight, attributes.get("alpha", 1.0)),
        None if bias is None else _scaled(bias, attributes.get("beta", 1.0)),
    )


def _scaled(tensor: torch.Tensor, factor: object) -> torch.Tensor:
    """Return the product; without a factor the tensor itself, which shares the file's memory."""
    assert isinstance(factor, float | int)
    return tensor if factor == 1 else tensor * factor


def _layer_norm(attributes: dict[str, object], known: Known) -> nn.Module | None:
    scale, bias = known[1], known[2] if len(known) > 2 else None
    assert isinstance(scale, torch.Tensor)
    is_last = attributes.get("axis", -1) == -1 and scale.dim() == 1
    if not is_last or attributes.get("num_outputs", 1) != 1 or len(scale) == 1:
        return None
    if isinstance(bias, torch.Tensor) and bias.shape != scale.shape:
        return None
    with torch.device("meta"):
        norm = nn.LayerNorm(len(scale), attributes.get("epsilon", 1e-5), bias=bias is not None)
    norm.weight = _weight(scale)
    norm.bias = _weight(bias) if isinstance(bias, torch.Tensor) else None
    return norm


BUILDERS: Mapping[str, Callable[[dict[str, object], Known], nn.Module | None]] = {
    "BatchNormalization": _norm,
    "Conv": _conv,
    "Gemm": _gemm,
    "LayerNormalization": _layer_norm,
    "MatMul": _matmul,
    "MaxPool": _max_pool,
}
