"""Configuration as frozen values: models, batching, and the server's listeners.

Parsed elsewhere (`repository` reads config.pbtxt, `cli` reads flags), resolved once, never changed
afterwards. Each default has a comment that says when to change it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from penstock.system.host_policy import HostPolicy
from penstock.types import TensorSpec, TimeoutAction

MIB = 1 << 20
DEFAULT_HANG_S = 30.0
DEFAULT_LOAD_TIMEOUT_S = 600.0
MAX_INSTANCES = 64
CPU = "cpu"
# Share of each GPU's memory that is reserved by default.
GPU_MEMORY_RESERVE = 0.05
# All GPUs, until the model is placed (`serving.placement`); for a worker, the first one.
EACH_GPU = "cuda"
# In place of an SLO: none, even if the version's evidence has one.
SLO_OFF = "off"


def ladder(max_batch_size: int) -> list[int]:
    """Return the batch sizes that are warmed up: 1, 2, 4, ... and the largest itself."""
    rungs = [1]
    while rungs[-1] * 2 < max_batch_size:
        rungs.append(rungs[-1] * 2)
    if max_batch_size > 1:
        rungs.append(max_batch_size)
    return rungs


# The backend of language models: an engine instead of workers.
LLM = "llm"
# Built-in steps in the place of a function, from the files of a Hugging Face folder. Steps before
# the model run as a stage of their own (`serving.pipeline`), steps behind it in its worker. Images
# for a GPU are decoded in the model's worker.
TOKENIZER, IMAGE = "tokenizer", "image"
STAGES = (TOKENIZER, IMAGE)
CLASSIFIER, TOKEN_CLASSIFIER, EMBEDDING = "classifier", "token_classifier", "embedding"
HEADS = (CLASSIFIER, TOKEN_CLASSIFIER, EMBEDDING)
# Inputs that a head takes beside the network's outputs; the network does not get them.
OFFSETS = "offsets"
HEAD_INPUTS: Mapping[str, tuple[str, ...]] = {TOKEN_CLASSIFIER: (OFFSETS,)}
# The backend of a preprocessing stage.
PREPROCESS_BACKEND = "preprocess"
# The option to run a model's layers over concatenated tokens, without padding.
PACK, TOKENS = "penstock.pack", "tokens"
# GPU memory of a worker for decoded images: a batch is decoded in parts of this size.
DECODE_BYTES = 256 * MIB
# The backend of ensembles, whose steps are other models (Triton's platform of this name).
ENSEMBLE = "ensemble"
# Triton's names of backends, where they differ from ours.
PLATFORM_NAMES = {"onnxruntime": "onnxruntime_onnx", "tensorrt": "tensorrt_plan"}
TORCHSCRIPT = "pytorch_libtorch"
# The option that says who runs an ONNX file on a GPU: Penstock's own engine, which is the default,
# or ONNX Runtime's GPU providers.
GPU_ENGINE = "penstock.gpu_engine"
OWN_ENGINE, ONNX_RUNTIME = "penstock", "onnxruntime"
GPU_ENGINES = (OWN_ENGINE, ONNX_RUNTIME)
# Engines that start a batch on a GPU while earlier ones are still running there.
AHEAD = ("pytorch", "tensorrt", "null", ONNX_RUNTIME)


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Limits of a queue (Triton's ModelQueuePolicy)."""

    timeout_action: TimeoutAction = "REJECT"
    # Zero: no time-out; set it below your clients' own time-out.
    default_timeout_s: float = 0.0
    # Lets a request shorten the default time-out, never lengthen it.
    allow_timeout_override: bool = False
    # Zero: no separate limit; `BatchPolicy.max_pending` still holds.
    max_queue_size: int = 0


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """Triton's dynamic_batching. `is_dynamic` False runs each request by itself."""

    max_batch_size: int
    is_dynamic: bool = False
    # Only for models that are much faster at certain sizes; otherwise leave empty.
    preferred_batch_sizes: tuple[int, ...] = ()
    # Deliberate waiting; batches form by themselves while the instances are busy.
    max_queue_delay_s: float = 0.0
    # Answers leave in the order of arrival; costs latency when there are several instances.
    preserve_ordering: bool = False
    num_priorities: int = 0
    default_priority: int = 0
    # Index 0 is the default; levels 1..num_priorities follow.
    policies: tuple[QueuePolicy, ...] = (QueuePolicy(),)
    # Limit on all queues of the model together; lower it if memory is short.
    max_pending: int = 8192
    # Longest latency of a request, from the model's SLO; switches from Triton's rules to slo mode.
    slo_latency_s: float | None = None
    # Most tokens of a batch, in addition to its most rows; a request with more runs alone. For
    # models whose batch time depends on tokens, not rows.
    max_tokens: int | None = None
    # Longest wait before a request is refused, without an SLO. None: the larger of 1 s and ten
    # times the largest batch, unless the queue has its own limit; 0: no limit, as in Triton. Lower
    # it below your clients' own time-out.
    max_wait_s: float | None = None

    def policy(self, level: int) -> QueuePolicy:
        return self.policies[level] if level < len(self.policies) else self.policies[0]

    def level(self, priority: int) -> int:
        """Return the index of the level of a request with this priority; 0 is the highest.
        Priorities that are not given (0) or not known mean the default."""
        if self.num_priorities <= 1:
            return 0
        is_known = 0 < priority <= self.num_priorities
        return max(1, priority if is_known else self.default_priority) - 1


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """Shared memory of one model. Raise it for large tensors or deep queues."""

    # Per slab; None: sized for a full batch of fixed shapes, 4 MiB for variable ones.
    slab_bytes: int | None = None
    # Slabs that queued requests may fill; beyond that they keep their bytes and are decoded later.
    max_slabs: int = 8
    # Per model for inputs, and per worker for outputs, that do not fit rows.
    spill_bytes: int = 256 * MIB


