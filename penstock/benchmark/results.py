"""A run as a file: measured once, shown many ways. Plain values, written and read as JSON."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.benchmark.exchange import TimingSample
from penstock.benchmark.inputs import Origin
from penstock.benchmark.pacer import Load
from penstock.benchmark.search import Knee as Knee
from penstock.benchmark.search import MaxRate as MaxRate
from penstock.benchmark.stats import Histogram, Window
from penstock.benchmark.targets import Counters, Description

FORMAT = 1

# Why a level ended: its interval was tight enough; its time was up; its trace or profile was
# through; somebody interrupted; the server no longer answered; the search had seen enough.
Ending = Literal["precise", "time", "through", "interrupted", "lost", "decided"]


class WarmUp(msgspec.Struct):
    """What was sent before measuring began and does not count."""

    duration_s: float
    num_requests: int
    # False: still changing when the patience was at an end.
    is_steady: bool
    # Median latency of its first and its last part; None where nothing was answered.
    first_s: float | None
    last_s: float | None


class GeneratorUse(msgspec.Struct):
    """What the load generator itself did: whether the numbers are the server's or its own."""

    # Of one core, while measuring; one figure per process.
    cpu_shares: list[float]
    # due -> sent.
    lateness: Histogram
    # Mean number under way over the whole span, whoever was due when.
    mean_in_flight: float
    max_in_flight: int
    num_connections: int
    # Requests that had to wait for a connection because all were busy.
    num_waited: int


class SystemSample(msgspec.Struct):
    """The machine of the generator at one moment, and its GPUs where it has any."""

    at_s: float  # since measuring began
    cpu_percent: float  # of all cores
    memory_bytes: int
    cpu_mhz: float | None = None
    gpu_percent: list[float] = []
    gpu_memory_bytes: list[int] = []
    gpu_watts: list[float] = []
    gpu_mhz: list[float] = []


class Level(msgspec.Struct):
    """One load, measured."""

    load: Load
    measured_s: float
    ending: Ending
    warm_up: WarmUp | None
    windows: list[Window]
    # sent -> done: what a client sees that does not mind waiting to send.
    service: Histogram
    generator: GeneratorUse
    # Differences over this level; None where the server keeps no account.
    server: Counters | None = None
    samples: list[TimingSample] = []
    system: list[SystemSample] = []


class ColdStart(msgspec.Struct):
    """Before anything was warm: how long loading (in process) or connecting took, and the first
    request."""

    first_s: float | None = None
    connect_s: float | None = None
    load_s: float | None = None


class Environment(msgspec.Struct):
    """The machine the load came from and what it ran."""

    host_cpu: str
    num_cores: int
    memory_bytes: int
    system: str
    gpus: list[str] = []
    versions: dict[str, str] = {}
    # Whether the server shares this machine: then its load is in the system samples too.
    is_server_local: bool = True


class Run(msgspec.Struct):
    """Everything that is known about one call of `penstock bench`."""

    target: Description
    origin: Origin
    environment: Environment
    created: str  # ISO 8601, UTC
    command: str
    duration_s: float
    precision_percent: float  # half the width of the interval that ends a level; 0: never
    statistic: str  # the percentile that decides, "p99"
    # Rows in each request: inferences are so many times the requests.
    batch_size: int = 1
    slo: str = ""
    price_per_hour: float | None = None
    cold_start: ColdStart | None = None
    levels: list[Level] = []
    knee: Knee | None = None
    max_rate: MaxRate | None = None
    seed: int = 0
    is_partial: bool = False
    # Why it is partial, or what else went wrong.
    problem: str = ""
    format: int = FORMAT
