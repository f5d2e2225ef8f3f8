"""Configuration as frozen values: what a model is, how it is batched, how the server listens.

Parsed elsewhere (`repository` reads config.pbtxt, `cli` reads flags), resolved once, never changed
afterwards. Each default stands beside the sentence that says when to change it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from penstock.types import TensorSpec, TimeoutAction

MIB = 1 << 20
DEFAULT_HANG_S = 30.0
DEFAULT_LOAD_TIMEOUT_S = 600.0
MAX_INSTANCES = 64
CPU = "cpu"
# The share of each GPU's memory that is kept back where nobody says otherwise.
GPU_MEMORY_RESERVE = 0.05
# Every GPU there is, until somebody places the model (`serving.placement`); to a worker, the first.
EACH_GPU = "cuda"
# In place of an SLO: none, whatever the evidence of the version says.
SLO_OFF = "off"


def ladder(max_batch_size: int) -> list[int]:
    """The batch sizes that are warmed up: 1, 2, 4, ... and the largest itself."""
    rungs = [1]
    while rungs[-1] * 2 < max_batch_size:
        rungs.append(rungs[-1] * 2)
    if max_batch_size > 1:
        rungs.append(max_batch_size)
    return rungs


# The backend of language models, which generate text: an engine instead of workers.
LLM = "llm"
# The option with which a model's layers run over tokens laid end to end, without padding.
PACK, TOKENS = "penstock.pack", "tokens"
# Backends that begin a batch on a GPU while others are computed there.
AHEAD = ("pytorch", "null")


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """What happens to requests that wait (Triton's ModelQueuePolicy)."""

    timeout_action: TimeoutAction = "REJECT"
    # Zero waits for ever; set it below your clients' own time-out.
    default_timeout_s: float = 0.0
    # Lets a request shorten the default time-out, never lengthen it.
    allow_timeout_override: bool = False
    # Zero means no limit of its own; `BatchPolicy.max_pending` still holds.
    max_queue_size: int = 0


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """Triton's dynamic_batching. `is_dynamic` False runs each request by itself."""

    max_batch_size: int
    is_dynamic: bool = False
    # Only for models that are much better at certain sizes; else leave empty.
    preferred_batch_sizes: tuple[int, ...] = ()
    # Waiting on purpose; batches form by themselves while the instances are busy.
    max_queue_delay_s: float = 0.0
    # Answers leave in the order of arrival; costs latency when there are several instances.
    preserve_ordering: bool = False
    num_priorities: int = 0
    default_priority: int = 0
    # Index 0 is the default; levels 1..num_priorities follow.
    policies: tuple[QueuePolicy, ...] = (QueuePolicy(),)
    # All queues of the model together; lower it where memory is short.
    max_pending: int = 8192
    # How long a request may take, from the model's SLO; switches from Triton's rules to slo mode.
    slo_latency_s: float | None = None
    # The most tokens of a batch, beside its most rows; whoever has more by itself runs alone. For
    # models whose batches take as long as they have tokens, not rows.
    max_tokens: int | None = None
    # How long a request may wait before it is refused, without an SLO. None: the larger of 1 s and
    # ten times the largest batch, where the queue has no limit of its own; 0: for ever, as in
    # Triton. Lower it below your clients' own time-out.
    max_wait_s: float | None = None

    def policy(self, level: int) -> QueuePolicy:
        return self.policies[level] if level < len(self.policies) else self.policies[0]


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """Shared memory of one model. Raise for large tensors or deep queues."""

    # Per slab; None is sized for a full batch of fixed shapes, 4 MiB for variable ones.
    slab_bytes: int | None = None
    # Slabs that waiting requests may fill; beyond it they keep their bytes and are decoded later.
    max_slabs: int = 8
    # Per model for inputs and per worker for outputs that do not fit rows.
    spill_bytes: int = 256 * MIB


@dataclass(frozen=True, slots=True)
class PadAxis:
    """An axis of an input, counted without the batch, that may be filled up with `value`."""

    input: str
    axis: int
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Padding:
    """Requests that differ along these axes are filled up to the next bucket and share a batch.
    What is longer than the last bucket runs with others of its own shape only."""

    axes: tuple[PadAxis, ...]
    # Closer buckets compute less padding; fewer of them make fuller batches and a shorter warm-up.
    buckets: tuple[int, ...] = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True, slots=True)
