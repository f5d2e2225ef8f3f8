"""The processes of shards as the core sees them: starts, health checks, restarts, drain.

Messages that a shard leaves to the core go to the core's own handler, and what it says about models
to `serving.shards`. A crash of a shard does not affect the core: its messages are given up and a
new process is started; one that stops answering pings is killed. Lives on the core's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from penstock.config import MIB, HttpLimits
from penstock.errors import BackendFailed, ConfigError, PenstockError
from penstock.processes.child import ChildProcess, StartLife
from penstock.processes.life import ProcessLife
from penstock.processes.restarts import MAX_LOAD_DEATHS, CrashLoop
from penstock.protocols import audit_log
from penstock.protocols.answer_sender import Keep
from penstock.protocols.gate import Gate
from penstock.protocols.http import Exchange, Handler
from penstock.protocols.http_reader import MessageHead
from penstock.protocols.line import (
    INLINE_BYTES,
    MAX_SENT_BYTES,
    Line,
    Outbox,
    ParcelLine,
    handle_all,
    unpack,
)
from penstock.serving.management import ManagementApi, ManagementCall
from penstock.serving.scrape import ShardUse
from penstock.serving.shards import ShardGone, Shards
from penstock.serving.slab import Segment
from penstock.types import Buffer, Tensor
from penstock.wire import frames
from penstock.wire.frames import Forwarded, Frame

log = logging.getLogger("penstock.shards")

SHARD = functools.partial(ProcessLife, module="penstock.protocols.shard_main")
# Shared memory of a shard for messages to the core, and as much again for answers; at least twice
# the largest message. Untouched pages cost nothing.
SEGMENT_BYTES = 256 * MIB
# A shard that does not answer for this long is hung. It gets more time for decoding the largest
# JSON allowed, at JSON_RATE bytes per second.
HANG_S = 10.0
JSON_RATE = 16 * MIB
STOP_TIMEOUT_S = 5.0
PING_S = 1.0
# Time for a shard to start.
START_S = 60.0
# Characters of an error, which may quote names of any length from the client.
MAX_TEXT = MAX_SENT_BYTES // 8
# Names of API keys in one frame; the longest fit `MAX_SENT_BYTES`.
NAMES_PER_FRAME = 256


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One shard: its process, and the `opening` frame sent first."""

    opening: frames.OpenShard
    hang_s: float
    # For HTTP and, if it is served, gRPC. The core keeps them open when the shard has ended.
    listeners: tuple[socket.socket, ...] = ()
    start_life: StartLife = SHARD
    # Names of the API keys by digest, for logs.
    key_names: Mapping[bytes, str] = field(default_factory=dict)

    @property
    def shard(self) -> int:
        """Its number, from 0."""
        return self.opening.shard

    @property
    def name(self) -> str:
        return f"shard {self.shard + 1}"


def shard_spec(
    opening: frames.OpenShard, listeners: tuple[socket.socket, ...], gate: Gate
) -> ShardSpec:
    """Describe a shard; fills in its memory, and what the gate knows."""
    limits = opening.limits or HttpLimits()
    opening = msgspec.structs.replace(
        opening,
        segment_bytes=max(SEGMENT_BYTES, 2 * limits.max_body_bytes),
        keys=_keys(gate),
        hosts=None if gate.hosts is None else tuple(gate.hosts),
        restrictions=gate.restrictions,
    )
    hang_s = HANG_S + limits.max_json_bytes / JSON_RATE
    return ShardSpec(opening, hang_s, listeners, key_names=_key_names(gate))


@dataclass(frozen=True, slots=True)
class CoreApi:
    """The core, as the processes of `shards` call it. `http` answers messages that they leave to
    it; `gate` names callers."""

    management: ManagementApi
    http: Handler | None = None
    gate: Gate = field(default_factory=Gate)
    shards: Shards | None = None

    async def manage(self, call: ManagementCall, caller: bytes) -> bytes:
        """Answer a management call of a gRPC client."""
        return await audit_log.answer_rpc(self.management, call, self.gate.name_of(caller))


