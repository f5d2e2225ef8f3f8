"""Core types: datatypes, tensors, requests, responses, timings, and the Servable protocol.

Nothing here knows a protocol, a process or a device. Inside Penstock a tensor is a contiguous
little-endian buffer; each BYTES element is preceded by its length in four bytes, as on the wire.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.errors import Cancelled, PenstockError

if TYPE_CHECKING:
    from penstock.serving.held_rows import HeldRows
    from penstock.serving.plan import Ticket
    from penstock.wire.trace_records import TracedStep

log = logging.getLogger("penstock")

Buffer = bytes | bytearray | memoryview
Parameter = bool | int | float | str
Array = npt.NDArray[Any]
# Parameters of a tensor in a client's shared memory, as Triton names them.
REGION, REGION_BYTES = "shared_memory_region", "shared_memory_byte_size"
REGION_OFFSET = "shared_memory_offset"
LEVEL_UNSET = 0


@dataclass(frozen=True, slots=True)
class Datatype:
    """A v2 datatype. `itemsize` is None for BYTES, whose elements carry their own length.

    BF16 has no numpy type, so its bits travel as uint16; a backend reinterprets them.
    """

    name: str
    itemsize: int | None
    numpy: np.dtype[Any]

    def __str__(self) -> str:
        return self.name


_CODES = {
    "BOOL": "?", "UINT8": "<u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8",
    "INT8": "<i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8",
    "FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "BF16": "<u2", "BYTES": "O",
}  # fmt: skip
DATATYPES: Mapping[str, Datatype] = {
    name: Datatype(name, None if name == "BYTES" else np.dtype(code).itemsize, np.dtype(code))
    for name, code in _CODES.items()
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of a model. `shape` excludes the batch dimension if the model has one; -1
    is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    is_optional: bool = False
    label_file: str = ""
    # Names of an output's elements, for classification.
    labels: tuple[str, ...] = ()
    # What the model sees instead of `shape`, with the same elements; None: the same.
    reshape: tuple[int, ...] | None = None
    # Whether requests with different shapes of this input share a batch: the model gets all their
    # elements in one dimension.
    is_ragged: bool = False

    @property
    def is_fixed(self) -> bool:
        """True when one row always takes the same number of bytes."""
        return self.datatype != "BYTES" and all(size >= 0 for size in self.shape)

    @property
    def is_text(self) -> bool:
        """True when one row is one string."""
        return self.datatype == "BYTES" and all(size in (1, -1) for size in self.shape)

    def row_bytes(self, shape: Sequence[int]) -> int:
        itemsize = DATATYPES[self.datatype].itemsize
        assert itemsize is not None, "BYTES rows have no fixed size"
        return num_elements(shape) * itemsize


@dataclass(frozen=True, slots=True)
class RegionPlace:
    """Where a tensor lies in shared memory that a client has registered as `region`."""

    region: str
    offset: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Tensor:
    """A named buffer with a shape. `data` may be a view that is only valid during a call; it is
    empty for a tensor that has a `place` in a client's memory."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Buffer
    place: RegionPlace | None = None

    @property
    def nbytes(self) -> int:
        return len(self.data) if self.place is None else self.place.nbytes

    def __repr__(self) -> str:
        return f"<Tensor {self.name} {self.datatype} {list(self.shape)}>"


NOT_COMPUTED = (0.0, 0.0, 0.0)


