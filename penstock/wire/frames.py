"""The messages between the core and its workers, and between the core and further fronts.

One frame is one datagram of a SOCK_SEQPACKET pair: MessagePack of a tagged array, a few hundred
bytes for a whole batch, because tensors stay in shared memory. `VERSION` is exchanged first and
must be equal on both sides; fields may be added at the end with a default, and frames for a kind of
process that there was not before; anything else raises it.
A front has a frame per request, so there a datagram is an array of the frames that are due
(`join`); only its first, Open, comes alone.

    core → worker   Load, MapSlab, Dispatch, Release, CancelRequests, UpcallReply, Stop
    worker → core   Ready, LoadFailed, Done, Failed, StreamResponse, Upcall
    core → front    Open, SetKeys, InferReply, Answer, Forwarded, Ping, Drain, Stop
    front → core    Listening, LoadFailed, Infer, Cancel, Release, Ask, Forward, Pong
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from penstock.config import HttpLimits, ModelConfig, TlsConfig
from penstock.types import Parameter

VERSION = 1
# A datagram must fit the socket buffer; what is larger belongs into shared memory.
MAX_FRAME_BYTES = 1 << 20


class Frame(msgspec.Struct, array_like=True, gc=False):
    """A message; `array_like` keeps names off the wire."""


class Extent(Frame, tag="e"):
    """A tensor lying at `offset` of a spill segment. BYTES lie there in wire form."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Run(Frame, tag="r"):
    """`count` rows from `row` on in one slab."""

    slab: int
    row: int
    count: int


class RequestPart(Frame, tag="p"):
    """One request inside a batch, for backends that see requests and for un-stacked inputs."""

    id: str
    num_rows: int
    inputs: tuple[Extent, ...] = ()
    outputs: tuple[str, ...] = ()
    parameters: dict[str, Parameter] = {}
    # How long the padded axes are without padding; 0: nothing is padded.
    length: int = 0


class Proof(Frame, tag="prf"):
    """What was tried out at load. `unbatched` and `unpadded` say why not, in words; empty: it may.
    `crops` are axes of outputs, counted without the batch, that are as long as the padded axes."""

    unbatched: str = ""
    unpadded: str = ""
    crops: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()


class Load(Frame, tag="load"):
    """First frame to a worker. Two descriptors come with it: input spill, output spill. With a
    `proof` that the model goes by already, nothing is tried out again."""

    version: int
    model: ModelConfig
    spill_bytes: int
    proof: Proof | None = None
    # Variables for the model's code beside those that the process was started with.
    environment: dict[str, str] = {}


class MapSlab(Frame, tag="map"):
    """A slab of the model; its descriptor comes with the frame."""

    slab: int
    nbytes: int


class Dispatch(Frame, tag="run"):
    """Run one batch: rows of slabs (`runs`, with the shape of one row of each input and the row
    capacity that fixes the layout) or, where `runs` is empty, the extents of `requests`."""

    batch: int
    runs: tuple[Run, ...]
    row_shapes: tuple[tuple[int, ...], ...] = ()
    capacity: int = 0
    requests: tuple[RequestPart, ...] = ()


class Release(Frame, tag="rel"):
    """The outputs at these offsets of the worker's spill, or of the front's answers, have been
    read."""

    offsets: tuple[int, ...]


class CancelRequests(Frame, tag="can"):
    """Nobody waits for these requests of a running batch any more."""

    batch: int
    requests: tuple[int, ...]


class Stop(Frame, tag="stop"):
    """Finish what is running and exit."""


class Ready(Frame, tag="rdy"):
    """Loaded, tried out and warmed up. `built` is what the backend really made of the options;
    `timings` maps each rung of the batch ladder to its warm duration in seconds, `bucket_timings`
    the same for each bucket of padded models."""

    version: int
    load_s: float
    built: dict[str, str]
    timings: dict[int, float]
    needs_requests: bool = False
    proof: Proof = msgspec.field(default_factory=Proof)
    bucket_timings: dict[int, dict[int, float]] = {}


class LoadFailed(Frame, tag="bad"):
    """A worker could not load, a front could not listen."""

    problems: tuple[str, ...]


class Done(Frame, tag="ok"):
    """A batch is computed. Fixed outputs lie in the slab rows; the others, per request, in
    `outputs` as extents of the worker's spill."""

    batch: int
    input_s: float
    infer_s: float
    output_s: float
    outputs: tuple[tuple[Extent, ...], ...] = ()
    errors: dict[int, str] = {}


class Failed(Frame, tag="err"):
    """The whole batch failed in the model, and the worker is well."""

    batch: int
    error: str


class Leaving(Frame, tag="bye"):
    """A worker that is well, and wants a new one in its place: it answers what it has been given,
    and waits for Stop."""

    reason: str


class StreamResponse(Frame, tag="str"):
    """One of several answers to request number `index` of the batch."""

    batch: int
    index: int
    outputs: tuple[Extent, ...]
    is_final: bool


class Upcall(Frame, tag="up"):
    """A model asks another model."""

    call: int
    model_name: str
    model_version: str
    request: RequestPart


class UpcallReply(Frame, tag="upr"):
    call: int
    outputs: tuple[Extent, ...]
    error: str = ""
    is_final: bool = True