class Relay:
    """A message of a shard's client, as the peer of an exchange in the core. The answer goes back
    whole or, if it is streamed, in parts."""

    def __init__(self, session: Session, frame: frames.Forward) -> None:
        self._session = session
        self._number = frame.call
        head = MessageHead(frame.method, frame.target, frame.headers)
        head.keep_alive = frame.keep_alive
        head.is_http_1_0 = frame.is_http_1_0
        (body,) = session.unpack(frame.parcel)
        head.content_length = len(body.data)
        self.exchange = Exchange(self, head, body.data, frame.received)

    @property
    def num_unsent(self) -> int:
        """Always 0: the shard limits unsent bytes."""
        return 0

    def will_keep_alive(self, head: MessageHead) -> bool:
        return head.keep_alive and not self._session.lifecycle.is_draining

    def write(self, data: bytes) -> None:
        """Send the next part of an answer, always inline in frames: a part that waited for memory
        could be overtaken by a later one."""
        if self._number not in self._session.relays:
            return
        for start in range(0, len(data), INLINE_BYTES):
            part = data[start : start + INLINE_BYTES]
            piece = frames.TensorHeader("body", "UINT8", (len(part),), len(part))
            parcel = frames.Parcel((piece,), part)
            self._session.line.send(Forwarded(self._number, parcel, is_part=True))

    def finish(self, data: bytes, keep_alive: bool) -> None:
        """Send the whole answer, or the end of a streamed one."""
        number, session = self._number, self._session
        if session.relays.pop(number, None) is None:
            return
        try:
            session.post(number, data, lambda parcel: Forwarded(number, parcel, keep_alive))
        except PenstockError:
            log.error("an answer of %d bytes is too large for the %s", len(data), session.spec.name)
            session.line.send(Forwarded(number, frames.Parcel(), is_cut=True))

    def finish_long(self, parts: Sequence[Buffer], keep_alive: bool, keep: Keep | None) -> None:
        self.finish(b"".join(parts), keep_alive)

    def abort(self) -> None:
        """Report that the message gets no answer."""
        if self._session.relays.pop(self._number, None) is not None:
            self._session.line.send(Forwarded(self._number, frames.Parcel(), is_cut=True))


