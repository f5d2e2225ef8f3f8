"""The messages of the core and of shards with workers, and of the core with shards.

One frame is one datagram of a SOCK_SEQPACKET pair: MessagePack of a tagged array, a few hundred
bytes for a whole batch, because tensors stay in shared memory. `VERSION` is exchanged first and
must match. Fields with a default may be added at the end, and frames for a new kind of process; any
other change increments the version.
Between the core and a shard, a datagram is an array of all pending frames (`join`); only the first,
OpenShard, is sent alone.

    core → worker   LoadModel, Enclosed, Attach, SetExecutors, Leave, Stop
    worker → core   WorkerReady, StartFailed, Leaving, Sketched, Measured
    shard → worker  Hello, MapSlab, MapRegion, UnmapRegion, Want, Dispatch, Decline, Recall,
                    Release, CancelRequest
    worker → shard  Claim, Started, Recalled, Responded, Done, BatchFailed, Leaving
    core → shard    OpenShard, NameKeys, SetKeys, ToPart, AskShard, Forwarded, Managed, Leased,
                    TokensTaken, OpenRegion, CloseRegion, MoveClients, Release, Ping, Drain, Stop
    shard → core    Listening, StartFailed, FromPart, ShardAnswer, Forward, Manage, Cancel, Lease,
                    TakeTokens, UseTokens, Traced, Release, Pong

A model's code that calls other models has a socket of its own to each shard, because no other
thread reads while it runs: CallModel, CancelCall and Waited to the shard, CallAnswer back.
A shard holds requests, and has a socket of its own to each worker and to the engine of each
language model (`llm.messages`); the core is one. A worker merges the rows of several shards in one
batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from penstock.config import (
    CacheConfig,
    GrpcConfig,
    HeaderPatterns,
    HttpLimits,
    MetricsConfig,
    ModelConfig,
    Restrictions,
    TlsConfig,
)
from penstock.system.logs import LogSwitches
from penstock.types import Parameter, RequestedOutput
from penstock.wire.trace_records import TraceRecord, TraceTable

VERSION = 5
# A datagram must fit the socket buffer; larger data belongs in shared memory.
MAX_FRAME_BYTES = 1 << 20
# A LoadModel that is larger travels as Enclosed: buffers of sockets are this large on any system.
MAX_LOAD_BYTES = 1 << 16


class Frame(msgspec.Struct, array_like=True, gc=False):
    """A message; `array_like` keeps field names off the wire."""


class Extent(Frame, tag="e"):
    """A tensor at `offset` of a spill segment; BYTES are in wire form. An output with a `region`
    was written to that client's memory instead, where its request wanted it."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    region: int = 0


class RegionSpan(Frame, tag="s"):
    """A tensor at `offset` of a region: memory that a client has registered."""

    name: str
    region: int
    offset: int
    nbytes: int


class RowRange(Frame, tag="r"):
    """`count` rows of one slab, starting at `row`."""

    slab: int
    row: int
    count: int


class RequestPart(Frame, tag="p"):
    """One request of a batch, for backends that see requests and for un-stacked inputs."""

    id: str
    num_rows: int
    inputs: tuple[Extent, ...] = ()
    outputs: tuple[str, ...] = ()
    parameters: dict[str, Parameter] = {}
    # Length of the padded axes without padding; 0: nothing is padded.
    length: int = 0
    # Inputs that the worker reads from clients' memory, into the rows or extents of the request;
    # and outputs that it writes there.
    reads: tuple[RegionSpan, ...] = ()
    writes: tuple[RegionSpan, ...] = ()
    # What its sequence holds in the worker; negative: it belongs to none.
    slot: int = -1


class Proof(Frame, tag="prf"):
    """Result of trial runs at load. `unbatched` and `unpadded` say why the model must not be
    batched or padded; empty: it may be. `crops` are output axes, counted without the batch, whose
    length follows the padded axes."""

    unbatched: str = ""
    unpadded: str = ""
    crops: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()


