"""Operations and bytes of an operator, from its type and shapes. Pure.

A multiply-add is two operations. Bytes are the minimum traffic: every input read once and every
output written once. Types are ONNX's; readers of other libraries' profiles translate to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

BITS: Mapping[str, int] = {
    "fp64": 64,
    "fp32": 32,
    "tf32": 32,
    "fp16": 16,
    "bf16": 16,
    "fp8": 8,
    "int64": 64,
    "int32": 32,
    "int16": 16,
    "int8": 8,
    "uint64": 64,
    "uint32": 32,
    "uint16": 16,
    "uint8": 8,
    "int4": 4,
    "bool": 8,
}
FLOATS = ("fp64", "fp32", "fp16", "bf16", "fp8")
BYTE_TYPES = ("int8", "uint8")


@dataclass(frozen=True, slots=True)
class Shaped:
    """A tensor as an operator saw it."""

    datatype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> float:
        return self.num_elements * BITS.get(self.datatype, 32) / 8


@dataclass(frozen=True, slots=True)
class Work:
    """Operations and bytes; None: unknown. `datatype` is that of the multiplications and selects
    the peak."""

    flops: float | None
    num_bytes: float | None
    datatype: str


Tensors = Sequence[Shaped]
Count = Callable[[Tensors, Tensors], float]

# Operators that only view memory differently.
VIEWS = frozenset(
    {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Shape", "Size", "Constant"}
)
# Operators that move memory and compute nothing.
MOVES = frozenset(
    {"Transpose", "Concat", "Slice", "Split", "Cast", "Expand", "Pad", "Tile", "Copy", "Reorder"}
    | {"ReorderInput", "ReorderOutput", "DepthToSpace", "SpaceToDepth", "ConstantOfShape", "Where"}
    | {"MemcpyFromHost", "MemcpyToHost", "OneHot", "Range", "ScatterND", "ScatterElements"}
)
# Lookups: only the requested rows of a table are read.
LOOKUPS = frozenset({"Gather", "GatherElements", "GatherND", "EmbedLayerNormalization"})
# Operations per output element, roughly: what matters is that they are few.
PER_ELEMENT: Mapping[str, float] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Max", "Min", "Neg", "Abs", "Relu", "Not"), 1),
    **dict.fromkeys(("And", "Or", "Xor", "Equal", "Greater", "Less", "GreaterOrEqual"), 1),
    **dict.fromkeys(("LessOrEqual", "Floor", "Ceil", "Round", "Sign", "Reciprocal", "Sqrt"), 1),
    **dict.fromkeys(("Clip", "LeakyRelu", "PRelu", "QLinearAdd", "QLinearMul", "Eltwise"), 2),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear", "BatchNormalization"), 2),
    **dict.fromkeys(("HardSigmoid", "HardSwish", "DynamicQuantizeLinear"), 4),
    **dict.fromkeys(("Exp", "Log", "Pow", "Sigmoid", "Tanh", "Erf", "Elu", "QLinearSigmoid"), 8),
    **dict.fromkeys(("Softmax", "LogSoftmax", "QLinearSoftmax"), 10),
    **dict.fromkeys(("Gelu", "FastGelu", "BiasGelu", "QuickGelu", "Mish", "Swish", "Silu"), 12),
    **dict.fromkeys(("LayerNormalization", "SimplifiedLayerNormalization", "LRN"), 8),
    **dict.fromkeys(("InstanceNormalization", "GroupNormalization", "LpNormalization"), 8),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), 9),
    "EmbedLayerNormalization": 10,
    "RotaryEmbedding": 6,
    "Sum": 1,
    "Mean": 1,
    "Resize": 8,
    "Upsample": 1,
}
# Operations per element of the first input.
PER_INPUT: Mapping[str, float] = {
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2"), 1),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "QLinearGlobalAveragePool"), 1),
    **dict.fromkeys(("ArgMax", "ArgMin", "CumSum", "TopK"), 1),
    **dict.fromkeys(("AveragePool", "MaxPool", "QLinearAveragePool", "LpPool"), 2),
}


def work_of(kind: str, inputs: Tensors, outputs: Tensors) -> Work:
    """Return the operator's work. `inputs` are in the order of its definition, weights included;
    omitted or unknown ones are skipped. Without shapes the work is unknown."""
    datatype = compute_type(kind, inputs)
    if kind in VIEWS:
        return Work(0.0, 0.0, datatype)
    if not inputs or not outputs:
        return Work(None, None, datatype)
    num_bytes = sum(tensor.num_bytes for tensor in outputs)
    if kind in LOOKUPS:
        indices = sum(each.num_bytes for each in inputs if each.datatype not in FLOATS)
        return Work(_flops(kind, inputs, outputs), 2 * num_bytes + indices, datatype)
    num_bytes += sum(tensor.num_bytes for tensor in inputs)
    return Work(_flops(kind, inputs, outputs), num_bytes, datatype)


def compute_type(kind: str, inputs: Tensors) -> str:
    """Return the datatype whose peak applies; fp32 if integers are only moved or added."""
    is_integer = kind in QUANTISED or (
        kind in MULTIPLIERS and bool(inputs) and inputs[0].datatype in BYTE_TYPES
    )
    if is_integer:
        return "int8"
    for tensor in inputs:
        if tensor.datatype in FLOATS:
            return tensor.datatype
    return "fp32"


def _flops(kind: str, inputs: Tensors, outputs: Tensors) -> float | None:
    if kind in MULTIPLIERS:
        try:
            return MULTIPLIERS[kind](inputs, outputs)
        # Weights that the library did not report, or impossible shapes.
        except (IndexError, ValueError, ZeroDivisionError):
            return None
    if kind in PER_ELEMENT:
        return PER_ELEMENT[kind] * outputs[0].num_elements
    if kind in PER_INPUT:
        return PER_INPUT[kind] * inputs[0].num_elements
    return 0.0 if kind in MOVES or kind in LOOKUPS else None


def _matmul(inputs: Tensors, outputs: Tensors) -> float:
    """Derive the inner dimension from the first matrix and the rows of the output, because either
    matrix may be transposed."""
    first, answer = inputs[0].shape, outputs[0].shape
    if len(first) == 1 or len(answer) < 2:
        return 2.0 * outputs[0].num_elements * first[-1]
    matrix = first[-1] * first[-2]
    # If the right side has no batch, a batch of matrices on the left is one taller matrix.
    length = matrix / answer[-2] if len(first) == len(answer) else first[-1]
    return 2.0 * outputs[0].num_elements * length


def _at(position: int, count: Callable[[Shaped, Tensors, Tensors], float]) -> Count:
    """Adapt `count` to operators whose weights are the input at this position."""

    def counted(inputs: Tensors, outputs: Tensors) -> float:
        return count(inputs[position], inputs, outputs)

    return counted


def _conv(weights: Shaped, inputs: Tensors, outputs: Tensors) -> float:
    """Count one filter per output element: channels of a group times the window."""
    return 2.0 * outputs[0].num_elements * math.prod(weights.shape[1:])


def _transposed_conv(weights: Shaped, inputs: Tensors, outputs: Tensors) -> float:
    return 2.0 * inputs[0].num_elements * math.prod(weights.shape[1:])


def _attention(inputs: Tensors, outputs: Tensors) -> float:
    """Count the contrib operator: one projection to queries, keys and values, then attention."""
    rows, length = inputs[0].shape[:2]
    width = outputs[0].shape[-1]
    projections = 2.0 * inputs[0].num_elements * inputs[1].shape[-1]
    return projections + 4.0 * rows * length * length * width


def _meeting(inputs: Tensors, outputs: Tensors) -> float:
    """Count attention on [rows, length, width] or [rows, heads, length, width]."""
    length = inputs[1].shape[-2] if len(inputs) > 1 else inputs[0].shape[-2]
    return 4.0 * outputs[0].num_elements * length


def _recurrent(inputs: Tensors, outputs: Tensors) -> float:
    """Count both weight matrices once per step and row; each direction has its own."""
    steps, rows = inputs[0].shape[:2]
    return 2.0 * steps * rows * (inputs[1].num_elements + inputs[2].num_elements)


# Matmul-like operators, which dominate the FLOP and set the peak.
MULTIPLIERS: Mapping[str, Count] = {
    **dict.fromkeys(("MatMul", "FusedMatMul", "Gemm", "FusedGemm", "MatMulNBits"), _matmul),
    **dict.fromkeys(("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"), _matmul),
    **dict.fromkeys(("QLinearMatMul", "QGemm", "TransposeMatMul"), _matmul),
    **dict.fromkeys(("Conv", "FusedConv", "ConvInteger", "NhwcFusedConv"), _at(1, _conv)),
    "QLinearConv": _at(3, _conv),
    "ConvTranspose": _at(1, _transposed_conv),
    **dict.fromkeys(("Attention", "QAttention"), _attention),
    **dict.fromkeys(("MultiHeadAttention", "GroupQueryAttention"), _meeting),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
}
QUANTISED = frozenset(
    {"MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul", "QGemm"}
    | {"ConvInteger", "QLinearConv", "QAttention"}
)
# Operators that a compiler can fuse with neighbours: those without a reduction over a whole row.
FUSIBLE = (frozenset(PER_ELEMENT) | {"Cast", "Where", "Transpose"}) - frozenset(
    {"Softmax", "LogSoftmax", "QLinearSoftmax", "LRN", "Resize", "EmbedLayerNormalization"}
    | {"SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "LpNormalization"}
    | {"LayerNormalization", "SimplifiedLayerNormalization", "GroupNormalization"}
    | {"InstanceNormalization", "DynamicQuantizeLinear"}
)