@dataclass(slots=True, eq=False)
class Timings:
    """When a request passed each stage, in seconds of the monotonic clock."""

    received: float
    queued: float = 0.0
    dispatched: float = 0.0
    # Accumulated time without an idle instance when the request was queued.
    saturated_s: float = 0.0
    # Part of the queueing time in which no instance was idle.
    instance_wait_s: float = 0.0
    # Measured by the worker for the whole batch: reading the inputs, running the model, writing the
    # outputs.
    compute_s: tuple[float, float, float] = NOT_COMPUTED
    completed: float = 0.0
    # When the first of several responses came; 0: there was one, at `completed`.
    first_response: float = 0.0

    @property
    def compute_input_s(self) -> float:
        return self.compute_s[0]

    @property
    def compute_infer_s(self) -> float:
        return self.compute_s[1]

    @property
    def compute_output_s(self) -> float:
        return self.compute_s[2]

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase of an answered request, as Server-Timing names them."""
        input_s, infer_s, output_s = self.compute_s
        return {
            "decode": self.queued - self.received,
            "queue_batch": self.dispatched - self.queued - self.instance_wait_s,
            "queue_instance": self.instance_wait_s,
            "compute_input": input_s,
            "compute_infer": infer_s,
            "compute_output": output_s,
            "total": self.completed - self.received,
        }


class RequestedOutput(msgspec.Struct, frozen=True):
    """An output the client asked for by name; `parameters` are interpreted by the protocol."""

    name: str
    parameters: dict[str, Parameter] = {}

    @property
    def place(self) -> RegionPlace | None:
        """Where the client wants it in its shared memory; None: in the answer."""
        region = self.parameters.get(REGION)
        if region is None:
            return None
        offset, nbytes = self.parameters.get(REGION_OFFSET, 0), self.parameters[REGION_BYTES]
        return RegionPlace(str(region), int(offset), int(nbytes))


class OutputKeeper(Protocol):
    """Owns the memory of answers."""

    def keep(self, request: Request) -> Callable[[], None]:
        """Keep the outputs of a request that is being answered, until the function that this
        returns is called. Call it during `respond`, and only once."""


@dataclass(slots=True, eq=False)
class Response:
    """One answer. The buffers of `outputs` are views into shared memory: a sink must copy what it
    keeps before `respond` returns, or ask the `keeper`, if there is one."""

    model_name: str
    model_version: str
    outputs: Sequence[Tensor]
    parameters: Mapping[str, Parameter] | None = None
    # Responses with the same form have the same model, names, datatypes and shapes, so a codec may
    # cache what it derives from them. None: unknown.
    form: object = None
    keeper: OutputKeeper | None = None
    # The outputs in memory of their own, instead of `outputs`, if the request takes them so.
    arrays: dict[str, Array] | None = None
    # Whether it is no response, only the end of those before it.
    is_empty: bool = False


class ReplySink(Protocol):
    """Receives the answers to a request, on the event loop; must not raise and must not block."""

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None: ...


class Request:
    """One inference from socket to socket; carries its own sink, deadline and timings.

    Invariant: an admitted request gets exactly one final `respond`. It sets `is_done`, and anything
    later (an answer after a cancel, a second error) is dropped here, in one place.
    """

    __slots__ = (
        "caller", "chain", "form", "id", "inputs", "is_done", "lost_with", "num_deaths", "num_rows",
        "num_tokens", "outputs", "parameters", "prefers_binary", "priority", "rows", "sink",
        "steps", "takes_arrays", "ticket", "timeout_s", "timings", "turn", "uses_regions",
        "wants_empty_final",
    )  # fmt: skip
    # Set by the model that admits the request.
    ticket: Ticket
    # No client waits for a mirror (`serving.traffic_split`).
    is_mirror = False

    def __init__(
        self,
        sink: ReplySink,
        inputs: Sequence[Tensor],
        received: float,
        *,
        id: str = "",
        outputs: Sequence[RequestedOutput] = (),
    ) -> None:
        # Requests with the same form have the same names, datatypes, shapes, sizes and outputs, so
        # what follows from them can be cached. None: unknown.
        self.form: object = None
        self.id = id
        self.inputs = inputs
        # The same inputs where a worker in this process may read them; None: they are copied.
        self.rows: HeldRows | None = None
        # Whether the sink takes arrays that it may keep. Only for a worker in this process.
        self.takes_arrays = False
        self.outputs = outputs
        self.parameters: Mapping[str, Parameter] | None = None
        # Default for outputs that do not say themselves whether they are binary.
        self.prefers_binary = False
        self.priority = LEVEL_UNSET
        self.timeout_s: float | None = None
        # Digest of the API key that came with it; empty if no key is required.
        self.caller = b""
        # The models whose code called each other and waits for this request, the first one first.
        self.chain: tuple[str, ...] = ()
        self.sink = sink
        self.timings = Timings(received)
        self.is_done = False
        # Set by the Servable that admits the request.
        self.num_rows = 1
        # Its share of a token budget; 0 without one.
        self.num_tokens = 0
        self.num_deaths = 0
        # Index of the instance whose worker crashed while it ran this request among others.
        self.lost_with: int | None = None
        self.turn = 0
        # Whether an input or output has a place in a client's shared memory.
        self.uses_regions = False
        # Whether the client hears of the end of its responses, if the last was not known as such.
        self.wants_empty_final = False
        # What models of several stages have done for it; None unless the request is traced.
        self.steps: list[TracedStep] | None = None

    def respond(self, answer: Response | PenstockError, final: bool = True) -> bool:
        """Deliver an answer, unless the request has ended. Return whether it was delivered."""
        if self.is_done:
            return False
        self.is_done = final
        try:
            self.sink.respond(self, answer, final)
        except Exception:  # A sink must not raise; if it does, its batch-mates still get answers.
            log.exception("a reply sink raised")
        return True

    def __repr__(self) -> str:
        state = "done" if self.is_done else "open"
        return f"<Request {self.id!r} {state} rows={self.num_rows}>"


class Servable(Protocol):
    """Anything that takes requests; protocols know nothing else."""

    def submit(self, request: Request) -> None:
        """Take the request. Every outcome, including refusal, goes to `request.sink`."""

    def cancel(self, request: Request) -> None:
        """Cancel a request and free what it holds. Safe to call at any time."""


class CallbackSink:
    """A sink that passes the final answer to a function; for tests and in-process use."""

    __slots__ = ("_deliver",)

    def __init__(self, deliver: Callable[[Request, Response | PenstockError], None]) -> None:
        self._deliver = deliver

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        self._deliver(request, answer)


CANCELLED = Cancelled("the client cancelled the request")
TimeoutAction = Literal["REJECT", "DELAY"]


def shape_fits(shape: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether a shape is as expected; -1 matches any size."""
    return len(shape) == len(expected) and all(
        limit in (-1, size) for size, limit in zip(shape, expected, strict=True)
    )