class LoadModel(Frame, tag="load"):
    """First frame to a worker. A `proof` replaces trial runs."""

    version: int
    model: ModelConfig
    proof: Proof | None = None
    # Environment variables for the model's code, added to those of the process.
    environment: dict[str, str] = {}


class Enclosed(Frame, tag="seg"):
    """A LoadModel of any size: its bytes lie in a segment, whose descriptor comes last."""

    nbytes: int


class Attach(Frame, tag="att"):
    """Serve one more shard, with the descriptor of a socket to it. `life` counts its restarts. For
    a worker, if there can be others, the descriptor of the shared page comes second; its slots
    begin at `first_slot` of this `block` there."""

    shard: int
    life: int = 0
    block: int | None = None
    first_slot: int = 0


class SetExecutors(Frame, tag="exec"):
    """So many batches of the model can run at once now, in all its workers."""

    count: int


class Leave(Frame, tag="leav"):
    """The worker is no longer needed: it answers with Leaving, to the core and to all shards."""

    reason: str


class Hello(Frame, tag="hi"):
    """First frame of a shard to a worker, with the shard's input spill and this worker's output
    spill."""

    version: int
    spill_bytes: int
    # Whether the worker sends Started to it.
    hears_starts: bool = False
    # Whether a third descriptor comes along: the socket for calls of the model's code.
    has_calls: bool = False


class MapSlab(Frame, tag="map"):
    """A slab of the shard, with its descriptor."""

    slab: int
    nbytes: int


class MapRegion(Frame, tag="mapr"):
    """Memory of a client that batches read or write: `nbytes` at `offset` of the file whose
    descriptor comes along. `is_sealed`: the file cannot shrink. With a `handle`, it is memory of
    the GPU with this number instead, and there is no descriptor."""

    region: int
    name: str
    offset: int
    nbytes: int
    is_sealed: bool = False
    handle: bytes = b""
    device: int = 0


class UnmapRegion(Frame, tag="unm"):
    """No batch of this shard will use the region any more."""

    region: int


class Want(Frame, tag="want"):
    """What a shard has queued and could give now, as in `serving.shares.Queued`; the worker answers
    with a Claim when a slot is free."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    # By the monotonic clock.
    due: float = math.inf
    head_rows: int = 1
    head_tokens: int = 0
    geometry: str | None = None
    arrivals_per_s: float = 0.0
    target_size: int = 0


class Dispatch(Frame, tag="run"):
    """Run one batch: rows of slabs (`runs`, with the row shape of each input and the row capacity
    that fixes the layout) or, if `runs` is empty, the extents of `requests`. The worker may merge
    it with those of other shards that have the same geometry, unless it `is_alone`: then nothing
    else runs meanwhile."""

    batch: int
    runs: tuple[RowRange, ...]
    row_shapes: tuple[tuple[int, ...], ...] = ()
    capacity: int = 0
    requests: tuple[RequestPart, ...] = ()
    # Equal for batches that can be merged.
    geometry: str = ""
    is_alone: bool = False
    # Its share of a token budget; 0 without one.
    num_tokens: int = 0
    # The Claim that it answers; 0: sent without one.
    round: int = 0
    # What is left; None: nothing that could be given now.
    more: Want | None = None
    # Number of a batch with arrays of this process (`serving.held_rows`); 0: it has none.
    held: int = 0
    # Whether any of `requests` has `reads` or `writes`.
    has_regions: bool = False
    # Whether a shard that hears of starts hears of this one.
    tells_start: bool = True


class Decline(Frame, tag="pass"):
    """The answer to a Claim of a shard that has nothing to give, except `more`."""

    round: int
    more: Want | None = None


class Started(Frame, tag="go"):
    """A batch runs, since `at` on the machine's monotonic clock, of a worker that several shards
    have. A worker that dies was not killed by what it had not started."""

    batch: int
    is_merged: bool
    at: float = 0.0


class Recall(Frame, tag="rcl"):
    """Do not run a batch that has not started: a request in it expired or was cancelled. If it has
    started, its answer follows as usual."""

    batch: int


class Recalled(Frame, tag="rcd"):
    """The answer to a Recall of a batch that had not started, and will not."""

    batch: int


class Claim(Frame, tag="clm"):
    """A slot is free: the shard answers with a Dispatch, within a `serving.shares.Share`, or with
    Decline."""

    round: int
    max_rows: int
    others_rows: int = 0
    ends_at: float = -math.inf
    drops_late: bool = False
    geometry: str | None = None
    max_tokens: float = math.inf
    is_due: bool = True


class Release(Frame, tag="rel"):
    """The outputs at these offsets of a worker's spill, or bodies in a parcel, were read."""

    offsets: tuple[int, ...]