@dataclass(frozen=True, slots=True)
class ModelMemoryLimit:
    """Memory of each device that the models loaded on demand may have together: a number of bytes,
    or else a share of it."""

    num_bytes: int | None = None
    share: float = 0.8

    def of(self, total: int) -> int:
        """Return the bytes for a device with so much memory."""
        return round(self.share * total) if self.num_bytes is None else self.num_bytes


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """Limits of the number of instances, which follows the load if they differ."""

    # None: the number of `instance_group`, which is also the number at the start. Set `min` to 0
    # for models that are rarely used: without requests, none of their processes run.
    min_instances: int | None = None
    max_instances: int | None = None
    # An instance is stopped when the load has allowed it for this long. Raise it if loading is
    # expensive, or if the load returns within minutes.
    scale_down_s: float = 20.0
    # With `min_instances` 0, the last one is stopped after this long without a request.
    scale_to_zero_s: float = 300.0
    # How long a request may wait for the first instance. If loading takes longer, requests are
    # refused at once, while it loads. Set it below your clients' own time-out.
    cold_start_s: float = 30.0
    # "true": the first request loads the model, and it is evicted when others need its memory;
    # "keep": it is never evicted; "false": it is loaded at the start, whatever the server's
    # default; empty: the server's default.
    on_demand: Literal["", "true", "keep", "false"] = ""

    @property
    def is_on_demand(self) -> bool:
        """Whether the first request loads the model."""
        return self.on_demand in ("true", "keep")


@dataclass(frozen=True, slots=True)
class PadAxis:
    """An axis of an input, counted without the batch, that may be padded with `value`."""

    input: str
    axis: int
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Padding:
    """Requests that differ along these axes are padded to the next bucket and share a batch.
    Requests longer than the last bucket run only with others of the same shape."""

    axes: tuple[PadAxis, ...]
    # Closer buckets compute less padding; fewer buckets make fuller batches and a shorter warm-up.
    buckets: tuple[int, ...] = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True, slots=True)
class Preprocess:
    """A function applied to the user's inputs before the model."""

    # FILE:NAME, a function in a file of the version folder; or one of STAGES.
    function: str
    # The model's inputs; `ModelConfig.inputs` are then the user's.
    inputs: tuple[TensorSpec, ...]
    # Padding of the model's inputs: rows are padded after the function, in the worker.
    padding: Padding | None = None
    # Text of `penstock.image`; None: preprocessor_config.json has the settings.
    image: str | None = None


