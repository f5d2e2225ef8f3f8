"""Text requests over HTTP: tokenizes prompts, starts generations, and assembles their output into
one answer, whole or as server-sent events, in the form of any protocol.

A streamed answer starts with the first piece of text, so that earlier refusals still get their own
HTTP status. When the client disconnects, its generations are cancelled at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.errors import (
    BackendFailed,
    Cancelled,
    InvalidRequest,
    NotReady,
    PenstockError,
    TooLarge,
)
from penstock.llm import text_split
from penstock.llm.generation import Generation
from penstock.llm.language_model import CONTEXT_LENGTH_EXCEEDED, LanguageModel
from penstock.llm.message_reader import MessageReader
from penstock.llm.messages import TokenEvent
from penstock.llm.tool_formats import Offer, after_prompt, constrain
from penstock.protocols import access_log
from penstock.protocols.choice_logprobs import ChoiceLogprobs
from penstock.protocols.gate import secret_of
from penstock.protocols.http import Exchange
from penstock.protocols.http_errors import reply_error
from penstock.sampling_params import CONSTRAINT, SamplingParams
from penstock.serving.served import Served
from penstock.serving.traffic_split import TrafficSplit
from penstock.types import CANCELLED
from penstock.wire.generate_v2 import GenerateForm
from penstock.wire.openai_constraints import check_size
from penstock.wire.openai_forms import AnswerChoice, CallDelta, CompletionForm, TokenUsage
from penstock.wire.openai_logprobs import TokenLogprob
from penstock.wire.openai_messages import Message
from penstock.wire.response_form import ResponseForm

log = logging.getLogger("penstock.http")
EVENTS = b"Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"


@contextmanager
def counted(model: Served, received: float) -> Iterator[None]:
    """Count errors that are raised here, before submission, as refusals of the model."""
    try:
        yield
    except PenstockError as error:
        model.refused(error, received)
        raise


@contextmanager
def guarded(exchange: Exchange, is_logged: bool) -> Iterator[None]:
    """Answer errors that are raised here, in the form of the path's protocol."""
    path = exchange.head.path
    try:
        yield
    except PenstockError as error:
        reply_error(exchange, error)
        if is_logged:
            what = {"path": path.decode("latin-1")}
            access_log.refused("http", what, exchange.received, error, path)
    except Exception:  # Answer 500 and keep serving.
        log.exception("while handling %r", path)
        reply_error(exchange, BackendFailed("internal error"))


