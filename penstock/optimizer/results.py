"""Results of an optimisation: every try with its reasons, the choice and its proof. Values from
which the journal, the report and the evidence are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from penstock.benchmark.stats import Interval
from penstock.optimizer.accuracy import Judgement
from penstock.optimizer.candidates import Candidate, Skip, Stage
from penstock.optimizer.facts import Facts
from penstock.optimizer.machine import Conditions, Machine
from penstock.optimizer.numerics import Numerics
from penstock.optimizer.simulate import TimeTable
from penstock.profiling.results import Profile, StepTime
from penstock.serving.input_statistics import InputStatistics

# kept: became the best so far, or is part of the choice; equal: no better than the best within the
# noise, and not simpler; slower: behind, as predicted or as measured; rejected: failed a gate;
# failed: could not be built or run; cut off: the time budget ended before it was built or measured.
Outcome = Literal["kept", "equal", "slower", "rejected", "failed", "cut off"]

# Units of terms with a lower limit; all others have an upper limit.
AT_LEAST = ("/s", "%")
# A figure this many times below its limit is certain, however few requests it comes from.
FAR = 3.0


class TermVerdict(msgspec.Struct):
    """One term of the SLO and its measurement."""

    term: str  # "p99 < 20ms"
    outcome: str  # kept, missed, not measured
    measured: Interval | None
    limit: float
    # In the unit of the term: s, /s, %, bytes, per million.
    unit: str

    @property
    def is_sure(self) -> bool:
        """Whether the term is kept by the whole confidence interval, or by a factor of FAR, where
        no interval is needed."""
        if self.measured is None:
            return False
        if self.unit in AT_LEAST:
            return self.measured.low >= self.limit
        return self.measured.high <= self.limit or FAR * self.measured.value <= self.limit


class Curve(msgspec.Struct):
    """Latency and throughput at increasing arrival rates."""

    rates: list[float]
    throughput: list[float]
    p50_s: list[float]
    p99_s: list[float]
    # For streamed answers; empty for others.
    ttft_p99_s: list[float] = []
    tpot_p99_s: list[float] = []


class Streams(msgspec.Struct):
    """Figures of streamed answers: p99 of the time to the first token and per token after it, and
    prompt and output tokens per second."""

    ttft: Interval
    tpot: Interval
    prompt_tokens_per_s: float
    tokens_per_s: float


class Turn(msgspec.Struct):
    """One repetition of a measurement."""

    p50_s: float
    p99_s: float
    throughput: float
    goodput: float
    is_kept: bool
    # The same without the time in which the load generator itself was late (None: too little is
    # left), and the share of that time.
    is_kept_calm: bool | None = None
    p99_calm_s: float | None = None
    late_share: float = 0.0
    conditions: Conditions = Conditions()


class MemberTime(msgspec.Struct):
    """Mean seconds that a request to an ensemble spends in one member, over all its requests to
    it; members may work at the same time."""

    queue_s: float
    compute_s: float
    # Requests to the member.
    num_requests: float

    @property
    def total_s(self) -> float:
        return self.queue_s + self.compute_s


class ServedMeasurement(msgspec.Struct):
    """Measurement through the real serving path, at the SLO's load."""

    load: str  # "200/s poisson"
    # Failed requests count as infinitely slow.
    p50: Interval
    p99: Interval
    throughput: Interval
    goodput: float
    verdicts: list[TermVerdict]
    num_requests: int
    num_failed: int
    # Mean seconds of a request by phase: queue, compute input, compute, compute output, network and
    # codec; or preprocess and postprocess, if a function takes most of compute input or output.
    phases: dict[str, float]
    rows_per_batch: float
    memory_bytes: int
    # Highest rate that keeps the latency terms; None: not searched for.
    max_rate: Interval | None = None
    cost_per_million: float | None = None
    curve: Curve | None = None
    # Number of repetitions; the figures cover all of them.
    num_runs: int = 1
    # The most common reason of failed requests.
    failure: str = ""
    # GPU memory of one instance; 0 on CPUs.
    gpu_memory_bytes: int = 0
    # None: answers are not streamed.
    streams: Streams | None = None
    # Each repetition, in order. Intervals cover their spread.
    turns: list[Turn] = []
    # Why these figures cannot be trusted; empty: nothing contradicts them.
    disturbances: list[str] = []
    # The members of an ensemble, by name; empty for other models.
    members: dict[str, MemberTime] = {}

    @property
    def is_met(self) -> bool:
        return bool(self.verdicts) and all(each.outcome == "kept" for each in self.verdicts)

    @property
    def is_sure(self) -> bool:
        """Whether the SLO is met with certainty."""
        return self.is_met and all(each.is_sure for each in self.verdicts)