class Session:
    """One lifetime of a shard's process: its socket, its memory and its open messages."""

    def __init__(
        self,
        core: CoreApi,
        spec: ShardSpec,
        segments: tuple[Segment, Segment],
        notify: Callable[[frames.FromShard], None],
        died: Callable[[str], None],
    ) -> None:
        """OSError if the process cannot be started."""
        assert core.shards is not None
        self._core, self._shards = core, core.shards
        self._catalog = core.management.catalog
        self.lifecycle = core.management.lifecycle
        self.spec = spec
        self._notify = notify
        self._requests, self._answers = segments
        self._outbox = Outbox(self._answers)
        self.relays: dict[int, Relay] = {}
        self._managing: dict[int, asyncio.Task[None]] = {}
        # Questions to a shard.
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count(1)
        self._loop = loop = asyncio.get_running_loop()
        self.child = ChildProcess(loop, spec.start_life, self._hear, died)
        self.line = Line(self.child.send)
        self.parcels = ParcelLine(self._outbox, self.line, self._requests)

    @property
    def num_running(self) -> int:
        """Unanswered messages and calls, and answers that wait for memory."""
        return len(self._managing) + self._outbox.num_waiting + len(self.relays)

    def open(self, frame: frames.OpenShard) -> None:
        try:
            listeners = [each.fileno() for each in self.spec.listeners]
            segments = self._requests.fd, self._answers.fd
            fds = *segments, self._shards.blocks.fd, *listeners
            self.child.send(frames.encode(frame), fds)
        except OSError as error:
            log.error("the %s cannot be given its memory: %s", self.spec.name, error)
            self.child.life.kill()

    def close(self) -> None:
        """Give up the messages of a shard that has exited."""
        self.line.close()
        relays = list(self.relays.values())
        self.relays.clear()
        for relay in relays:
            relay.exchange.leave()
        for task in self._managing.values():
            task.cancel()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(ShardGone("the shard has ended"))
        self._requests.close()
        self._answers.close()

    def send(self, frame: Frame, fds: tuple[int, ...] = ()) -> None:
        """Send a frame to a shard, after those before it."""
        if not fds:
            self.line.send(frame)
            return
        self.line.flush()
        if self.line.is_open:
            self.child.send(frames.join([frames.encode(frame)]), fds)

    async def ask(self, question: frames.ShardQuestion) -> bytes:
        """Return a shard's answer; raise ShardGone when it has ended."""
        if not self.line.is_open:
            raise ShardGone("the shard has ended")
        call = next(self._numbers)
        asked: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[call] = asked
        try:
            body = frames.encode(question)
            self.post(-call, body, lambda parcel: frames.AskShard(call, parcel))
            return await asked
        finally:
            del self._asked[call]

    def kill(self) -> None:
        if self.line.is_open:
            self.child.life.kill()

    def unpack(self, parcel: frames.Parcel) -> list[Tensor]:
        return unpack(parcel, self._requests)

    def _hear(self, data: memoryview) -> None:
        handle_all(frames.decode_all_from_shard(data), self._receive)

    def _receive(self, frame: frames.FromShard) -> None:
        match frame:
            case frames.Release():
                for offset in frame.offsets:
                    self._outbox.release(offset)
            case frames.Cancel():
                self._cancel(frame.call)
            case frames.Forward():
                self._forward(frame)
            case frames.FromPart():
                self._shards.receive(self.spec.shard, frame)
            case _:
                self._receive_more(frame)

    def _receive_more(self, frame: frames.FromShard) -> None:
        match frame:
            case frames.ShardAnswer():
                self._hear_answer(frame)
            case frames.Lease():
                now, quotas = time.monotonic(), self._catalog.quotas
                leased, wait_s = quotas.lease(frame.key, frame.amount, now)
                if frame.amount > 0:
                    self.line.send(frames.Leased(frame.key, leased, wait_s))
            case frames.TakeTokens(call, key, amount):
                wait_s = self._catalog.quotas.take_tokens(key, amount, time.monotonic())
                self.line.send(frames.TokensTaken(call, wait_s))
            case frames.UseTokens(key, amount):
                self._catalog.quotas.use_tokens(key, amount, time.monotonic())
            case frames.Traced():
                self._core.management.traces.receive(frame.record)
            case frames.Manage():
                self._managing[frame.call] = task = self._loop.create_task(self._manage(frame))
                task.add_done_callback(lambda task: self._managing.pop(frame.call))
            case _:
                self._notify(frame)

    async def _manage(self, frame: frames.Manage) -> None:
        number = frame.call
        named = (frame.action, frame.model_name, frame.model_version, frame.parameters)
        kind, text = "BackendFailed", "internal error"
        try:
            # Copied: the shard needs its memory for other messages while a model loads.
            files = {each.name: bytes(each.data) for each in self.unpack(frame.parcel)}
            if frame.parcel.offset is not None:
                self.line.send(frames.Release((frame.parcel.offset,)))
            call = ManagementCall(*named, frame.caller, files)
            body = await self._core.manage(call, frame.caller)
            self.post(number, body, lambda parcel: frames.Managed(number, parcel))
            return
        except PenstockError as error:
            kind, text = type(error).__name__, str(error)[:MAX_TEXT]
        except Exception:  # The protocol edge.
            log.exception("a management call of a shard could not be answered")
        self.line.send(frames.Managed(number, frames.Parcel(), kind, text))

    def _hear_answer(self, frame: frames.ShardAnswer) -> None:
        asked = self._asked.get(frame.call)
        data = b"".join([piece.data for piece in self.unpack(frame.parcel)])
        if frame.parcel.offset is not None:
            self.line.send(frames.Release((frame.parcel.offset,)))
        if asked is None or asked.done():
            return
        if frame.error:
            asked.set_exception(BackendFailed(f"the {self.spec.name}: {frame.error}"))
        else:
            asked.set_result(data)

    def _forward(self, frame: frames.Forward) -> None:
        assert self._core.http is not None
        relay = self.relays[frame.call] = Relay(self, frame)
        try:
            self._core.http(relay.exchange)
        except Exception:  # Keep serving.
            relay.exchange.reply_bug()

    def _cancel(self, number: int) -> None:
        if relay := self.relays.get(number):
            relay.exchange.leave()
            relay.abort()
        elif task := self._managing.get(number):
            task.cancel()

    def post(self, number: int, body: bytes, frame: Callable[[frames.Parcel], Frame]) -> None:
        """Send a body in the frame that `frame` makes of its parcel."""
        tensor = Tensor("body", "UINT8", (len(body),), body)
        try:
            self._outbox.post(number, [tensor], lambda parcel: self.line.send(frame(parcel)))
        except PenstockError as error:
            raise BackendFailed(f"the answer: {error}") from None


