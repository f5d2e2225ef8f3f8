"""A language model in this process: prompts and chats in, text out. The engine and the tokenizer
run in processes of their own, as in a server; parameters are those of OpenAI's API."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from penstock.api.options import unknown_option
from penstock.config import ModelConfig
from penstock.errors import BackendFailed, InvalidRequest, NotReady, Overloaded, PenstockError
from penstock.llm.generation import Generation
from penstock.llm.language_model import LanguageModel
from penstock.llm.messages import TokenEvent
from penstock.llm.settings import settings_of
from penstock.serving.local import ModelThread, started
from penstock.wire.openai_fields import HARMLESS, OF_CHATS, OF_COMPLETIONS
from penstock.wire.openai_forms import TokenUsage
from penstock.wire.openai_prompts import CompletionBody, CompletionRequest, read_completion
from penstock.wire.openai_v1 import ChatBody, ChatRequest, read_chat

# A text to continue, or the messages of a chat.
Prompt = str | Sequence[Mapping[str, Any]]
# A prompt's number, and a piece of its answer, None at its end, or why it failed.
TextEvent = tuple[int, str | PenstockError | None]
# Fields of requests that the call itself gives.
OF_THE_CALL = frozenset({"model", "prompt", "messages", "stream", "stream_options"})
# Parameters that have an effect; others of the API are refused by name, or harmless.
PARAMETERS = sorted(
    {*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__} - OF_THE_CALL - {*HARMLESS}
)
# How long prompts that have not begun wait for a new engine: loading one takes up to minutes. It
# counts from when they miss it, until a token comes.
ENGINE_WAIT_S = 300.0
# Time between attempts meanwhile.
LOOK_AGAIN_S = 0.5
KNOWN = frozenset({*PARAMETERS, *OF_COMPLETIONS, *OF_CHATS, *HARMLESS})


class LocalTextModel(ModelThread[LanguageModel]):
    """Owns an event loop in its own thread; its methods may be called from any thread."""

    def __init__(self, config: ModelConfig) -> None:
        # Runs that have not ended; guarded by the lock.
        self._runs: set[_LocalRun] = set()
        super().__init__(config, _start(config))

    def stream(
        self, prompts: Sequence[Prompt], parameters: Mapping[str, object]
    ) -> Generator[TextEvent]:
        """Yield the answers piece by piece; parameters are those of `LoadedModel.generate`. Leaving
        the loop early cancels the rest."""
        events: queue.SimpleQueue[TextEvent] = queue.SimpleQueue()
        run = self._begin(prompts, parameters, events.put)
        try:
            num_open = len(prompts)
            while num_open:
                event = events.get()
                num_open -= not isinstance(event[1], str)
                yield event
        finally:
            self._give_up(run)

    async def stream_async(
        self, prompts: Sequence[Prompt], parameters: Mapping[str, object]
    ) -> AsyncGenerator[TextEvent]:
        """Like `stream`, on the caller's event loop."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue[TextEvent]()

        def put(event: TextEvent) -> None:
            with contextlib.suppress(RuntimeError):  # The caller's loop has ended.
                loop.call_soon_threadsafe(events.put_nowait, event)

        run = self._begin(prompts, parameters, put)
        try:
            num_open = len(prompts)
            while num_open:
                event = await events.get()
                num_open -= not isinstance(event[1], str)
                yield event
        finally:
            self._give_up(run)

    def _begin(
        self,
        prompts: Sequence[Prompt],
        parameters: Mapping[str, object],
        put: Callable[[TextEvent], None],
    ) -> _LocalRun:
        asked = _parse_all(self.config.name, prompts, parameters)
        run = _LocalRun(self._model, asked, put, num_at_once(self.config))
        with self._lock:
            if self._is_closed:
                raise self._closed()
            self._runs.add(run)
            self._loop.call_soon_threadsafe(run.begin_some)
        return run

    async def _close_model(self) -> None:
        await super()._close_model()
        with self._lock:
            runs = list(self._runs)
        for run in runs:
            # Prompts that wait to be begun again: nothing else would end them.
            run.fail_rest(self._closed())

    def _give_up(self, run: _LocalRun) -> None:
        with self._lock:
            self._runs.discard(run)
            if not self._is_closed:
                self._loop.call_soon_threadsafe(run.give_up)


def num_at_once(config: ModelConfig) -> int:
    """Return the prompts that are open at a time: enough to keep the engine busy."""
    settings = settings_of(config)
    return min(2 * settings.max_sequences, settings.max_waiting)


async def _start(config: ModelConfig) -> LanguageModel:
    return await started(LanguageModel(config))


