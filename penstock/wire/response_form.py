"""Generated text as a response of OpenAI's responses API, whole or as its events. Pure.

A response is a list of items: reasoning, a message, calls of functions. In a stream each opens,
grows and closes before the next one; `sequence_number` counts the events.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.errors import PenstockError
from penstock.wire import openai_logprobs
from penstock.wire.json_errors import JsonObject
from penstock.wire.openai_forms import AnswerChoice, CallDelta, TokenUsage
from penstock.wire.openai_logprobs import TokenLogprob

_encode = msgspec.json.Encoder().encode
TEXT_FORMAT = {"format": {"type": "text"}}


@dataclass(slots=True)
class OpenItem:
    """An item that still grows: its place, and what it has so far."""

    place: int
    value: JsonObject
    text: str = ""
    logprobs: list[object] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return str(self.value["type"])

    @property
    def is_message(self) -> bool:
        return self.kind == "message"


@dataclass(slots=True)
class ResponseForm:
    """Encodes one response. It keeps what it has sent, as the last event repeats all of it."""

    id: str
    created: int
    model: str
    # Fields of the request that are repeated.
    repeated: JsonObject
    _number: int = 0
    _items: list[JsonObject] = field(default_factory=list)
    _open: OpenItem | None = None
    # Logprobs of tokens before the first text, which may turn out to belong to a call.
    _unshown: list[TokenLogprob] = field(default_factory=list)
    _reason: str | None = None

    def whole(self, choices: Sequence[AnswerChoice], usage: TokenUsage) -> bytes:
        (choice,) = choices
        self._reason = choice.reason
        self._grow(choice)
        self._close()
        return _encode(self._response(self._status(), usage))

    def begin(self, index: int) -> bytes:
        """Encode what precedes the first piece."""
        response = self._response("in_progress", None)
        events = (self._event(kind, response=response) for kind in ("created", "in_progress"))
        return b"".join(events)

    def piece(self, choice: AnswerChoice) -> bytes:
        data = self._grow(choice)
        if choice.reason is not None:
            self._reason = choice.reason
            data += self._close()
        return data

    def end(self, usage: TokenUsage) -> bytes:
        status = self._status()
        return self._event(status, response=self._response(status, usage))

    def error(self, error: PenstockError) -> bytes:
        """Encode the end of a stream that failed."""
        problem = {"code": "server_error", "message": str(error)}
        response = {**self._response("failed", None), "error": problem}
        return self._event("failed", response=response)

    # Items.

    def _grow(self, choice: AnswerChoice) -> bytes:
        data = b""
        if choice.reasoning:
            data += self._add_reasoning(choice.reasoning)
        if choice.calls or choice.reasoning:
            self._unshown.clear()
        elif choice.logprobs:
            self._unshown += choice.logprobs
        if choice.text or (self._unshown and self._open is not None and self._open.is_message):
            logprobs, self._unshown = self._unshown or choice.logprobs or (), []
            data += self._add_text(choice.text, logprobs)
        for call in choice.calls:
            data += self._add_call(call)
        return data

    def _add_reasoning(self, text: str) -> bytes:
        value = {"type": "reasoning", "id": new_id("rs"), "summary": [], "content": []}
        data, item = self._item("reasoning", value)
        item.text += text
        return data + self._of_item("reasoning_text.delta", item, content_index=0, delta=text)

    def _add_text(self, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        value = {"type": "message", "id": new_id("msg"), "role": "assistant", "content": []}
        is_new = self._open is None or not self._open.is_message
        data, item = self._item("message", value)
        if is_new:
            part = _text_part("", [])
            data += self._of_item("content_part.added", item, content_index=0, part=part)
        item.text += text
        new = _logprobs(logprobs)
        item.logprobs += new
        if not text and not new:
            return data
        return data + self._of_item(
            "output_text.delta", item, content_index=0, delta=text, logprobs=new
        )

    def _add_call(self, call: CallDelta) -> bytes:
        data = b""
        if call.name:
            data += self._close()
            value = {
                "type": "function_call", "id": new_id("fc"), "call_id": call.id,
                "name": call.name, "arguments": "",
            }  # fmt: skip
            data += self._item("function_call", value)[0]
        item = self._open
        assert item is not None, "the name of a call comes first"
        item.text += call.arguments
        if not call.arguments:
            return data
        return data + self._of_item("function_call_arguments.delta", item, delta=call.arguments)

    def _item(self, kind: str, value: JsonObject) -> tuple[bytes, OpenItem]:
        """Return the open item of a kind, after closing another one and opening it if needed."""
        if self._open is not None and self._open.kind == kind:
            return b"", self._open
        data = self._close()
        self._open = item = OpenItem(len(self._items), value)
        shown = {**value, "status": "in_progress"}
        return data + self._event("output_item.added", output_index=item.place, item=shown), item

    def _close(self) -> bytes:
        """Encode the end of the open item, and keep it."""
        item, self._open = self._open, None
        if item is None:
            return b""
        data, value = b"", item.value
        if item.kind == "function_call":
            value = {**value, "arguments": item.text}
            data += self._of_item("function_call_arguments.done", item, arguments=item.text,
                                  name=value["name"])  # fmt: skip
        elif item.kind == "reasoning":
            value = {**value, "content": [{"type": "reasoning_text", "text": item.text}]}
            data += self._of_item("reasoning_text.done", item, content_index=0, text=item.text)
        else:
            part = _text_part(item.text, item.logprobs)
            value = {**value, "content": [part]}
            data += self._of_item("output_text.done", item, content_index=0, text=item.text,
                                  logprobs=item.logprobs)  # fmt: skip
            data += self._of_item("content_part.done", item, content_index=0, part=part)
        is_cut = self._reason == "length"
        value = {**value, "status": "incomplete" if is_cut else "completed"}
        self._items.append(value)
        return data + self._event("output_item.done", output_index=item.place, item=value)

    # The response.

    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _response(self, status: str, usage: TokenUsage | None) -> JsonObject:
        given = self.repeated
        is_cut = status == "incomplete"
        return {
            **given,
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": list(self._items),
            "text": given.get("text") or TEXT_FORMAT,
            "tool_choice": given.get("tool_choice") or "auto",
            "tools": [_tool(each) for each in _list(given.get("tools"))],
            "metadata": given.get("metadata") or {},
            "background": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }

    def _of_item(self, kind: str, item: OpenItem, **fields: object) -> bytes:
        return self._event(kind, item_id=item.value["id"], output_index=item.place, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        name = f"response.{kind}"
        value = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(value))


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def _text_part(text: str, logprobs: Sequence[object]) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _logprobs(logprobs: Sequence[TokenLogprob]) -> list[object]:
    found = openai_logprobs.encode_chat(logprobs)["content"]
    return found if isinstance(found, list) else []


def _list(value: object) -> list[JsonObject]:
    return value if isinstance(value, list) else []


def _tool(tool: JsonObject) -> JsonObject:
    return {"strict": None, "parameters": None, **tool}


def _usage(usage: TokenUsage) -> JsonObject:
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
        "output_tokens": usage.num_generated,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning},
        "total_tokens": usage.num_prompt + usage.num_generated,
    }
