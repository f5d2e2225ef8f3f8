"""Find bottlenecks of operators and models, and the steps that could gain most. Pure.

An operator needs at least the longest of: its operations at the peak of their datatype, its bytes
at the bandwidth of the memory they are in, and one launch. Time beyond a few times that is
overhead: a poor kernel, threads that wait for each other, memory in the wrong order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

import msgspec

from penstock import units
from penstock.config import CPU, PACK, ModelConfig
from penstock.profiling.results import Bound, GpuTime, NextStep, Operator, Peaks, RequestPhase
from penstock.profiling.work import BITS, FUSIBLE, LOOKUPS, MULTIPLIERS, OperatorTime, work_of

# Operators below this efficiency are overhead-bound.
MIN_EFFICIENCY = 0.15
# Operators that take at most this many launches can count as launch-bound.
NUM_LAUNCHES = 8
# Steps with a lower ceiling are not proposed.
MIN_CEILING = 1.05
# Runs were disturbed if the slowest takes this many times as long as the fastest.
NOISY = 1.5
# Bucket of a request's time that is spent in the model.
COMPUTE = "compute"
# Buckets around the model below this share of a request's time are not worth a step.
MIN_PART = 0.1
BLOCK = re.compile(r"^(.*?(?:layers?|blocks?|stages?|encoder|features|h)[._/]+\d+)\b", re.I)
# Narrower datatypes by that of the multiplications.
NARROWER = {
    "fp32": ("tf32", "bf16", "fp16", "fp8", "int8"),
    "tf32": ("bf16", "fp16", "fp8", "int8"),
    "bf16": ("fp8", "int8"),
    "fp16": ("fp8", "int8"),
}
# Datatypes that `penstock optimize` can build: on CPUs; of PyTorch modules on GPUs; and there only
# of packed encoders. There is no INT8 on GPUs.
ON_CPUS = ("bf16", "int8")
ON_GPUS = ("tf32", "fp16", "bf16")
OF_PACKED = "fp8"
MEASURE_AGAIN = "Measure again on a quiet machine before you act on this profile"
# Smaller shares of GPU time without a kernel, or with exposed copies, are not reported.
MIN_IDLE = 0.1
BOUNDS: Sequence[Bound] = get_args(Bound)
WORDS = {each: f"{each}-bound" for each in BOUNDS} | {"unknown": "bottleneck unknown"}


@dataclass(frozen=True, slots=True)
class RooflineInput:
    """All inputs of a verdict."""

    operators: Sequence[Operator]
    peaks: Peaks
    # Time of one run without the profiler.
    total_s: float
    buckets: Sequence[RequestPhase]
    num_rows: int
    # 0: the model has no batch dimension.
    max_batch_size: int
    # None: not measured, or there is only one thread.
    single_thread_s: float | None = None
    # None on CPUs.
    gpu: GpuTime | None = None
    # Datatypes that Penstock can build this model in.
    datatypes: Sequence[str] = ON_CPUS
    # Longest time that the batcher may delay a request.
    queue_delay_s: float = 0.0
    # Why the times cannot be trusted, in which case no estimates are made; empty: they can.
    disturbance: str = ""

    @property
    def launch_gap_s(self) -> float:
        """Time between operators in which the GPU waited for the next kernel."""
        return 0.0 if self.gpu is None else min(self.gap_s, self.gpu.gap_s)

    @property
    def listed_s(self) -> float:
        return _total_s(self.operators)

    @property
    def whole_s(self) -> float:
        return max(self.total_s, self.listed_s)

    @property
    def fits(self) -> bool:
        """Whether the caches hold all weights."""
        return sum(each.weight_bytes for each in self.operators) <= self.peaks.cache_bytes

    @property
    def gap_s(self) -> float:
        """Time of a run between operators; the profiler's overhead hides some of it."""
        return max(0.0, self.total_s - self.listed_s) if self.operators else 0.0


def _total_s(parts: Iterable[Operator | RequestPhase]) -> float:
    return sum(each.seconds for each in parts)


def raised(peaks: Peaks, times: Iterable[OperatorTime]) -> Peaks:
    """Raise each peak to the highest rate that an operator of the model reached."""
    flops = dict(peaks.flops)
    for each in times:
        work = work_of(each.kind, each.inputs, each.outputs)
        datatype = each.datatype or work.datatype
        if each.kind in MULTIPLIERS and work.flops and each.seconds > 0 and datatype in flops:
            flops[datatype] = max(flops[datatype], work.flops * each.num_calls / each.seconds)
    return msgspec.structs.replace(peaks, flops=flops)