class Stop(Frame, tag="stop"):
    """Finish the running work and exit."""


class WorkerReady(Frame, tag="rdy"):
    """Loaded, tried out and warmed up. `built` is how the backend resolved its options; `timings`
    maps each batch size of the ladder to its warm duration in seconds, `bucket_timings` the same
    for each bucket of padded models."""

    version: int
    load_s: float
    built: dict[str, str]
    timings: dict[int, float]
    needs_requests: bool = False
    proof: Proof = msgspec.field(default_factory=Proof)
    bucket_timings: dict[int, dict[int, float]] = {}


class StartFailed(Frame, tag="bad"):
    """A worker could not load, or a shard could not start."""

    problems: tuple[str, ...]


class Done(Frame, tag="ok"):
    """A batch is computed. Fixed-size outputs are in the slab rows; the others, per request, are
    extents of the worker's spill in `outputs`."""

    batch: int
    input_s: float
    infer_s: float
    output_s: float
    outputs: tuple[tuple[Extent, ...], ...] = ()
    errors: dict[int, str] = {}
    # Those of `errors` that are the client's: the request cannot be run.
    invalid: tuple[int, ...] = ()
    # Rows of the whole batch, those of other shards included; 0: there were no others.
    total_rows: int = 0
    total_tokens: int = 0
    # Of the shards that share a batch, one counts it.
    is_first: bool = True
    # Classes of those of `errors` that a model chose, if it chose one.
    kinds: dict[int, str] = {}
    # Those of the answers to some requests.
    parameters: dict[int, dict[str, Parameter]] = {}


class Responded(Frame, tag="rsp"):
    """A response of a decoupled model to the request at this `index` of a batch, with the `outputs`
    in the worker's spill, or an `error` with its class. Others follow unless it `is_final`;
    `is_empty`: there is no response, only the end. The Done of its batch says that the worker takes
    the next batch, and may come before or after it."""

    batch: int
    index: int
    outputs: tuple[Extent, ...] = ()
    is_final: bool = False
    is_empty: bool = False
    error: str = ""
    parameters: dict[str, Parameter] = {}
    error_kind: str = ""


class CancelRequest(Frame, tag="crq"):
    """The client of the request at this `index` of a batch is gone: its model may stop."""

    batch: int
    index: int


class BatchFailed(Frame, tag="err"):
    """The whole batch failed in the model; the worker itself is healthy. `is_merged`: it had rows
    of other shards, which may be the cause."""

    batch: int
    error: str
    is_merged: bool = False


class Leaving(Frame, tag="bye"):
    """A healthy worker asks to be replaced, or does as told by Leave: it answers what it has, then
    waits for Stop. Shards learn it before the answer that caused it, so no batch follows that."""

    reason: str


class QuantityCounts(Frame, tag="q"):
    """Rows of live inputs that a worker has measured since it said so last: a tensor's values, or
    its sizes. `sums` and `squares` are over rows, of the shares of values up to each edge that the
    version's evidence has."""

    tensor: str
    quantity: str
    num_rows: int
    num_outside: int
    sums: tuple[float, ...] = ()
    squares: tuple[float, ...] = ()


