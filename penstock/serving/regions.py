"""Shared memory of clients (regions), as those who admit requests see it: a core or a shard.

The core registers regions (`region_registry`); shards have copies of the table. Workers map a
region when a batch uses it for the first time, read its inputs and write its outputs. Here memory
is only read or written for requests that no worker can serve like that, through the descriptor: a
mapping of a file that its client truncates would raise SIGBUS. Belongs to one event loop.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock.errors import InvalidRequest, PenstockError
from penstock.types import (
    Buffer,
    RegionPlace,
    ReplySink,
    Request,
    Response,
    Tensor,
)
from penstock.wire import frames


class RegionUser(Protocol):
    """The link to a worker that has mapped regions."""

    def unmap_region(self, region: Region) -> None: ...


@dataclass(slots=True, eq=False)
class Region:
    """Memory that a client has registered. `fd` is its file, which is closed after the last use;
    None: GPU memory."""

    caller: bytes
    memory: frames.MapRegion
    fd: int | None
    # Requests that use it, and workers that have mapped it.
    num_users: int = 0
    users: set[RegionUser] = field(default_factory=set)
    is_registered: bool = True

    @property
    def number(self) -> int:
        return self.memory.region

    @property
    def name(self) -> str:
        return self.memory.name

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return a copy; InvalidRequest if it is not all there."""
        data = memoryview(bytearray(nbytes))
        read_file(self._file(), self.memory.offset + offset, data, self.name)
        return data

    def write(self, offset: int, data: Buffer) -> None:
        write_file(self._file(), self.memory.offset + offset, data, self.name)

    def unregister(self) -> None:
        self.is_registered = False
        self._close_if_unused()

    def begin_use(self) -> None:
        self.num_users += 1

    def end_use(self) -> None:
        self.num_users -= 1
        self._close_if_unused()

    def _file(self) -> int:
        if self.fd is None:
            text = "this model reads and writes no GPU memory of clients; use system shared memory"
            raise InvalidRequest(f"shared memory region '{self.name}': {text}")
        return self.fd

    def _close_if_unused(self) -> None:
        if self.is_registered or self.num_users:
            return
        users, self.users = self.users, set()
        for user in users:
            user.unmap_region(self)
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


@dataclass(frozen=True, slots=True)
class LentTensor:
    """A tensor in a region."""

    name: str
    region: Region
    place: RegionPlace

    @property
    def frame(self) -> frames.RegionSpan:
        place = self.place
        return frames.RegionSpan(self.name, self.region.number, place.offset, place.nbytes)

    def read(self) -> memoryview:
        return self.region.read(self.place.offset, self.place.nbytes)


@dataclass(slots=True, eq=False)
class Loan:
    """The regions of one request: `inputs` by the index of the tensor, `outputs` by name. Between
    `begin` and `end` they stay mapped, even if their client unregisters them."""

    inputs: dict[int, LentTensor] = field(default_factory=dict)
    outputs: dict[str, LentTensor] = field(default_factory=dict)
    regions: set[Region] = field(default_factory=set)

    def begin(self) -> None:
        for region in self.regions:
            region.begin_use()

    def end(self) -> None:
        for region in self.regions:
            region.end_use()

    def read(self, tensors: Sequence[Tensor]) -> None:
        """Read all inputs here, instead of in a worker."""
        for index, span in self.inputs.items():
            tensors[index].data, tensors[index].place = span.read(), None
        self.inputs = {}

    def check_output(self, name: str, nbytes: int) -> None:
        """Raise InvalidRequest if an output has no room where its client wants it."""
        span = self.outputs.get(name)
        if span is not None and span.place.nbytes < nbytes:
            raise no_room(name, span.place.nbytes, nbytes)


