"""Operator times of PyTorch: the backend's own Runner under torch.profiler.

Times are an operator's self time, without the operators it calls. Calls with the same shapes are
one entry. On a GPU the time is that of the kernels that the operator launched.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.profiling import gpu_timeline
from penstock.profiling.gpu_timeline import RUN, GpuTrace
from penstock.profiling.work import Event, OperatorTime, Shaped, Timed

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent
    from torch.profiler import profile

    from penstock.profiling.results import GpuTime

# Operators with the same name in ONNX, and a form that works in place.
IN_PLACE = ("add", "mul", "div", "sub", "silu", "gelu", "erf", "tanh", "sigmoid")
# Attention whose inputs are [.., length, heads, width], not [.., heads, length, width].
KERNEL_ATTENTION = ("_flash_attention_forward", "_efficient_attention_forward")
# Operators that change no memory, only how it is viewed.
VIEWS = (
    *("view", "reshape", "as_strided", "transpose", "t", "expand", "permute", "unsqueeze", "slice"),
    *("select", "squeeze", "empty", "empty_like", "empty_strided", "resize_", "_unsafe_view"),
    *("flatten", "_reshape_alias", "detach", "split", "chunk", "narrow", "alias", "view_as"),
)
# ONNX names of PyTorch operators. Those that only call others (linear, softmax, conv2d) are left
# out: their work is counted in the others.
KINDS: Mapping[str, str] = {
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "_addmm_activation"), "MatMul"),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm"), "BatchNormalization"),
    **dict.fromkeys(("relu", "relu_", "clamp_min", "clamp_min_"), "Relu"),
    **dict.fromkeys(("hardtanh", "hardtanh_", "clamp", "clamp_"), "Clip"),
    **{name: name.rstrip("_").capitalize() for kind in IN_PLACE for name in (kind, f"{kind}_")},
    **dict.fromkeys(("mean", "sum"), "ReduceMean"),
    **dict.fromkeys(("embedding", "index_select"), "Gather"),
    **dict.fromkeys(("max_pool2d_with_indices", "mkldnn_max_pool2d"), "MaxPool"),
    **dict.fromkeys(("mkldnn_convolution", "cudnn_convolution"), "Conv"),
    **dict.fromkeys(("_slow_conv2d_forward", "_conv_depthwise2d"), "Conv"),
    **dict.fromkeys((*KERNEL_ATTENTION, "_cudnn_attention_forward"), "MultiHeadAttention"),
    **dict.fromkeys(VIEWS, "Reshape"),
    "_scaled_dot_product_flash_attention_for_cpu": "MultiHeadAttention",
    "avg_pool2d": "AveragePool",
    "adaptive_avg_pool2d": "GlobalAveragePool",
    "_int_mm": "MatMulInteger",
    "_softmax": "Softmax",
    "cat": "Concat",
    "copy_": "Copy",
    "native_layer_norm": "LayerNormalization",
}
# Matmuls whose second matrix is nearly always weights.
WEIGHTED = frozenset({"mm", "addmm", "_addmm_activation", "_int_mm"})
# Inputs before the two matrices.
SKIPPED_INPUTS = {"addmm": 1, "baddbmm": 1, "_addmm_activation": 1}
NUM_WARM_UP = 2
NO_KERNELS = "torch's profiler told of no kernel: another tool may be watching the GPU"
PREFIX = "aten::"
Tensors = tuple[Shaped, ...]


@dataclass(frozen=True, slots=True)
class Flight:
    """Batches as served on a GPU: as many in flight as the model has instances."""

    run: Callable[[], object]
    num_slots: int


def timed(
    run: Callable[[], object],
    num_runs: int,
    datatype: str,
    flight: Flight | None = None,
    rounded: str = "",
) -> Timed:
    """Profile `num_runs` batches. `run` sends one batch through the Runner; `datatype` is that of
    its weights. On a GPU `flight` is given, and `rounded` lists what runs in TF32."""
    from torch.profiler import record_function

    is_cuda = flight is not None
    for _ in range(NUM_WARM_UP):
        run()
    with _watching(is_cuda) as watched:
        seconds = []
        for _ in range(num_runs):
            began = time.perf_counter()
            with record_function(RUN):
                run()
            seconds.append(time.perf_counter() - began)
    found = [event for event in watched.events() if event.name.startswith(PREFIX)]
    profiled_s = statistics.median(seconds)
    told = read(found, num_runs, profiled_s, datatype, is_cuda=is_cuda, rounded=rounded)
    if flight is None:
        return told
    gpu = gpu_timeline.summary(trace_of(watched), _flown(flight), flight.num_slots)
    if gpu is None:
        return replace(told, notes=(*told.notes, NO_KERNELS))
    left = gpu_timeline.left_over(gpu.kernels, launched_s(found, num_runs), datatype)
    return replace(told, operators=(*told.operators, *left), gpu=gpu)


def gpu_time(run: Callable[[], object], num_runs: int) -> GpuTime | None:
    """Return what the GPU does in `num_runs` batches; None if the profiler sees no kernel."""
    from torch.profiler import record_function

    for _ in range(NUM_WARM_UP):
        run()
    with _watching(is_cuda=True) as watched:
        for _ in range(num_runs):
            with record_function(RUN):
                run()
    return gpu_timeline.summary(trace_of(watched))


def _watching(is_cuda: bool) -> profile:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if is_cuda else [])
    return profile(activities=activities, record_shapes=True, acc_events=True)


def _flown(flight: Flight) -> GpuTrace | None:
    if flight.num_slots < 2:
        return None
    with _watching(is_cuda=True) as watched:
        flight.run()
    return trace_of(watched)


def trace_of(watched: profile) -> GpuTrace:
    """Return the profiler's Chrome trace."""
    with tempfile.TemporaryDirectory(prefix="penstock-trace-") as made:
        path = Path(made) / "trace.json"
        watched.export_chrome_trace(str(path))
        return gpu_timeline.read(json.loads(path.read_bytes()))


