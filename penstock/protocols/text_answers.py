"""A request for text on its way through HTTP: from what was asked to generations, and from their
parts to one answer, whole or as a stream of events, in whatever form a protocol gives it.

An answer that is streamed begins with its first piece, so that whatever is refused before has a
status of its own. Whoever leaves has it given up at once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import Cancelled, InvalidRequest, NotReady, PenstockError, TooLarge
from penstock.llm.asking import generation_of
from penstock.llm.generation import Generation, Part, Totals
from penstock.llm.params import Likelihood
from penstock.protocols import access_log
from penstock.protocols.gate import caller_of, secret_of
from penstock.protocols.http import Exchange
from penstock.protocols.v2_http import reply_error, status_at
from penstock.serving.served import Served
from penstock.types import CANCELLED
from penstock.wire.openai_v1 import (
    CONTEXT_LENGTH_EXCEEDED,
    Choice,
    Invalid,
    TokenLogprob,
    TooLargeField,
    Usage,
    Wishes,
)

if TYPE_CHECKING:
    from penstock.llm.text_model import TextModel
    from penstock.llm.token_bytes import Stream

_JSON = b"Content-Type: application/json\r\n"
_EVENTS = b"Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"


@contextmanager
def counted(model: Served, received: float) -> Iterator[None]:
    """What is refused before the model has it is the model's to count."""
    try:
        yield
    except PenstockError as error:
        model.refused(error, received)
        raise


Guarded = Callable[[Exchange, Callable[[], None]], None]
Then = Callable[[Sequence[list[int]]], None]


@dataclass(frozen=True, slots=True)
class Reading:
    """The texts of a request while the model's renderer makes tokens of them. A client that leaves
    meanwhile gets no answer."""

    exchange: Exchange
    model: TextModel
    # Called with the tokens of each.
    then: Then
    # Calls that later, and answers errors.
    guarded: Guarded
    # The field that texts come from, for errors.
    param: str
    # Whether refusals count as the model's.
    is_counted: bool = True

    def begin(self, given: Sequence[str | list[int]], *, is_whole: bool = True) -> None:
        """Errors that are known at once are raised."""
        with self._counted():
            if any(isinstance(each, str) for each in given):
                self.model.encode(given, is_whole, self)
            else:
                self.then([each for each in given if not isinstance(each, str)])

    def begin_chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> None:
        with self._counted():
            self.model.encode_chat(messages, options, self)

    def is_gone(self) -> bool:
        return self.exchange.is_finished

    def encoded(self, tokens: Sequence[list[int]]) -> None:
        self.guarded(self.exchange, partial(self._go_on, tokens))

    def failed(self, error: Exception) -> None:
        self.guarded(self.exchange, partial(self._fail, error))

    def _fail(self, error: Exception) -> None:
        with self._counted():
            raise error

    def _go_on(self, tokens: Sequence[list[int]]) -> None:
        with self._counted():
            if self.exchange.is_finished:
                raise Cancelled("the client left")
            self.then(tokens)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the request, and name the request field in errors about its text."""
        is_counted = self.is_counted
        with counted(self.model, self.exchange.received) if is_counted else nullcontext():
            try:
                yield
            except InvalidRequest as error:
                raise with_field(error, self.param) from None


def with_field(error: InvalidRequest, param: str) -> InvalidRequest:
    """The same error, with a field where it names none."""
    if isinstance(error, TooLargeField) or (isinstance(error, Invalid) and error.param):
        return error
    if isinstance(error, TooLarge):
        # Only a text that cannot fit the context is too large here.
        return TooLargeField(str(error), param, CONTEXT_LENGTH_EXCEEDED)
    return Invalid(str(error), param, error.code if isinstance(error, Invalid) else None)


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: list[int]
    # What comes before its text.
    echo: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """One request, understood."""

    exchange: Exchange
    model: TextModel
    form: Form
    wishes: Wishes
    prompts: Sequence[Prompt]
    # What the log calls it.
    id: str = ""
    is_logged: bool = False
    # Tokens of prompts are told with their logprobs, before those that are generated.
    tells_prompts: bool = False
    # The field that prompts came from, for errors.
    param: str = "prompt"

    @property
    def is_of_prompts(self) -> bool:
        """Nothing is to be generated."""
        return self.wishes.max_tokens == 0


def begin(answer: Answer) -> None:
    job = answer.job
    num_asked = len(job.prompts) * job.wishes.num
    if num_asked > job.model.max_waiting:
        text = f"n x prompts is {num_asked}; expected at most {job.model.max_waiting} in a request"
        raise Invalid(text, "n")
    wishes = job.wishes
    headers = job.exchange.head.headers
    salt, caller = salt_of(headers, wishes.cache_salt), caller_of(headers)
    for number, prompt in enumerate(job.prompts):
        sink = PromptSink(answer, number, prompt.echo)
        generation = generation_of(job.model, wishes, prompt.tokens, sink, salt)
        if job.tells_prompts:
            num = wishes.num_logprobs
            generation.sampling = replace(generation.sampling, num_prompt_logprobs=num)
        generation.arrived, generation.caller = job.exchange.received, caller
        answer.generations.append(generation)
    first, *others = answer.generations
    first.num_following = sum(len(each.tokens) for each in others)
    for each in others:
        each.leader = first
    job.exchange.waiter = answer
    for generation in list(answer.generations):
        if not answer.is_over:
            job.model.generate(generation)


def salt_of(headers: Mapping[bytes, bytes], cache_salt: str = "") -> str:
    """Return the salt that separates prefix caches: one for each API key and `cache_salt`."""
    parts = secret_of(headers) or b"", cache_salt.encode()
    if not any(parts):
        return ""
    digests = (hashlib.sha256(part).digest() for part in parts)
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


# Answers.


class Form(Protocol):
    """How choices are written, whole and in pieces."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes: ...
    def begin(self, index: int) -> bytes:
        """Before the first piece of a choice; empty where nothing is."""

    def piece(self, choice: Choice) -> bytes: ...

    def end(self, usage: Usage) -> bytes:
        """After the last piece."""

    def error(self, error: PenstockError) -> bytes:
        """Ends a stream that cannot be completed."""