class Preprocess:
    """A function between what users send and what the model takes."""

    # FILE:NAME, a function of a file of the version folder.
    function: str
    # What the model takes; `ModelConfig.inputs` is then what users send.
    inputs: tuple[TensorSpec, ...]
    # Of the model's inputs; rows are padded after the function, where they are computed.
    padding: Padding | None = None


@dataclass(frozen=True, slots=True)
class Postprocess:
    """A function between what the model gives and what users get."""

    # FILE:NAME, a function of a file of the version folder.
    function: str
    # What the model gives; `ModelConfig.outputs` is then what users get.
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class WarmupInput:
    """One tensor of a warm-up request, without the batch dimension. `file` has its bytes, if that
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
    # How many times it runs.
    count: int = 1
    # Where the files are.
    folder: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One version of one model, everything resolved: what `penstock inspect` prints."""

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
    # Where they run: "cpu", "cuda:N", or "cuda", so many on each GPU there is.
    device: str = CPU
    # The device of each instance, where they are not all on the same; `device` is then the first.
    spread: tuple[str, ...] = ()
    memory: MemoryPolicy = field(default_factory=MemoryPolicy)
    # A batch that takes longer than max(this, 20 x the p99 of its size) is taken for a hang.
    hang_s: float = DEFAULT_HANG_S
    # A load that takes longer fails. Raise it for weights that come over a slow network.
    load_timeout_s: float = DEFAULT_LOAD_TIMEOUT_S
    # Private memory of one worker: heap, stacks and anonymous mappings, not shared memory or files
    # that are mapped. Set it where a model must not take the machine's memory; None: no limit.
    memory_bytes: int | None = None
    # Environment variables that the model's code gets beside the usual ones; NAME or PREFIX_*.
    env: tuple[str, ...] = ()
    padding: Padding | None = None
    preprocess: Preprocess | None = None
    postprocess: Postprocess | None = None
    # How far answers may move when rows share a batch or are padded, as a share of the output's
    # largest value; None goes by the datatype. Raise it for models that compute in less precision.
    tolerance: float | None = None
    # The artifact's name below the version folder, where it is not the backend's usual one.
    file: str = ""
    # Strings for the backend, as written under `parameters`.
    options: Mapping[str, str] = field(default_factory=dict)
    # What is promised, from `penstock.slo` or else from the evidence of the version; "off" where
    # `penstock.slo` says so, empty where nobody says anything.
    slo: str = ""
    is_slo_from_evidence: bool = False
    # The SLO of the evidence and its outcome, where it was not kept: it is not enforced then.
    unkept_slo: str = ""
    # What an instance takes of a GPU's memory, for the plan at start. Give it where the plan's own
    # estimate is far off; None: estimated, or as the evidence of the version says.
    gpu_memory_bytes: int | None = None
    # The version's manifest.json, which a worker checks before it loads; empty: there is none.
    manifest: str = ""
    # Further labels of the model's metrics.
    metric_tags: Mapping[str, str] = field(default_factory=dict)
    # Run before an instance is ready, beside the warm-up of every batch size.
    warmups: tuple[Warmup, ...] = ()
    # config.pbtxt as it was read, for `/config`; and what in it has no effect.
    written: str = field(default="", compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @property
    def unkept_note(self) -> str:
        """What the server logs at load and `penstock inspect` shows of an SLO that was not kept."""
        if not self.unkept_slo:
            return ""
        return (
            f"the evidence says that the SLO was not kept: {self.unkept_slo}; serving without it, "
            "set penstock.slo to enforce it"
        )

    @property
    def model(self) -> ModelConfig:
        """As the model itself sees it, without the functions around it."""
        config = self.without_postprocess
        before = self.preprocess
        if before is None:
            return config
        return replace(config, inputs=before.inputs, padding=before.padding, preprocess=None)

    @property
    def without_postprocess(self) -> ModelConfig:
        """Answers are then what the model itself gives."""
        if self.postprocess is None:
            return self
        return replace(self, outputs=self.postprocess.outputs, postprocess=None)

    @property
    def is_processed(self) -> bool:
        """Whether a function stands before or behind the model."""
        return self.preprocess is not None or self.postprocess is not None

    @property
    def is_packed(self) -> bool:
        """Whether padding is not computed: a row costs its own length, not that of its bucket."""
        return self.options.get(PACK) == TOKENS

    def max_rows(self, bucket: int) -> int:
        """Of a batch of rows that are filled up to this bucket: a budget of tokens may leave room
        for fewer than `max_batch_size`. Not where only their own lengths count."""
        most = self.batching.max_tokens
        if most is None or self.is_packed:
            return self.max_batch_size
        return min(self.max_batch_size, max(1, most // max(1, bucket)))

    @property
    def devices(self) -> tuple[str, ...]:
        """One for each instance."""
        return self.spread or (self.device,) * self.num_instances

    @property
    def workers(self) -> tuple[tuple[str, int], ...]:
        """The device of each, and of how many instances it is the worker. Those on one GPU share a
        worker, and with it the weights, where batches are begun ahead of their answers."""
        is_shared = self.backend in AHEAD and not self.is_processed
        found: list[tuple[str, int]] = []
        for device in self.devices:
            if device == CPU or not is_shared:
                found.append((device, 1))
            elif device not in dict(found):
                found.append((device, self.devices.count(device)))
        return tuple(found)

    def of_worker(self, device: str, num_slots: int) -> ModelConfig:
        """As a worker knows it: its own device and, on a GPU, its own instances only."""
        num_instances = self.num_instances if device == CPU else num_slots
        return replace(self, device=device, spread=(), num_instances=num_instances)

    @property
    def uses_gpu(self) -> bool:
        return any(device != CPU for device in self.devices)

    def on(self, devices: Sequence[str]) -> ModelConfig:
        """With an instance on each of these. They are put into turns, each device once a turn, so
        that a few requests already meet all devices."""
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
        return "onnxruntime_onnx" if self.backend == "onnxruntime" else self.backend


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one client may ask of the HTTP server."""

    max_body_bytes: int = 64 * MIB
    # JSON is decoded on the event loop, so its size is everybody's latency.
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
    # A client that does not read its answer is cut off after this.
    write_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    """How the gRPC front listens."""

    port: int = 8001
    # Of one request; raise it for larger tensors.
    max_message_bytes: int = 64 * MIB
    # Shared memory for tensors on their way to the core, and as much for the way back; at least
    # twice the largest message is taken. Pages that are never used cost nothing.
    segment_bytes: int = 256 * MIB
    # How answers are compressed: none, deflate or gzip. For networks slower than a core is.
    compression: str = "none"
    # A front that has not answered for so long is taken for a hang. Raise it where messages are so
    # large that decoding one takes seconds.
    hang_s: float = 10.0


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files for every port of the server; read again when they change."""

    # The certificate and those of its issuers.
    cert: str
    key: str
    # Issuers of client certificates, which every client then needs; empty: no client needs one.
    client_ca: str = ""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the server listens and stops."""

    # Name in the server's metadata. Change it where clients tell servers apart by it.
    id: str = "penstock"
    host: str = "127.0.0.1"
    http_port: int = 8000
    # Processes that answer HTTP on that port; 0: the core does it itself. Raise it when the core's
    # event loop is the limit, not the models.
    num_fronts: int = 0
    # None: no gRPC.
    grpc: GrpcConfig | None = None
    # A listener for scrapes and health alone; None: only the HTTP port answers them.
    metrics_port: int | None = None
    # How long accepted requests may take to finish after SIGTERM.
    drain_s: float = 30.0
    # True allows loading and unloading over the API, and loads at start only what `load` names.
    is_explicit: bool = False
    # Models to load at start in explicit mode; "*" is all.
    load: tuple[str, ...] = ()
    # The share of each GPU's memory that models may not plan with; for what they need beyond their
    # estimates, and for others.
    gpu_memory_reserve: float = GPU_MEMORY_RESERVE
    # The path is the configuration of a language model, whose weights are drawn.
    has_random_weights: bool = False
    # None: plain text.
    tls: TlsConfig | None = None
    # A TOML file of API keys; empty: nobody needs one.
    api_keys: str = ""
    # Further names under which clients may address the server, beside the loopback ones.
    allow_hosts: tuple[str, ...] = ()
    # Accept files of models that have further hard links.
    allows_hard_links: bool = False
    # One line per inference; costs time on every one.
    logs_requests: bool = False
    limits: HttpLimits = field(default_factory=HttpLimits)
