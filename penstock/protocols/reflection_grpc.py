"""gRPC server reflection: a stream of questions about the services, each answered at once."""

from __future__ import annotations

from collections import deque

from penstock.errors import PenstockError
from penstock.protocols.grpc_call import GrpcCall, RpcHead
from penstock.protocols.grpc_server import GrpcServer
from penstock.protocols.h2_stream import H2Stream
from penstock.types import Buffer
from penstock.wire.reflection_pb import Reflection
from penstock.wire.v2_pb import Proto, parse


class ReflectionCall(GrpcCall):
    """A ServerReflectionInfo. Nothing is answered while the client does not read, so a client
    cannot make the server hold more than its unread questions."""

    __slots__ = ("_reflection", "_types", "_unread")

    def __init__(
        self,
        reflection: Reflection,
        types: tuple[Proto, Proto],
        server: GrpcServer,
        stream: H2Stream,
        head: RpcHead,
    ) -> None:
        """`types` are those of requests and of responses, of one version."""
        super().__init__(server, stream, head)
        self._reflection = reflection
        self._types = types
        self._unread: deque[Buffer] = deque()

    @property
    def is_busy(self) -> bool:
        return False

    def message(self, data: Buffer) -> None:
        if self._unread or self.stream.unsent:
            self._unread.append(data)
            self.stream.pause()
        else:
            self._answer(data)

    def drained(self) -> None:
        while self._unread and not self.stream.unsent and not self.is_over:
            self._answer(self._unread.popleft())
            if not self._unread:
                self.stream.resume()
        if self.has_ended:
            self.ended()

    def ended(self) -> None:
        if not self._unread:
            self.end()

    def _answer(self, data: Buffer) -> None:
        request_type, response_type = self._types
        try:
            request = parse(request_type, bytes(data))
        except PenstockError as error:
            self.fail(error)
            return
        answer = self._reflection.answer(request, response_type())
        self.send([answer.SerializeToString()])
