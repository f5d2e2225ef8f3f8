"""A language model in this process: prompts and chats in, text out. The engine and the tokenizer
run in processes of their own, as in a server; parameters are those of OpenAI's API."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.config import ModelConfig
from penstock.errors import BackendFailed, InvalidRequest, PenstockError
from penstock.llm.generation import Generation
from penstock.llm.language_model import LanguageModel
from penstock.llm.messages import TokenEvent
from penstock.serving.local import ModelThread, started
from penstock.wire.openai_forms import TokenUsage
from penstock.wire.openai_prompts import CompletionRequest, read_completion
from penstock.wire.openai_v1 import ChatRequest, read_chat

# A text to continue, or the messages of a chat.
Prompt = str | Sequence[Mapping[str, Any]]


class LocalTextModel(ModelThread[LanguageModel]):
    """Owns an event loop in its own thread; `stream` may be called from any thread."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, _start(config))

    def stream(self, prompt: Prompt, **parameters: object) -> Iterator[str]:
        """Yield the answer piece by piece; prompt and parameters are `LoadedModel.generate`'s."""
        answer = _LocalAnswer(self._model, _parse(self.config.name, prompt, parameters))
        with self._lock:
            if self._is_closed:
                raise self._closed()
            self._loop.call_soon_threadsafe(answer.begin)
        try:
            while (piece := answer.pieces.get()) is not None:
                if isinstance(piece, PenstockError):
                    raise piece
                yield piece
        finally:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(answer.give_up)


async def _start(config: ModelConfig) -> LanguageModel:
    return await started(LanguageModel(config))


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

    def finished(self, totals: TokenUsage) -> None:
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
        asked = read_completion(msgspec.json.encode({**fields, "prompt": prompt}))
    else:
        asked = read_chat(msgspec.json.encode({**fields, "messages": list(prompt)}))
    if asked.params.n != 1:
        raise InvalidRequest(f"n is {asked.params.n}; expected 1: call it once for each answer")
    return asked
