"""Operators that compute each element by itself, and softmax."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from penstock.backends.onnx_import.values import DTYPES, FOUR_BITS, OnnxOperator
from penstock.errors import ConfigError

UNSIGNED = {
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)
# Larger numbers do not round to the largest of float8_e4m3fn, 448.
E4M3_OVERFLOW = 464


def widened(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute in a signed type what torch does not have for wide unsigned integers."""

    def call(*given: Tensor | float, **attributes: object) -> Tensor:
        dtype = next((each.dtype for each in given if isinstance(each, Tensor)), None)
        wide = UNSIGNED.get(dtype)
        if wide is None:
            return compute(*given, **attributes)
        found = compute(
            *(each.to(wide) if isinstance(each, Tensor) else each for each in given), **attributes
        )
        return found.to(dtype) if found.dtype == wide else found

    # torch.fx writes functions by name.
    call.__name__ = f"widened_{compute.__name__}"
    return call


def divide(x: Tensor, y: Tensor | float) -> Tensor:
    if x.is_floating_point() or x.is_complex():
        return torch.div(x, y)
    return torch.div(x, y, rounding_mode="trunc")


def power(x: Tensor, y: Tensor | float) -> Tensor:
    if x.is_floating_point():
        return torch.pow(x, y).to(x.dtype)
    is_whole = not y.is_floating_point() if isinstance(y, Tensor) else isinstance(y, int)
    # FP32 does not hold every integer.
    return torch.pow(x if is_whole else x.double(), y).to(x.dtype)


def modulo(x: Tensor, y: Tensor | float, *, fmod: int = 0) -> Tensor:
    return torch.fmod(x, y) if fmod else torch.remainder(x, y)


