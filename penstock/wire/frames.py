"""The messages between the core and its workers, and between the core and further fronts.

One frame is one datagram of a SOCK_SEQPACKET pair: MessagePack of a tagged array, a few hundred
bytes for a whole batch, because tensors stay in shared memory. `VERSION` is exchanged first and
must be equal on both sides; fields may be added at the end with a default, anything else raises it.

    core → worker   Load, MapSlab, Dispatch, Release, CancelRequests, UpcallReply, Stop
    worker → core   Ready, LoadFailed, Done, Failed, StreamResponse, Upcall
    front → core    Infer, InferCancel           core → front   InferReply
"""

from __future__ import annotations

import msgspec

from penstock.config import ModelConfig
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


class Load(Frame, tag="load"):
    """First frame to a worker. Two descriptors come with it: input spill, output spill."""

    version: int
    model: ModelConfig
    spill_bytes: int


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
    """The outputs at these offsets of the worker's spill have been read."""

    offsets: tuple[int, ...]


class CancelRequests(Frame, tag="can"):
    """Nobody waits for these requests of a running batch any more."""

    batch: int
    requests: tuple[int, ...]


class Stop(Frame, tag="stop"):
    """Finish what is running and exit."""


class Ready(Frame, tag="rdy"):
    """Loaded and warmed up. `built` is what the backend really made of the options; `timings` maps
    each rung of the batch ladder to its warm duration in seconds."""

    version: int
    load_s: float
    built: dict[str, str]
    timings: dict[int, float]
    needs_requests: bool = False


class LoadFailed(Frame, tag="bad"):
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


class Infer(Frame, tag="inf"):
    """A request decoded by another front; its tensors lie in that front's spill segment."""

    call: int
    model_name: str
    model_version: str
    request: RequestPart
    priority: int = 0
    timeout_s: float | None = None


class InferCancel(Frame, tag="infc"):
    call: int


class InferReply(Frame, tag="infr"):
    call: int
    outputs: tuple[Extent, ...]
    error_kind: str = ""
    error: str = ""
    is_final: bool = True


ToWorker = Load | MapSlab | Dispatch | Release | CancelRequests | UpcallReply | Stop
FromWorker = Ready | LoadFailed | Done | Failed | StreamResponse | Upcall
FromFront = Infer | InferCancel
ToFront = InferReply

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
decode_from_front = msgspec.msgpack.Decoder(FromFront).decode
decode_to_front = msgspec.msgpack.Decoder(ToFront).decode
