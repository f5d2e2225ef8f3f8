"""Operators of a run: their times, in the form that all profile readers return, and the operations
and bytes of each, from its type and shapes. Pure.

A multiply-add is two operations. Bytes are the minimum traffic: every input read once and every
output written once. Types are ONNX's; readers of other libraries' profiles translate to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.profiling.results import GpuTime

BITS: Mapping[str, int] = {
    **dict.fromkeys(("fp64", "int64", "uint64"), 64),
    **dict.fromkeys(("fp32", "tf32", "int32", "uint32"), 32),
    **dict.fromkeys(("fp16", "bf16", "int16", "uint16"), 16),
    **dict.fromkeys(("fp8", "int8", "uint8", "bool"), 8),
    "int4": 4,
}
FLOATS = ("fp64", "fp32", "fp16", "bf16", "fp8")


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
class OperatorTime:
    """One operator in a run of the model: `seconds` of all its calls, shapes of one call."""

    name: str
    # ONNX operator type, or the library's own where ONNX has none.
    kind: str
    seconds: float
    inputs: tuple[Shaped, ...] = ()
    outputs: tuple[Shaped, ...] = ()
    # Constant inputs: read from memory however small the batch is.
    weight_bytes: float = 0.0
    num_calls: int = 1
    # Compute datatype that the library reports; empty: follows from the inputs.
    datatype: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """A span of the trace, in seconds from the first."""

    name: str
    kind: str
    start_s: float
    seconds: float
    # Shapes and the like, as text.
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timed:
    """Result of a library's profiler."""

    operators: Sequence[OperatorTime]
    # Median time of a run under the profiler.
    profiled_s: float
    events: Sequence[Event]
    notes: Sequence[str] = ()
    # None on CPUs.
    gpu: GpuTime | None = None


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """Operations and bytes; None: unknown. The `datatype` of multiplications selects the peak."""

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
    **dict.fromkeys(("Sum", "Mean", "Upsample"), 1),
    **dict.fromkeys(("Clip", "LeakyRelu", "PRelu", "QLinearAdd", "QLinearMul", "Eltwise"), 2),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear", "BatchNormalization"), 2),
    **dict.fromkeys(("HardSigmoid", "HardSwish", "DynamicQuantizeLinear"), 4),
    **dict.fromkeys(("Exp", "Log", "Pow", "Sigmoid", "Tanh", "Erf", "Elu", "QLinearSigmoid"), 8),
    **dict.fromkeys(("Softmax", "LogSoftmax", "QLinearSoftmax", "EmbedLayerNormalization"), 10),
    **dict.fromkeys(("Gelu", "FastGelu", "BiasGelu", "QuickGelu", "Mish", "Swish", "Silu"), 12),
    **dict.fromkeys(("LayerNormalization", "SimplifiedLayerNormalization", "LRN", "Resize"), 8),
    **dict.fromkeys(
        ("InstanceNormalization", "GroupNormalization", "LpNormalization", "Resize"), 8
    ),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), 9),
    "RotaryEmbedding": 6,
}
# Operations per element of the first input.
PER_INPUT: Mapping[str, float] = {
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2"), 1),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "QLinearGlobalAveragePool"), 1),
    **dict.fromkeys(("ArgMax", "ArgMin", "CumSum", "TopK"), 1),
    **dict.fromkeys(("AveragePool", "MaxPool", "QLinearAveragePool", "LpPool"), 2),
}


def work_of(kind: str, inputs: Tensors, outputs: Tensors) -> OperatorWork:
    """Return the operator's work. `inputs` are in the order of its definition, weights included;
    omitted or unknown ones are skipped. Without shapes the work is unknown."""
    datatype = compute_type(kind, inputs)
    if kind in VIEWS:
        return OperatorWork(0.0, 0.0, datatype)
    if not inputs or not outputs:
        return OperatorWork(None, None, datatype)
    num_bytes = sum(tensor.num_bytes for tensor in outputs)
    if kind in LOOKUPS:
        num_bytes += num_bytes + sum(e.num_bytes for e in inputs if e.datatype not in FLOATS)
    else:
        num_bytes += sum(tensor.num_bytes for tensor in inputs)
    return OperatorWork(_flops(kind, inputs, outputs), num_bytes, datatype)


def compute_type(kind: str, inputs: Tensors) -> str:
    """Return the datatype whose peak applies; fp32 if integers are only moved or added."""
    datatypes = [tensor.datatype for tensor in inputs]
    is_integer = kind in MULTIPLIERS and datatypes[:1] in (["int8"], ["uint8"])
    if kind in QUANTISED or is_integer:
        return "int8"
    return next((each for each in datatypes if each in FLOATS), "fp32")


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
    """Derive the inner dimension from input and output: either matrix may be transposed."""
    first, answer = inputs[0].shape, outputs[0].shape
    if len(first) == 1 or len(answer) < 2:
        return 2.0 * outputs[0].num_elements * first[-1]
    matrix = first[-1] * first[-2]
    # If the right side has no batch, a batch of matrices on the left is one taller matrix.
    length = matrix / answer[-2] if len(first) == len(answer) else first[-1]
    return 2.0 * outputs[0].num_elements * length


def _conv(position: int, is_transposed: bool = False) -> Count:
    """Return a count for convolutions whose weights are the input at this position: one filter per
    output element (transposed: input element), channels of a group times the window."""

    def count(inputs: Tensors, outputs: Tensors) -> float:
        elements = (inputs if is_transposed else outputs)[0].num_elements
        return 2.0 * elements * math.prod(inputs[position].shape[1:])

    return count


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
    **dict.fromkeys(("Conv", "FusedConv", "ConvInteger", "NhwcFusedConv"), _conv(1)),
    "QLinearConv": _conv(3),
    "ConvTranspose": _conv(1, is_transposed=True),
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
