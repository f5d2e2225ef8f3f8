"""OpenAI's API over HTTP: completions, chats and models, whole or as a stream of events.

Translates and nothing more: bodies to generations (`wire.openai_v1`), parts to choices, errors to
statuses by one table, in OpenAI's form. An answer that is streamed begins with its first piece, so
that whatever is refused before has a status of its own. Whoever leaves has it given up at once.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote

from penstock.errors import BackendFailed, NotReady, PenstockError
from penstock.llm.generation import Generation, GenerationSink, Part, Totals
from penstock.llm.params import Likelihood, Sampling
from penstock.llm.sequence import Ending
from penstock.protocols.http import Exchange
from penstock.protocols.openai_errors import kind_of, reply_error, reply_method
from penstock.wire import openai_v1
from penstock.wire.openai_v1 import Choice, Head, Invalid, Known, TokenLogprob, Usage, Wishes

if TYPE_CHECKING:
    from penstock.llm.text import Text
    from penstock.llm.text_model import TextModel

log = logging.getLogger("penstock.http")
MODELS = b"/v1/models"
_JSON = b"Content-Type: application/json\r\n"
_EVENTS = b"Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"


class TextModels(Protocol):
    def find(self, name: str) -> TextModel:
        """NotFound, NotReady."""

    def known(self) -> Sequence[Known]: ...


class OpenAiHttp:
    """Behind the gate."""

    def __init__(
        self,
        models: TextModels,
        is_draining: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._models = models
        self._is_draining = is_draining
        self._clock = clock
        self._posts: Mapping[bytes, Callable[[Exchange], None]] = {
            b"/v1/completions": self._completions,
            b"/v1/chat/completions": self._chats,
            b"/tokenize": self._tokenize,
            b"/detokenize": self._detokenize,
        }

    def handle(self, exchange: Exchange) -> None:
        try:
            self._handle(exchange)
        except PenstockError as error:
            reply_error(exchange, error)
        except Exception:  # The protocol edge: the client is told.
            log.exception("while handling %r", exchange.head.path)
            reply_error(exchange, BackendFailed("internal error"))

    def _handle(self, exchange: Exchange) -> None:
        path = exchange.head.path
        if path == MODELS or path.startswith(MODELS + b"/"):
            self._tell_models(exchange)
        elif (post := self._posts.get(path)) is None:
            text = f"there is no {path.decode('latin-1')[:200]} here"
            body = openai_v1.error(text, "not_found_error")
            exchange.reply(404, _JSON, (body,))
        elif exchange.head.method != b"POST":
            reply_method(exchange, b"POST")
        elif self._is_draining():
            raise NotReady("the server is shutting down")
        else:
            post(exchange)

    def _tell_models(self, exchange: Exchange) -> None:
        head = exchange.head
        if head.method not in (b"GET", b"HEAD"):
            reply_method(exchange, b"GET")
            return
        known = self._models.known()
        if head.path == MODELS:
            exchange.reply(200, _JSON, (openai_v1.models(known),))
            return
        name = unquote(head.path[len(MODELS) + 1 :].decode("latin-1"))
        found = [each for each in known if each.name == name]
        if not found:
            # Says what there is.
            self._models.find(name)
            raise NotReady(f"model '{name}' is loading")
        exchange.reply(200, _JSON, (openai_v1.model(found[0]),))

    def _completions(self, exchange: Exchange) -> None:
        asked = openai_v1.read_completion(exchange.body)
        if asked.is_echoed and asked.wishes.num_logprobs is not None:
            raise Invalid("echo together with logprobs is not served", "echo")
        if asked.wishes.max_tokens == 0:
            raise Invalid("max_tokens is 0; expected at least 1", "max_tokens")
        model = self._models.find(asked.model)
        form = CompletionForm(self._head("cmpl", asked.model))
        with counted(model, exchange.received):
            prompts = [
                Prompt(
                    _tokens(model.text, each, asked.has_special_tokens),
                    _echo(model.text, each) if asked.is_echoed else "",
                )
                for each in asked.prompts
            ]
            _begin(Job(exchange, model, form, asked.wishes, prompts), asked.streaming)

    def _chats(self, exchange: Exchange) -> None:
        asked = openai_v1.read_chat(exchange.body)
        model = self._models.find(asked.model)
        form = ChatForm(self._head("chatcmpl", asked.model))
        with counted(model, exchange.received):
            text = model.text.chat(asked.messages, asked.template_options)
            prompts = [Prompt(model.text.encode(text, is_whole=False))]
            _begin(Job(exchange, model, form, asked.wishes, prompts), asked.streaming)

    def _tokenize(self, exchange: Exchange) -> None:
        asked = openai_v1.read_tokenize(exchange.body)
        model = self._models.find(asked.model)
        if asked.prompt is None:
            tokens = model.text.encode(model.text.chat(asked.messages), is_whole=False)
        else:
            tokens = model.text.encode(asked.prompt, is_whole=asked.has_special_tokens)
        texts = [model.text.token(each) for each in tokens] if asked.has_texts else None
        exchange.reply(200, _JSON, (openai_v1.tokenized(tokens, model.max_length, texts),))

    def _detokenize(self, exchange: Exchange) -> None:
        name, tokens = openai_v1.read_detokenize(exchange.body)
        text = self._models.find(name).text.decode(tokens)
        exchange.reply(200, _JSON, (openai_v1.detokenized(text),))

    def _head(self, prefix: str, model: str) -> Head:
        return Head(f"{prefix}-{secrets.token_hex(12)}", int(self._clock()), model)


@contextmanager
def counted(model: TextModel, received: float) -> Iterator[None]:
    """What is refused before the model has it is the model's to count."""
    try:
        yield
    except PenstockError as error:
        model.refused(error, received)
        raise


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