@dataclass(slots=True)
class PromptSink:
    """Of one prompt of a request: its choices come after those of the prompts before it."""

    answer: Answer
    number: int
    echo: str

    def part(self, part: Part) -> None:
        self.answer.part(self.number, part, self.echo)

    def finished(self, totals: Totals) -> None:
        self.answer.finished(totals)

    def failed(self, error: PenstockError) -> None:
        self.answer.failed(error)


@dataclass(slots=True)
class Growing:
    """A choice."""

    text: str = ""
    reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    has_begun: bool = False
    # Text offsets of its tokens; None if logprobs were not requested.
    places: TokenPlaces | None = None


class TokenPlaces:
    """How many characters of a choice come before each of its tokens."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._num_chars = 0

    def add(self, token: int) -> int:
        """The place of the next token."""
        place = self._num_chars
        self._num_chars += len(self._stream.add(token))
        return place


class Answer:
    """To one request, of one or several prompts; ends once, with all of them or with an error."""

    def __init__(self, job: Job) -> None:
        self.exchange = job.exchange
        self.form = job.form
        self.generations: list[Generation] = []
        self.is_over = False
        self.choices: dict[int, Growing] = {}
        self.usage = Usage(0, 0)
        self.job = job
        self._model = job.model
        self._num = job.wishes.num
        self._has_logprobs = job.wishes.num_logprobs is not None
        self._num_finished = 0

    def abandon(self) -> None:
        """The client left."""
        self._give_up()
        self._note(CANCELLED)

    def part(self, number: int, part: Part, echo: str) -> None:
        place = number * self._num + part.index
        choice = self.choices.setdefault(place, Growing())
        text = "" if self.job.is_of_prompts else part.text
        if not choice.has_begun:
            text = echo + text
        logprobs = self._logprobs(choice, number, part) if self._has_logprobs else None
        self.grow(choice, Choice(place, text, part.reason or None, logprobs))
        choice.has_begun = True

    def _logprobs(self, choice: Growing, number: int, part: Part) -> list[TokenLogprob]:
        """Those of a part; of the first with those of the prompt, where they are wanted."""
        found: list[TokenLogprob] = []
        vocabulary, generation = self._model.vocabulary, self.generations[number]
        if choice.places is None:
            before = () if self.job.tells_prompts else generation.tokens
            choice.places = TokenPlaces(vocabulary.stream(before))
            if self.job.tells_prompts:
                told = generation.prompt_likelihoods
                for token, likelihood in zip_longest(generation.tokens, told):
                    found.append(self._named(token, likelihood, choice.places))
        if part.likelihood is not None and not self.job.is_of_prompts:
            found.append(self._named(part.token, part.likelihood, choice.places))
        return found

    def finished(self, totals: Totals) -> None:
        known = self.usage
        self.usage = Usage(
            known.num_prompt + totals.num_prompt,
            known.num_generated + (0 if self.job.is_of_prompts else totals.num_generated),
            known.num_cached + totals.num_found,
        )
        self._num_finished += 1
        if self._num_finished == len(self.generations):
            self.is_over = True
            self.end()
            self._note(None)

    def failed(self, error: PenstockError) -> None:
        if not self.is_over:
            if isinstance(error, InvalidRequest):
                error = with_field(error, self.job.param)
            self._give_up()
            self.fail(error)
            self._note(error)

    def _give_up(self) -> None:
        self.is_over = True
        for generation in self.generations:
            self._model.give_up(generation)

    def _note(self, error: PenstockError | None) -> None:
        """For the access log; of a stream that failed the status was sent before."""
        if self.job.is_logged:
            path = self.exchange.head.path
            status = 200 if error is None else status_at(path, error)
            kind = "" if error is None else type(error).__name__
            told = access_log.Generated(self.job.id, self.exchange.received)
            for each in self.generations:
                told.add(each)
            access_log.generated(status, self._model.config, told, kind)

    def _named(
        self, token: int, likelihood: Likelihood | None, places: TokenPlaces
    ) -> TokenLogprob:
        """The first token of a prompt has no likelihood."""
        vocabulary, place = self._model.vocabulary, places.add(token)
        if likelihood is None:
            return TokenLogprob(vocabulary.piece(token), math.nan, offset=place)
        top = [
            (vocabulary.piece(other), logprob)
            for other, logprob in zip(likelihood.top_tokens, likelihood.top_logprobs, strict=True)
        ]
        return TokenLogprob(vocabulary.piece(token), likelihood.logprob, top, place)

    def grow(self, choice: Growing, new: Choice) -> None:
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError

    def fail(self, error: PenstockError) -> None:
        reply_error(self.exchange, error)


class WholeAnswer(Answer):
    def grow(self, choice: Growing, new: Choice) -> None:
        choice.text += new.text
        choice.reason = new.reason
        choice.logprobs += new.logprobs or ()

    def end(self) -> None:
        choices = [
            Choice(place, each.text, each.reason, each.logprobs if self._has_logprobs else None)
            for place, each in sorted(self.choices.items())
        ]
        self.reply(self.form.whole(choices, self.usage))

    def reply(self, body: bytes) -> None:
        self.exchange.reply(200, _JSON, (body,))


class OneEventAnswer(WholeAnswer):
    """Whole, to whoever reads streams."""

    def reply(self, body: bytes) -> None:
        self.exchange.reply(200, _EVENTS, (b"data: " + body + b"\n\n",))


class StreamedAnswer(Answer):
    def grow(self, choice: Growing, new: Choice) -> None:
        if not self.exchange.is_streaming:
            self.exchange.start_stream(200, _EVENTS)
        data = b"" if choice.has_begun else self.form.begin(new.index)
        # Parts of a character that is not whole yet are nothing to tell.
        if new.text or new.reason or new.logprobs:
            data += self.form.piece(new)
        choice.text += new.text
        choice.reason = new.reason
        self.exchange.stream(data)

    def end(self) -> None:
        self.exchange.stream(self.form.end(self.usage))
        self.exchange.end_stream()

    def fail(self, error: PenstockError) -> None:
        if not self.exchange.is_streaming:
            reply_error(self.exchange, error)
            return
        # A client sees that every choice has ended, why, and that nothing more comes.
        reason = "abort" if isinstance(error, Cancelled | NotReady) else "error"
        for place in range(len(self.generations) * self._num):
            choice = self.choices.setdefault(place, Growing())
            if choice.reason is None:
                self.grow(choice, Choice(place, "", reason))
        self.exchange.stream(self.form.error(error))
        self.exchange.end_stream()
