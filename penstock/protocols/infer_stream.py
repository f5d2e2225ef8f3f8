"""Streams of inference requests over gRPC (ModelStreamInfer), each the sink of its answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from penstock.errors import NotAllowed, PenstockError
from penstock.protocols.grpc_call import GrpcCall, RpcHead, log
from penstock.protocols.grpc_server import GrpcServer
from penstock.protocols.h2_stream import H2Stream
from penstock.protocols.infer_grpc import InferRpcs
from penstock.serving.served import Served
from penstock.types import Buffer, Request, Response
from penstock.wire.grpc_status import MAX_DETAILS
from penstock.wire.v2_pb_templates import stream_answer, stream_error

# Requests of one stream in flight; at the limit the stream is not read further.
MAX_STREAM_CALLS = 1024
# Bytes of responses of decoupled models that the client of one stream has not read yet. A client
# that reads too slowly loses its stream.
MAX_UNREAD_BYTES = 64 << 20
TOO_SLOW = f"the client has not read {MAX_UNREAD_BYTES} bytes of responses; read faster"


class StreamedInfer:
    """One request of a stream. `parts` is its answer, once there is one, unless its model is
    decoupled: then responses leave as they come."""

    __slots__ = ("_rpcs", "_stream", "has_ended", "id", "model", "parts", "request")
    is_streamed = True

    def __init__(self, rpcs: InferRpcs, stream: InferStream) -> None:
        self._rpcs = rpcs
        self._stream = stream
        self.id = ""
        self.model: Served | None = None
        self.request: Request | None = None
        self.parts: list[Buffer] | None = None
        self.has_ended = False

    @property
    def is_over(self) -> bool:
        return self._stream.is_over

    @property
    def is_decoupled(self) -> bool:
        return self.model is not None and self.model.config.is_decoupled

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        return self._stream.stream.head.headers

    def start(self, data: Buffer) -> None:
        stream = self._stream
        try:
            self._rpcs.submit(data, self, stream.head.caller, stream.server.now())
        except PenstockError as error:
            self.refuse(error)
        except Exception:  # The protocol edge.
            self.refuse_bug()

    def refuse(self, error: PenstockError) -> None:
        if self._stream.ends_by_error:
            self._stream.fail(error)
        else:
            self._answer(stream_error(self.id, str(error)[:MAX_DETAILS]))

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        if final:
            self.request = None
        if isinstance(answer, PenstockError):
            self.refuse(answer)
        else:
            self._pass_on(request, answer, final)
        if final and self._rpcs.logs_requests:
            self._rpcs.log(self, request, answer)

    def _pass_on(self, request: Request, answer: Response, final: bool) -> None:
        if answer.is_empty and not request.wants_empty_final:
            self._answer([])
            return
        try:
            parts = stream_answer(self._rpcs.encode(self, request, answer), final)
            # The tensors are only valid until this returns.
            self._answer([b"".join(parts)], final)
        except PenstockError as error:
            self.cancel()
            self.refuse(error)
        except Exception:  # Keep serving.
            self.cancel()
            self.refuse_bug()

    def cancel(self) -> None:
        if self.model is not None and self.request is not None:
            self.model.cancel(self.request)

    def refuse_bug(self) -> None:
        log.exception("while answering a request of a stream")
        self._answer(stream_error(self.id, "internal error"))

    def _answer(self, parts: list[Buffer], final: bool = True) -> None:
        """Send an answer; no parts: it only ends."""
        if self.has_ended:
            return
        self.has_ended = final
        if self.is_decoupled:
            self._stream.respond(self, parts)
        else:
            self.parts = parts
            self._stream.flush()


class InferStream(GrpcCall):
    """A ModelStreamInfer, as in Triton: requests run concurrently, and their answers leave in
    order, but responses of decoupled models at once."""

    __slots__ = (
        "_has_all", "_infers", "_is_flushing", "_is_reading", "_open", "_refusal", "_rpcs",
        "_unread", "_unsent", "_unsent_bytes", "ends_by_error",
    )  # fmt: skip

    def __init__(
        self, rpcs: InferRpcs, server: GrpcServer, stream: H2Stream, head: RpcHead
    ) -> None:
        super().__init__(server, stream, head)
        self._rpcs = rpcs
        # An error ends the stream, as in Triton.
        self.ends_by_error = stream.head.headers.get(b"triton_grpc_error") == b"true"
        # In order; those of decoupled models leave it at its head.
        self._infers: deque[StreamedInfer] = deque()
        self._open: set[StreamedInfer] = set()
        # Responses of decoupled models.
        self._unsent: deque[list[Buffer]] = deque()
        self._unsent_bytes = 0
        # Messages beyond MAX_STREAM_CALLS.
        self._unread: deque[Buffer] = deque()
        self._is_reading = True
        # The client has sent its last message, and it was read.
        self._has_all = False
        self._is_flushing = False
        # Why the stream ends before its client ends it.
        self._refusal: PenstockError | None = None
        rpcs.streams.add(self)

    @property
    def is_busy(self) -> bool:
        return bool(self._infers or self._open or self._unsent)

    @property
    def _is_full(self) -> bool:
        return len(self._infers) + len(self._open) >= MAX_STREAM_CALLS

    def message(self, data: Buffer) -> None:
        if not self._is_reading:
            return
        if self._unread or self._is_full:
            self._unread.append(data)
            self.stream.pause()
        else:
            self._begin(data)

    def _begin(self, data: Buffer) -> None:
        try:
            self._rpcs.gate.check_caller("infer", self.head.caller)
        except NotAllowed as error:
            # Requests that were read before get their answers.
            self.finish(error)
            return
        infer = StreamedInfer(self._rpcs, self)
        self._infers.append(infer)
        infer.start(data)

    def ended(self) -> None:
        self._has_all = True
        self.flush()

    def finish(self, reason: PenstockError) -> None:
        """Read no further; end for this reason when all is answered, unless the client has sent all
        by now."""
        if not self._has_all:
            self._refusal = reason
        self._is_reading = False
        self._has_all = True
        self._unread.clear()
        self.flush()

    def drained(self) -> None:
        self.flush()

    def respond(self, infer: StreamedInfer, parts: list[Buffer]) -> None:
        """Send a response of a decoupled model, if there are parts."""
        if infer.has_ended:
            self._open.discard(infer)
        if parts:
            self._unsent.append(parts)
            self._unsent_bytes += sum(map(len, parts))
        self.flush()
        if self._unsent_bytes > MAX_UNREAD_BYTES:
            self.abort("RESOURCE_EXHAUSTED", TOO_SLOW)

    def flush(self) -> None:
        """Send the answers that are due, while the client takes them, and begin unread requests in
        their place. Those may be answered at once, which calls this again."""
        if self._is_flushing:
            return
        self._is_flushing = True
        self._send_due()
        while self._unread and not self._is_full and not self.is_over:
            self._begin(self._unread.popleft())
            self._send_due()
            if not self._unread:
                self.stream.resume()
        self._is_flushing = False
        if self._has_all and not self.is_busy and not self._unread and not self.is_over:
            self._finish()

    def _send_due(self) -> None:
        infers = self._infers
        while infers and not self.is_over:
            first = infers[0]
            if first.is_decoupled:
                if not first.has_ended:
                    self._open.add(first)
            elif first.parts is None or self.stream.unsent:
                break
            else:
                self.send(first.parts)
            infers.popleft()
        while self._unsent and not self.stream.unsent and not self.is_over:
            parts = self._unsent.popleft()
            self._unsent_bytes -= sum(map(len, parts))
            self.send(parts)

    def _finish(self) -> None:
        if self._refusal is not None:
            self.fail(self._refusal)
        else:
            self._rpcs.streams.discard(self)
            self.end()

    def left(self) -> None:
        self._rpcs.streams.discard(self)
        self._unread.clear()
        self._unsent.clear()
        infers = [*self._infers, *self._open]
        self._infers.clear()
        self._open.clear()
        for infer in infers:
            infer.cancel()
