"""A language model in this process: prompts and chats in, text out. The engine and the tokenizer
run in processes of their own, as in a server; parameters are those of OpenAI's API."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.config import ModelConfig
from penstock.errors import BackendFailed, InvalidRequest, NotReady, PenstockError
from penstock.llm.generation import Generation, Totals
from penstock.llm.language_model import LanguageModel
from penstock.llm.messages import TokenEvent
from penstock.wire import openai_v1
from penstock.wire.openai_v1 import ChatRequest, CompletionRequest

# A text to continue, or the messages of a chat.
Prompt = str | Sequence[Mapping[str, Any]]


class LocalTextModel:
    """Owns an event loop in its own thread; `stream` may be called from any thread."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._model = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:
            self._end_loop()
            raise

    def stream(self, prompt: Prompt, **parameters: object) -> Iterator[str]:
        """Yield the answer piece by piece. A text is continued; a list of messages is a chat.
        `parameters` are fields of OpenAI's requests: max_tokens, temperature, stop, seed, ..."""
        answer = _LocalAnswer(self._model, _parse(self.config.name, prompt, parameters))
        if self._is_closed:
            raise NotReady(f"model '{self.config.name}' is closed")
        self._loop.call_soon_threadsafe(answer.begin)
        try:
            while (piece := answer.pieces.get()) is not None:
                if isinstance(piece, PenstockError):
                    raise piece
                yield piece
        finally:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(answer.give_up)

    def statistics(self) -> dict[str, Any]:
        """Return an entry of v2's statistics, as in a server's `/stats`."""

        async def read() -> dict[str, Any]:
            return self._model.metrics.statistics()

        return asyncio.run_coroutine_threadsafe(read(), self._loop).result()

    def close(self) -> None:
        """Stop the model. Closing again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._model.close(), self._loop).result()
        self._end_loop()

    async def _start(self) -> LanguageModel:
        model = LanguageModel(self.config)
        try:
            await model.start()
        except BaseException:
            await model.close()
            raise
        return model

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass(slots=True, eq=False)
class _LocalAnswer:
    """One request on the model's loop. Ends `pieces` with None or an error, exactly once."""

    model: LanguageModel
    asked: ChatRequest | CompletionRequest
    pieces: queue.SimpleQueue[str | PenstockError | None] = field(default_factory=queue.SimpleQueue)
    generation: Generation | None = None
    is_ended: bool = False

    def begin(self) -> None:
        asked = self.asked
        try:
            if isinstance(asked, ChatRequest):
                self.model.encode_chat(asked.messages, asked.template_options, self)
            else:
                self.model.encode(asked.prompts, asked.has_special_tokens, self)
        except PenstockError as error:
            self.failed(error)

    def give_up(self) -> None:
        if self.generation is not None and not self.is_ended:
            self.model.cancel(self.generation)

    # Receives the tokens of the prompt.

    def is_gone(self) -> bool:
        return self.is_ended

    def encoded(self, tokens: list[list[int]]) -> None:
        try:
            self.generation = self.model.new_generation(tokens[0], self.asked.params, self)
        except PenstockError as error:
            self.failed(error)
            return
        self.model.submit(self.generation)

    # Receives the answer.

    def token(self, event: TokenEvent) -> None:
        if event.text:
            self.pieces.put(event.text)

    def finished(self, totals: Totals) -> None:
        self._end(None)

    def failed(self, error: Exception) -> None:
        self._end(error if isinstance(error, PenstockError) else BackendFailed(str(error)))

    def _end(self, last: PenstockError | None) -> None:
        if not self.is_ended:
            self.is_ended = True
            self.pieces.put(last)


def _parse(
    name: str, prompt: Prompt, parameters: Mapping[str, object]
) -> ChatRequest | CompletionRequest:
    """Check the request as the server does; InvalidRequest says what is wrong."""
    fields = {"model": name, **parameters}
    asked: ChatRequest | CompletionRequest
    if isinstance(prompt, str):
        asked = openai_v1.read_completion(msgspec.json.encode({**fields, "prompt": prompt}))
    else:
        asked = openai_v1.read_chat(msgspec.json.encode({**fields, "messages": list(prompt)}))
    if asked.params.n != 1:
        raise InvalidRequest(f"n is {asked.params.n}; expected 1: call it once for each answer")
    return asked