@dataclass(slots=True, eq=False)
class _LocalRun:
    """Several requests on the model's loop, some of them open at a time. Each ends with None or an
    error, exactly once, unless the caller gives up."""

    model: LanguageModel
    asked: Sequence[ChatRequest | CompletionRequest]
    put: Callable[[TextEvent], None]
    num_at_once: int
    # Requests that were not begun; those that came too soon come again.
    _due: deque[int] = field(init=False)
    _open: dict[int, _LocalAnswer] = field(default_factory=dict)
    _is_paused: bool = False
    _is_beginning: bool = False
    # When the engine was first missed, if no token came since, by the loop's clock.
    missed_at: float | None = None

    def __post_init__(self) -> None:
        self._due = deque(range(len(self.asked)))

    def begin_some(self) -> None:
        """Begin as many as may be open. One that fails at once calls this again: it goes on here,
        however many fail."""
        if self._is_beginning:
            return
        self._is_beginning = True
        while self._due and not self._is_paused and len(self._open) < self.num_at_once:
            number = self._due.popleft()
            self._open[number] = answer = _LocalAnswer(self, number)
            answer.begin()
        self._is_beginning = False

    def ended(self, number: int, last: PenstockError | None) -> None:
        del self._open[number]
        if isinstance(last, Overloaded | NotReady) and (delay_s := self._delay_s(last)) is not None:
            self._due.appendleft(number)
            if not self._is_paused:
                self._is_paused = True
                asyncio.get_running_loop().call_later(delay_s, self._go_on)
            return
        self.put((number, last))
        if isinstance(last, NotReady):
            # Closed, or there is no new engine: the others would fail too.
            self.fail_rest(last)
        self.begin_some()

    def fail_rest(self, error: PenstockError) -> None:
        """End the requests that were not begun."""
        while self._due:
            self.put((self._due.popleft(), error))

    def _delay_s(self, refusal: Overloaded | NotReady) -> float | None:
        """Return when to begin a refused request again; None if it fails."""
        if isinstance(refusal, Overloaded):
            # Others use the model too: nothing is lost, it takes longer.
            return refusal.retry_after_s
        if refusal.retry_after_s is None:
            return None
        # The engine ended before the request had begun, and a new one is being loaded.
        now = asyncio.get_running_loop().time()
        if self.missed_at is None:
            self.missed_at = now
        if now - self.missed_at >= ENGINE_WAIT_S:
            return None
        return min(refusal.retry_after_s, LOOK_AGAIN_S)

    def give_up(self) -> None:
        self._due.clear()
        for answer in list(self._open.values()):
            answer.give_up()

    def _go_on(self) -> None:
        self._is_paused = False
        self.begin_some()


@dataclass(slots=True, eq=False)
class _LocalAnswer:
    """One request of a run."""

    run: _LocalRun
    number: int
    generation: Generation | None = None
    is_ended: bool = False

    def begin(self) -> None:
        asked, model = self.run.asked[self.number], self.run.model
        try:
            if isinstance(asked, ChatRequest):
                model.encode_chat(asked.messages, asked.template_options, self)
            else:
                model.encode(asked.prompts, asked.has_special_tokens, self)
        except Exception as error:  # The other prompts go on.
            self.failed(error)

    def give_up(self) -> None:
        self.is_ended = True
        if self.generation is not None:
            self.run.model.cancel(self.generation)

    # Receives the tokens of the prompt.

    def is_gone(self) -> bool:
        return self.is_ended

    def encoded(self, tokens: list[list[int]]) -> None:
        params = self.run.asked[self.number].params
        try:
            self.generation = self.run.model.new_generation(tokens[0], params, self)
        except PenstockError as error:
            self.failed(error)
            return
        self.run.model.submit(self.generation)

    # Receives the answer.

    def token(self, event: TokenEvent) -> None:
        self.run.missed_at = None
        if event.text:
            self.run.put((self.number, event.text))

    def finished(self, totals: TokenUsage) -> None:
        self._end(None)

    def failed(self, error: Exception) -> None:
        self._end(error if isinstance(error, PenstockError) else BackendFailed(str(error)))

    def _end(self, last: PenstockError | None) -> None:
        if not self.is_ended:
            self.is_ended = True
            self.run.ended(self.number, last)


def is_one(prompt: object) -> bool:
    """Return whether this is one prompt, a text or the messages of a chat, and not several."""
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, Sequence) or not prompt:
        return False
    return all(isinstance(each, Mapping) for each in prompt)


def check_names(parameters: Mapping[str, object]) -> None:
    """Raise TypeError for the first parameter that no request has, as of any function."""
    for name in parameters:
        if name not in KNOWN:
            raise unknown_option(name, PARAMETERS)


def _parse_all(
    name: str, prompts: Sequence[Prompt], parameters: Mapping[str, object]
) -> list[ChatRequest | CompletionRequest]:
    """Check all requests before any is begun; the error names the prompt if there are several."""
    fields = {"model": name, **{key: _encode(key, value) for key, value in parameters.items()}}
    found = []
    for number, prompt in enumerate(prompts):
        try:
            found.append(_parse(prompt, fields))
        except InvalidRequest as error:
            if len(prompts) == 1:
                raise
            text = f"prompts[{number}]: {error}"
            raise InvalidRequest(text, error.field, error.code) from error
    return found


def _parse(prompt: Prompt, fields: Mapping[str, object]) -> ChatRequest | CompletionRequest:
    """Check the request as the server does; InvalidRequest says what is wrong."""
    if not is_one(prompt):
        kind = type(prompt).__name__
        raise InvalidRequest(f"a prompt is of type {kind}; expected a text or a list of messages")
    asked: ChatRequest | CompletionRequest
    if isinstance(prompt, str):
        given = _encode("prompt", prompt)
        asked = read_completion(msgspec.json.encode({**fields, "prompt": given}))
    else:
        given = _encode("messages", list(prompt))
        asked = read_chat(msgspec.json.encode({**fields, "messages": given}))
    if asked.params.n != 1:
        raise InvalidRequest(f"n is {asked.params.n}; expected 1: call it once for each answer")
    return asked


def _encode(field: str, value: object) -> msgspec.Raw:
    """Return a value of a request as JSON; InvalidRequest names its field if it has no such
    form."""
    try:
        return msgspec.Raw(msgspec.json.encode(value, enc_hook=_plain))
    except UnicodeEncodeError:
        problem = "a text holds a lone surrogate, which UTF-8 cannot encode"
    except RecursionError:
        problem = "it is nested too deeply"
    except (TypeError, ValueError, OverflowError) as error:
        problem = str(error)
    raise InvalidRequest(f"{field}: {problem}", field)


def _plain(value: object) -> object:
    """Return what JSON has for a value of another type: those of numpy, and subclasses."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of type {type(value).__name__} has no form in JSON")