class Sketched(Frame, tag="skt"):
    """Counts of a worker's live inputs, about once a second."""

    quantities: tuple[QuantityCounts, ...]


class MetricChange(Frame, tag="mc"):
    """What a worker has done to one metric of its model since it said so last. `value` is added to
    the metric, or replaces it (`is_set`); a histogram has it as the sum of the values that are in
    `counts`, by bucket. `is_new`: the worker has just declared the metric."""

    family: str
    text: str
    kind: str
    labels: tuple[tuple[str, str], ...]
    bounds: tuple[float, ...] = ()
    value: float = 0.0
    is_set: bool = False
    is_new: bool = False
    counts: list[int] = []


class Measured(Frame, tag="msd"):
    """Changes of metrics that a model's code has."""

    changes: tuple[MetricChange, ...]


class TensorHeader(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="t"):
    """Description of one tensor in a parcel. Hashable: equal tensors share a key."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    nbytes: int


class Parcel(Frame, tag="pcl"):
    """The tensors of one request or answer, contiguous: at `offset` of the sender's segment, or in
    the frame itself if they are small."""

    pieces: tuple[TensorHeader, ...] = ()
    data: bytes = b""
    offset: int | None = None


class CallModel(Frame, tag="cal"):
    """The code of a model calls another model, while it runs a `batch` of this shard. The tensors
    are in the `parcel` or, if that has an offset, in a segment whose descriptor comes along. With
    an `action`, it manages that model instead; the pieces are the files of a load, by name."""

    call: int
    batch: int
    model_name: str
    model_version: str
    parcel: Parcel
    id: str = ""
    outputs: tuple[str, ...] = ()
    parameters: dict[str, Parameter] = {}
    action: str = ""


class CancelCall(Frame, tag="calc"):
    """The code does not wait for the answer to a CallModel any more."""

    call: int


class Waited(Frame, tag="cald"):
    """For how long calls of the worker have been open so far, in seconds: such time is no hang."""

    total_s: float


class CallAnswer(Frame, tag="cala"):
    """An answer to CallModel: tensors as there, or an error with its class. More follow unless it
    `is_final`."""

    call: int
    parcel: Parcel
    is_final: bool = True
    parameters: dict[str, Parameter] = {}
    error_kind: str = ""
    error: str = ""
    # As in Responded.
    is_empty: bool = False


class OpenShard(Frame, tag="open"):
    """First frame to a shard, with descriptors: the segments for messages and for answers, the
    shared page, and the listeners for HTTP and, if it is served, gRPC."""

    version: int
    shard: int
    segment_bytes: int = 0
    # Scopes by digest of the API key, as in `protocols.gate`; None: no key is required.
    keys: dict[bytes, tuple[str, ...]] | None = None
    # Its limits, and the host names it serves; None: any.
    limits: HttpLimits | None = None
    hosts: tuple[str, ...] | None = None
    # Whether it logs requests.
    logs_requests: bool = False
    # The TLS files; None: plain text.
    tls: TlsConfig | None = None
    # None: it does not answer gRPC.
    grpc: GrpcConfig | None = None
    # Requests and tokens per second of the API keys that have a limit, and shares of queues.
    rates: dict[bytes, float] = {}
    token_rates: dict[bytes, float] = {}
    shares: dict[bytes, float] = {}
    # Whether clients may register shared memory.
    allows_regions: bool = False
    # Folder for recordings, and how many shards there are; empty: nothing is recorded.
    record_folder: str = ""
    num_shards: int = 1
    # The latencies that it counts.
    metrics: MetricsConfig = MetricsConfig()
    # The response cache, which the shards divide.
    cache: CacheConfig = CacheConfig()
    # What messages need beside an API key, and which headers become parameters.
    restrictions: Restrictions = Restrictions()
    header_patterns: HeaderPatterns = HeaderPatterns()


class NameKeys(Frame, tag="named"):
    """Names of some API keys by digest, for logs. Frames of names come after OpenShard, and before
    the SetKeys that has their keys. Secrets are never sent."""

    names: dict[bytes, str]


class SetKeys(Frame, tag="keys"):
    """The API keys have changed; fields as in OpenShard."""

    keys: dict[bytes, tuple[str, ...]]
    rates: dict[bytes, float] = {}
    token_rates: dict[bytes, float] = {}
    shares: dict[bytes, float] = {}


class Listening(Frame, tag="lis"):
    """The shard has started, and accepts connections once the models are published."""

    version: int


class Cancel(Frame, tag="infc"):
    """The client of this message or call is gone. A message is still answered, possibly with an
    error."""

    call: int


class Forward(Frame, tag="fwd"):
    """An HTTP message for the core to answer: everything but inference. `received` is a time of the
    monotonic clock, which all processes of a machine share. The body is the one piece of `parcel`,
    whose memory is free after Forwarded."""

    call: int
    received: float
    method: bytes
    target: bytes
    headers: dict[bytes, bytes]
    keep_alive: bool
    is_http_1_0: bool
    parcel: Parcel


class Forwarded(Frame, tag="fwdr"):
    """Bytes for the client, as the one piece of `parcel`, whose memory is free after a Release. The
    connection then stays open if `keeps`. `is_cut`: closed unanswered; `is_part`: more follows."""

    call: int
    parcel: Parcel
    keeps: bool = False
    is_cut: bool = False
    is_part: bool = False


class Ping(Frame, tag="ping"):
    """Health check."""


class Pong(Frame, tag="pong"):
    """The answer to Ping, with the number of connected clients."""

    num_connections: int = 0


class MoveClients(Frame, tag="move"):
    """So many clients should leave this shard, by connecting again after their next answer."""

    count: int


class Drain(Frame, tag="drn"):
    """The server is shutting down: close each connection after its next answer."""


# Between the core, which supervises the workers of a model, and a shard, which batches its
# requests. With one shard both are in one process and hand these over without encoding them.


class ModelProved(Frame, tag="prv"):
    """All workers of a model are ready for the first time: what their trial runs showed, and the
    warm durations of each (see WorkerReady). A model that the first request loads is opened with
    the defaults, and once more when that has happened."""

    proof: Proof = msgspec.field(default_factory=Proof)
    load_s: float = 0.0
    needs_requests: bool = False
    timings: tuple[dict[int, float], ...] = ()
    bucket_timings: tuple[dict[int, dict[int, float]], ...] = ()


class SetWorker(Frame, tag="setw"):
    """The instance `index` has a ready worker, its `life`, with warm durations. To another process
    it comes with the descriptor of the socket to that worker."""

    index: int
    life: int
    timings: dict[int, float] = {}


class Died(Frame, tag="died"):
    """A worker that shards knew has died. Each answers with Lost and keeps what it lost."""

    index: int
    life: int
    reason: str


class Lost(Frame, tag="lost"):
    """What a shard lost with a worker. If it is one request, `body` is its fingerprint and `key`
    its API key's digest; `lost_with` is the instance that it was lost with before, in company."""

    life: int
    num_requests: int = 0
    body: bytes = b""
    key: bytes = b""
    lost_with: int | None = None


