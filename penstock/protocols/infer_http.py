"""One inference over HTTP: what its head says, and the sink that answers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from penstock.errors import PenstockError
from penstock.protocols import access_log
from penstock.protocols.http import JSON, Exchange
from penstock.protocols.http_errors import reply_error
from penstock.protocols.route import Match
from penstock.serving.served import Served
from penstock.types import OutputKeeper, Request, Response, Servable, TensorSpec
from penstock.wire import compression
from penstock.wire.v2 import Codec

# Smaller answers are not worth compressing.
MIN_COMPRESSED_BYTES = 1024
_BINARY = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"


class InferCall:
    """An inference call as its message head describes it. Cached on the head (`MessageHead.note`),
    which is the same object for identical heads."""

    __slots__ = (
        "accepts", "caller", "headers", "json_bytes", "model_name", "model_version", "wants_timing",
    )  # fmt: skip

    def __init__(self, match: Match, headers: Mapping[bytes, bytes]) -> None:
        self.model_name = match.model_name
        self.model_version = match.model_version
        self.headers = headers
        self.json_bytes: int | None = None
        # As in `Request.caller`.
        self.caller = b""
        # Encoding that the client accepts for the answer.
        self.accepts = _accepted(headers.get(b"accept-encoding", b""))
        self.wants_timing = b"penstock-timing" in headers


@dataclass(slots=True, eq=False)
class InferSink:
    """Turns the answer of one infer request into the reply of its exchange."""

    _exchange: Exchange
    _codec: Codec
    _call: InferCall
    _model: Servable
    # The model's outputs, as for `Codec.encode_answer`.
    _specs: Sequence[TensorSpec] | None
    request: Request | None = None
    _keeper: OutputKeeper | None = None

    def abandon(self) -> None:
        if self.request is not None:
            self._model.cancel(self.request)

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        if isinstance(answer, PenstockError):
            reply_error(self._exchange, answer)
        else:
            self._reply(request, answer)
        # Breaks the cycle of sink and request, which only the GC would free.
        self.request = None

    def _reply(self, request: Request, answer: Response) -> None:
        try:
            head, tail = self._codec.encode_answer(request, answer, self._specs)
        except PenstockError as error:
            reply_error(self._exchange, error)
            return
        except Exception:  # Keep serving.
            self._exchange.reply_bug()
            return
        headers = _BINARY % len(head) if tail else JSON
        call = self._call
        if call.wants_timing:
            phases = request.timings.phases().items()
            text = ", ".join(f"{name};dur={seconds * 1e3:.3f}" for name, seconds in phases)
            headers += f"Server-Timing: {text}\r\n".encode()
        if call.accepts and len(head) + sum(map(len, tail)) >= MIN_COMPRESSED_BYTES:
            body = compression.deflate(b"".join((head, *tail)), call.accepts)
            headers += b"Content-Encoding: %b\r\n" % call.accepts
            self._exchange.reply(200, headers, (body,))
        elif tail:
            self._keeper = answer.keeper
            self._exchange.reply(200, headers, (head, *tail), self._keep)
        else:
            self._exchange.reply(200, headers, (head,))

    def _keep(self) -> Callable[[], None] | None:
        if self._keeper is None or self.request is None:
            return None
        return self._keeper.keep(self.request)


class LoggedSink(InferSink):
    __slots__ = ()

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        super().respond(request, answer, final)
        access_log.ended("http", cast(Served, self._model).config, request, answer)


def _accepted(header: bytes) -> bytes:
    """Return the first supported encoding that the client accepts; empty for none."""
    for item in header.lower().split(b","):
        name, _, quality = item.partition(b";")
        if name.strip() in compression.ENCODINGS and quality.strip() not in (b"q=0", b"q=0.0"):
            return name.strip()
    return b""
