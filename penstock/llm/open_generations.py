"""The open requests of a language model in one shard: admission, messages to and from its engine,
detokenization, and delivery to their sinks.

Runs on the shard's event loop. The core starts and replaces the engine, and tells of it
(`core_link`); this has a socket to it. When the engine dies, its open requests fail: a partial
answer is never silently continued by another engine. Knows no protocol: each request carries its
sink.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from penstock.errors import (
    BackendFailed,
    InvalidRequest,
    NotReady,
    Overloaded,
    PenstockError,
    QuotaExceeded,
)
from penstock.llm import messages
from penstock.llm.engine_supervisor import EngineState
from penstock.llm.generation import Generation, SequenceOutput
from penstock.llm.stops import StopTexts
from penstock.llm.text_metrics import TextMetrics
from penstock.llm.token_bytes import Vocabulary
from penstock.processes.channel import Datagrams
from penstock.sampling_params import CONSTRAINT
from penstock.serving.core_link import EngineCore
from penstock.serving.metrics import ModelMetrics
from penstock.serving.quotas import QueueShares, Quotas, TokenQuotas
from penstock.types import CANCELLED
from penstock.wire.frames import MAX_FRAME_BYTES, EngineEnded, EngineReady, SetEngine

log = logging.getLogger("penstock.llm")
# Of a model whose renderer is not loaded.
NO_TEXT = Vocabulary(b"", b"")
SOCKET_OVERHEAD = 1024
# An engine is hung if it is silent for `hang_s` or `SLOWER` times its slowest step, whichever is
# longer; before the first step, for `FIRST_STEP` times `hang_s`.
SLOWER, FIRST_STEP = 20, 10


@dataclass(frozen=True, slots=True)
class TextShard:
    """What a language model needs to know to be one of several shards' parts: its engine is the
    core's, in another process; `tokens` counts those of API keys."""

    core: EngineCore
    tokens: TokenQuotas
    num_shards: int


class EngineSocket:
    """A shard's end of the socket to one engine."""

    def __init__(self, sock: socket.socket, received: Callable[[memoryview], object]) -> None:
        self.loop = asyncio.get_running_loop()
        self._sock = sock
        # The kernel needs part of the send buffer for itself.
        room = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        self.max_bytes = min(room - SOCKET_OVERHEAD, MAX_FRAME_BYTES)
        # The core tells when and how the engine has ended.
        self._datagrams = Datagrams(self.loop, sock, received, lambda: None)
        self.send, self.read = self._datagrams.send, self._datagrams.read

    def close(self) -> None:
        """Handle what the engine has sent before, then close."""
        self._datagrams.read(reads_all=True)
        self._datagrams.close()
        self._sock.close()