class Verdict(Frame, tag="vdct"):
    """What a worker's death means: `is_excused` if a request is to blame, rather than the model;
    `is_pinned` if only one was lost. If the core `awaits_answer`, it wants to hear of the next
    answer of any worker."""

    life: int
    is_excused: bool
    is_pinned: bool
    awaits_answer: bool


class SetQuarantine(Frame, tag="qtn"):
    """The ends of all quarantines of a model, by fingerprint and by API key."""

    bodies: dict[bytes, float]
    keys: dict[bytes, float]


class SetReason(Frame, tag="why"):
    """Why the last worker ended."""

    text: str


class TryGranted(Frame, tag="try"):
    """The answer to MayTry, once a suspect may run. The grant ends with Tried."""


class Scaled(Frame, tag="scl"):
    """How many instances the model should have from now on, and how long one took to be ready. With
    none, requests wait for the first one, and the part sends Wake. With a `problem`, they are
    refused for `refuse_s`."""

    target: int
    load_s: float
    problem: str = ""
    refuse_s: float = 0.0


class Resized(Frame, tag="rsz"):
    """The model has another number of instances from now on, and so many places for workers."""

    num_instances: int
    num_places: int


class PartLoad(Frame, tag="pld"):
    """The load of a part whose model is scaled, several times a second: rows (or tokens, with a
    token budget) that were offered so far, refused ones included; those that are queued; time that
    its batches have run so far; T(b), if it is known, and how many times as long the slowest
    batches take; requests so far, and those that were answered late or refused for lack of time."""

    num_offered: int
    num_queued: int
    busy_s: float
    times_s: dict[int, float] = {}
    inflation: float = 1.0
    num_requests: int = 0
    num_late: int = 0


