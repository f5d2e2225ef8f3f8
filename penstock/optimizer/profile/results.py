"""What a profile found. Values, written as JSON and shown as table and page."""

from __future__ import annotations

from typing import Literal

import msgspec

Bound = Literal["compute", "memory", "launch", "overhead", "unknown"]


class Peaks(msgspec.Struct):
    """What this device was measured to do, with the threads that were profiled with."""

    device: str
    num_threads: int
    # By datatype: fp32, bf16, int8, ... in operations a second (a multiply-add is two).
    flops: dict[str, float]
    bytes_per_s: float
    # Smallest time of an operator that does nothing.
    launch_s: float
    # What lies in the caches of the cores moves faster; 0: not measured.
    cache_bytes_per_s: float = 0.0
    cache_bytes: int = 0
    # From pinned memory of the host to a GPU; 0: there is none.
    host_bytes_per_s: float = 0.0


class Operator(msgspec.Struct):
    """One operator of the graph that ran, mean over the runs."""

    name: str
    type: str
    seconds: float
    # None where shapes are not known.
    flops: float | None
    num_bytes: float | None
    datatype: str
    bound: Bound
    # The part of its time that the roofline says is needed, 0 to 1; None: not known.
    efficiency: float | None
    # Of the model's layer, where the name says it.
    block: str = ""
    num_calls: int = 1
    # Of the bytes, those that are constants: read anew for every batch, however small.
    weight_bytes: float = 0.0
    # The least time that the peaks allow; None: not known.
    needed_s: float | None = None


class Kernel(msgspec.Struct):
    """What a GPU ran under one name, mean of a run."""

    name: str
    seconds: float
    num_calls: float


class GpuSpan(msgspec.Struct):
    """Something that a GPU did: in the lane of kernels (compute), or of copies (in, out)."""

    name: str
    lane: str
    stream: int
    start_s: float
    seconds: float
    num_bytes: int = 0


class GpuTime(msgspec.Struct):
    """A run as the GPU saw it; medians of runs one after the other."""

    kernels: list[Kernel]
    num_kernels: int
    # With some kernel running, and from the first to the last with none.
    busy_s: float
    gap_s: float
    copy_in_s: float
    copy_out_s: float
    # Instances of the model there, each with a batch on its way at once.
    num_slots: int = 1
    # Of the time of copies, that in which kernels ran; None: there are no copies.
    hidden: float | None = None
    # The first spans, of runs at once where there are several slots.
    timeline: list[GpuSpan] = []

    @property
    def copies_s(self) -> float:
        return self.copy_in_s + self.copy_out_s


class Bucket(msgspec.Struct):
    """A part of a request's way: decode, queue, copy in or preprocess, compute, copy out or
    postprocess, encode."""

    name: str
    seconds: float


class NextStep(msgspec.Struct):
    """Something to do, and how many times as fast it can make the model at most."""

    name: str
    text: str
    ceiling: float
    # False: answers come no sooner, but more of them at once.
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
    buckets: list[Bucket]
    bound: Bound
    # Such as: 41 % of the time is MatMul, compute-bound at 62 % of the peak.
    findings: list[str]
    # What to do next and what it can give at most: "INT8 MatMul: at most 1.9x".
    recommendation: str
    ceiling: float
    versions: dict[str, str] = {}
    # All that could be done, the one recommended first.
    steps: list[NextStep] = []
    # How many times as fast the operators would be if all ran at the peaks of their datatypes.
    # None: the runs were disturbed.
    headroom: float | None = None
    # Of one run with a single thread; None: it is that, or nobody knows.
    single_thread_s: float | None = None
    # Where the inputs came from.
    inputs: str = ""
    # Of the time of a run, the part that the work needs at the peaks; None: not known.
    limit_share: float | None = None
    # None on CPUs.
    gpu: GpuTime | None = None
    # Why the times cannot be trusted: no step is recommended then. Empty: they can.
    disturbance: str = ""
    format: int = 1
