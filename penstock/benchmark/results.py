"""A run as a file: plain values, written and read as JSON."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.benchmark import pacer
from penstock.benchmark.agreement import Agreement
from penstock.benchmark.exchange import TimingSample
from penstock.benchmark.pacer import Load
from penstock.benchmark.search import Knee as Knee
from penstock.benchmark.search import MaxRate as MaxRate
from penstock.benchmark.stats import DurationHistogram, Window
from penstock.benchmark.targets import Counters, Description
from penstock.data import Origin

FORMAT = 1

# Why a level ended: its interval was narrow enough; its time was up; its trace or profile ended;
# the user interrupted; the server stopped answering; the search had enough data.
Ending = Literal["precise", "time", "through", "interrupted", "lost", "decided"]


class WarmUp(msgspec.Struct):
    """Requests sent before measuring began; they do not count."""

    duration_s: float
    num_requests: int
    # False: still changing when the time for warm-up was up.
    is_steady: bool
    # Median latency of the first and the last third; None where nothing was answered.
    first_s: float | None
    last_s: float | None


class GeneratorUse(msgspec.Struct):
    """The generator's own behaviour: shows whether it limited the results."""

    # Share of one core while measuring, by process.
    cpu_shares: list[float]
    # due -> sent.
    lateness: DurationHistogram
    # Mean number in flight over the whole span.
    mean_in_flight: float
    max_in_flight: int
    num_connections: int
    # Requests that had to wait for a connection because all were busy.
    num_waited: int


class SystemSample(msgspec.Struct):
    """The generator's machine at one moment, and its GPUs if it has any."""

    at_s: float  # since measuring began
    cpu_percent: float  # of all cores
    memory_bytes: int
    cpu_mhz: float | None = None
    gpu_percent: list[float] = []
    gpu_memory_bytes: list[int] = []
    gpu_watts: list[float] = []
    gpu_mhz: list[float] = []


class Level(msgspec.Struct):
    """The measurement of one load."""

    load: Load
    measured_s: float
    ending: Ending
    warm_up: WarmUp | None
    windows: list[Window]
    # sent -> done: latency without the wait to be sent.
    service: DurationHistogram
    generator: GeneratorUse
    # Differences over this level; None where the server has no counters.
    server: Counters | None = None
    samples: list[TimingSample] = []
    system: list[SystemSample] = []
    # With recorded answers, of a replay.
    agreement: Agreement | None = None

    @property
    def label(self) -> str:
        return pacer.label(self.load)


class ColdStart(msgspec.Struct):
    """Times before anything was warm: loading (in process) or connecting, and the first request."""

    first_s: float | None = None
    connect_s: float | None = None
    load_s: float | None = None


class Environment(msgspec.Struct):
    """The machine that sent the load, and its software."""

    host_cpu: str
    num_cores: int
    memory_bytes: int
    system: str
    gpus: list[str] = []
    versions: dict[str, str] = {}
    # True: the system samples include the server's load.
    is_server_local: bool = True


class BenchRun(msgspec.Struct):
    """Everything known about one call of `penstock bench`."""

    target: Description
    origin: Origin
    environment: Environment
    created: str  # ISO 8601, UTC
    command: str
    duration_s: float
    precision_percent: float  # half the width of the interval that ends a level; 0: never
    statistic: str  # the percentile that decides, "p99"
    # Rows per request: inferences are requests times this.
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