class OpenGenerations:
    """`core_link.EnginePart`. Invariant: a generation that was admitted is in `_open` until it has
    ended; before, it may be in `_deciding`, while the tokens of its API key are counted."""

    def __init__(
        self,
        metrics: ModelMetrics,
        settings: messages.EngineSettings,
        core: EngineCore,
        clock: Callable[[], float] = time.monotonic,
        *,
        quotas: Quotas | None = None,
        shard: TextShard | None = None,
    ) -> None:
        """Each of several shards gives an API key an equal part of its share of the queue."""
        self.name = metrics.name
        self.metrics = TextMetrics(metrics)
        # Set when the renderer has loaded it.
        self.vocabulary = NO_TEXT
        self.state: EngineState = "LOADING"
        # The last engine's.
        self.ready: EngineReady | None = None
        self.loaded_at = 0
        self._core = core
        self._hang_s = settings.hang_s
        self._quotas = quotas or Quotas()
        self._tokens = self._quotas if shard is None else shard.tokens
        max_pending = settings.max_waiting + settings.max_sequences
        if shard is not None:
            max_pending = -(-max_pending // shard.num_shards)
        self._shares = QueueShares(self._quotas, max_pending)
        self._clock = clock
        self._engine: EngineSocket | None = None
        self._life = 0
        self._ended = EngineEnded("", "")
        self._numbers = itertools.count()
        self._aborted: list[int] = []
        # When to look whether the engine hangs; None while it is not watched.
        self._watch: asyncio.TimerHandle | None = None
        # When the engine last sent a message or was idle, by the loop's clock; its slowest step.
        self._heard_at = self._slowest_s = 0.0
        self._open: dict[int, Generation] = {}
        self._deciding: dict[int, Generation] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_idle(self) -> bool:
        return not self._open

    @property
    def reason(self) -> str:
        """Why it is not ready."""
        return "" if self.state == "READY" else self._ended.reason

    async def drain(self) -> None:
        await self._idle.wait()

    def close(self) -> None:
        """Take no more requests. Those that are open fail with "the model is unloaded"."""
        self.state, self._ended = "UNAVAILABLE", EngineEnded("", "it is unloaded")
        if self._watch is not None:
            self._watch.cancel()
        error = NotReady(f"model '{self.name}' is unloaded; the answer is cut off")
        self._fail(tuple(self._open), error)
        for generation in list(self._deciding.values()):
            self._decided(generation, b"", None)
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def not_ready(self) -> NotReady:
        """Return why it cannot answer, with a retry time that assumes the next engine loads as long
        as the last one."""
        ended = self._ended
        text = f"model '{self.name}' is not ready: {ended.reason or 'it is loading'}"
        if ended.load_s is None:
            return NotReady(text)
        return NotReady(text, max(0.0, ended.restart_at - self._clock()) + ended.load_s)

    # The core.

    def set_engine(self, engine: SetEngine, sock: socket.socket) -> None:
        if self._engine is not None:
            self.engine_ended(EngineEnded("was replaced", ""))
        self._engine = EngineSocket(sock, self.received)
        self._life, self.ready, self.state = engine.life, engine.ready, "READY"
        self._numbers = itertools.count(engine.first_request)
        self.loaded_at = engine.loaded_at
        self.metrics.loaded(engine.ready)

    def engine_ended(self, ended: EngineEnded) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self.state, self._ended = "UNAVAILABLE", ended
        error = BackendFailed(f"the engine {ended.ending}; what it had generated is lost")
        self._fail(tuple(self._open), error)

    def _look_after(self) -> None:
        """Watch the engine while requests are open; tell the core if it was silent for too long."""
        self._watch = None
        if self._engine is not None:
            self._engine.read()  # This loop may be late: something may have arrived.
        if not self._open or self._engine is None:
            return
        longest_s, slowest_s = self._hang_s, self._slowest_s
        # It reports every step; before the first, its step time is unknown.
        longest_s = max(longest_s, SLOWER * slowest_s) if slowest_s else FIRST_STEP * longest_s
        left_s = self._heard_at + longest_s - self._engine.loop.time()
        if left_s > 0:
            self._watch = self._engine.loop.call_later(left_s, self._look_after)
        else:
            self._core.engine_hung(self._life, longest_s)

    def _send(self, message: messages.ShardToEngine) -> None:
        if self._engine is not None:
            self._engine.send(messages.encode(message))

    def _abort_in_engine(self, request: int) -> None:
        """Abort a request. Those of one iteration of the event loop share a message."""
        if self._engine is None:
            return
        if not self._aborted:
            self._engine.loop.call_soon(self._send_aborted)
        self._aborted.append(request)

    def _send_aborted(self) -> None:
        requests, self._aborted = tuple(self._aborted), []
        self._send(messages.GiveUp(requests))

    # Requests.

    def new_number(self) -> int:
        """Return the number of a new request, which no other part of the model uses."""
        return next(self._numbers)

    def submit(self, generation: Generation) -> None:
        """Admit a request. Every outcome goes to its sink, refusals too."""
        try:
            data = self._check(generation)
            if self._tokens.is_active:
                # QuotaExceeded when the key has used up its tokens.
                about = generation.caller, len(generation.request.tokens), self._clock()
                decided = partial(self._decided, generation, data)
                if not self._tokens.start_prompt(*about, decided):
                    self._deciding[generation.request.id] = generation
                    self._idle.clear()
                    return
            self._begin(generation, data)
        except (NotReady, InvalidRequest, QuotaExceeded) as error:
            self._refuse_at_once(generation, error)

    def cancel(self, generation: Generation) -> None:
        """Drop a request, at any time; its sink is not called again."""
        if self._deciding.pop(generation.request.id, None) is not None:
            generation.is_ended = True
            self.metrics.not_admitted(generation, CANCELLED, self._clock())
            self._check_idle()
        elif not self._abort(generation, CANCELLED):
            return
        if generation.on_cancel is not None:
            generation.on_cancel()

    def _abort(self, generation: Generation, error: PenstockError) -> bool:
        """Drop a request; return whether it was open."""
        request = generation.request.id
        if self._close(request) is None:
            return False
        self.metrics.failed(generation, error, self._clock())
        self._abort_in_engine(request)
        self._check_idle()
        return True

    def _check(self, generation: Generation) -> bytes:
        """Return the message for the engine; raise why the request is refused."""
        if self.state != "READY" or self.ready is None:
            raise self.not_ready()
        _check(generation.request, self.ready, self.vocabulary)
        data = self._encode(generation.request)
        if self._quotas.is_active:
            # QuotaExceeded when the key has used up its share of the queue.
            self._shares.check(generation.caller, self._clock())
        return data

    def _decided(self, generation: Generation, data: bytes, error: QuotaExceeded | None) -> None:
        """Go on with a request whose prompt was counted, or refuse it."""
        if self._deciding.pop(generation.request.id, None) is None:
            return
        try:
            if error is not None:
                raise error
            self._begin(generation, data)
        except (NotReady, QuotaExceeded) as refusal:
            self._refuse_at_once(generation, refusal)
            self._check_idle()

    def _refuse_at_once(self, generation: Generation, error: PenstockError) -> None:
        generation.is_ended = True
        self.metrics.not_admitted(generation, error, self._clock())
        generation.sink.failed(error)

    def _begin(self, generation: Generation, data: bytes) -> None:
        if self.state != "READY" or self._engine is None:
            raise self.not_ready()
        request = generation.request
        generation.admitted = self._clock()
        generation.arrived = generation.arrived or generation.admitted
        generation.outputs = [
            SequenceOutput(
                self.vocabulary.stream(request.tokens, generation.shown_tokens),
                StopTexts(request.params.stop),
            )
            for _ in range(request.params.n)
        ]
        self._engine.send(data)
        if not self._open:
            self._heard_at = self._engine.loop.time()
        self._open[request.id] = generation
        if self._watch is None:
            self._look_after()
        if self._quotas.is_active:
            self._shares.enter(generation, generation.caller, request.params.n)
        self._idle.clear()

    def _encode(self, request: messages.GenerateRequest) -> bytes:
        """Encode a request. InvalidRequest if it does not fit a datagram."""
        try:
            data = messages.encode(request)
        except OverflowError:
            raise InvalidRequest("a number has more than 64 bits") from None
        most = MAX_FRAME_BYTES if self._engine is None else self._engine.max_bytes
        if len(data) > most:
            raise InvalidRequest(f"the request takes {len(data)} bytes; expected at most {most}")
        return data

    def _close(self, request: int) -> Generation | None:
        """Close the request with this id and return it; None if it has ended before."""
        generation = self._open.pop(request, None)
        if generation is not None:
            generation.is_ended = True
            self._shares.leave(generation)
        return generation

    # The engine.

    def received(self, datagram: memoryview) -> None:
        """Handle a message of the engine."""
        if self._engine is not None:
            self._heard_at = self._engine.loop.time()
        match messages.decode_engine_to_shard(datagram):
            case messages.StepReport() as report:
                self._slowest_s = max(self._slowest_s, report.step_s)
                self.metrics.step(report, self._clock())
                self._take(report)
            case messages.PromptLogprobsChunk() as chunk:
                self._take_prompt(chunk)
            case messages.RequestRefused() as refusal:
                self._refuse(refusal)
            case messages.StepFailed() as failure:
                error: PenstockError = BackendFailed(failure.reason)
                if failure.is_invalid:
                    error = InvalidRequest(failure.reason, CONSTRAINT)
                self._fail(failure.requests, error)

    def _take_prompt(self, message: messages.PromptLogprobsChunk) -> None:
        """Store prompt logprobs, which arrive before the request's first token."""
        generation = self._open.get(message.request)
        if generation is not None:
            known = generation.prompt_logprobs
            known += [None] * (generation.num_prompt - len(known))
            known[message.start : message.start + len(message.logprobs)] = message.logprobs

    def _take(self, report: messages.StepReport) -> None:
        now = self._clock()
        for event in report.events:
            generation = self._open.get(event.request)
            if generation is not None and not generation.outputs[event.index].is_ended:
                generation.num_cached = event.num_cached
                try:
                    self._give(generation, event, now)
                except Exception:  # Its sink or detokenizer failed; other requests continue.
                    log.exception("%s: an answer cannot be given", self.name)
                    error = BackendFailed("internal error; this is a bug")
                    if self._abort(generation, error):
                        generation.sink.failed(error)
        self._check_idle()

    def _give(self, generation: Generation, event: messages.TokenEvent, now: float) -> None:
        """Detokenize a token and pass it to the request's sink."""
        token, params = event.token, generation.request.params
        output = generation.outputs[event.index]
        self.metrics.token(generation, output, now)
        if self._tokens.is_active:
            self._tokens.use_tokens(generation.caller, 1, now)
        output.num_tokens += 1
        generation.first_at = now if generation.first_at is None else generation.first_at
        generation.last_at = output.last_at = now
        # The text of a stop token is not part of the answer.
        is_end = event.reason == "stop" and token in params.stop_token_ids
        text = "" if is_end else output.stream.add(token)
        if output.num_tokens > params.min_tokens:
            # Stop strings do not apply to the first `min_tokens` tokens.
            text = output.stops.add(text)
        if output.stops.found is not None:
            if not event.reason:
                self._send(messages.EndText(event.request, event.index))
            event.reason = "stop"
        elif event.reason:
            text += _rest(output)
        event.text = text
        output.is_ended, output.reason = bool(event.reason), event.reason
        generation.sink.token(event)
        if output.is_ended and all(each.is_ended for each in generation.outputs):
            self._finish(generation)

    def _finish(self, generation: Generation) -> None:
        """Finish a request, unless its sink has cancelled it meanwhile."""
        if self._close(generation.request.id) is not None:
            self.metrics.finished(generation, self._clock())
            try:
                generation.sink.finished(generation.totals)
            except Exception:  # The sink failed.
                log.exception("%s: an answer cannot be given", self.name)
                generation.sink.failed(BackendFailed("internal error; this is a bug"))
            self._check_idle()

    def _refuse(self, message: messages.RequestRefused) -> None:
        generation = self._close(message.request)
        if generation is not None:
            error: PenstockError = InvalidRequest(message.reason)
            if message.is_overload:
                error = Overloaded(message.reason, message.retry_after_s, message.kind)
                num_open = sum(each.request.params.n for each in self._open.values())
                self._shares.refused(num_open, self._clock())
            self.metrics.not_admitted(generation, error, self._clock())
            generation.sink.failed(error)
            self._check_idle()

    def _fail(self, requests: Collection[int], error: PenstockError) -> None:
        generations = [self._close(request) for request in requests]
        for each in filter(None, generations):
            self.metrics.failed(each, error, self._clock())
            each.sink.failed(error)
        self._check_idle()

    def _check_idle(self) -> None:
        if not self._open:
            self.metrics.idle()
            if not self._deciding:
                self._idle.set()


def _check(request: messages.GenerateRequest, ready: EngineReady, vocabulary: Vocabulary) -> None:
    """Check what the engine relies on."""
    if not request.tokens:
        raise InvalidRequest("the prompt is empty; expected at least one token")
    most = min(ready.max_length, messages.MAX_PROMPT_TOKENS)
    if len(request.tokens) > most:
        raise InvalidRequest(
            f"the prompt has {len(request.tokens)} tokens; expected at most {most}"
        )
    params = request.params
    # The model's own stop tokens are not checked: they may lie beyond its vocabulary.
    stops = params.stop_token_ids - vocabulary.stop_tokens
    _check_tokens(request.tokens, "", ready.vocabulary)
    _check_tokens(params.logit_bias, "logit_bias", ready.vocabulary)
    _check_tokens(stops, "stop_token_ids", ready.vocabulary)


def _rest(output: SequenceOutput) -> str:
    """Return the text held back, cut at the first stop string."""
    text = output.stops.add(output.stream.rest())
    return text if output.stops.found is not None else text + output.stops.rest()


def _check_tokens(tokens: Collection[int], field: str, vocabulary: int) -> None:
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        strange = next(each for each in tokens if not 0 <= each < vocabulary)
        text = f"token {strange}; expected 0 to {vocabulary - 1}"
        raise InvalidRequest(f"{field}: {text}" if field else text, field or None)