@dataclass(slots=True, kw_only=True)
class TextCall:
    """A request for tokens of texts. The model's renderer tokenizes them, then `take` gets the
    tokens. A client that disconnects meanwhile gets no answer."""

    exchange: Exchange
    model: LanguageModel
    # The request field that holds the texts, for errors.
    field: str
    # Whether the model's metrics count refusals.
    is_counted: bool = True
    is_logged: bool = False
    # Counts what becomes of it, if the model has a rollout.
    split: TrafficSplit | None = None

    def take(self, tokens: Sequence[list[int]]) -> None:
        """Go on with the tokens of each text."""
        raise NotImplementedError

    def tokenize(self, given: Sequence[str | list[int]], *, is_whole: bool = True) -> None:
        """Tokenize texts; token lists pass unchanged. Errors that are known at once are raised."""
        with self._counted():
            if any(isinstance(each, str) for each in given):
                self.model.encode(given, is_whole, self)
            else:
                self.take([each for each in given if not isinstance(each, str)])

    def tokenize_chat(self, messages: Sequence[Message], options: Mapping[str, object]) -> None:
        with self._counted():
            self.model.encode_chat(messages, options, self)

    # Called by the renderer.

    def is_gone(self) -> bool:
        return self.exchange.is_finished

    def encoded(
        self,
        tokens: Sequence[list[int]],
        then: Callable[[Sequence[list[int]]], None] | None = None,
    ) -> None:
        with guarded(self.exchange, self.is_logged), self._counted():
            if self.exchange.is_finished:
                raise Cancelled("the client left")
            (then or self.take)(tokens)

    def failed(self, error: Exception) -> None:
        with guarded(self.exchange, self.is_logged), self._counted():
            raise error

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count refusals, and name the request field in errors about its text."""
        try:
            yield
        except PenstockError as error:
            add_field(error, self.field)
            if self.is_counted:
                self.model.refused(error, self.exchange.received)
            if self.split is not None:
                text_split.note_refusal(self.split, self.model, error, self.exchange.received)
            raise


def add_field(error: PenstockError, field: str) -> None:
    """Let an error about a request name `field`, unless it names one already."""
    if isinstance(error, InvalidRequest) and not error.field:
        error.field = field
        if isinstance(error, TooLarge):
            # Only a text that cannot fit the context is too large here.
            error.code = CONTEXT_LENGTH_EXCEEDED


@dataclass(slots=True, kw_only=True)
class GenerateCall(TextCall):
    """A request for text: tokenize its prompts, then submit a generation for each."""

    form: CompletionForm | GenerateForm | ResponseForm
    params: SamplingParams
    answer: type[Answer]
    # The request's id in the log.
    id: str = ""
    # Prompts that precede their answers; empty: none.
    echoed: Sequence[str | list[int]] = ()
    # The request field that has the constraint of the text, for errors.
    constraint_field: str = "structured_outputs"
    # What the answer may contain besides its text: calls of tools, reasoning.
    offer: Offer | None = None
    # Each prompt as the client sent it, for recordings.
    asked: Sequence[Mapping[str, object]] = ()

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs are returned, before those of generated tokens."""
        return bool(self.echoed) and self.params.num_logprobs is not None

    @property
    def is_prompt_only(self) -> bool:
        """Whether no tokens are requested, only the prompts."""
        return self.params.max_tokens == 0

    def take(self, tokens: Sequence[list[int]]) -> None:
        """Submit generations, when the grammar of structured output is known to be valid."""
        if self.offer is not None:
            self.offer = after_prompt(self.offer, self.model.vocabulary, tokens[0])
            constraint = constrain(self.offer, self.params.constraint)
            self.params = replace(self.params, constraint=constraint)
        constraint = self.params.constraint
        if constraint is None:
            self.submit(tokens)
            return
        field = "tools" if self.offer is not None and self.offer.is_forced else ""
        self.constraint_field = field or self.constraint_field
        try:
            check_size(constraint.text, self.constraint_field)
            self.model.check_constraint(constraint, GrammarCheck(self, tokens))
        except PenstockError as error:
            add_field(error, self.constraint_field)
            raise

    def submit(self, tokens: Sequence[list[int]]) -> None:
        """Submit a generation for each prompt."""
        model, exchange = self.model, self.exchange
        num_asked = len(tokens) * self.params.n
        if num_asked > model.max_waiting:
            text = f"n x prompts is {num_asked}; expected at most {model.max_waiting} in a request"
            raise InvalidRequest(text, "n")
        params = replace(
            self.params,
            cache_salt=salt_of(exchange.head.headers, self.params.cache_salt),
            num_prompt_logprobs=self.params.num_logprobs if self.has_prompt_logprobs else None,
        )
        answer, decode = self.answer(self), model.vocabulary.decode
        echoes = [each if isinstance(each, str) else decode(each) for each in self.echoed]
        echoes = echoes or [""] * len(tokens)
        for number, (prompt, echo) in enumerate(zip(tokens, echoes, strict=True)):
            sink = PromptSink(answer, number, echo)
            generation = model.new_generation(prompt, params, sink)
            generation.arrived, generation.caller = exchange.received, exchange.caller
            generation.asked = self.asked[number] if self.asked else None
            if self.offer is not None:
                generation.shown_tokens = frozenset(model.dialect.tokens.values())
            if self.split is not None:
                text_split.watch(self.split, model, generation)
            answer.generations.append(generation)
        first, *others = (each.request for each in answer.generations)
        first.num_following = sum(len(each.tokens) for each in others)
        for each in others:
            each.leader = first.id
        exchange.abandon = answer.abandon
        for generation in list(answer.generations):
            if not answer.is_over:
                model.submit(generation)


@dataclass(frozen=True, slots=True)
class GrammarCheck:
    """The renderer's answer about the grammar of a call."""

    call: GenerateCall
    tokens: Sequence[list[int]]

    def is_gone(self) -> bool:
        return self.call.is_gone()

    def encoded(self, tokens: Sequence[list[int]]) -> None:
        self.call.encoded(self.tokens, self.call.submit)

    def failed(self, error: Exception) -> None:
        if isinstance(error, PenstockError):
            add_field(error, self.call.constraint_field)
        self.call.failed(error)


def salt_of(headers: Mapping[bytes, bytes], cache_salt: str = "") -> str:
    """Return the salt that separates prefix caches: one for each API key and `cache_salt`."""
    parts = secret_of(headers) or b"", cache_salt.encode()
    if not any(parts):
        return ""
    digests = (hashlib.sha256(part).digest() for part in parts)
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


@dataclass(slots=True)
class PromptSink:
    """The sink of one prompt; its choices are numbered after those of earlier prompts."""

    answer: Answer
    number: int
    echo: str

    def token(self, event: TokenEvent) -> None:
        self.answer.token(self.number, event, self.echo)

    def finished(self, totals: TokenUsage) -> None:
        self.answer.finished(totals)

    def failed(self, error: PenstockError) -> None:
        self.answer.failed(error)


@dataclass(slots=True)
class PartialChoice:
    """A choice that is still being generated."""

    text: str = ""
    reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    has_begun: bool = False
    reasoning: str = ""
    num_reasoning: int = 0
    calls: list[CallDelta] = field(default_factory=list)
    # Separates calls and reasoning from the text; None if there are none.
    reader: MessageReader | None = None
    # None if logprobs were not requested.
    named: ChoiceLogprobs | None = None