def judged(times: Iterable[OperatorTime], peaks: Peaks) -> list[Operator]:
    """Return every operator with its work and its bottleneck, longest first."""
    listed = list(times)
    fits = sum(_weights_read(each) * each.num_calls for each in listed) <= peaks.cache_bytes
    found = [_judged(each, peaks, fits) for each in listed]
    return sorted(found, key=lambda each: -each.seconds)


def _judged(each: OperatorTime, peaks: Peaks, fits: bool) -> Operator:
    work = work_of(each.kind, each.inputs, each.outputs)
    calls = each.num_calls
    operator = Operator(
        name=each.name,
        type=each.kind,
        seconds=each.seconds,
        flops=None if work.flops is None else work.flops * calls,
        num_bytes=None if work.num_bytes is None else work.num_bytes * calls,
        datatype=each.datatype or work.datatype,
        bound="unknown",
        efficiency=None,
        block=block_of(each.name),
        num_calls=calls,
        weight_bytes=_weights_read(each) * calls,
    )
    if operator.num_bytes is not None:
        needed = _needs(operator, peaks, fits)
        operator.needed_s = max(needed.values())
        if each.seconds > 0:
            operator.efficiency = min(1.0, operator.needed_s / each.seconds)
        operator.bound = _bound(operator, needed)
    return operator


def _weights_read(each: OperatorTime) -> float:
    """Return the weight bytes read; 0 for lookups, which read only a few rows."""
    return 0.0 if each.kind in LOOKUPS else each.weight_bytes


def _needs(operator: Operator, peaks: Peaks, fits: bool, datatype: str = "") -> dict[Bound, float]:
    """Return the least time by bottleneck, in another datatype if one is given."""
    own = operator.datatype
    shrink = BITS[datatype] / BITS.get(own, 32) if datatype else 1.0
    flops = peaks.flops.get(datatype or own) or peaks.flops.get("fp32", 0.0)
    return {
        "compute": (operator.flops or 0.0) / flops if flops else 0.0,
        "memory": shrink * _memory_s(operator, peaks, fits),
        "launch": peaks.launch_s * operator.num_calls,
    }


def _memory_s(operator: Operator, peaks: Peaks, fits: bool) -> float:
    """Return the memory time. Weights come from memory unless the whole model's fit the caches;
    activations come from the caches if they fit."""
    near = max(peaks.cache_bytes_per_s, peaks.bytes_per_s)
    passing = max(0.0, (operator.num_bytes or 0.0) - operator.weight_bytes)
    is_near = passing / operator.num_calls <= peaks.cache_bytes
    passing_s = passing / (near if is_near else peaks.bytes_per_s)
    return passing_s + operator.weight_bytes / (near if fits else peaks.bytes_per_s)


def _bound(operator: Operator, needed: dict[Bound, float]) -> Bound:
    work_s, launch_s = max(needed["compute"], needed["memory"]), needed["launch"]
    is_tiny = operator.seconds <= NUM_LAUNCHES * launch_s and work_s < 0.5 * operator.seconds
    if launch_s >= work_s or is_tiny:
        return "launch"
    if operator.efficiency is not None and operator.efficiency < MIN_EFFICIENCY:
        return "overhead"
    return "compute" if needed["compute"] >= needed["memory"] else "memory"


def block_of(name: str) -> str:
    """Return `encoder/layer.0` for `/encoder/layer.0/output/MatMul`; empty if there is no block."""
    found = BLOCK.match(name.strip("/"))
    return found.group(1) if found else ""


def shares(measured: RooflineInput) -> dict[Bound, float]:
    """Return a run's seconds by bottleneck. Gaps are overhead, or launch if a GPU waits."""
    found = dict.fromkeys(BOUNDS, 0.0)
    for each in measured.operators:
        found[each.bound] += each.seconds
    found["launch"] += measured.launch_gap_s
    found["overhead"] += measured.gap_s - measured.launch_gap_s
    return {bound: seconds for bound, seconds in found.items() if seconds > 0}


def bound_of(measured: RooflineInput) -> Bound:
    found = shares(measured)
    return max(found, key=lambda bound: found[bound]) if found else "unknown"


def headroom(measured: RooflineInput) -> float:
    """Return the speed-up at the peaks, with the same operators in the same datatypes."""
    if not measured.operators:
        return 1.0
    known = [each for each in measured.operators if each.needed_s is not None]
    saved_s = sum(max(0.0, each.seconds - (each.needed_s or 0.0)) for each in known)
    return _speed_up(measured, saved_s)


