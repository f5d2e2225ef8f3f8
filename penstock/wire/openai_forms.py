"""Generated text as OpenAI's JSON: completions and chats, whole or as events of a stream. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from penstock.errors import PenstockError
from penstock.wire import openai_logprobs
from penstock.wire.openai_logprobs import TokenLogprob
from penstock.wire.statuses import encode_openai_error

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of a call of a tool: its name and id with the first, then pieces of its arguments."""

    index: int
    name: str = ""
    arguments: str = ""
    id: str = ""


@dataclass(frozen=True, slots=True)
class AnswerChoice:
    index: int
    text: str
    # None while it is being generated.
    reason: str | None
    # None if not requested. The first token of a prompt has no logprob (NaN).
    logprobs: Sequence[TokenLogprob] | None = None
    # What came before the text, in models that reason; calls of tools, in part or as a whole.
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()


@dataclass(frozen=True, slots=True)
class TokenUsage:
    num_prompt: int
    num_generated: int
    # Prompt tokens found in the prefix cache.
    num_cached: int = 0
    # Generated tokens of reasoning.
    num_reasoning: int = 0

    def json(self) -> dict[str, object]:
        found: dict[str, object] = {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_generated,
            "total_tokens": self.num_prompt + self.num_generated,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }
        if self.num_reasoning:
            found["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning}
        return found


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """Encodes the choices of a completion, whole or as events."""

    id: str
    created: int
    model: str
    # Whether a stream ends with the usage.
    has_usage: bool = False
    kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"

    def whole(self, choices: Sequence[AnswerChoice], usage: TokenUsage) -> bytes:
        found = self._json(self.kind, [self._choice(each) for each in choices])
        return _encode({**found, "usage": usage.json()})

    def begin(self, index: int) -> bytes:
        """Encode what precedes the first piece of a choice; may be empty."""
        return b""

    def piece(self, choice: AnswerChoice) -> bytes:
        return _event(self._json(self.chunk_kind, [self._piece(choice)]))

    def end(self, usage: TokenUsage) -> bytes:
        """Encode what follows the last piece."""
        if not self.has_usage:
            return DONE
        return _event({**self._json(self.chunk_kind, []), "usage": usage.json()}) + DONE

    def error(self, error: PenstockError) -> bytes:
        """Encode the end of a stream that failed."""
        return b"data: " + encode_openai_error(error) + b"\n\n" + DONE

    def _json(self, kind: str, choices: Sequence[object]) -> dict[str, object]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices}

    def _choice(self, choice: AnswerChoice) -> dict[str, object]:
        found = choice.logprobs
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": None if found is None else openai_logprobs.encode_completion(found),
            "finish_reason": choice.reason,
        }

    _piece = _choice


class ChatForm(CompletionForm):
    """Encodes the choices of a chat, whole or as events."""

    __slots__ = ()
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def begin(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": "", "refusal": None}
        choice = _chat_choice(AnswerChoice(index, "", None), "delta", delta)
        return _event(self._json(self.chunk_kind, [choice]))

    def _choice(self, choice: AnswerChoice) -> dict[str, object]:
        content = choice.text if choice.text or not choice.calls else None
        message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["tool_calls"] = [_call(each) for each in choice.calls]
        return _chat_choice(choice, "message", message)

    def _piece(self, choice: AnswerChoice) -> dict[str, object]:
        delta: dict[str, object] = {"content": choice.text} if choice.text else {}
        if choice.reasoning:
            delta["reasoning_content"] = choice.reasoning
        if choice.calls:
            delta["tool_calls"] = [_call_delta(each) for each in choice.calls]
        return _chat_choice(choice, "delta", delta)


def _event(value: object) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def _call(call: CallDelta) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_delta(call: CallDelta) -> dict[str, object]:
    if call.name:
        return {"index": call.index, **_call(call)}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def _chat_choice(choice: AnswerChoice, name: str, content: object) -> dict[str, object]:
    found = choice.logprobs
    return {
        "index": choice.index,
        name: content,
        "logprobs": None if found is None else openai_logprobs.encode_chat(found),
        "finish_reason": choice.reason,
    }