def launched_s(found: Sequence[FunctionEvent], num_runs: int) -> dict[str, float]:
    """Return the seconds per run that operators account for, by kernel."""
    seconds: dict[str, float] = {}
    for kernel in (kernel for event in found for kernel in event.kernels):
        seconds[kernel.name] = seconds.get(kernel.name, 0.0) + kernel.duration / 1e6 / num_runs
    return seconds


def read(
    found: Sequence[FunctionEvent],
    num_runs: int,
    profiled_s: float,
    datatype: str,
    *,
    is_cuda: bool,
    rounded: str = "",
) -> Timed:
    """Read the profiler's events, which have `name`, `input_shapes`, `time_range` and times."""
    clock = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    grouped: dict[tuple[str, str], list[FunctionEvent]] = {}
    for event in found:
        grouped.setdefault((event.name, str(event.input_shapes)), []).append(event)
    operators = []
    for events in grouped.values():
        calls = max(1, round(len(events) / num_runs))
        seconds = calls * statistics.median(getattr(event, clock) for event in events) / 1e6
        if seconds > 0:
            operator = _operator(events[0], seconds, calls, datatype)
            operators.append(replace(operator, datatype=_computed_in(operator, rounded)))
    return Timed(operators, profiled_s, list(_events(found)))


def _computed_in(operator: OperatorTime, rounded: str) -> str:
    """Return the datatype of its multiplications; weights do not show TF32."""
    of = {"MatMul": "matrices", "Conv": "convolutions"}.get(operator.kind)
    is_rounded = of in rounded.split(",") and operator.datatype == "fp32"
    return "tf32" if is_rounded else operator.datatype


def _operator(event: FunctionEvent, seconds: float, calls: int, datatype: str) -> OperatorTime:
    name = event.name.removeprefix(PREFIX)
    given = [shape for shape in event.input_shapes if shape]
    shapes = [tuple(each) for each in given if all(isinstance(size, int) for size in each)]
    kind = KINDS.get(name, name)
    if name in KERNEL_ATTENTION:
        shapes = [(*each[:-3], each[-2], each[-3], each[-1]) for each in shapes if len(each) == 4]
    tensors = [Shaped(datatype, shape) for shape in shapes[SKIPPED_INPUTS.get(name, 0) :]]
    inputs, outputs = _answer(kind, tensors, event)
    has_weights = len(inputs) > 1 and (name in WEIGHTED or kind == "Conv")
    weights = inputs[1].num_bytes if has_weights else 0.0
    label = f"{name} {' '.join('x'.join(map(str, shape)) for shape in shapes)}".strip()
    return OperatorTime(label, kind, seconds, inputs, outputs, weights, calls, datatype)


def _answer(kind: str, tensors: list[Shaped], event: FunctionEvent) -> tuple[Tensors, Tensors]:
    """Return inputs and output, which is derived from them; both empty if it cannot be."""
    inputs = tuple(tensors)
    if not inputs:
        return (), ()
    first = inputs[0]
    if kind in ("MatMul", "MatMulInteger") and len(inputs) > 1:
        width = inputs[1].shape[-1]
        return inputs, (Shaped(first.datatype, (*first.shape[:-1], width)),)
    if kind == "Conv":
        shape = _convolved(event, inputs)
        return (inputs, (Shaped(first.datatype, shape),)) if shape else ((), ())
    if kind == "Gather":
        shape = (*inputs[1].shape, first.shape[-1]) if len(inputs) > 1 else ()
        indices = tuple(Shaped("int64", each.shape) for each in inputs[1:])
        return (first, *indices), (Shaped(first.datatype, shape),)
    if kind == "Concat":
        return (), ()
    if kind == "ReduceMean":
        return inputs, (Shaped(first.datatype, ()),)
    largest = max(inputs, key=lambda each: each.num_elements)
    return inputs, (first if kind == "MultiHeadAttention" else largest,)


def _convolved(event: FunctionEvent, inputs: Tensors) -> tuple[int, ...]:
    """Derive the output shape of a convolution from stride, padding and dilation, if recorded."""
    given = [
        value
        for value in getattr(event, "concrete_inputs", None) or ()
        if isinstance(value, list) and len(value) == len(inputs[0].shape) - 2
    ]
    if len(inputs) < 2:
        return ()
    image, weights = inputs[0].shape, inputs[1].shape
    name = event.name.removeprefix(PREFIX)
    # Some list the window first.
    if name in ("_slow_conv2d_forward", "_conv_depthwise2d"):
        given = given[1:]
    elif name in ("mkldnn_convolution", "cudnn_convolution"):
        given = [given[1], given[0], *given[2:]] if len(given) > 1 else given
    if len(given) < 2:
        return ()
    strides, paddings = given[0], given[1]
    dilations = given[2] if len(given) > 2 else [1] * len(strides)
    columns = zip(image[2:], weights[2:], strides, paddings, dilations, strict=True)
    sizes = [
        (size + 2 * padding - dilation * (window - 1) - 1) // stride + 1
        for size, window, stride, padding, dilation in columns
    ]
    return (image[0], weights[0], *sizes)


def _events(found: Sequence[FunctionEvent]) -> Iterator[Event]:
    begin_us = min((event.time_range.start for event in found), default=0)
    for event in found:
        name, span_us = event.name.removeprefix(PREFIX), event.time_range
        start_s, seconds = (span_us.start - begin_us) / 1e6, (span_us.end - span_us.start) / 1e6
        yield Event(
            name, KINDS.get(name, name), start_s, seconds, {"input": str(event.input_shapes)}
        )