def limit_share(measured: RooflineInput) -> float | None:
    """Return the share of a run's time that its operations and bytes take at the peaks, without
    launches. A lower bound: unknown operators count as 0. None if most are unknown."""
    known = [each for each in measured.operators if each.num_bytes is not None]
    if not known or _total_s(known) < 0.5 * measured.listed_s:
        return None
    needs = [_needs(each, measured.peaks, measured.fits) for each in known]
    needed_s = sum(max(each["compute"], each["memory"]) for each in needs)
    return min(1.0, needed_s / measured.whole_s)


def _speed_up(measured: RooflineInput, saved_s: float) -> float:
    """Apply Amdahl's law."""
    whole_s = measured.whole_s
    return whole_s / max(whole_s - saved_s, 1e-12) if whole_s > 0 else 1.0


def buildable(config: ModelConfig) -> tuple[str, ...]:
    """Return the datatypes that `penstock optimize` can build this model in."""
    if config.device == CPU:
        # INT8 is made of ONNX files, and of models that can be exported to one.
        is_onnx_made = not config.artifact.endswith(".xml")
        return tuple(each for each in ON_CPUS if each != "int8" or is_onnx_made)
    if config.backend != "pytorch" or config.artifact.endswith((".pt2", ".pt")):
        return ()
    return (*ON_GPUS, OF_PACKED) if PACK in config.options else ON_GPUS


def next_steps(measured: RooflineInput) -> list[NextStep]:
    """Return the steps worth trying, best first, then cheapest; none if runs were disturbed."""
    if measured.disturbance:
        return []
    tried = [_fusion(measured), _better_kernels(measured), _graphs(measured)]
    tried += [_narrower(measured, datatype) for datatype in NARROWER["fp32"]]
    tried += [_batching(measured), _hidden_copies(measured), _instances(measured), _path(measured)]
    worth = [step for step in tried if step is not None and step.ceiling >= MIN_CEILING]
    return sorted(worth, key=lambda step: -round(step.ceiling, 2))


def _fusion(measured: RooflineInput) -> NextStep | None:
    """Fuse operators that mostly move memory into their neighbours."""
    small = [each for each in measured.operators if each.type in FUSIBLE and each.seconds > 0]
    saved_s = _total_s(small)
    text = f"fuse {_top_types(small)} into adjacent operators ({_percent(saved_s, measured)})"
    return _step("fusion", text, measured, saved_s)


def _better_kernels(measured: RooflineInput) -> NextStep | None:
    poor = [each for each in measured.operators if each.bound == "overhead"]
    saved_s = sum(each.seconds - (each.needed_s or 0.0) for each in poor)
    part = _percent(saved_s, measured)
    text = f"another runtime or compiler for {_top_types(poor)} ({part} is overhead)"
    return _step("compile", text, measured, saved_s)


def _narrower(measured: RooflineInput, datatype: str) -> NextStep | None:
    """Use a narrower datatype in matmuls: its peak helps if they are compute-bound, its size if
    memory-bound. Their distance from the roof is assumed to stay the same."""
    if datatype not in measured.peaks.flops or datatype not in measured.datatypes:
        return None
    fits = measured.fits
    chosen, saved_s = [], 0.0
    for each in measured.operators:
        if each.type not in MULTIPLIERS or datatype not in NARROWER.get(each.datatype, ()):
            continue
        now = max(_needs(each, measured.peaks, fits).values())
        then = max(_needs(each, measured.peaks, fits, datatype).values())
        if now > 0 and then < now:
            chosen.append(each)
            saved_s += each.seconds * (1 - then / now)
    part = _percent(_total_s(chosen), measured)
    text = f"{datatype.upper()} for {_top_types(chosen)} ({part})"
    return _step(datatype, text, measured, saved_s)


def _graphs(measured: RooflineInput) -> NextStep | None:
    saved_s = measured.launch_gap_s
    part = _percent(saved_s, measured)
    text = f"CUDA graphs, or fewer kernels: the GPU waits for kernel launches ({part})"
    return _step("cuda-graphs", text, measured, saved_s)


def _hidden_copies(measured: RooflineInput) -> NextStep | None:
    """Use two instances on a GPU, so that one batch is copied while another is computed."""
    gpu = measured.gpu
    if gpu is None or gpu.num_slots > 1:
        return None
    saved_s = min(gpu.copies_s, gpu.busy_s)
    text = f"2 instances on the GPU, to overlap copies with kernels ({_percent(saved_s, measured)})"
    return _step("instances", text, measured, saved_s, is_latency=False)