class Wake(Frame, tag="wake"):
    """A request waits, and the model has no instance."""


class Answered(Frame, tag="answ"):
    """A worker has answered, after a Verdict that awaits it."""


class MayTry(Frame, tag="may"):
    """A shard has a suspect to run, which may kill its worker. `is_patient`: it can wait for a
    spare worker."""

    is_patient: bool


class Tried(Frame, tag="trd"):
    """A suspect has ended, or there is none any more."""


class Hung(Frame, tag="hung"):
    """A worker takes too long over a batch."""

    index: int
    life: int


class Left(Frame, tag="left"):
    """A leaving worker has answered all that this shard sent."""

    index: int
    life: int


class HandOver(Frame, tag="hov"):
    """A request for a model whose requests are all the core's, or of the core for a model whose
    requests are the shards'; the pieces of `parcel` are its inputs. `call` numbers the requests of
    the sender for this model."""

    call: int
    received: float
    parcel: Parcel
    id: str = ""
    outputs: tuple[RequestedOutput, ...] = ()
    parameters: dict[str, Parameter] = {}
    priority: int = 0
    timeout_s: float | None = None
    caller: bytes = b""
    is_mirror: bool = False
    # The models whose code waits for it, as in `types.Request`.
    chain: tuple[str, ...] = ()


class TakeBack(Frame, tag="tkb"):
    """The client of a request that was handed over is gone; no answer is awaited."""

    call: int


class HandBack(Frame, tag="hbk"):
    """An answer to HandOver: outputs as the pieces of `parcel`, or an error with its class. More
    follow unless it `is_final`. `times` are when the request was queued, dispatched and completed,
    how long it waited for an instance, and the three parts of its computation."""

    call: int
    parcel: Parcel
    is_final: bool = True
    times: tuple[float, ...] = ()
    parameters: dict[str, Parameter] = {}
    error_kind: str = ""
    error: str = ""
    # Why it was refused, and when to try again, if that is known.
    reason: str = ""
    retry_after_s: float | None = None
    # As in Responded.
    is_empty: bool = False


class EngineReady(Frame, tag="ready"):
    """The engine of a language model is loaded. `built` is how it resolved its options."""

    version: int
    load_s: float
    num_blocks: int
    max_length: int
    # Tokens that the model knows.
    vocabulary: int
    built: dict[str, str]


class SetEngine(Frame, tag="sete"):
    """A language model has a ready engine. To another process it comes with the descriptor of the
    socket to it. Requests of this part are numbered from `first_request` on, which no other part
    uses; the model was loaded at `loaded_at`, in seconds since 1970."""

    life: int
    ready: EngineReady
    first_request: int
    loaded_at: int


