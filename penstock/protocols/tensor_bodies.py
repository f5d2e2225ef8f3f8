"""Long bodies of inference requests, received into the shared memory that their model reads."""

from __future__ import annotations

from penstock.protocols.http_reader import LONG_BYTES
from penstock.serving.model import Model
from penstock.serving.reservation import Reservation, private_memory
from penstock.types import ReplySink, Request, Servable
from penstock.wire.v2 import Codec
from penstock.wire.v2_templates import InferTemplate

# Longer JSON has no form that could be known.
MAX_HEAD_BYTES = 64 * 1024
# Longer bodies are read as they come: memory for them is taken as they grow.
MAX_BYTES = 256 << 20


class TensorBody:
    """One body: its JSON part, then its tensors. Once the JSON part is complete, the tensors go
    into the rows that the model reserves for them or, without any, into one private buffer."""

    def __init__(self, codec: Codec, model: Model, json_bytes: int, num_bytes: int) -> None:
        self._codec = codec
        self.model = model
        self._json = bytearray(json_bytes)
        self._num_bytes = num_bytes
        self.num_received = 0
        self._form: InferTemplate | None = None
        self._id = ""
        self.reservation: Reservation | None = None
        self.buffer: memoryview | None = None
        # First the JSON is filled, then each tensor: the number of the part, and where to go on.
        self._parts = [memoryview(self._json)]
        self._part = self._start = 0
        self.fill(0)

    def room(self) -> memoryview:
        parts = self._parts
        if self.reservation is not None:
            # They change when the memory is given back.
            parts = self.reservation.views
        return parts[self._part][self._start :]

    def fill(self, num_bytes: int) -> None:
        self.num_received += num_bytes
        self._start += num_bytes
        if self.num_received == len(self._json):
            self._place_tensors()
        while self._start == len(self._parts[self._part]) and self.num_received < self._num_bytes:
            self._part += 1
            self._start = 0

    def _place_tensors(self) -> None:
        json, num_tail = bytes(self._json), self._num_bytes - len(self._json)
        found = self._codec.find_form(json, num_tail)
        if found is not None:
            self._id, self._form = found
            self.reservation = self.model.reserve(self._form)
        self._part = self._start = 0
        if self.reservation is not None:
            self._parts = self.reservation.views
            return
        self.buffer = private_memory(self._num_bytes)
        self.buffer[: len(json)] = json
        self._parts = [self.buffer[len(json) :]]

    def request(self, model: Servable, sink: ReplySink, received: float) -> Request:
        """Return the complete request. The model may have been replaced while it was received."""
        assert self._form is not None and self.reservation is not None
        if model is not self.model:
            self.reservation.move_out()
        return self._form.fill_parts(self._id, self.reservation.views, sink, received)

    def move_out(self) -> None:
        if self.reservation is not None:
            self.reservation.move_out()

    def drop(self) -> None:
        if self.reservation is not None:
            self.reservation.drop()


def make_body(codec: Codec, model: Model, json_bytes: int, num_bytes: int) -> TensorBody | None:
    """Return memory for a body with this JSON part; None if it has few tensors, or is huge."""
    if num_bytes - json_bytes < LONG_BYTES or json_bytes > MAX_HEAD_BYTES or num_bytes > MAX_BYTES:
        return None
    return TensorBody(codec, model, json_bytes, num_bytes)