def fold(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def call(*given: Tensor) -> Tensor:
        return functools.reduce(combine, given)

    return call


def mean(*given: Tensor) -> Tensor:
    return functools.reduce(torch.add, given) / len(given)


def clip(
    x: Tensor,
    lowest: Tensor | float | None = None,
    highest: Tensor | float | None = None,
    *,
    min: float | None = None,
    max: float | None = None,
) -> Tensor:
    lowest, highest = min if lowest is None else lowest, max if highest is None else highest
    if lowest is not None:
        x = torch.maximum(x, lowest) if isinstance(lowest, Tensor) else x.clamp(min=lowest)
    if highest is not None:
        x = torch.minimum(x, highest) if isinstance(highest, Tensor) else x.clamp(max=highest)
    return x


def celu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return functional.celu(x, alpha)


def elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return functional.elu(x, alpha)


def selu(
    x: Tensor, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875
) -> Tensor:
    return gamma * functional.elu(x, alpha)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return functional.gelu(x, approximate=approximate)


def hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    return (alpha * x + beta).clamp(0, 1)


def leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    return functional.leaky_relu(x, alpha)


def prelu(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, slope * x, x)


def shrink(x: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    shrunk = torch.where(x > lambd, x - bias, torch.zeros_like(x))
    return torch.where(x < -lambd, x + bias, shrunk).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return functional.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


def swiglu(gate: Tensor, x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return swish(gate, alpha=alpha) * x


def thresholded_relu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return torch.where(x > alpha, x, torch.zeros_like(x))


def _from_axis(
    compute: Callable[[Tensor, int], Tensor],
) -> Callable[..., Tensor]:
    """Before opset 13 softmax and its kin flattened the tensor to two dimensions at the axis."""

    def call(x: Tensor, *, axis: int | None = None, opset: int) -> Tensor:
        if opset >= 13:
            return compute(x, -1 if axis is None else axis)
        first = 1 if axis is None else axis
        flat = x.reshape(math.prod(x.shape[:first]), math.prod(x.shape[first:]))
        return compute(flat, 1).reshape(x.shape)

    return call


def softmax(x: Tensor, axis: int) -> Tensor:
    return torch.softmax(x, axis)


def log_softmax(x: Tensor, axis: int) -> Tensor:
    return torch.log_softmax(x, axis)


def hardmax(x: Tensor, axis: int) -> Tensor:
    largest = x.argmax(axis, keepdim=True)
    return torch.zeros_like(x).scatter(axis, largest, 1)


def shift(x: Tensor, y: Tensor, *, direction: str) -> Tensor:
    shifts = torch.bitwise_left_shift if direction == "LEFT" else torch.bitwise_right_shift
    return shifts(x, y)


def is_inf(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    if x.dtype in FLOAT8:
        x = x.float()
    wanted = [torch.isneginf(x)] * detect_negative + [torch.isposinf(x)] * detect_positive
    return functools.reduce(torch.logical_or, wanted, torch.zeros_like(x, dtype=torch.bool))


def is_nan(x: Tensor) -> Tensor:
    return torch.isnan(x.float() if x.dtype in FLOAT8 else x)


def cast(x: Tensor, *, to: int | torch.dtype, saturate: int = 1, round_mode: str = "up") -> Tensor:
    """Cast; to FP8 with saturation, which torch does not do."""
    if round_mode != "up":
        raise ConfigError(f"Cast: round_mode '{round_mode}' is not supported")
    dtype = to if isinstance(to, torch.dtype) else DTYPES[to]
    if not isinstance(to, torch.dtype) and to in FOUR_BITS:
        return _cast_to_four_bits(x, to)
    if dtype == torch.bool and x.dtype in FLOAT8:
        x = x.float()
    if dtype in FLOAT8:
        largest, whole = torch.finfo(dtype).max, x.float()
        # NaN stays NaN in both.
        if saturate:
            return whole.clamp(-largest, largest).to(dtype)
        if dtype == torch.float8_e4m3fn:
            # It has no infinity; torch takes the largest number for what rounds to more than that.
            return whole.masked_fill(whole.abs() > E4M3_OVERFLOW, torch.nan).to(dtype)
    if x.is_floating_point() and dtype in UNSIGNED:
        x = x.to(torch.int64)
    return x.to(dtype)


def widen(x: Tensor) -> Tensor:
    """Cast floats of 16 bits to FP32; leave anything else as it is."""
    is_narrow = x.is_floating_point() and x.itemsize < torch.float32.itemsize
    return x.float() if is_narrow else x


def cast_within(x: Tensor, *, to: torch.dtype, has_small: bool = False) -> Tensor:
    """Cast; finite numbers beyond the range become half its largest, so that scores can be added to
    what masks. With `has_small`, those below it become its smallest, so that one can divide by
    them."""
    limits = torch.finfo(to)
    most = limits.max / 2
    plain = x.to(to)
    limited = plain.nan_to_num(nan=math.nan, posinf=most, neginf=-most)
    found = torch.where(x.isinf(), plain, limited)
    if not has_small:
        return found
    least = torch.full_like(x, limits.smallest_normal).copysign(x).to(to)
    return torch.where((found == 0) & (x != 0), least, found)


def _cast_to_four_bits(x: Tensor, to: int) -> Tensor:
    if x.is_floating_point():
        x = x.float().trunc()
    whole = x.to(torch.int64) & 15
    return torch.where(whole > FOUR_BITS[to][1], whole - 16, whole).to(DTYPES[to])


def cast_like(x: Tensor, like: Tensor, *, saturate: int = 1, types: Sequence[int] = ()) -> Tensor:
    return cast(x, to=types[1] if types and types[1] else like.dtype, saturate=saturate)


def bit_cast(x: Tensor, *, to: int) -> Tensor:
    return x.view(DTYPES[to])


def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(condition, x, y)


def sign(x: Tensor) -> Tensor:
    return torch.sign(x)


def equal(x: Tensor, y: Tensor) -> Tensor:
    return torch.eq(x, y)


def hard_swish(x: Tensor) -> Tensor:
    return x * (x / 6 + 0.5).clamp(0, 1)


# Operators that compute in the datatype of their inputs.
ARITHMETIC = {
    name: OnnxOperator(compute)
    for name, compute in {
        "Abs": torch.abs,
        "Acos": torch.acos,
        "Acosh": torch.acosh,
        "Add": torch.add,
        "And": torch.logical_and,
        "Asin": torch.asin,
        "Asinh": torch.asinh,
        "Atan": torch.atan,
        "Atanh": torch.atanh,
        "BitShift": shift,
        "BitwiseAnd": torch.bitwise_and,
        "BitwiseNot": torch.bitwise_not,
        "BitwiseOr": torch.bitwise_or,
        "BitwiseXor": torch.bitwise_xor,
        "Ceil": torch.ceil,
        "Celu": celu,
        "Clip": clip,
        "Cos": torch.cos,
        "Cosh": torch.cosh,
        "Div": divide,
        "Elu": elu,
        "Equal": equal,
        "Erf": torch.erf,
        "Exp": torch.exp,
        "Floor": torch.floor,
        "Gelu": gelu,
        "Greater": torch.gt,
        "GreaterOrEqual": torch.ge,
        "HardSigmoid": hard_sigmoid,
        "HardSwish": hard_swish,
        "Less": torch.lt,
        "LessOrEqual": torch.le,
        "LeakyRelu": leaky_relu,
        "Log": torch.log,
        "Max": fold(torch.maximum),
        "Mean": mean,
        "Min": fold(torch.minimum),
        "Mish": functional.mish,
        "Mod": modulo,
        "Mul": torch.mul,
        "Neg": torch.neg,
        "Not": torch.logical_not,
        "Or": torch.logical_or,
        "PRelu": prelu,
        "Pow": power,
        "Reciprocal": torch.reciprocal,
        "Relu": torch.relu,
        "Round": torch.round,
        "Selu": selu,
        "Shrink": shrink,
        "Sigmoid": torch.sigmoid,
        "Sign": sign,
        "Sin": torch.sin,
        "Sinh": torch.sinh,
        "Softplus": softplus,
        "Softsign": functional.softsign,
        "Sqrt": torch.sqrt,
        "Sub": torch.sub,
        "Sum": fold(torch.add),
        "SwiGLU": swiglu,
        "Swish": swish,
        "Tan": torch.tan,
        "Tanh": torch.tanh,
        "ThresholdedRelu": thresholded_relu,
        "Where": where,
        "Xor": torch.logical_xor,
    }.items()
}
OPERATORS = ARITHMETIC | {
    "BitCast": OnnxOperator(bit_cast),
    "Cast": OnnxOperator(cast),
    "CastLike": OnnxOperator(cast_like),
    "Hardmax": OnnxOperator(_from_axis(hardmax)),
    "IsInf": OnnxOperator(is_inf),
    "IsNaN": OnnxOperator(is_nan),
    "LogSoftmax": OnnxOperator(_from_axis(log_softmax)),
    "Softmax": OnnxOperator(_from_axis(softmax)),
}