class RegionTable:
    """The registered regions by owner and name. `is_allowed`: whether the server takes any."""

    def __init__(self, is_allowed: bool = False) -> None:
        self.is_allowed = is_allowed
        self._regions: dict[tuple[bytes, str], Region] = {}
        self._by_number: dict[int, Region] = {}

    def open(self, frame: frames.OpenRegion, fd: int | None) -> Region:
        """Add a region; owns the descriptor."""
        region = Region(frame.caller, frame.memory, fd)
        self._regions[region.caller, region.name] = region
        self._by_number[region.number] = region
        return region

    def close(self, number: int) -> None:
        region = self._by_number.pop(number, None)
        if region is not None:
            del self._regions[region.caller, region.name]
            region.unregister()

    def close_all(self) -> None:
        for number in list(self._by_number):
            self.close(number)

    def lend(self, request: Request) -> Loan:
        """Find the regions that a request names, and check that its tensors lie within them. Texts
        are read here, for their lengths must be checked. Raises InvalidRequest."""
        loan = Loan()
        for index, tensor in enumerate(request.inputs):
            if tensor.place is not None:
                span = self._find(request.caller, tensor.name, tensor.place)
                if tensor.datatype == "BYTES":
                    tensor.data, tensor.place = span.read(), None
                else:
                    loan.inputs[index] = span
                    loan.regions.add(span.region)
        for output in request.outputs:
            if (place := output.place) is not None:
                loan.outputs[output.name] = span = self._find(request.caller, output.name, place)
                loan.regions.add(span.region)
        return loan

    def _find(self, caller: bytes, name: str, place: RegionPlace) -> LentTensor:
        region = self._regions.get((caller, place.region))
        if region is None:
            raise self._unknown(place.region)
        if place.offset + place.nbytes > region.nbytes:
            raise InvalidRequest(
                f"Invalid offset or size for shared memory region '{place.region}': "
                f"{place.nbytes} bytes at {place.offset} of {region.nbytes}"
            )
        return LentTensor(name, region, place)

    def _unknown(self, name: str) -> InvalidRequest:
        text = f"Unable to find shared memory region: '{name:.200}'"
        if not self.is_allowed:
            text += "; start the server with --shared-memory to allow them"
        return InvalidRequest(text)


NO_REGIONS = RegionTable()


class RegionSink:
    """The sink of a request to a model that knows no regions: inputs are read before it is
    submitted, and outputs are written to clients' memory before its answer is passed on."""

    def __init__(self, inner: ReplySink, loan: Loan) -> None:
        self._inner = inner
        self._loan = loan

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        if isinstance(answer, Response):
            try:
                answer = self._stored(answer)
            except InvalidRequest as error:
                answer, final = error, True
        if final:
            self._loan.end()
        self._inner.respond(request, answer, final)

    def _stored(self, answer: Response) -> Response:
        outputs = []
        for tensor in answer.outputs:
            span = self._loan.outputs.get(tensor.name)
            if span is not None:
                self._loan.check_output(tensor.name, len(tensor.data))
                span.region.write(span.place.offset, tensor.data)
                place = replace(span.place, nbytes=len(tensor.data))
                tensor = Tensor(tensor.name, tensor.datatype, tensor.shape, b"", place)
            outputs.append(tensor)
        return Response(answer.model_name, answer.model_version, outputs, answer.parameters)


def read_regions(request: Request, table: RegionTable) -> None:
    """Prepare a request for a model that knows no regions. Raises InvalidRequest."""
    loan = table.lend(request)
    loan.read(request.inputs)
    loan.begin()
    request.sink = RegionSink(request.sink, loan)
    request.uses_regions = False
    request.form = None


def no_room(name: str, given: int, needed: int) -> InvalidRequest:
    return InvalidRequest(
        f"shared memory size specified with the request for output '{name}' ({given} bytes) should "
        f"be at least {needed} bytes to hold the results"
    )


def truncated(name: str) -> InvalidRequest:
    text = "its file is shorter than when it was registered"
    return InvalidRequest(f"shared memory region '{name}': {text}")


def read_file(fd: int, offset: int, target: memoryview, name: str) -> None:
    """Read from a client's file, which may have been truncated: InvalidRequest, not SIGBUS."""
    position, end = 0, len(target)
    while position < end:
        try:
            count = os.preadv(fd, [target[position:]], offset + position)
        except OSError as error:
            text = f"shared memory region '{name}' cannot be read: {error.strerror}"
            raise InvalidRequest(text) from None
        if not count:
            raise truncated(name)
        position += count


def write_file(fd: int, offset: int, data: Buffer, name: str) -> None:
    """Write to a client's file; it does not grow, unless it is truncated at this moment."""
    view = memoryview(data)
    position, end = 0, len(view)
    try:
        if os.fstat(fd).st_size < offset + end:
            raise truncated(name)
        while position < end:
            position += os.pwritev(fd, [view[position:]], offset + position)
    except OSError as error:
        text = f"shared memory region '{name}' cannot be written: {error.strerror}"
        raise InvalidRequest(text) from None


def close_quietly(fd: int | None) -> None:
    if fd is not None:
        with contextlib.suppress(OSError):
            os.close(fd)
