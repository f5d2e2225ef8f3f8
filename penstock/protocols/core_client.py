"""The core as a shard's process sees it: it answers messages and management calls, asks questions,
and tells about models.

Everything goes by frames and shared memory. Knows no protocol. Belongs to the shard's event loop;
`begin` is the main function of its process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

from penstock.errors import BackendFailed, ConfigError, Overloaded, PenstockError, TooLarge
from penstock.processes.channel import Datagrams
from penstock.processes.start import begin_life, take_part
from penstock.protocols.gate import Gate, Keys
from penstock.protocols.line import (
    MAX_HEAD_BYTES,
    Line,
    Outbox,
    ParcelLine,
    handle_all,
    unpack,
)
from penstock.serving.management import ManagementCall
from penstock.serving.shared_page import SharedPage
from penstock.serving.slab import Segment
from penstock.system import garbage
from penstock.types import Buffer, Tensor
from penstock.wire import frames
from penstock.wire.statuses import STATUSES

log = logging.getLogger("penstock.core_client")
# Descriptors that come with OpenShard: two segments, the page and two listeners.
MAX_OPENING_FDS = 5
# Characters of an error about a question of the core.
MAX_ERROR = 1000
# Messages that may wait for memory while the segment is full.
MAX_WAITING = 1024


# Listens and answers until the core says Stop; ConfigError if it cannot.
Serve = Callable[["CoreClient", frames.OpenShard], Coroutine[object, object, None]]
# Takes the answer to a message: its bytes, and the frame they came with.
Deliver = Callable[[bytes, frames.Forwarded], None]

# Errors that the core may answer with. Configuration errors are not for clients.
KINDS = {kind.__name__: kind for kind in STATUSES}


class CoreClient:
    """Invariant: a message is in `_forwards` until the core has answered it, cancelled or not,
    because the core may read its body until then. `stopped` is set when the core says so or has
    exited; `on_drain` is called when it is about to stop; `count_connections` provides the number
    for a Pong; `on_keys` receives changed API keys. `on_part` receives what the core says about
    models, with a socket if one came along, and `on_question` answers its questions; `on_rates` and
    `on_leased` are for `serving.leases`, `on_token_rates` and `on_tokens` for
    `serving.shared_tokens`. It passes `listeners` for HTTP and, if it is served, gRPC."""

    def __init__(
        self,
        sock: socket.socket,
        requests: Segment,
        answers: Segment,
        page: SharedPage,
        listeners: Sequence[socket.socket] = (),
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(requests)
        self._answers = answers
        self._numbers = itertools.count(1)
        self._forwards: dict[int, tuple[Deliver, int | None]] = {}
        self.stopped = asyncio.Event()
        # Management calls that the core has not answered.
        self._managing: dict[int, asyncio.Future[bytes]] = {}
        self.page = page
        self.listeners = listeners
        self.on_drain: Callable[[], None] = lambda: None
        self.count_connections: Callable[[], int] = lambda: 0
        self.on_keys: Callable[[Keys], None] = lambda keys: None
        # Names of API keys by digest, for logs; all `Keys` of this shard share it.
        self.key_names: dict[bytes, str] = {}
        self.on_part: Callable[[frames.ToPart, socket.socket | None], None] | None = None
        self.on_question: Callable[[frames.ShardQuestion], Awaitable[bytes]] | None = None
        self.on_rates: Callable[[Mapping[bytes, float]], None] = lambda rates: None
        self.on_shares: Callable[[Mapping[bytes, float]], None] = lambda shares: None
        self.on_leased: Callable[[frames.Leased], None] = lambda leased: None
        # Clients' memory: a region with its descriptor, or the number of one that is closed.
        self.on_region: Callable[[frames.OpenRegion, int | None], object] | None = None
        self.on_region_closed: Callable[[int], None] = lambda number: None
        self.on_move: Callable[[int], None] = lambda count: None
        self.on_token_rates: Callable[[Mapping[bytes, float]], None] = lambda rates: None
        self.on_tokens: Callable[[frames.TokensTaken], None] = lambda taken: None
        self._answering: set[asyncio.Task[None]] = set()
        self._socket = Datagrams(self._loop, sock, self._hear, self.stopped.set, takes_fds=True)
        self._line = Line(self._socket.send)
        self.parcels = ParcelLine(self._outbox, self._line, answers)

    @property
    def num_running(self) -> int:
        return len(self._managing) + self._outbox.num_waiting + len(self._forwards)

    @property
    def num_extents_held(self) -> int:
        return self._outbox.num_held

    def send(self, frame: frames.Frame) -> None:
        self._line.send(frame)

    async def serve_until_stopped(self) -> None:
        """Tell the core that this shard is up, and wait until it says Stop or has exited."""
        garbage.freeze(garbage.SERVING)
        take_part()
        self.send(frames.Listening(frames.VERSION))
        await self.stopped.wait()

    def close(self) -> None:
        self._line.flush()
        self._line.close()
        self._socket.close()

    def forward(self, message: frames.Forward, body: Buffer, deliver: Deliver) -> None:
        """Let the core answer a message; sets its `call`. Raises Overloaded or TooLarge before
        anything is stored: once the message waits, errors cannot be reported."""
        message.call = next(self._numbers)
        self._check_waiting()
        if len(frames.encode(message)) > MAX_HEAD_BYTES:
            raise TooLarge("the head of the message is too large")

        def send(parcel: frames.Parcel) -> None:
            message.parcel = parcel
            self._line.send(message)
            self._forwards[message.call] = (deliver, parcel.offset)

        self._outbox.post(message.call, [Tensor("body", "UINT8", (len(body),), body)], send)

    def cancel_forward(self, call: int) -> None:
        if not self._outbox.withdraw(call):
            self._line.send(frames.Cancel(call))

    async def manage(self, call: ManagementCall, caller: bytes) -> bytes:
        """Return the core's answer to a management call; raise its error."""
        number = next(self._numbers)
        named = (call.action, call.model_name, call.model_version, dict(call.parameters))
        files = [Tensor(name, "UINT8", (len(f),), f) for name, f in call.files.items()]

        def send(parcel: frames.Parcel) -> None:
            self._line.send(frames.Manage(number, *named, caller, parcel))

        self._outbox.post(number, files, send)
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._managing[number] = answer
        try:
            return await answer
        except asyncio.CancelledError:
            if not self._outbox.withdraw(number):
                self._line.send(frames.Cancel(number))
            raise
        finally:
            del self._managing[number]

    def _check_waiting(self) -> None:
        if self._outbox.num_waiting >= MAX_WAITING:
            raise Overloaded("too many messages wait for memory")

    def _hear(self, data: memoryview) -> None:
        handle_all(frames.decode_all_to_shard(data), self._receive)

    def _receive(self, frame: frames.ToShard) -> None:
        match frame:
            case frames.Forwarded():
                self._forwarded(frame)
            case frames.Ping():
                self._line.send(frames.Pong(self.count_connections()))
            case frames.Drain():
                self.on_drain()
            case frames.NameKeys():
                self.key_names.update(frame.names)
            case frames.SetKeys():
                for digest in self.key_names.keys() - frame.keys.keys():
                    del self.key_names[digest]
                self.on_keys(_keys(frame.keys, self.key_names))
                self.on_rates(frame.rates)
                self.on_token_rates(frame.token_rates)
                self.on_shares(frame.shares)
            case frames.Stop():
                self.stopped.set()
            case frames.OpenShard():
                pass  # Only the first frame, which is read before there is a loop.
            case _:
                self._receive_more(frame)

    def _receive_more(self, frame: frames.ToShard) -> None:
        match frame:
            case frames.ToPart():
                assert self.on_part is not None
                fds = self._socket.fds
                self.on_part(frame, socket.socket(fileno=fds.pop(0)) if fds else None)
            case frames.AskShard():
                (piece,) = unpack(frame.parcel, self._answers)
                question = frames.decode_shard_question(bytes(piece.data))
                self._release(frame.parcel)
                task = self._loop.create_task(self._answer_core(frame.call, question))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            case frames.OpenRegion() | frames.CloseRegion():
                self._receive_region(frame)
            case frames.Leased():
                self.on_leased(frame)
            case frames.MoveClients(count):
                self.on_move(count)
            case frames.TokensTaken():
                self.on_tokens(frame)
            case frames.Managed():
                self._managed(frame)
            case frames.Release():
                for offset in frame.offsets:
                    self._outbox.release(offset)

    def _receive_region(self, frame: frames.OpenRegion | frames.CloseRegion) -> None:
        if isinstance(frame, frames.CloseRegion):
            self.on_region_closed(frame.region)
            return
        assert self.on_region is not None
        fds = self._socket.fds
        self.on_region(frame, fds.pop(0) if fds else None)

    def _managed(self, frame: frames.Managed) -> None:
        data = b"".join([piece.data for piece in unpack(frame.parcel, self._answers)])
        self._release(frame.parcel)
        answer = self._managing.get(frame.call)
        if answer is None or answer.done():
            return
        if frame.error_kind:
            answer.set_exception(_error(frame.error_kind, frame.error))
        else:
            answer.set_result(data)

    async def _answer_core(self, call: int, question: frames.ShardQuestion) -> None:
        """Answer a question of the core."""
        assert self.on_question is not None

        def send(parcel: frames.Parcel) -> None:
            self._line.send(frames.ShardAnswer(call, parcel))

        try:
            body = await self.on_question(question)
            number = next(self._numbers)
            self._outbox.post(number, [Tensor("body", "UINT8", (len(body),), body)], send)
        except Exception as error:  # The core must not wait for ever.
            log.exception("a question of the core could not be answered")
            text = f"{type(error).__name__}: {error}"[:MAX_ERROR]
            self._line.send(frames.ShardAnswer(call, frames.Parcel(), text))

    def _forwarded(self, frame: frames.Forwarded) -> None:
        data = b"".join([piece.data for piece in unpack(frame.parcel, self._answers)])
        self._release(frame.parcel)
        deliver, offset = self._forwards[frame.call]
        if not frame.is_part:
            del self._forwards[frame.call]
        elif offset is not None:
            self._forwards[frame.call] = (deliver, None)
        if offset is not None:
            # Even a partial answer means that the core has read the message.
            self._outbox.release(offset)
        deliver(data, frame)

    def _release(self, parcel: frames.Parcel) -> None:
        self.parcels.free(parcel)