def num_elements(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


_LENGTH = struct.Struct("<I")


def pack_bytes(array: Array) -> bytes:
    """Encode bytes (or str) elements in row-major order, each prefixed with its length."""
    parts: list[bytes] = []
    for element in array.ravel():
        item = element if isinstance(element, bytes) else str(element).encode()
        parts.append(_LENGTH.pack(len(item)))
        parts.append(item)
    return b"".join(parts)


def split_bytes(data: Buffer) -> list[bytes]:
    """Split a BYTES buffer into elements; ValueError when a length runs past the end."""
    view = memoryview(data)
    elements: list[bytes] = []
    position, end = 0, len(view)
    while position < end:
        if position + 4 > end:
            raise ValueError(f"{end - position} bytes left where a 4-byte length was expected")
        (length,) = _LENGTH.unpack_from(view, position)
        position += 4
        if position + length > end:
            raise ValueError(f"an element of {length} bytes runs past the end of the tensor")
        elements.append(bytes(view[position : position + length]))
        position += length
    return elements


def to_array(tensor: Tensor) -> Array:
    """Convert a tensor to a numpy array: a view if the datatype allows it, objects for BYTES."""
    if tensor.datatype == "BYTES":
        elements = split_bytes(tensor.data)
        if len(elements) != num_elements(tensor.shape):
            raise ValueError(f"{len(elements)} elements do not fill {list(tensor.shape)}")
        array = np.empty(len(elements), dtype=np.object_)
        array[:] = elements
        return array.reshape(tensor.shape)
    dtype = DATATYPES[tensor.datatype].numpy
    return np.frombuffer(tensor.data, dtype=dtype).reshape(tensor.shape)


def from_array(name: str, datatype: str, array: Array) -> Tensor:
    if datatype == "BYTES":
        return Tensor(name, datatype, array.shape, pack_bytes(array))
    contiguous = np.ascontiguousarray(array, dtype=DATATYPES[datatype].numpy)
    return Tensor(name, datatype, array.shape, contiguous.reshape(-1).view(np.uint8).data)