class Piece(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="t"):
    """What is known of one tensor of a parcel. Equal ones are the same key."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    nbytes: int


class Parcel(Frame, tag="pcl"):
    """The tensors of one request or answer, one behind the other: from `offset` on in the sender's
    segment, or in the frame itself where they are few bytes."""

    pieces: tuple[Piece, ...] = ()
    data: bytes = b""
    offset: int | None = None


class Open(Frame, tag="open"):
    """First frame to a front. Two descriptors come with it: the segment for its requests and the
    one for the answers."""

    version: int
    host: str
    port: int
    segment_bytes: int
    max_message_bytes: int
    # How answers are compressed: none, deflate or gzip.
    compression: str = "none"
    # Scopes by the digest of the API key, as `protocols.gate` has them; None: nobody needs one.
    keys: dict[bytes, tuple[str, ...]] | None = None
    # Of an HTTP front: what one client may ask of it, and the names it is served under; None: any.
    limits: HttpLimits | None = None
    hosts: tuple[str, ...] | None = None
    # Whether the front tells the access log of what never reaches the core.
    logs_requests: bool = False
    # Which files its TLS is made of; None: plain text.
    tls: TlsConfig | None = None


class SetKeys(Frame, tag="keys"):
    """The API keys have changed; `keys` as in Open."""

    keys: dict[bytes, tuple[str, ...]]


class Listening(Frame, tag="lis"):
    """The front takes connections."""

    version: int
    port: int


class Infer(Frame, tag="inf"):
    """A request that a front has decoded. `received` is of the monotonic clock, which all processes
    of a machine share."""

    call: int
    model_name: str
    model_version: str
    received: float
    parcel: Parcel
    id: str = ""
    outputs: tuple[str, ...] = ()
    parameters: dict[str, Parameter] = {}
    priority: int = 0
    timeout_s: float | None = None
    # Of the outputs that are asked for as their best classes: how many.
    classes: dict[str, int] = {}
    # The reply is to say where the time went.
    wants_timings: bool = False
    # As `Request.caller`.
    caller: bytes = b""


class Cancel(Frame, tag="infc"):
    """Nobody waits for this request, question or message any more. Of a request or a message the
    answer comes all the same, and may be an error."""

    call: int


class InferReply(Frame, tag="infr"):
    """The memory of the request is free when the final one has come; that of the answer after a
    Release."""

    call: int
    parcel: Parcel
    model_name: str = ""
    model_version: str = ""
    parameters: dict[str, Parameter] = {}
    error_kind: str = ""
    error: str = ""
    is_final: bool = True
    # When asking again may make sense, of one that is refused for overload.
    retry_after_s: float = 1.0
    # As `types.Timings` has them: queued, dispatched, instance_wait_s, compute_s, completed.
    timings: tuple[float, ...] = ()


class Forward(Frame, tag="fwd"):
    """An HTTP message that the core answers itself: everything but inference that could be decoded.
    Its body is the one piece of `parcel`, which is free when the Forwarded has come."""

    call: int
    received: float
    method: bytes
    target: bytes
    headers: dict[bytes, bytes]
    keep_alive: bool
    is_http_1_0: bool
    parcel: Parcel


class Forwarded(Frame, tag="fwdr"):
    """The bytes to send to the client, as the one piece of `parcel`, whose memory is free after a
    Release; and whether the connection stays open. `is_cut`: it ends here, without an answer.
    `is_part`: more follows, as it is made."""

    call: int
    parcel: Parcel
    keeps: bool = False
    is_cut: bool = False
    is_part: bool = False


AskKind = Literal[
    "server_ready",
    "server_metadata",
    "model_ready",
    "model_metadata",
    "model_config",
    "model_statistics",
    "repository_index",
    "model_load",
    "model_unload",
    # An inference request that the front could not decode, to be counted all the same.
    "count_request",
]


class Ask(Frame, tag="ask"):
    """A question that only the core can answer, or a change that only it can make."""

    call: int
    kind: AskKind
    model_name: str = ""
    model_version: str = ""
    # `ready` for the index; of a load only which ones were given.
    parameters: dict[str, Parameter] = {}
    # The digest of the API key that came with a change or an inference; empty where there was none.
    key: bytes = b""


class Answer(Frame, tag="ans"):
    """JSON; for `model_config` a serialized protobuf. A long body lies in shared memory, as the one
    piece of `parcel`, until a Release."""

    call: int
    body: bytes
    error_kind: str = ""
    error: str = ""
    parcel: Parcel | None = None


class Ping(Frame, tag="ping"):
    """Are you still there?"""


class Pong(Frame, tag="pong"):
    """Yes, and with so many clients connected, where the front knows."""

    num_connections: int = 0


class Drain(Frame, tag="drn"):
    """The server is about to stop: connections are not kept open beyond their next answer."""


ToWorker = Load | MapSlab | Dispatch | Release | CancelRequests | UpcallReply | Stop
FromWorker = Ready | LoadFailed | Done | Failed | Leaving | StreamResponse | Upcall
FromFront = Listening | LoadFailed | Infer | Cancel | Release | Ask | Forward | Pong
ToFront = Open | SetKeys | InferReply | Answer | Forwarded | Ping | Drain | Stop

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
decode_to_front = msgspec.msgpack.Decoder(ToFront).decode
decode_all_from_front = msgspec.msgpack.Decoder(list[FromFront]).decode
decode_all_to_front = msgspec.msgpack.Decoder(list[ToFront]).decode


def join(encoded: Sequence[bytes]) -> bytes:
    """At most 65535 encoded frames as one array (array 16 of MessagePack)."""
    return b"\xdc" + len(encoded).to_bytes(2, "big") + b"".join(encoded)
