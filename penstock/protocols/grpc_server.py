"""The gRPC server: the listener of its port, and the way of a call from its head to its service.

Every call passes the gate before anything else sees it. Its method is found by the row of the route
table that the gate has checked, so none can bypass it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping

from penstock.config import GrpcConfig, HttpLimits
from penstock.errors import PenstockError, TooLarge, Unsupported
from penstock.protocols.gate import Gate
from penstock.protocols.grpc_call import GrpcCall, RefusedCall, RpcHead, accepted_encoding
from penstock.protocols.h2 import H2Connection
from penstock.protocols.h2_stream import H2Stream
from penstock.protocols.http_errors import WrongHead
from penstock.protocols.http_reader import MessageHead
from penstock.protocols.listener import Listener
from penstock.wire import grpc_status
from penstock.wire.hpack import HeaderListTooLarge

# With a subtype of the messages or parameters; not application/grpc-web.
_KIND = re.compile(rb"application/grpc(?:[+; ]|$)")
OpenCall = Callable[["GrpcServer", H2Stream, RpcHead], GrpcCall]


class GrpcServer(Listener):
    """Listens for HTTP/2, with prior knowledge or by ALPN, and opens the calls of `methods`, whose
    keys are paths."""

    def __init__(
        self, methods: Mapping[str, OpenCall], config: GrpcConfig, gate: Gate, limits: HttpLimits
    ) -> None:
        super().__init__(limits)
        self.loop: asyncio.AbstractEventLoop = self._loop
        self.repeated_fields = grpc_status.REPEATED
        self.max_message_bytes = config.max_message_bytes
        # Bytes of incomplete messages of one connection, beyond which they come one by one.
        self.max_held_bytes = config.max_message_bytes
        self._compression = config.compression.replace("none", "identity").encode()
        self._methods = methods
        self._gate = gate

    def connect(self) -> H2Connection:
        return H2Connection(self)

    def go_away(self) -> None:
        """Tell clients to use another server; open calls go on."""
        for connection in self._connections:
            assert isinstance(connection, H2Connection)
            connection.go_away()

    def open_stream(self, stream: H2Stream) -> GrpcCall:
        head = stream.head
        note = head.note
        if not isinstance(note, RpcHead) or note.keys is not self._gate.keys:
            try:
                note = self._read(head)
            except PenstockError as error:
                call = RefusedCall(self, stream, RpcHead(RefusedCall, None))
                call.fail(error)
                return call
            except WrongHead as error:
                call = RefusedCall(self, stream, RpcHead(RefusedCall, None))
                call.refuse(error)
                return call
            head.note = note
        return note.open(self, stream, note)

    def _read(self, head: MessageHead) -> RpcHead:
        """Check a head that was not seen before, or not with these keys."""
        if isinstance(head.note, HeaderListTooLarge):
            raise TooLarge(str(head.note))
        if head.method != b"POST":
            raise WrongHead(405, "gRPC calls are sent by POST")
        if not _KIND.match(head.headers.get(b"content-type", b"")):
            raise WrongHead(415, "the Content-Type must be application/grpc")
        self._gate.admit_rpc(head)
        headers = head.headers
        found = RpcHead(self._methods[head.path.decode("latin-1")], self._gate.keys)
        found.caller = self._gate.caller(headers)
        timeout = headers.get(b"grpc-timeout")
        if timeout is not None:
            found.timeout_s = grpc_status.read_timeout(timeout)
        found.encoding = headers.get(b"grpc-encoding", b"identity").lower()
        if found.encoding not in grpc_status.ENCODINGS:
            name = found.encoding[:50].decode("latin-1")
            expected = b", ".join(grpc_status.ENCODINGS).decode()
            raise Unsupported(f"grpc-encoding '{name}' is not supported; expected {expected}")
        found.answers = accepted_encoding(head, self._compression)
        return found