class EngineEnded(Frame, tag="ende"):
    """The engine has died: how it ended, and why there is none now. The next one is started at
    `restart_at`, by the monotonic clock, and takes about `load_s`; None: it is unknown when there
    will be one."""

    ending: str
    reason: str
    restart_at: float = 0.0
    load_s: float | None = None


class EngineHung(Frame, tag="hnge"):
    """The engine said nothing for `silent_s`, although it has requests of this part."""

    life: int
    silent_s: float


ToPartMessage = (
    ModelProved
    | SetWorker
    | Died
    | Verdict
    | SetQuarantine
    | SetReason
    | TryGranted
    | Scaled
    | Resized
    | SetEngine
    | EngineEnded
    | HandBack
    | HandOver
    | TakeBack
)
FromPartMessage = (
    Lost
    | Answered
    | MayTry
    | Tried
    | Hung
    | Left
    | PartLoad
    | Wake
    | EngineHung
    | HandOver
    | TakeBack
    | HandBack
)


class ToPart(Frame, tag="tpt"):
    """A message of the core about one stage of a model, to a shard in another process."""

    part: int
    message: ToPartMessage


class FromPart(Frame, tag="fpt"):
    """A shard's message about one stage of a model."""

    part: int
    message: FromPartMessage


class OpenModel(Frame, tag="opm"):
    """Prepare to serve a version of a model; `parts` number its stages, `blocks` are theirs on the
    shared page. A language model, and one whose requests are handed over, is one part and has no
    block."""

    model: int
    config: ModelConfig
    parts: tuple[int, ...]
    blocks: tuple[int, ...]


class SplitRule(Frame, tag="spl"):
    """How the requests of a model are split between the version that is served and a candidate, and
    the limits that are counted: metrics and their highest values. `mirrored_per_s` is the most of
    one shard."""

    # Of all rollouts of this server.
    rollout: int
    # "canary" or "shadow".
    mode: str
    # The candidate's version, and its number in the shards.
    candidate: str
    number: int = 0
    share: float = 0.0
    header: str = ""
    hash_header: str = ""
    salt: bytes = b""
    limits: tuple[tuple[str, float], ...] = ()
    mirrored_per_s: float = 0.0
    # KL divergence per token that texts of a language model may have, in nats.
    max_kl: float = 0.0


class Publish(Frame, tag="pub"):
    """All models that requests may use, by name. `failures` could not be loaded, and why; `awaited`
    are loading. A later `epoch` replaces an earlier one."""

    epoch: int
    models: dict[str, tuple[int, ...]]
    failures: dict[str, tuple[str, ...]]
    awaited: tuple[str, ...]
    # Rollouts by the name of their model; candidates are not among `models`.
    splits: dict[str, SplitRule] = {}
    # Which requests are traced.
    tracing: TraceTable = TraceTable()
    # None: the log settings of the start.
    logging: LogSwitches | None = None


class OpenRegion(Frame, tag="opr"):
    """A client has registered shared memory: the digest of the API key that owns it, and how
    workers map it. The descriptor of its file comes along, if it has one."""

    caller: bytes
    memory: MapRegion


class CloseRegion(Frame, tag="clr"):
    """A region is registered no more; requests that use it are still answered."""

    region: int


class DrainModel(Frame, tag="drm"):
    """Answer when everything that the model has admitted is answered."""

    model: int


class RetireModel(Frame, tag="ret"):
    """Close a model; requests that are still queued get an error."""

    model: int


class ReadModels(Frame, tag="rdm"):
    """Answer with the statistics of all models, as `serving.shard.ModelReading` by number."""


class ExplainModel(Frame, tag="exm"):
    """Answer with the explanation of a model."""

    model: int


class Lease(Frame, tag="lea"):
    """A shard wants this many tokens of a key's request rate; a negative number gives some back."""

    key: bytes
    amount: int


class Leased(Frame, tag="lead"):
    """Tokens for a shard, at most as many as it wanted; more are there in `wait_s`."""

    key: bytes
    amount: int
    wait_s: float