def _error(kind: str, text: str) -> PenstockError:
    return KINDS.get(kind, BackendFailed)(text)


def _keys(sent: Mapping[bytes, Sequence[str]], names: Mapping[bytes, str]) -> Keys:
    return Keys({digest: frozenset(scopes) for digest, scopes in sent.items()}, names)


def gate_of(settings: frames.OpenShard, core: CoreClient) -> Gate:
    keys = None if settings.keys is None else _keys(settings.keys, core.key_names)
    hosts = None if settings.hosts is None else frozenset(settings.hosts)
    return Gate(keys, hosts, settings.restrictions)


async def run(
    serve: Serve, sock: socket.socket, settings: frames.OpenShard, fds: Sequence[int]
) -> None:
    """Serve until the core says Stop. The core hears of a ConfigError."""
    requests, answers = (Segment(settings.segment_bytes, fd) for fd in fds[:2])
    page = SharedPage.open(fds[2])
    os.close(fds[2])
    listeners = [socket.socket(fileno=fd) for fd in fds[3:]]
    core = CoreClient(sock, requests, answers, page, listeners)
    try:
        await serve(core, settings)
    except ConfigError as error:
        core.send(frames.StartFailed(error.problems))
    finally:
        core.close()
        for listener in listeners:
            listener.close()


def begin(serve: Serve, run_loop: Callable[[Coroutine[object, object, None]], None]) -> None:
    """Run a shard's process, `python -m MODULE FD PARENT`, on the loop of `run_loop`, then exit."""
    sock = begin_life()
    if sock is None:
        return
    data, fds, _, _ = socket.recv_fds(sock, frames.MAX_FRAME_BYTES, MAX_OPENING_FDS)
    if not data:
        return
    sock.setblocking(False)
    settings = frames.decode_to_shard(data)
    assert isinstance(settings, frames.OpenShard)
    if settings.version != frames.VERSION:
        text = f"the core speaks frames version {settings.version}, this front {frames.VERSION}"
        sock.send(frames.join([frames.encode(frames.StartFailed((text,)))]))
        return
    run_loop(run(serve, sock, settings, fds))
    sys.stdout.flush()
    os._exit(0)
