"""The core's side of a language model: sends requests to the engine, turns its tokens into text.

Supervises the engine process; runs on the core's event loop. When the engine dies, its open
requests fail and a new engine is started: a partial answer is never silently continued by another
engine. Knows no protocol: each request carries its sink.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Literal

from penstock.errors import (
    BackendFailed,
    ConfigError,
    InvalidRequest,
    NotReady,
    Overloaded,
    PenstockError,
    QuotaExceeded,
)
from penstock.llm import messages
from penstock.llm.generation import Generation, SequenceOutput
from penstock.llm.stops import StopTexts
from penstock.llm.text_metrics import Death, TextMetrics
from penstock.llm.token_bytes import Vocabulary
from penstock.processes.channel import Sender
from penstock.processes.life import ProcessLife
from penstock.processes.restarts import backoff_s, deaths_in_a_row
from penstock.serving.metrics import ModelMetrics
from penstock.serving.quotas import QueueShares, Quotas
from penstock.serving.supervisor import Life, StartLife, await_death
from penstock.types import CANCELLED
from penstock.wire.frames import MAX_FRAME_BYTES

log = logging.getLogger("penstock.llm")
MODULE = "penstock.llm.engine_main"
State = Literal["LOADING", "READY", "UNAVAILABLE"]
STOP_S = 5.0
SOCKET_OVERHEAD = 1024
# Loading fails after this many deaths in a row.
MAX_LOAD_DEATHS = 3
# An engine is hung if it is silent for `hang_s` or `SLOWER` times its slowest step, whichever is
# longer; before the first step, for `FIRST_STEP` times `hang_s`.
SLOWER, FIRST_STEP = 20, 10
EngineLife: StartLife = partial(ProcessLife, module=MODULE)


class LlmModel:
    """Invariant: a generation that was admitted is in `_open` until it has ended."""

    def __init__(
        self,
        metrics: ModelMetrics,
        settings: messages.Settings,
        vocabulary: Vocabulary,
        start_life: StartLife = EngineLife,
        clock: Callable[[], float] = time.monotonic,
        *,
        quotas: Quotas | None = None,
    ) -> None:
        self.name = metrics.name
        self.metrics = TextMetrics(metrics)
        self.vocabulary = vocabulary
        self.state: State = "LOADING"
        self.reason = ""
        self.ready: messages.Ready | None = None
        # The engine's report of its last step.
        self.last: messages.StepReport | None = None
        self.num_restarts = 0
        self._settings = settings
        self._quotas = quotas or Quotas()
        max_pending = settings.max_waiting + settings.max_sequences
        self._shares = QueueShares(self._quotas, max_pending)
        self._start_life = start_life
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, Generation] = {}
        self._given_up: list[int] = []
        self._life: Life | None = None
        self._sender: Sender | None = None
        self._buffer = bytearray(MAX_FRAME_BYTES)
        self._most_bytes = MAX_FRAME_BYTES
        self._num_deaths = 0
        self._ready_at = 0.0
        self._is_stopping = False
        self._restart: asyncio.TimerHandle | None = None
        self._restart_at = 0.0
        self._hang_s = settings.hang_s
        self._slowest_s = 0.0
        # When the engine last sent a message or was idle, by the loop's clock.
        self._heard = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._is_hung = False
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._dead = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    # Lifecycle.

    async def start(self) -> None:
        """Start the engine and wait until it is ready. ConfigError if it cannot be loaded."""
        self._launch()
        await self._loaded

    async def drain(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    async def close(self) -> None:
        self._is_stopping = True
        self.state, self.reason = "UNAVAILABLE", "it is unloaded"
        if not self._loaded.done():
            self._loaded.cancel()
        for timer in (self._restart, self._watch):
            if timer is not None:
                timer.cancel()
        self._fail_all(NotReady(f"model '{self.name}' is unloaded; the answer is cut off"))
        if self._life is None:
            return
        self._send(messages.Stop())
        await await_death(self._life, self._dead, STOP_S)

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def pid(self) -> int:
        return 0 if self._life is None else self._life.pid

    def not_ready(self) -> NotReady:
        """Return why it cannot answer, with a retry time that assumes the next engine loads as long
        as the last one."""
        text = f"model '{self.name}' is not ready: {self.reason or 'it is loading'}"
        if self._is_stopping or self.ready is None:
            return NotReady(text)
        return NotReady(text, max(0.0, self._restart_at - self._clock()) + self.ready.load_s)

    # Requests.

    def submit(self, generation: Generation) -> None:
        """Admit a request. Every outcome goes to its sink, refusals too."""
        try:
            self._admit(generation)
        except (NotReady, InvalidRequest, QuotaExceeded) as error:
            generation.is_ended = True
            now = self._clock()
            self.metrics.refused(error, now - (generation.arrived or now))
            generation.sink.failed(error)

    def cancel(self, generation: Generation) -> None:
        """Drop a request that is no longer wanted. Safe at any time; its sink is not called
        again."""
        self._give_up(generation, CANCELLED)

    def cancel_with(self, generation: Generation, error: PenstockError) -> None:
        """Drop a request and report the error to its sink."""
        if generation.request.id in self._open:
            self._give_up(generation, error)
            generation.sink.failed(error)

    def _give_up(self, generation: Generation, error: PenstockError) -> None:
        if self._left(generation.request.id) is None:
            return
        self.metrics.failed(generation, error, self._clock())
        if not self._given_up:
            # Cancellations of one loop iteration share a message.
            self._loop.call_soon(self._send_given_up)
        self._given_up.append(generation.request.id)
        self._check_idle()

    def _admit(self, generation: Generation) -> None:
        ready = self.ready
        if self.state != "READY" or ready is None or self._sender is None:
            raise self.not_ready()
        self._check(generation.request, ready)
        if self._quotas.is_active:
            self._check_quota(generation.caller)
        generation.admitted = self._clock()
        generation.arrived = generation.arrived or generation.admitted
        data = self._encoded(generation)
        request = generation.request
        generation.outputs = [
            SequenceOutput(self.vocabulary.stream(request.tokens), StopTexts(request.params.stop))
            for _ in range(request.params.n)
        ]
        if not self._open:
            self._heard = self._loop.time()
        self._open[request.id] = generation
        if self._quotas.is_active:
            self._shares.enter(generation, generation.caller, request.params.n)
            self._quotas.use_tokens(generation.caller, len(request.tokens), generation.admitted)
        self._idle.clear()
        assert self._sender is not None
        self._sender.send(data)
        if self._watch is None:
            self._watch = self._loop.call_later(self._longest_silence_s, self._look_after)

    def _check_quota(self, caller: bytes) -> None:
        """QuotaExceeded when the key has used up its tokens or its share of the queue."""
        now = self._clock()
        self._shares.check(caller, now)
        self._quotas.check_tokens(caller, now)

    def _left(self, request: int) -> Generation | None:
        """Close the request with this id and return it; None if it has ended before."""
        generation = self._open.pop(request, None)
        if generation is not None:
            generation.is_ended = True
            self._shares.leave(generation)
        return generation

    @property
    def _longest_silence_s(self) -> float:
        """How long the engine may be silent. It reports every step; before the first, its step time
        is unknown."""
        if not self._slowest_s:
            return FIRST_STEP * self._hang_s
        return max(self._hang_s, SLOWER * self._slowest_s)

    def _look_after(self) -> None:
        """Kill an engine that was silent for too long while requests are open."""
        self._watch = None
        if not self._open or self._life is None:
            return
        left_s = self._heard + self._longest_silence_s - self._loop.time()
        if left_s > 0:
            self._watch = self._loop.call_later(left_s, self._look_after)
            return
        self._is_hung = True
        self._life.kill()

    def _encoded(self, generation: Generation) -> bytes:
        """Encode the request for the engine. InvalidRequest if it does not fit a datagram."""
        try:
            data = messages.encode(generation.request)
        except OverflowError:
            raise InvalidRequest("a number has more than 64 bits") from None
        if len(data) > self._most_bytes:
            raise InvalidRequest(
                f"the request takes {len(data)} bytes; expected at most {self._most_bytes}"
            )
        return data

    def _check(self, request: messages.GenerateRequest, ready: messages.Ready) -> None:
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
        stops = params.stop_token_ids - self.vocabulary.stop_tokens
        _check_tokens(request.tokens, "", ready.vocabulary)
        _check_tokens(params.logit_bias, "logit_bias", ready.vocabulary)
        _check_tokens(stops, "stop_token_ids", ready.vocabulary)

    def _send_given_up(self) -> None:
        requests, self._given_up = tuple(self._given_up), []
        self._send(messages.GiveUp(requests))

    # The engine.

    def _launch(self) -> None:
        try:
            life = self._start_life(self._loop, self._died)
        except OSError as error:
            self._ended(f"could not be started ({error})")
            return
        self._life = life
        self._dead.clear()
        # The largest datagram: the kernel needs part of its send buffer for itself.
        room = life.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) - SOCKET_OVERHEAD
        self._most_bytes = min(room, MAX_FRAME_BYTES)
        self._sender = Sender(self._loop, life.sock)
        self._loop.add_reader(life.sock.fileno(), self._receive)
        self._send(messages.Load(messages.VERSION, self._settings))

    def _send(self, message: messages.ToEngine) -> None:
        if self._sender is not None:
            self._sender.send(messages.encode(message))

    def _receive(self) -> None:
        """Handle all pending messages."""
        while self._life is not None:
            try:
                size = self._life.sock.recv_into(self._buffer)
            except BlockingIOError:
                return
            except ConnectionResetError:
                size = 0
            if size == 0:
                self._loop.remove_reader(self._life.sock.fileno())
                self._life.socket_closed()
                return
            self._heard = self._loop.time()
            self._handle(messages.decode_from_engine(memoryview(self._buffer)[:size]))

    def _handle(self, message: messages.FromEngine) -> None:
        match message:
            case messages.StepReport():
                self._take(message)
            case messages.PromptLogprobsChunk():
                self._take_prompt(message)
            case messages.Refused():
                self._refuse(message)
            case messages.Failed():
                for request in message.requests:
                    self._fail(request, BackendFailed(message.reason))
            case messages.Ready():
                self._came(message)
            case messages.LoadFailed():
                self.reason = "; ".join(message.problems)
                if not self._loaded.done():
                    self._loaded.set_exception(ConfigError(message.problems))

    def _came(self, message: messages.Ready) -> None:
        self.ready, self.state, self.reason = message, "READY", ""
        self._ready_at = self._clock()
        self.metrics.loaded(message)
        log.info("%s is ready after %.2f s", self.name, message.load_s, extra={"model": self.name})
        if not self._loaded.done():
            self._loaded.set_result(None)

    def _take_prompt(self, message: messages.PromptLogprobsChunk) -> None:
        """Store prompt logprobs, which arrive before the request's first token."""
        generation = self._open.get(message.request)
        if generation is not None:
            known = generation.prompt_logprobs
            known += [None] * (generation.num_prompt - len(known))
            known[message.start : message.start + len(message.logprobs)] = message.logprobs

    def _take(self, report: messages.StepReport) -> None:
        self.last = report
        self._slowest_s = max(self._slowest_s, report.step_s)
        now = self._clock()
        self.metrics.step(report)
        for event in report.events:
            generation = self._open.get(event.request)
            if generation is not None and not generation.outputs[event.index].is_ended:
                generation.num_cached = event.num_cached
                try:
                    self._give(generation, event, now)
                except Exception:  # Its sink or detokenizer failed; other requests continue.
                    log.exception("%s: an answer cannot be given", self.name)
                    self.cancel_with(generation, BackendFailed("internal error; this is a bug"))
        self._check_idle()

    def _give(self, generation: Generation, event: messages.TokenEvent, now: float) -> None:
        """Detokenize a token and pass it to the request's sink."""
        token, params = event.token, generation.request.params
        output = generation.outputs[event.index]
        self.metrics.token(generation, output, now)
        if self._quotas.is_active:
            self._quotas.use_tokens(generation.caller, 1, now)
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
        if self._left(generation.request.id) is not None:
            self.metrics.finished(generation, self._clock())
            try:
                generation.sink.finished(generation.totals)
            except Exception:  # The sink failed.
                log.exception("%s: an answer cannot be given", self.name)
                generation.sink.failed(BackendFailed("internal error; this is a bug"))
            self._check_idle()

    def _refuse(self, message: messages.Refused) -> None:
        generation = self._left(message.request)
        if generation is not None:
            error: PenstockError = InvalidRequest(message.reason)
            if message.is_overload:
                error = Overloaded(message.reason, message.retry_after_s, message.kind)
                self._shares.refused(
                    sum(each.request.params.n for each in self._open.values()), self._clock()
                )
            self.metrics.refused(error, self._clock() - generation.arrived)
            generation.sink.failed(error)
            self._check_idle()

    def _fail(self, request: int, error: BackendFailed) -> None:
        generation = self._left(request)
        if generation is not None:
            self.metrics.failed(generation, error, self._clock())
            generation.sink.failed(error)
            self._check_idle()

    def _fail_all(self, error: BackendFailed | NotReady) -> None:
        generations = [self._left(request) for request in tuple(self._open)]
        for each in filter(None, generations):
            self.metrics.failed(each, error, self._clock())
            each.sink.failed(error)
        self._check_idle()

    def _check_idle(self) -> None:
        if not self._open:
            self.metrics.idle()
            self._idle.set()

    def _died(self, reason: str) -> None:
        life, sender = self._life, self._sender
        assert life is not None and sender is not None
        cause: Death = "crash"
        if self._is_hung:
            reason = f"said nothing for {self._longest_silence_s:.3g} s and was killed"
            cause, self._is_hung = "hang", False
        # Messages that it sent before its death still count.
        try:
            self._receive()
        except Exception:  # A new engine is started in any case.
            log.exception("%s: the last words of the engine cannot be read", self.name)
        self._loop.remove_reader(life.sock.fileno())
        sender.close()
        life.sock.close()
        self._life = self._sender = None
        self._dead.set()
        if not self._is_stopping:
            self._ended(reason, cause)

    def _ended(self, reason: str, cause: Death = "crash") -> None:
        was_ready, self.state = self.state == "READY", "UNAVAILABLE"
        if was_ready:
            self.metrics.died(cause)
        well_s = self._clock() - self._ready_at if was_ready else 0.0
        self._num_deaths = deaths_in_a_row(self._num_deaths, well_s)
        self._fail_all(BackendFailed(f"the engine {reason}; what it had generated is lost"))
        if not self._loaded.done() and self._num_deaths >= MAX_LOAD_DEATHS:
            text = f"the engine {reason} while loading, {MAX_LOAD_DEATHS} times"
            self._loaded.set_exception(ConfigError([self.reason or text]))
        if self._loaded.done() and self.ready is None:
            return
        self.reason = self.reason or f"its engine {reason}"
        delay_s = backoff_s(self._num_deaths)
        self.num_restarts += 1
        text = "%s: the engine %s; restart in %.1f s"
        log.warning(text, self.name, reason, delay_s, extra={"model": self.name, "reason": reason})
        self._restart = self._loop.call_later(delay_s, self._launch)
        self._restart_at = self._clock() + delay_s
        self.metrics.restarted()


def _rest(output: SequenceOutput) -> str:
    """Return the text held back, cut at the first stop string."""
    text = output.stops.add(output.stream.rest())
    return text if output.stops.found is not None else text + output.stops.rest()


def _check_tokens(tokens: Collection[int], field: str, vocabulary: int) -> None:
    """Raise InvalidRequest for a token outside the vocabulary."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        strange = next(each for each in tokens if not 0 <= each < vocabulary)
        text = f"token {strange}; expected 0 to {vocabulary - 1}"
        raise InvalidRequest(f"{field}: {text}" if field else text, field or None)