@dataclass(slots=True)
class Silence:
    """How long a process has not answered. Each tick counts for at most twice PING_S: if this
    process was suspended, the other may have been too. Pure."""

    _limit_s: float
    _ticked: float
    _silent_s: float = 0.0

    def heard(self) -> None:
        self._silent_s = 0.0

    def is_over(self, now: float) -> bool:
        """Advance by one tick, about every PING_S; True when the process should be killed."""
        self._silent_s += min(now - self._ticked, 2 * PING_S)
        self._ticked = now
        return self._silent_s > self._limit_s


class ShardProcess:
    """Keeps one shard running."""

    def __init__(self, core: CoreApi, spec: ShardSpec) -> None:
        assert core.shards is not None
        self._core, self._shards = core, core.shards
        self._spec = spec
        self._loop = asyncio.get_running_loop()
        self._session: Session | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._silence = Silence(START_S, self._loop.time())
        self._first_listening: asyncio.Future[None] = self._loop.create_future()
        self._is_stopping = False
        self._listening_at: float | None = None
        self._problems: tuple[str, ...] = ()
        self._crashes = CrashLoop()
        self._opening: set[asyncio.Task[None]] = set()
        self.num_restarts = 0
        # As of its last Pong.
        self.num_connections = 0

    @property
    def listeners(self) -> tuple[socket.socket, ...]:
        return self._spec.listeners

    @property
    def pid(self) -> int:
        return self._session.child.life.pid if self._session is not None else 0

    def use(self) -> ShardUse:
        number = str(self._spec.shard + 1)
        return ShardUse(number, self.num_restarts, self.num_connections, self._spec.name, self.pid)

    @property
    def num_running(self) -> int:
        return self._session.num_running if self._session is not None else 0

    def start(self) -> None:
        """Start the process; `listening` waits until it accepts connections."""
        self._timer = None
        self._listening_at = None
        self._problems = ()
        self._silence = Silence(START_S, self._loop.time())
        self.num_connections = 0
        try:
            self._session = self._launch()
        except OSError as error:
            self._restart(f"could not be started ({error})")
            return
        quotas = self._core.management.catalog.quotas
        opening = msgspec.structs.replace(
            self._spec.opening,
            rates=quotas.rates,
            token_rates=quotas.token_rates,
            shares=quotas.shares,
        )
        self._session.open(opening)
        if self._ticker is None:
            self._ticker = self._loop.call_later(PING_S, self._tick)

    def _launch(self) -> Session:
        segment_bytes = self._spec.opening.segment_bytes
        with contextlib.ExitStack() as undo:
            requests = undo.enter_context(contextlib.closing(Segment(segment_bytes)))
            answers = undo.enter_context(contextlib.closing(Segment(segment_bytes)))
            memory = requests, answers
            session = Session(self._core, self._spec, memory, self._receive, self._died)
            undo.pop_all()
        return session

    async def listening(self) -> None:
        """Wait until the shard has started; ConfigError if it cannot."""
        await self._first_listening

    def set_keys(self, gate: Gate) -> None:
        """Update the API keys, for this process and for its replacements."""
        keys = _keys(gate)
        assert keys is not None
        opening = msgspec.structs.replace(self._spec.opening, keys=keys)
        self._spec = replace(self._spec, opening=opening, key_names=_key_names(gate))
        if self._session is not None:
            self._send_names(self._session)
            quotas = self._core.management.catalog.quotas
            changed = frames.SetKeys(keys, quotas.rates, quotas.token_rates, quotas.shares)
            self._session.line.send(changed)

    def _send_names(self, session: Session) -> None:
        names = list(self._spec.key_names.items())
        for start in range(0, len(names), NAMES_PER_FRAME):
            session.line.send(frames.NameKeys(dict(names[start : start + NAMES_PER_FRAME])))

    def drain(self) -> None:
        if self._session is not None and self._listening_at is not None:
            self._session.line.send(frames.Drain())

    async def close(self) -> None:
        """Let the shard shut down gracefully; kill it after STOP_TIMEOUT_S."""
        self._is_stopping = True
        self._first_listening.cancel()
        for timer in (self._timer, self._ticker):
            if timer is not None:
                timer.cancel()
        if self._session is not None:
            self._session.line.send(frames.Stop())
            await self._session.child.wait(STOP_TIMEOUT_S)

    def _receive(self, frame: frames.FromShard) -> None:
        match frame:
            case frames.Pong():
                self._silence.heard()
                self.num_connections = frame.num_connections
            case frames.Listening():
                self._silence = Silence(self._spec.hang_s, self._loop.time())
                self._listening_at = self._loop.time()
                if not self._first_listening.done():
                    self._first_listening.set_result(None)
                self._open_shard()
                if self._core.management.lifecycle.is_draining and self._session is not None:
                    self._session.line.send(frames.Drain())
                text, extra = "%s is up (pid %d)", {"shard_pid": self.pid}
                log.info(text, self._spec.name, self.pid, extra=extra)
            case frames.StartFailed():
                self._problems = frame.problems

    def _open_shard(self) -> None:
        """Tell the shard the names of keys, and which models it has."""
        if self._session is not None:
            self._send_names(self._session)
            opening = self._shards.open(self._spec.shard, self._session)
            task = self._loop.create_task(opening)
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _tick(self) -> None:
        """Ping the shard; kill it if it hangs, so that it is restarted."""
        self._ticker = self._loop.call_later(PING_S, self._tick)
        session = self._session
        if session is None:
            return
        session.child.read()  # The Pong may have arrived while this loop was busy.
        if self._silence.is_over(self._loop.time()):
            log.error("the %s hangs; killing pid %d", self._spec.name, self.pid)
            session.child.life.kill()
        else:
            session.line.send(frames.Ping())

    def _died(self, reason: str) -> None:
        assert self._session is not None
        self._session.close()
        self._session = None
        self._shards.lose(self._spec.shard)
        if not self._is_stopping:
            self._restart(reason)

    def _restart(self, reason: str) -> None:
        """Restart after a crash or a failed start, whose cause may be temporary."""
        since = self._listening_at
        well_s = self._loop.time() - since if since is not None else 0.0
        self._crashes.died(well_s)
        is_given_up = self._problems or self._crashes.num_deaths >= MAX_LOAD_DEATHS
        if is_given_up and not self._first_listening.done():
            problems = self._problems or (
                f"the {self._spec.name} {reason} while starting, {MAX_LOAD_DEATHS} times",
            )
            self._first_listening.set_exception(ConfigError(problems))
            return
        delay_s = self._crashes.delay_s
        why = "; ".join(self._problems) or reason
        text, extra = "the %s %s; restart in %.1f s", {"reason": why}
        log.warning(text, self._spec.name, why, delay_s, extra=extra)
        self.num_restarts += 1
        self._timer = self._loop.call_later(delay_s, self.start)


def _keys(gate: Gate) -> dict[bytes, tuple[str, ...]] | None:
    if gate.keys is None:
        return None
    return {digest: tuple(scopes) for digest, scopes in gate.keys.scopes.items()}


def _key_names(gate: Gate) -> Mapping[bytes, str]:
    return {} if gate.keys is None else gate.keys.names