class Answer:
    """The answer to a request of one or more prompts; ends once, with all choices or an error."""

    def __init__(self, call: GenerateCall) -> None:
        self.exchange = call.exchange
        self.form = call.form
        self.generations: list[Generation] = []
        self.is_over = False
        self.choices: dict[int, PartialChoice] = {}
        self.usage = TokenUsage(0, 0)
        self.call = call
        self._model = call.model
        self._num = call.params.n
        self._has_logprobs = call.params.num_logprobs is not None
        self._num_finished = 0
        # Names the version that answers while a rollout runs.
        self.headers = b""
        if call.split is not None:
            self.headers = b"Penstock-Version: %b\r\n" % call.model.config.version.encode()

    def abandon(self) -> None:
        self._give_up()
        self._note(CANCELLED)

    def token(self, number: int, event: TokenEvent, echo: str) -> None:
        place = number * self._num + event.index
        choice = self.choices.setdefault(place, PartialChoice())
        text = "" if self.call.is_prompt_only else event.text
        if not choice.has_begun:
            text = echo + text
        logprobs = None
        if self._has_logprobs:
            if choice.named is None:
                generation, has_prompt = self.generations[number], self.call.has_prompt_logprobs
                choice.named = ChoiceLogprobs(self._model.vocabulary, generation, has_prompt)
            logprobs = choice.named.take(None if self.call.is_prompt_only else event)
        new = AnswerChoice(place, text, event.reason or None, logprobs)
        self.grow(choice, new if self.call.offer is None else self._read(choice, new))
        choice.has_begun = True

    def _read(self, choice: PartialChoice, new: AnswerChoice) -> AnswerChoice:
        """Separate calls of tools and reasoning from the text."""
        offer = self.call.offer
        assert offer is not None
        if choice.reader is None:
            choice.reader = MessageReader(offer)
        was_reasoning = choice.reader.is_reasoning
        found = choice.reader.add(new.text, is_last=new.reason is not None)
        choice.num_reasoning += was_reasoning or choice.reader.is_reasoning
        calls = [each if not each.name else self._with_id(each, offer) for each in found.calls]
        reason = new.reason
        if reason == "stop" and choice.reader.num_calls and not offer.is_named:
            reason = "tool_calls"
        return AnswerChoice(new.index, found.content, reason, new.logprobs, found.reasoning, calls)

    def _with_id(self, call: CallDelta, offer: Offer) -> CallDelta:
        assert offer.format is not None
        return dataclasses.replace(call, id=offer.format.new_id())

    def finished(self, totals: TokenUsage) -> None:
        known = self.usage
        self.usage = TokenUsage(
            known.num_prompt + totals.num_prompt,
            known.num_generated + (0 if self.call.is_prompt_only else totals.num_generated),
            known.num_cached + totals.num_cached,
            sum(each.num_reasoning for each in self.choices.values()),
        )
        self._num_finished += 1
        if self._num_finished == len(self.generations):
            self.is_over = True
            self.end()
            self._note(None)

    def failed(self, error: PenstockError) -> None:
        if not self.is_over:
            if isinstance(error, InvalidRequest) and error.field == CONSTRAINT:
                error.field = self.call.constraint_field
            add_field(error, self.call.field)
            self._give_up()
            self.fail(error)
            self._note(error)

    def _give_up(self) -> None:
        self.is_over = True
        for generation in self.generations:
            self._model.cancel(generation)

    def _note(self, error: PenstockError | None) -> None:
        """Write to the access log; a failed stream with its error's status, not the 200 sent."""
        if self.call.is_logged:
            path, received = self.exchange.head.path, self.exchange.received
            what = {**access_log.about(self._model.config), "request_id": self.call.id}
            access_log.generated(what, self.generations, received, error, path)

    def grow(self, choice: PartialChoice, new: AnswerChoice) -> None:
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError

    def fail(self, error: PenstockError) -> None:
        reply_error(self.exchange, error)


class StreamedAnswer(Answer):
    def grow(self, choice: PartialChoice, new: AnswerChoice) -> None:
        if not self.exchange.is_streaming:
            self.exchange.start_stream(200, EVENTS + self.headers)
        data = b"" if choice.has_begun else self.form.begin(new.index)
        # An incomplete UTF-8 character yields no text yet, so there may be nothing to send.
        if new.text or new.reason or new.logprobs or new.reasoning or new.calls:
            data += self.form.piece(new)
        choice.reason = new.reason
        self.exchange.stream(data)

    def end(self) -> None:
        self.exchange.stream(self.form.end(self.usage))
        self.exchange.end_stream()

    def fail(self, error: PenstockError) -> None:
        if not self.exchange.is_streaming:
            reply_error(self.exchange, error)
            return
        # End every choice with a reason, so that clients know that nothing more comes.
        reason = "abort" if isinstance(error, Cancelled | NotReady) else "error"
        for place in range(len(self.generations) * self._num):
            choice = self.choices.setdefault(place, PartialChoice())
            if choice.reason is None:
                self.grow(choice, AnswerChoice(place, "", reason))
        self.exchange.stream(self.form.error(error))
        self.exchange.end_stream()