class Try(msgspec.Struct):
    candidate: Candidate
    stage: Stage
    outcome: Outcome
    # Why, in one sentence, with the numbers.
    reason: str
    facts: Facts | None = None
    numerics: Numerics | None = None
    accuracy: Judgement | None = None
    # The judgement that refused it on the held-out set; None: not judged there, or passed.
    held_out: Judgement | None = None
    times: list[TimeTable] = []
    # Highest rate by simulation, with the serving configuration that gives it.
    predicted_rate: float | None = None
    predicted_shape: str = ""
    served: ServedMeasurement | None = None
    seconds: float = 0.0
    # Layers kept in float, with the accuracy regained and the time lost by each.
    fallback: list[FallbackLayer] = []
    # Where a batch spends the GPU's time, for the original and steps that were kept on a GPU.
    step_time: StepTime | None = None

    @property
    def refusal(self) -> Judgement | None:
        """The judgement by which the accuracy gate refused it; None: it was not refused."""
        judged = (self.held_out, self.accuracy)
        return next((each for each in judged if each is not None and not each.is_passed), None)

    @property
    def is_inaccurate(self) -> bool:
        """Whether it was built as asked for, and refused for its answers."""
        return self.outcome == "rejected" and self.numerics is not None


def try_of(tries: Sequence[Try], key: str) -> Try | None:
    return next((each for each in tries if each.candidate.key == key), None)


class FallbackLayer(msgspec.Struct):
    name: str
    operator: str
    # Share of the quantisation error that keeping it in float avoids.
    regained: float
    lost_s: float


class Phase(msgspec.Struct):
    """A bar of the waterfall: the original, or the chosen candidate up to one of its steps."""

    label: str
    p99_s: float
    max_rate: float
    accuracy: float | None
    cost_per_million: float | None
    # From a served run; False: predicted from batch times.
    is_measured: bool
    # The served run did not search for the highest rate: rate and cost are predicted.
    is_rate_predicted: bool = False
    # Where a batch spends the GPU's time after this step; None: not on a GPU, or not profiled.
    step_time: StepTime | None = None

    @property
    def is_rate_measured(self) -> bool:
        return self.is_measured and not self.is_rate_predicted


class NextOption(msgspec.Struct):
    """What could be done next about an SLO that was missed, the most promising first."""

    # more GPUs, another precision, more time, smaller model, ...
    name: str
    text: str
    # The rate that it would reach; None: unknown.
    rate: float | None = None
    # Whether that rate is the required one or more.
    is_enough: bool = False
    # From measured figures of that very option; False: modelled from others.
    is_measured: bool = False


class Optimization(msgspec.Struct):
    """Everything known about one call of `penstock optimize`."""

    name: str
    source: str  # the model as given
    source_text: str  # "ONNX, 22.7 M parameters, FP32"
    slo: str
    accuracy_budget: str
    data_text: str
    machine: Machine
    created: str
    command: str
    # Important notes: no data, agreement only, the time budget ran out.
    notes: list[str] = []
    tries: list[Try] = []
    skipped: list[Skip] = []
    chosen: Candidate | None = None
    # Original and chosen: measured alternately in one run if `is_proven`, else in the search.
    before: ServedMeasurement | None = None
    after: ServedMeasurement | None = None
    is_proven: bool = False
    held_out: Judgement | None = None
    phases: list[Phase] = []
    # kept, missed, refused (by the accuracy gate), disturbed (the measurements contradict each
    # other), interrupted, failed (the proof of the chosen version could not be measured).
    outcome: str = ""
    # Why the proof of the chosen version could not be measured; empty: it was, or was not started.
    proof_failure: str = ""
    # Disturbances of the measurements, one sentence each.
    disturbances: list[str] = []
    # Gaps in what the accuracy gate checked, one sentence each.
    unchecked: list[str] = []
    # The first line of the report.
    headline: str = ""
    # Bottleneck when the SLO is missed: "compute: 71 % of p99".
    binding: str = ""
    # What to do next when it is missed.
    next_options: list[NextOption] = []
    version: str = ""  # in the repository
    # Why no version was committed; empty: it was.
    uncommitted: str = ""
    # Version that keeps its SLO and stays served, because this result is not proven; empty: none.
    kept_version: str = ""
    # Folder of the chosen build, as long as the run's folder exists.
    build_folder: str = ""
    out: str = ""  # the repository
    source_digest: str = ""
    price_per_hour: float | None = None
    profile: Profile | None = None
    # Key of the candidate that was profiled.
    profiled: str = ""
    elapsed_s: float = 0.0
    num_measured: int = 0
    num_remembered: int = 0
    # The run's folder, with every build by its key; empty: not kept.
    work: str = ""
    # Statistics of the data, which the server compares live inputs with; empty without data.
    input_statistics: InputStatistics = {}
    # Path of the recording that the data is; empty for other data.
    live_data: str = ""
    # Arrival of the first and last request of live data, ISO 8601; empty for other data.
    live_span: tuple[str, ...] = ()
    # The member of an ensemble that was optimised; empty for other models.
    member: str = ""
    # tensors; or text: a language model behind OpenAI's API.
    form: Literal["tensors", "text"] = "tensors"
    format: int = 1