def _batching(measured: RooflineInput) -> NextStep | None:
    """Use larger batches, so that more rows share the fixed cost of a batch."""
    largest = measured.max_batch_size
    if largest <= measured.num_rows:
        return None
    fixed_s = measured.gap_s
    for each in measured.operators:
        if each.bound in ("launch", "overhead"):
            fixed_s += each.seconds
        elif each.bound == "memory" and each.num_bytes:
            fixed_s += each.seconds * each.weight_bytes / each.num_bytes
    saved_s = fixed_s * (1 - measured.num_rows / largest)
    text = f"batches of {largest} rows: {_percent(fixed_s, measured)} is paid once per batch"
    return _step("batching", text, measured, saved_s, is_latency=False)


def _instances(measured: RooflineInput) -> NextStep | None:
    """Run one instance per thread, which regains all that is lost between threads. The instances
    would share memory and caches, so this is an upper bound."""
    count, alone_s = measured.peaks.num_threads, measured.single_thread_s
    if alone_s is None or count < 2 or alone_s <= 0:
        return None
    ceiling = count * measured.total_s / alone_s
    gained = alone_s / measured.total_s
    text = f"{count} instances of 1 thread: {count} threads are only {gained:.2g}x as fast as 1"
    return NextStep("instances", f"{text}: at most {ceiling:.2g}x the rate", ceiling, False)


def _path(measured: RooflineInput) -> NextStep | None:
    """Shorten the largest part of a request's time around the model that can be shortened."""
    whole = _total_s(measured.buckets)
    for each in sorted(measured.buckets, key=lambda each: -each.seconds):
        advice = _advice(each.name, measured)
        if advice and each.seconds >= MIN_PART * whole > 0:
            ceiling = whole / max(whole - each.seconds, 1e-12)
            text = f"{each.name} is {units.share(each.seconds, whole)} of a request: {advice}"
            return NextStep("path", f"{text}: at most {ceiling:.2g}x", ceiling)
    return None


def _advice(part: str, measured: RooflineInput) -> str:
    """Return how to shorten a part of a request's time; empty if Penstock can do nothing today. The
    profiled request has binary tensors already, and no other request to wait for."""
    if part == "queue" and (delay_s := measured.queue_delay_s) > 0:
        return f"lower max_queue_delay_microseconds (now {units.duration(delay_s)})"
    if part in ("preprocess", "postprocess"):
        return f"vectorise the {part} function (numpy on whole arrays), or do less in it"
    if part == "encode":
        return "request only the outputs that you need"
    if part in ("decode", "copy in", "copy out") and measured.max_batch_size > measured.num_rows:
        return "send more rows per request"
    return ""


def _step(
    name: str, text: str, measured: RooflineInput, saved_s: float, *, is_latency: bool = True
) -> NextStep | None:
    if saved_s <= 0:
        return None
    ceiling = _speed_up(measured, saved_s)
    unit = "" if is_latency else " the rate"
    return NextStep(name, f"{text}: at most {ceiling:.2g}x{unit}", ceiling, is_latency)


def findings(measured: RooflineInput) -> list[str]:
    """Return the findings, most important first."""
    lines = [measured.disturbance, _bound_line(measured), *_type_lines(measured)]
    if measured.operators and not measured.disturbance:
        if (share := limit_share(measured)) is not None:
            limit = "its limit (its FLOP and bytes at the device's peaks)"
            lines.append(f"the model runs at {share:.0%} of {limit}")
        lines.append(_headroom_line(measured))
    lines += _gpu_lines(measured)
    whole = _total_s(measured.buckets)
    queue_s = _total_s(each for each in measured.buckets if each.name == "queue")
    if whole and queue_s > 0.1 * whole:
        held = "although no other request is there: the batcher holds it back"
        part = units.share(queue_s, whole)
        lines.append(f"a request waits in the queue for {part} of its time {held}")
    around_s = _total_s(each for each in measured.buckets if each.name != COMPUTE)
    if whole and around_s > 0.1 * whole:
        part = units.share(around_s, whole)
        lines.append(f"{part} of a request's time is spent around the model")
    return [line for line in lines if line]