def _tokens(text: Text, prompt: str | list[int], is_whole: bool) -> list[int]:
    return text.encode(prompt, is_whole=is_whole) if isinstance(prompt, str) else prompt


def _echo(text: Text, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else text.decode(prompt)


def _begin(job: Job, streaming: openai_v1.Streaming) -> None:
    answer = StreamedAnswer(job, streaming.has_usage) if streaming.is_on else WholeAnswer(job)
    salt = salt_of(job.exchange.head.headers)
    for number, prompt in enumerate(job.prompts):
        sink = PromptSink(answer, number, prompt.echo)
        generation = generation_of(job.model, job.wishes, prompt.tokens, sink, salt)
        generation.arrived = job.exchange.received
        answer.generations.append(generation)
    job.exchange.waiter = answer
    for generation in list(answer.generations):
        if not answer.is_over:
            job.model.generate(generation)


def salt_of(headers: Mapping[bytes, bytes]) -> str:
    """Who shares prompts in the cache: those with the same key."""
    secret = headers.get(b"authorization", b"") or headers.get(b"x-api-key", b"")
    return hashlib.sha256(secret).hexdigest()[:16] if secret else ""


def generation_of(
    model: TextModel, wishes: Wishes, tokens: list[int], sink: GenerationSink, salt: str
) -> Generation:
    left = model.max_length - len(tokens)
    if left < (wishes.max_tokens or 1):
        asked = f" and {wishes.max_tokens} are to follow" if wishes.max_tokens else ""
        raise Invalid(
            f"the prompt has {len(tokens)} tokens{asked}; expected at most {model.max_length} "
            "together",
            code="context_length_exceeded",
        )
    stops = frozenset(wishes.stop_tokens)
    if not wishes.ignores_end:
        stops |= model.text.stop_tokens
    sampling = Sampling(
        temperature=wishes.temperature,
        top_p=wishes.top_p,
        top_k=wishes.top_k,
        min_p=wishes.min_p,
        presence_penalty=wishes.presence_penalty,
        frequency_penalty=wishes.frequency_penalty,
        repetition_penalty=wishes.repetition_penalty,
        seed=secrets.randbits(62) if wishes.seed is None else wishes.seed,
        bias=wishes.bias,
        num_logprobs=wishes.num_logprobs,
    )
    ending = Ending(wishes.max_tokens or left, stops, wishes.min_tokens)
    return Generation(
        tokens, sampling, ending, sink, wishes.stops, wishes.num, wishes.priority, salt
    )


# Answers.


class Form(Protocol):
    """How choices are written, whole and in pieces."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes: ...
    def begin(self, index: int) -> bytes:
        """Before the first piece of a choice; empty where nothing is."""

    def piece(self, choice: Choice, offset: int) -> bytes: ...
    def usage(self, usage: Usage) -> bytes: ...


@dataclass(frozen=True, slots=True)
class CompletionForm:
    head: Head

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return openai_v1.completion(self.head, choices, usage)

    def begin(self, index: int) -> bytes:
        return b""

    def piece(self, choice: Choice, offset: int) -> bytes:
        return openai_v1.completion_piece(self.head, choice, offset)

    def usage(self, usage: Usage) -> bytes:
        return openai_v1.completion_usage(self.head, usage)


@dataclass(frozen=True, slots=True)
class ChatForm:
    head: Head

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return openai_v1.chat(self.head, choices, usage)

    def begin(self, index: int) -> bytes:
        return openai_v1.chat_begin(self.head, index)

    def piece(self, choice: Choice, offset: int) -> bytes:
        return openai_v1.chat_piece(self.head, choice)

    def usage(self, usage: Usage) -> bytes:
        return openai_v1.chat_usage(self.head, usage)


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


class Answer:
    """To one request, of one or several prompts; ends once, with all of them or with an error."""

    def __init__(self, job: Job) -> None:
        self.exchange = job.exchange
        self.form = job.form
        self.generations: list[Generation] = []
        self.is_over = False
        self.choices: dict[int, Growing] = {}
        self.usage = Usage(0, 0)
        self._model = job.model
        self._num = job.wishes.num
        self._has_logprobs = job.wishes.num_logprobs is not None
        self._num_finished = 0

    def abandon(self) -> None:
        """The client left."""
        self.is_over = True
        for generation in self.generations:
            self._model.give_up(generation)

    def part(self, number: int, part: Part, echo: str) -> None:
        place = number * self._num + part.index
        choice = self.choices.setdefault(place, Growing())
        text = part.text if choice.has_begun else echo + part.text
        logprobs = None
        if self._has_logprobs:
            logprobs = [] if part.likelihood is None else [self._named(part, part.likelihood)]
        self.grow(choice, Choice(place, text, part.reason or None, logprobs))
        choice.has_begun = True

    def finished(self, totals: Totals) -> None:
        known = self.usage
        self.usage = Usage(
            known.num_prompt + totals.num_prompt,
            known.num_generated + totals.num_generated,
            known.num_cached + totals.num_found,
        )
        self._num_finished += 1
        if self._num_finished == len(self.generations):
            self.is_over = True
            self.end()

    def failed(self, error: PenstockError) -> None:
        if not self.is_over:
            self.abandon()
            self.fail(error)

    def _named(self, part: Part, likelihood: Likelihood) -> TokenLogprob:
        text = self._model.text
        top = [
            (text.token(token), logprob)
            for token, logprob in zip(likelihood.top_tokens, likelihood.top_logprobs, strict=True)
        ]
        return TokenLogprob(text.token(part.token), likelihood.logprob, top)

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
        self.exchange.reply(200, _JSON, (self.form.whole(choices, self.usage),))


class StreamedAnswer(Answer):
    def __init__(self, job: Job, has_usage: bool) -> None:
        super().__init__(job)
        self._has_usage = has_usage

    def grow(self, choice: Growing, new: Choice) -> None:
        if not self.exchange.is_streaming:
            self.exchange.start_stream(200, _EVENTS)
        data = b"" if choice.has_begun else self.form.begin(new.index)
        # Parts of a character that is not whole yet are nothing to tell.
        if new.text or new.reason or new.logprobs:
            data += self.form.piece(new, len(choice.text))
        choice.text += new.text
        self.exchange.stream(data)

    def end(self) -> None:
        usage = self.form.usage(self.usage) if self._has_usage else b""
        self.exchange.stream(usage + openai_v1.DONE)
        self.exchange.end_stream()

    def fail(self, error: PenstockError) -> None:
        if not self.exchange.is_streaming:
            reply_error(self.exchange, error)
            return
        _, kind = kind_of(error)
        self.exchange.stream(b"data: " + openai_v1.error(str(error), kind) + b"\n\n")
        self.exchange.end_stream()
