"""Results of a profile. Values, written as JSON and shown as table and page."""

from __future__ import annotations

from typing import Literal

import msgspec

Bound = Literal["compute", "memory", "launch", "overhead", "unknown"]


class Peaks(msgspec.Struct):
    """Measured peaks of this device, with the profiled number of threads."""

    device: str
    num_threads: int
    # By datatype: fp32, bf16, int8, ... in operations a second (a multiply-add is two).
    flops: dict[str, float]
    bytes_per_s: float
    # Shortest time of an operator that does nothing.
    launch_s: float
    # Bandwidth of data in the cores' caches; 0: not measured.
    cache_bytes_per_s: float = 0.0
    cache_bytes: int = 0
    # From pinned host memory to the GPU; 0: no GPU.
    host_bytes_per_s: float = 0.0


class Operator(msgspec.Struct):
    """One operator of the executed graph, in a typical run."""

    name: str
    type: str
    seconds: float
    # None if shapes are unknown.
    flops: float | None
    num_bytes: float | None
    datatype: str
    bound: Bound
    # Share of its time that the roofline requires, 0 to 1; None: unknown.
    efficiency: float | None
    # Layer of the model, if the name contains it.
    block: str = ""
    num_calls: int = 1
    # The part of the bytes that is constants: read again for every batch, however small.
    weight_bytes: float = 0.0
    # Least time that the peaks allow; None: unknown.
    needed_s: float | None = None


class Kernel(msgspec.Struct):
    """All calls of a GPU kernel in a run, mean over runs."""

    name: str
    seconds: float
    num_calls: float


class GpuSpan(msgspec.Struct):
    """One GPU activity: a kernel (lane compute) or a copy (lanes in, out)."""

    name: str
    lane: str
    stream: int
    start_s: float
    seconds: float
    num_bytes: int = 0


class GpuTime(msgspec.Struct):
    """A run from the GPU's side; medians over sequential runs."""

    kernels: list[Kernel]
    num_kernels: int
    # Time with a kernel running, and without one between the first and the last.
    busy_s: float
    gap_s: float
    copy_in_s: float
    copy_out_s: float
    # Instances of the model on the GPU, each with one batch in flight.
    num_slots: int = 1
    # Share of the copy time in which kernels ran; None: no copies.
    hidden: float | None = None
    # The first spans; of concurrent runs if there are several slots.
    timeline: list[GpuSpan] = []

    @property
    def copies_s(self) -> float:
        return self.copy_in_s + self.copy_out_s


class StepTime(msgspec.Struct):
    """Where a batch of one candidate spends the GPU's time, to compare steps."""

    num_rows: int
    # Kernel seconds by kind of layer, longest first.
    layers: dict[str, float]
    num_kernels: int
    busy_s: float
    # Without a kernel between the first and the last.
    gap_s: float
    copy_in_s: float
    copy_out_s: float


class RequestPhase(msgspec.Struct):
    """A part of a request's time: decode, queue, copy in or preprocess, compute, copy out or
    postprocess, encode."""

    name: str
    seconds: float


class NextStep(msgspec.Struct):
    """A possible optimisation, and an upper bound on its speed-up."""

    name: str
    text: str
    ceiling: float
    # False: it raises the rate, but does not lower the latency of a request.
    is_latency: bool = True


class Profile(msgspec.Struct):
    model: str
    backend: str
    batch: str  # "1 row of 32 tokens"
    num_runs: int
    total_s: float  # of one run, measured without the profiler
    profiled_s: float  # with it
    operators: list[Operator]
    peaks: Peaks
    buckets: list[RequestPhase]
    bound: Bound
    # For example: 41 % of the time is MatMul, compute-bound at 62 % of the peak.
    findings: list[str]
    # The next step and its ceiling: "INT8 MatMul: at most 1.9x".
    recommendation: str
    ceiling: float
    versions: dict[str, str] = {}
    # All possible steps, the recommended one first.
    steps: list[NextStep] = []
    # Speed-up if all operators ran at the peaks of their datatypes. None: the runs were disturbed.
    headroom: float | None = None
    # Time of one run on a single thread; None: the run has only one, or it was not measured.
    single_thread_s: float | None = None
    # Source of the inputs.
    inputs: str = ""
    # Share of a run's time that its work needs at the peaks; None: unknown.
    limit_share: float | None = None
    # None on CPUs.
    gpu: GpuTime | None = None
    # Why the times cannot be trusted, in which case no step is recommended; empty: they can.
    disturbance: str = ""
    format: int = 1