def disturbance(runs_s: Sequence[float], again_s: float | None = None) -> str:
    """Return a warning if equal runs took very different times. `again_s`: a later median."""
    ordered = sorted(runs_s)
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    if again_s:
        low, high = min(low, again_s), max(high, again_s)
    if high <= NOISY * low:
        return ""
    spread = f"the same run took from {units.duration(low)} to {units.duration(high)}"
    return f"{spread}: other processes used this machine"


def _bound_line(measured: RooflineInput) -> str:
    found = sorted(shares(measured).items(), key=lambda item: -item[1])
    parts = [f"{_percent(seconds, measured, '')} {WORDS[bound]}" for bound, seconds in found]
    return f"of {units.duration(measured.total_s)}: {', '.join(parts)}" if parts else ""


def _type_lines(measured: RooflineInput) -> list[str]:
    lines = []
    for kind, operators in by_type(measured.operators)[:3]:
        seconds = _total_s(operators)
        if seconds < 0.05 * measured.total_s:
            continue
        by_bound = [[each for each in operators if each.bound == bound] for bound in BOUNDS]
        bound = max(filter(None, by_bound), key=_total_s)[0].bound
        known = [each for each in operators if each.needed_s is not None]
        needed = sum(min(each.seconds, each.needed_s or 0.0) for each in known)
        at = f" at {units.share(needed, seconds)} of its roof" if known else ""
        lines.append(f"{_percent(seconds, measured)} is {kind}, {WORDS[bound]}{at}")
    return lines


def _gpu_lines(measured: RooflineInput) -> list[str]:
    gpu = measured.gpu
    if gpu is None:
        return []
    lines = []
    span_s = gpu.busy_s + gpu.gap_s
    if gpu.gap_s > MIN_IDLE * span_s:
        waits = f"the GPU waits for the next of {gpu.num_kernels}"
        part = f"{units.share(gpu.gap_s, span_s)} of the time from the first kernel to the last"
        lines.append(f"launch-bound: {part} {waits} (while profiled, which takes its own time)")
    if gpu.hidden is not None and gpu.copies_s > MIN_IDLE * span_s:
        times = f"{units.duration(gpu.copy_in_s)} in and {units.duration(gpu.copy_out_s)} out"
        hidden = f"{gpu.hidden:.0%} of that is hidden behind kernels"
        slots = units.count(gpu.num_slots, "instance")
        lines.append(f"copies take {times}; with {slots} on the GPU {hidden}")
    return lines


def _headroom_line(measured: RooflineInput) -> str:
    room = headroom(measured)
    known_s = _total_s(each for each in measured.operators if each.needed_s is not None)
    if known_s < 0.5 * measured.listed_s:
        return "the shapes of most operators are unknown, so there is no estimate at the peaks"
    if room < MIN_CEILING:
        return "the operators run at this device's peaks: only fewer or narrower ones help"
    return f"at this device's peaks the same operators and datatypes would be {room:.2g}x as fast"


def verdict(measured: RooflineInput, steps: Sequence[NextStep]) -> str:
    """Return the report's first line."""
    if measured.disturbance:
        return f"Disturbed: {measured.disturbance}. {MEASURE_AGAIN}"
    if not measured.operators:
        start = f"{units.duration(measured.total_s)} per batch; its operators cannot be seen"
    else:
        bound = bound_of(measured)
        part = _percent(shares(measured).get(bound, 0.0), measured)
        start = f"{WORDS[bound].capitalize()}: {part}{_most_of(measured, bound)}"
    if not steps:
        return f"{start}. No step promises more than {MIN_CEILING:g}x"
    return f"{start}. Next: {steps[0].text}"


def _most_of(measured: RooflineInput, bound: Bound) -> str:
    types = by_type([each for each in measured.operators if each.bound == bound])
    longest_s = _total_s(types[0][1]) if types else 0.0
    if bound == "overhead" and measured.gap_s > longest_s:
        return ", most of it between operators"
    return f", most of it {types[0][0]}" if types else ""


def by_type(operators: Sequence[Operator]) -> list[tuple[str, list[Operator]]]:
    """Group operators by type, the type with the most time first."""
    found: dict[str, list[Operator]] = {}
    for each in operators:
        found.setdefault(each.type, []).append(each)
    return sorted(found.items(), key=lambda item: -_total_s(item[1]))


def _top_types(operators: Sequence[Operator]) -> str:
    names = [kind for kind, _ in by_type(operators)] or ["nothing"]
    return units.listed(names[:3] + (["others"] if len(names) > 3 else []))


def _percent(seconds: float, measured: RooflineInput, words: str = " of the time") -> str:
    return units.share(seconds, measured.whole_s) + words
