"""Messages between the ingress and the replicas of models: HTTP messages that were admitted, RPCs,
and their answers. Pure.

Ray carries them as bytes, which it does not look into: that costs less than its own serialization
of objects.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.errors import PenstockError
from penstock.wire.statuses import STATUSES

# Errors by their names, to raise them on the other side.
KINDS = {kind.__name__: kind for kind in STATUSES}
Kind = Literal["http", "infer", "manage"]


class ClusterCall(msgspec.Struct, array_like=True):
    """A call of a model, as its replica gets it. HTTP has a head; `infer` is a ModelInferRequest,
    and `manage` an action of the management API."""

    kind: Kind
    # A part of the encoded call, not a copy.
    body: memoryview
    method: bytes = b""
    target: bytes = b""
    headers: dict[bytes, bytes] = {}
    action: str = ""
    version: str = ""


class ClusterAnswer(msgspec.Struct, array_like=True):
    """The answer: that of HTTP has a status and headers as lines; the others have an error's kind
    instead, if they failed."""

    body: memoryview = memoryview(b"")
    status: int = 200
    headers: bytes = b""
    error: str = ""

    def check(self) -> bytes:
        """Return the body; raise the error that it tells."""
        if self.error:
            raise KINDS[self.error](bytes(self.body).decode())
        return bytes(self.body)


_encode = msgspec.msgpack.Encoder().encode
_calls = msgspec.msgpack.Decoder(ClusterCall)
_answers = msgspec.msgpack.Decoder(ClusterAnswer)


def encode_call(call: ClusterCall) -> bytes:
    return _encode(call)


def decode_call(data: bytes) -> ClusterCall:
    return _calls.decode(data)


def encode_answer(answer: ClusterAnswer) -> bytes:
    return _encode(answer)


def decode_answer(data: bytes) -> ClusterAnswer:
    return _answers.decode(data)


def refusal(error: PenstockError) -> ClusterAnswer:
    """Return the answer that tells an error."""
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in KINDS]
    return ClusterAnswer(
        memoryview(str(error).encode()), error=kinds[0] if kinds else "BackendFailed"
    )


def header_lines(pairs: list[tuple[bytes, bytes]]) -> bytes:
    """Return headers as lines, without the length, which the sender of the answer adds."""
    return b"".join(b"%b: %b\r\n" % pair for pair in pairs if pair[0] != b"content-length")