@dataclass(frozen=True, slots=True)
class Postprocess:
    """A function applied to the model's outputs before the user gets them."""

    # FILE:NAME, a function in a file of the version folder; or one of HEADS.
    function: str
    # The model's outputs; `ModelConfig.outputs` are then the user's.
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class WarmupInput:
    """One tensor of a warm-up request, without the batch dimension. `file` holds its bytes if that
    is its source."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    source: Literal["zero", "random", "file"] = "zero"
    file: str = ""


@dataclass(frozen=True, slots=True)
class Warmup:
    """A batch that every instance runs before it is ready (Triton's ModelWarmup)."""

    name: str
    num_rows: int
    inputs: tuple[WarmupInput, ...]
    # Number of runs.
    count: int = 1
    # Folder of the files.
    folder: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class BatchInput:
    """Inputs of the model that are made of a batch's requests (Triton's BatchInput): they describe
    another input, the source."""

    # Its name in Triton's message, such as BATCH_ELEMENT_COUNT.
    kind: str
    names: tuple[str, ...]
    # INT32 or FP32.
    datatype: str
    source: str


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """Outputs whose elements are divided among a batch's requests by the shapes of an input (the
    BATCH_SCATTER_WITH_INPUT_SHAPE of Triton's BatchOutput)."""

    names: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """A tensor of one element, compared with a number or a text. A condition has one or more, which
    must all hold."""

    tensor: str
    operator: Literal["<", "<=", ">", ">=", "==", "!="]
    value: float | str


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One model of an ensemble. The maps lead from its inputs and outputs to the ensemble's own
    tensors, which connect the steps."""

    model: str
    # Empty: the one that clients get who name none.
    version: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    # Tensors whose rows are requests of their own; empty: the step makes one request.
    fan_out: tuple[str, ...] = ()
    # The step runs if all of them hold.
    condition: tuple[Comparison, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorDefault:
    """What a tensor of an ensemble is if no step makes it: another tensor, or else a value in every
    element. Without either it has no elements."""

    tensor: str = ""
    value: float | str | None = None


@dataclass(frozen=True, slots=True)
class FanOutLimits:
    """Limits of each step of an ensemble that makes one request for each row."""

    # Rows of one request. Raise it if a step makes more; each row costs the time of a request.
    max_rows: int = 1024
    # Requests of one request at a time. Raise it above the member's batches to fill several of its
    # instances; lower it to leave more room to other clients.
    max_in_flight: int = 64


@dataclass(frozen=True, slots=True)
class SequenceControl:
    """An input that the server makes to tell the model about the sequence of a request (Triton's
    ControlInput)."""

    input: str
    kind: Literal["START", "READY", "END", "CORRID"]
    datatype: str
    # What it says if it does not apply and if it does; not for CORRID.
    false_true: tuple[float, float] = (0, 1)


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A tensor that the model gives for one request of a sequence and gets with the next one.
    `shape` excludes the batch dimension; variable dimensions begin with 1."""

    input: str
    output: str
    datatype: str
    shape: tuple[int, ...]
    # The first request of a sequence gets zeros, or the bytes of this file in `folder`.
    initial_shape: tuple[int, ...] = ()
    file: str = ""
    name: str = ""
    # Accepted, without a difference that a model can see.
    has_same_buffer: bool = False
    folder: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class SequencePolicy:
    """Triton's sequence_batching. With `is_direct`, a sequence holds one row of the batches of one
    instance; otherwise (oldest) it is one of an instance's candidates, in any row."""

    is_direct: bool = True
    # Without requests for this long, a sequence ends; raise it for clients that think for longer.
    max_idle_s: float = 1.0
    # Sequences of one instance at a time, for oldest. Raise it if sequences wait while instances
    # are idle.
    max_candidates: int = 0
    # Share of the rows of a batch that is worth waiting for, for direct.
    min_utilization: float = 0.0
    controls: tuple[SequenceControl, ...] = ()
    states: tuple[SequenceState, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordPolicy:
    """How requests and answers of a model are recorded, if the server has a folder for them."""

    # Size of the ring of files; 0: the model is not recorded. Raise it to keep a longer time.
    max_bytes: int = 64 * 10**6
    # Share of the requests, 0 to 1. Raise it for models with few requests.
    share: float = 0.01
    # Names of tensors, or datatypes, whose values are not written; "id" and "parameters" are those
    # of the request. Set it wherever values identify people.
    redact: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Restriction:
    """A header that messages need: its name in lower case, and its secret value."""

    header: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class Restrictions:
    """Restricted categories of routes and methods (Triton's `--http-restricted-api`)."""

    http: Mapping[str, Restriction] = field(default_factory=dict)
    grpc: Mapping[str, Restriction] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeaderPatterns:
    """Which headers become parameters of requests; empty: none."""

    http: str = ""
    grpc: str = ""


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """How requests are traced at start (Triton's `--trace-config`), and where traces go. Only the
    levels, rate, count and log frequency can be changed later."""

    # triton, opentelemetry or chrome.
    mode: str = "triton"
    levels: tuple[str, ...] = ()
    rate: int = 1000
    count: int = -1
    # Of the modes triton and chrome.
    file: str = ""
    log_frequency: int = 0
    # Of opentelemetry: the collector, and what its spans say about the server.
    url: str = "http://localhost:4318/v1/traces"
    resource: Mapping[str, str] = field(default_factory=dict)
    max_queue_size: int = 2048
    schedule_delay_s: float = 5.0
    max_batch_size: int = 512

    @property
    def exports(self) -> bool:
        return self.mode == "opentelemetry"


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Families of latencies in a scrape (Triton's `--metrics-config`), and how often the use of the
    machine is read."""

    has_counters: bool = True
    # Off, as in Triton: each costs time at every answer.
    has_histograms: bool = False
    has_summaries: bool = False
    # The quantiles of summaries, as they were written.
    quantiles: tuple[str, ...] = ("0.5", "0.9", "0.95", "0.99", "0.999")
    # Scrapes within this time show the same use. Raise it if several systems scrape the server, so
    # that all see the utilisation over a time that says something.
    interval_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RateLimit:
    """What an instance needs to execute (Triton's ModelRateLimiter), and how seldom it may."""

    # As it was asked for: "cpu", "cuda:N", or "cuda" for each GPU.
    device: str
    # Name, whether all devices share it, and count.
    resources: tuple[tuple[str, bool, int], ...]
    # An instance with 2 executes half as often as one with 1, if both want to.
    priority: int = 1


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """Where answers are kept outside the server."""

    host: str
    port: int = 6379
    username: str = ""
    password: str = field(default="", repr=False)
    # Longest time that a request waits for it. Raise it for a slow network, below what computing
    # takes.
    timeout_s: float = 0.02


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The server's response cache (Triton's `--cache-config`)."""

    # Memory for answers, of all shards together; 0: there is no cache. Raise it while answers that
    # are asked for again leave it too early.
    max_bytes: int = 0
    # In place of memory, for servers that share their answers.
    redis: RedisConfig | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One version of one model, fully resolved, as `penstock inspect` prints it."""

    name: str
    version: str
    backend: str
    # The file or folder that the backend loads.
    artifact: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    # 0: the model has no batch dimension.
    max_batch_size: int
    batching: BatchPolicy
    num_instances: int = 1
    # "cpu", "cuda:N", or "cuda": that many instances on each GPU.
    device: str = CPU
    # The device of each instance if they differ; `device` is then the first.
    spread: tuple[str, ...] = ()
    # A model that a GPU's engine cannot read runs on the CPU instead: no kind is given.
    is_gpu_optional: bool = False
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    memory: MemoryPolicy = field(default_factory=MemoryPolicy)
    # A batch that takes longer than max(this, 20 x the p99 of its size) counts as a hang.
    hang_s: float = DEFAULT_HANG_S
    # A load that takes longer fails. Raise it for weights on a slow network.
    load_timeout_s: float = DEFAULT_LOAD_TIMEOUT_S
    # Private memory of one worker: heap, stacks and anonymous mappings, not shared memory or mapped
    # files. Set it to protect the machine's memory from a model; None: no limit.
    memory_bytes: int | None = None
    # Cores that all instances share, where another program divides the machine, such as Ray; None:
    # those that the process may use.
    num_cores: int | None = None
    # Additional environment variables for the model's code; NAME or PREFIX_*.
    env: tuple[str, ...] = ()
    padding: Padding | None = None
    preprocess: Preprocess | None = None
    postprocess: Postprocess | None = None
    # How far answers may change when rows share a batch or are padded, relative to the output's
    # largest value; None: by datatype. Raise it for models that compute in lower precision.
    tolerance: float | None = None
    # The artifact's name in the version folder, if it is not the backend's default.
    file: str = ""
    # Strings for the backend, from `parameters`.
    options: Mapping[str, str] = field(default_factory=dict)
    # The SLO, from `penstock.slo` or else from the version's evidence; "off" if `penstock.slo` says
    # so, empty without one.
    slo: str = ""
    is_slo_from_evidence: bool = False
    # The SLO of the evidence and its outcome if it was not kept: then it is not enforced.
    unkept_slo: str = ""
    # Price of the machine per hour, from the version's evidence; None: it has none.
    price_per_hour: float | None = field(default=None, compare=False)
    # GPU memory of one instance, for the plan at start. Set it if the plan's own estimate is far
    # off; None: from the version's evidence, or estimated.
    gpu_memory_bytes: int | None = None
    # Path of the version's manifest.json, which a worker checks before it loads; empty without one.
    manifest: str = ""
    # Inputs and outputs of the model that depend on which requests share a batch.
    batch_inputs: tuple[BatchInput, ...] = ()
    batch_outputs: tuple[BatchOutput, ...] = ()
    # Of an ensemble: the models that it runs.
    steps: tuple[EnsembleStep, ...] = ()
    # By tensor: what it is where no step that makes it runs.
    defaults: Mapping[str, TensorDefault] = field(default_factory=dict)
    fan_out_limits: FanOutLimits = FanOutLimits()
    # None: requests do not depend on each other.
    sequences: SequencePolicy | None = None
    # Additional labels of the model's metrics.
    metric_tags: Mapping[str, str] = field(default_factory=dict)
    # Upper bounds of the histogram of the time to the first answer, in milliseconds; empty:
    # Triton's own.
    first_response_ms: tuple[float, ...] = ()
    # Whether answers may come from the response cache, if the server has one.
    is_cached: bool = False
    # Whether a request has any number of responses (`model_transaction_policy`).
    is_decoupled: bool = False
    # One for each instance in the order of the groups, if any needs a resource; the core then
    # queues the requests. Empty if the server does not limit executions.
    rate_limits: tuple[RateLimit, ...] = ()
    # What its answers depend on, if servers share them; see `repository.fingerprint`.
    fingerprint: str = field(default="", compare=False)
    # Names of host policies, by device: "cpu", "cuda" or "cuda:N".
    host_policies: Mapping[str, str] = field(default_factory=dict)
    # The policies of this server for the devices, and that of one worker.
    pinned: Mapping[str, HostPolicy] = field(default_factory=dict)
    host_policy: HostPolicy | None = None
    # Files with their MD5 digests, which are compared before the model is loaded.
    checksums: tuple[tuple[str, str], ...] = ()
    # Run before an instance is ready, in addition to the warm-up of every batch size.
    warmups: tuple[Warmup, ...] = ()
    # None: not configured; a server that has a folder for recordings records by the defaults.
    record: RecordPolicy | None = None
    # config.pbtxt as read, for `/config`; and the fields in it without effect.
    written: str = field(default="", compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)
    # How the model is served and why, where that was worked out from its file.
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def labels(self) -> dict[str, str]:
        """Labels of this version in log lines."""
        return {"model": self.name, "version": self.version}

    @property
    def unkept_note(self) -> str:
        """Note for the log at load and `penstock inspect` about an SLO that was not kept."""
        if not self.unkept_slo:
            return ""
        how = "serving without it, set penstock.slo to enforce it"
        return f"the evidence says that the SLO was not kept: {self.unkept_slo}; {how}"

    @property
    def model(self) -> ModelConfig:
        """The configuration of the model itself, without the functions around it."""
        config = self.without_postprocess
        before = config.preprocess
        if before is None:
            return config
        return replace(config, inputs=before.inputs, padding=before.padding, preprocess=None)

    @property
    def without_postprocess(self) -> ModelConfig:
        """The configuration without its postprocess function: outputs are the model's own, and
        there are no inputs of a head."""
        made = self.postprocess
        if made is None:
            return self
        config = replace(self, outputs=made.outputs, postprocess=None)
        names = HEAD_INPUTS.get(made.function, ())
        if not names:
            return config
        taker = config.preprocess or config
        inputs = tuple(spec for spec in taker.inputs if spec.name not in names)
        padding = taker.padding
        if padding is not None:
            axes = tuple(each for each in padding.axes if each.input not in names)
            padding = replace(padding, axes=axes)
        if config.preprocess is None:
            return replace(config, inputs=inputs, padding=padding)
        before = replace(config.preprocess, inputs=inputs, padding=padding)
        return replace(config, preprocess=before)

    @property
    def joins_requests(self) -> bool:
        """Whether the model gets the requests of a batch as one, not as rows."""
        is_ragged = any(spec.is_ragged for spec in self.inputs)
        return is_ragged or bool(self.batch_inputs or self.batch_outputs)

    @property
    def has_views(self) -> bool:
        """Whether the model sees tensors that differ from those that clients see."""
        specs = (*self.inputs, *self.outputs)
        return self.joins_requests or any(spec.reshape is not None for spec in specs)

    @property
    def is_processed(self) -> bool:
        return self.preprocess is not None or self.postprocess is not None

    @property
    def is_staged(self) -> bool:
        """Whether preprocessing is a batched stage with workers of its own."""
        is_built_in = self.preprocess is not None and self.preprocess.function in STAGES
        return is_built_in and not self.decodes_on_gpu

    @property
    def decodes_on_gpu(self) -> bool:
        """Whether the model's own workers get encoded images: a GPU decodes or normalises them."""
        is_image = self.preprocess is not None and self.preprocess.function == IMAGE
        return is_image and self.uses_gpu and self.engine == "pytorch"

    @property
    def is_ensemble(self) -> bool:
        """Whether it has no workers of its own, but passes requests on to other models."""
        return self.backend == ENSEMBLE

    @property
    def has_one_owner(self) -> bool:
        """Whether the core queues the requests of all shards: they share state, or their responses
        take as long as they like, while workers run other batches."""
        return self.is_decoupled or self.sequences is not None or bool(self.rate_limits)

    @property
    def num_sequence_slots(self) -> int:
        """Sequences that one worker takes at a time; 0 without sequences."""
        if self.sequences is None:
            return 0
        return max(
            1, self.max_batch_size if self.sequences.is_direct else self.sequences.max_candidates
        )

    @property
    def in_sequences(self) -> ModelConfig:
        """The configuration of the model itself, with the tensors that clients do not see."""
        policy = self.sequences
        if policy is None:
            return self
        made = [TensorSpec(c.input, c.datatype, (1,)) for c in policy.controls]
        given = [TensorSpec(s.input, s.datatype, s.shape) for s in policy.states]
        known = {spec.name for spec in self.outputs}
        kept = [
            TensorSpec(s.output, s.datatype, s.shape)
            for s in policy.states
            if s.output not in known
        ]
        inputs, outputs = (*self.inputs, *made, *given), (*self.outputs, *kept)
        return replace(self, inputs=inputs, outputs=outputs, sequences=None)

    @property
    def has_head(self) -> bool:
        """Whether a built-in step computes the answers from the model's outputs, by the batch."""
        return self.postprocess is not None and self.postprocess.function in HEADS

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, if an output has them."""
        return next((spec.labels for spec in self.outputs if spec.labels), ())

    @property
    def label(self) -> str:
        """The artifact in errors: `1/model.onnx`."""
        return f"{self.version}/{self.file or Path(self.artifact).name}"

    @property
    def folder(self) -> Path:
        """The version's folder: the artifact may lie deeper in it."""
        return Path(self.artifact).parents[max(1, len(Path(self.file).parts)) - 1]

    @property
    def is_packed(self) -> bool:
        """Whether padding is not computed: a row costs its own length, not its bucket's."""
        return self.options.get(PACK) == TOKENS

    def max_rows(self, bucket: int) -> int:
        """Return the most rows of a batch in this bucket: a token budget may allow fewer than
        `max_batch_size`. It does not if the model is packed, as only actual lengths count then."""
        most = self.batching.max_tokens
        if most is None or self.is_packed:
            return self.max_batch_size
        return min(self.max_batch_size, max(1, most // max(1, bucket)))

    @property
    def devices(self) -> tuple[str, ...]:
        return self.spread or (self.device,) * self.num_instances

    @property
    def shares_workers(self) -> bool:
        """Whether instances on one GPU share a worker, and with it the weights: if the backend
        starts batches ahead."""
        return self.engine in AHEAD and (self.decodes_on_gpu or not self.is_processed)

    @property
    def workers(self) -> tuple[tuple[str, int], ...]:
        """The device and number of instances of each worker that is started first."""
        is_shared = self.shares_workers
        found: list[tuple[str, int]] = []
        for device in self.devices:
            if device == CPU or not is_shared:
                found.append((device, 1))
            elif device not in dict(found):
                found.append((device, self.devices.count(device)))
        return tuple(found)

    @property
    def min_instances(self) -> int:
        least = self.scaling.min_instances
        return self.num_instances if least is None else least

    @property
    def max_instances(self) -> int:
        most = self.scaling.max_instances
        return self.num_instances if most is None else most

    @property
    def is_scaled(self) -> bool:
        """Whether the number of instances follows the load, or requests."""
        return self.min_instances < self.max_instances or self.scaling.is_on_demand

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """The device and number of instances of each worker that there can be: those of `workers`,
        then those that may be added. A worker that instances share is never added: it has them
        all."""
        workers = self.workers
        if self.uses_gpu and self.shares_workers:
            return workers
        devices = self.devices
        num_more = max(0, self.max_instances - len(workers))
        return workers + tuple((devices[i % len(devices)], 1) for i in range(num_more))

    def with_instances_of(self, other: ModelConfig) -> ModelConfig:
        """Return this configuration with the instances of another one."""
        return replace(
            self,
            num_instances=other.num_instances,
            device=other.device,
            spread=other.spread,
            is_gpu_optional=other.is_gpu_optional,
        )

    def of_worker(self, device: str, num_slots: int) -> ModelConfig:
        """Return the configuration of one worker: its device and, on a GPU, its own instances. On a
        CPU, it has the share of the cores that is left when all instances run."""
        count = self.max_instances if device == CPU else num_slots
        fixed = ScalingConfig()
        own = self.pinned.get(device)
        config = replace(self, device=device, spread=(), num_instances=count, scaling=fixed)
        return replace(config, pinned={}, host_policy=own)

    @property
    def engine(self) -> str:
        """The backend that computes: ONNX files run on PyTorch's on a GPU, unless ONNX Runtime's
        own providers are chosen."""
        default = ONNX_RUNTIME if "providers" in self.options else OWN_ENGINE
        is_own = self.options.get(GPU_ENGINE, default) == OWN_ENGINE
        is_imported = self.backend == ONNX_RUNTIME and self.uses_gpu and is_own
        return "pytorch" if is_imported else self.backend

    @property
    def uses_gpu(self) -> bool:
        return any(device != CPU for device in self.devices)

    def on(self, devices: Sequence[str]) -> ModelConfig:
        """Return the configuration with an instance on each of these devices, interleaved so that
        even a few requests use all devices."""
        counts = {device: devices.count(device) for device in devices}
        turns = tuple(
            device
            for turn in range(max(counts.values()))
            for device, count in counts.items()
            if turn < count
        )
        spread = turns if len(counts) > 1 else ()
        return replace(self, num_instances=len(turns), device=turns[0], spread=spread)

    @property
    def platform(self) -> str:
        if self.backend == "pytorch" and self.artifact.endswith(".pt"):
            return TORCHSCRIPT
        return PLATFORM_NAMES.get(self.backend, self.backend)


@dataclass(frozen=True, slots=True)
class LoadPermissions:
    """What an operator lets administrators send with a load."""

    files: bool = False
    code: bool = False


@dataclass(frozen=True, slots=True)
class HttpLimits:
    max_body_bytes: int = 64 * MIB
    # JSON is decoded on the event loop, so large bodies delay all requests.
    max_json_bytes: int = 8 * MIB
    max_header_bytes: int = 16 * 1024
    max_headers: int = 100
    max_url_bytes: int = 8 * 1024
    max_connections: int = 20_000
    header_timeout_s: float = 10.0
    # A body must arrive within this plus one second per `min_body_rate` bytes.
    body_timeout_s: float = 60.0
    min_body_rate: int = 16 * 1024
    keep_alive_s: float = 75.0
    # A client that does not read its answer is disconnected after this.
    write_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    port: int = 8001
    # Size of one request; raise it for larger tensors.
    max_message_bytes: int = 64 * MIB
    # Compression of answers: none, deflate or gzip. For slow networks.
    compression: str = "none"


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files for all ports of the server; reloaded when they change."""

    # The certificate and those of its issuers.
    cert: str
    key: str
    # Issuers of client certificates, which are then required; empty: not required.
    client_ca: str = ""
