"""The open requests of a language model: admission, messages to and from its engine,
detokenization, and delivery to their sinks.

Runs on the core's event loop. When the engine dies, its open requests fail: a partial answer is
never silently continued by another engine. Knows no protocol: each request carries its sink.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from penstock.errors import (
    BackendFailed,
    InvalidRequest,
    NotReady,
    Overloaded,
    PenstockError,
    QuotaExceeded,
)
from penstock.llm import messages
from penstock.llm.engine_supervisor import EngineLife, EngineSupervisor
from penstock.llm.generation import Generation, SequenceOutput
from penstock.llm.stops import StopTexts
from penstock.llm.text_metrics import TextMetrics
from penstock.llm.token_bytes import Vocabulary
from penstock.processes.child import StartLife
from penstock.serving.metrics import ModelMetrics
from penstock.serving.quotas import QueueShares, Quotas
from penstock.types import CANCELLED

log = logging.getLogger("penstock.llm")
# Placeholder until the renderer has loaded the vocabulary.
NO_TEXT = Vocabulary(b"", b"")


class OpenGenerations:
    """Invariant: a generation that was admitted is in `_open` until it has ended."""

    def __init__(
        self,
        metrics: ModelMetrics,
        settings: messages.EngineSettings,
        vocabulary: Vocabulary = NO_TEXT,
        start_life: StartLife = EngineLife,
        clock: Callable[[], float] = time.monotonic,
        *,
        quotas: Quotas | None = None,
    ) -> None:
        self.name = metrics.name
        self.metrics = TextMetrics(metrics)
        self.vocabulary = vocabulary
        self.engine = EngineSupervisor(
            metrics.name, settings, self.metrics, self, start_life, clock
        )
        self._quotas = quotas or Quotas()
        max_pending = settings.max_waiting + settings.max_sequences
        self._shares = QueueShares(self._quotas, max_pending)
        self._clock = clock
        # When the engine last sent a message or was idle, by the loop's clock; its slowest step.
        self.heard_at = self.slowest_s = 0.0
        self._open: dict[int, Generation] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_idle(self) -> bool:
        return not self._open

    async def drain(self) -> None:
        await self._idle.wait()

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
        """Drop a request, at any time; its sink is not called again."""
        self._abort(generation, CANCELLED)

    def _abort(self, generation: Generation, error: PenstockError) -> bool:
        """Drop a request; return whether it was open."""
        request = generation.request.id
        if self._close(request) is None:
            return False
        self.metrics.failed(generation, error, self._clock())
        self.engine.abort(request)
        self._check_idle()
        return True

    def _admit(self, generation: Generation) -> None:
        request, ready = generation.request, self.engine.ready
        if self.engine.state != "READY" or ready is None:
            raise self.engine.not_ready()
        _check(request, ready, self.vocabulary)
        if self._quotas.is_active:
            # QuotaExceeded when the key has used up its tokens or its share of the queue.
            now = self._clock()
            self._shares.check(generation.caller, now)
            self._quotas.check_tokens(generation.caller, now)
        generation.admitted = self._clock()
        generation.arrived = generation.arrived or generation.admitted
        data = self._encode(request)
        generation.outputs = [
            SequenceOutput(self.vocabulary.stream(request.tokens), StopTexts(request.params.stop))
            for _ in range(request.params.n)
        ]
        process = self.engine.process
        assert process.child is not None, "its state is READY"
        process.child.send(data)
        if not self._open:
            self.heard_at = process.loop.time()
        self._open[request.id] = generation
        if self.engine.watch is None:
            self.engine.look_after()
        if self._quotas.is_active:
            self._shares.enter(generation, generation.caller, request.params.n)
            self._quotas.use_tokens(generation.caller, len(request.tokens), generation.admitted)
        self._idle.clear()

    def _encode(self, request: messages.GenerateRequest) -> bytes:
        """Encode a request. InvalidRequest if it does not fit a datagram."""
        try:
            data = messages.encode(request)
        except OverflowError:
            raise InvalidRequest("a number has more than 64 bits") from None
        most = self.engine.max_bytes
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
        self.heard_at = self.engine.process.loop.time()
        match messages.decode_from_engine(datagram):
            case messages.StepReport() as report:
                self.slowest_s = max(self.slowest_s, report.step_s)
                self.metrics.step(report)
                self._take(report)
            case messages.PromptLogprobsChunk() as chunk:
                self._take_prompt(chunk)
            case messages.RequestRefused() as refusal:
                self._refuse(refusal)
            case messages.StepFailed() as failure:
                self._fail(failure.requests, BackendFailed(failure.reason))
            case message:
                self.engine.loaded(message)

    def engine_ended(self, error: BackendFailed | NotReady) -> None:
        self._fail(tuple(self._open), error)

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
                self.engine.send(messages.EndText(event.request, event.index))
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
            self.metrics.refused(error, self._clock() - generation.arrived)
            generation.sink.failed(error)
            self._check_idle()

    def _fail(self, requests: Collection[int], error: BackendFailed | NotReady) -> None:
        generations = [self._close(request) for request in requests]
        for each in filter(None, generations):
            self.metrics.failed(each, error, self._clock())
            each.sink.failed(error)
        self._check_idle()

    def _check_idle(self) -> None:
        if not self._open:
            self.metrics.idle()
            self._idle.set()


def _check(
    request: messages.GenerateRequest, ready: messages.Ready, vocabulary: Vocabulary
) -> None:
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