class TakeTokens(Frame, tag="tkt"):
    """A shard wants to start a prompt of this many tokens for a key that has a limit of tokens per
    second."""

    call: int
    key: bytes
    amount: int


class TokensTaken(Frame, tag="tktd"):
    """The answer to TakeTokens: the tokens are counted or, if `wait_s` is above 0, the key has used
    up its tokens for so long."""

    call: int
    wait_s: float


class UseTokens(Frame, tag="ust"):
    """Tokens that were generated for a key that has a limit."""

    key: bytes
    amount: int


class Traced(Frame, tag="trc"):
    """A traced request of a shard has ended."""

    record: TraceRecord


class Manage(Frame, tag="mng"):
    """A management call of a shard's gRPC client, as `serving.management.ManagementCall`. `caller`
    is the digest of its API key, which the shard has checked. The pieces of `parcel` are the files
    of a load, by the names of their parameters."""

    call: int
    action: str
    model_name: str
    model_version: str
    parameters: dict[str, Parameter]
    caller: bytes
    parcel: Parcel = msgspec.field(default_factory=Parcel)


class Managed(Frame, tag="mngd"):
    """The answer to Manage: JSON as the one piece of `parcel`, or an error."""

    call: int
    parcel: Parcel
    error_kind: str = ""
    error: str = ""


ShardQuestion = OpenModel | Publish | DrainModel | RetireModel | ReadModels | ExplainModel


class AskShard(Frame, tag="asks"):
    """A question to a shard: the one piece of `parcel` is an encoded ShardQuestion."""

    call: int
    parcel: Parcel


class ShardAnswer(Frame, tag="anss"):
    """The answer is the one piece of `parcel`; `error`: there is none, and why."""

    call: int
    parcel: Parcel
    error: str = ""


ToWorker = LoadModel | Enclosed | Attach | SetExecutors | Leave | Stop
FromWorker = WorkerReady | StartFailed | Leaving | Sketched | Measured
ShardToWorker = (
    Hello
    | MapSlab
    | MapRegion
    | UnmapRegion
    | Want
    | Dispatch
    | Decline
    | Recall
    | Release
    | CancelRequest
)
# On the socket for calls, which a thread of its own reads.
WorkerCall = CallModel | CancelCall | Waited
WorkerToShard = Claim | Started | Recalled | Responded | Done | BatchFailed | Leaving
FromShard = (
    Listening
    | StartFailed
    | FromPart
    | ShardAnswer
    | Forward
    | Manage
    | Cancel
    | Lease
    | TakeTokens
    | UseTokens
    | Traced
    | Release
    | Pong
)
ToShard = (
    OpenShard
    | NameKeys
    | SetKeys
    | ToPart
    | AskShard
    | Forwarded
    | Managed
    | Leased
    | TokensTaken
    | OpenRegion
    | CloseRegion
    | MoveClients
    | Release
    | Ping
    | Drain
    | Stop
)

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
decode_shard_to_worker = msgspec.msgpack.Decoder(ShardToWorker).decode
decode_worker_call = msgspec.msgpack.Decoder(WorkerCall).decode
decode_call_answer = msgspec.msgpack.Decoder(CallAnswer).decode
decode_worker_to_shard = msgspec.msgpack.Decoder(WorkerToShard).decode
decode_shard_question = msgspec.msgpack.Decoder(ShardQuestion).decode
decode_to_shard = msgspec.msgpack.Decoder(ToShard).decode
decode_all_from_shard = msgspec.msgpack.Decoder(list[FromShard]).decode
decode_all_to_shard = msgspec.msgpack.Decoder(list[ToShard]).decode


def join(encoded: Sequence[bytes]) -> bytes:
    """Join at most 65535 encoded frames into one array (MessagePack's array 16)."""
    return b"\xdc" + len(encoded).to_bytes(2, "big") + b"".join(encoded)
