"""OpenAI's responses API in its stateless form: requests, read as chats. Pure.

Fields that need a server to keep something (`store`, `previous_response_id`, `conversation`,
`background`) are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from penstock.errors import InvalidRequest
from penstock.types import Buffer
from penstock.wire.json_errors import JsonObject
from penstock.wire.openai_constraints import of_schema, read_format
from penstock.wire.openai_fields import OF_RESPONSES
from penstock.wire.openai_messages import MAX_MESSAGES, Message, read_messages
from penstock.wire.openai_nested import (
    FunctionTool,
    Reasoning,
    TextConfig,
    check_fields,
    check_items,
)
from penstock.wire.openai_tools import read_tools
from penstock.wire.openai_v1 import (
    MAX_LOGPROBS,
    ChatRequest,
    SamplingFields,
    StreamOptions,
    check_range,
    decode,
    read_params,
)

TEXT_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
# Fields of `reasoning` that ask for a summary.
SUMMARIES = ("summary", "generate_summary")
LOGPROBS = "message.output_text.logprobs"
# Fields of the request that the response repeats.
REPEATED = (
    "instructions", "max_output_tokens", "metadata", "reasoning", "temperature", "text",
    "tool_choice", "tools", "top_logprobs", "top_p", "user",
)  # fmt: skip


class ResponsesBody(msgspec.Struct, kw_only=True):
    """The JSON of a request for a response."""

    model: str
    input: str | list[JsonObject]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: JsonObject | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    reasoning: JsonObject | None = None
    metadata: JsonObject | None = None
    # vLLM's extensions.
    seed: int | None = None
    top_k: int | None = None
    cache_salt: str | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    chat: ChatRequest
    # Fields that the response repeats.
    repeated: JsonObject


_responses = msgspec.json.Decoder(ResponsesBody)


def read_responses(body: Buffer) -> ResponsesRequest:
    found = decode(_responses, body, OF_RESPONSES)
    check_range("max_output_tokens", found.max_output_tokens, 1, None)
    _check_nested(found)
    tools = read_tools(
        [_chat_tool(each, place) for place, each in enumerate(found.tools or ())],
        _chat_choice(found.tool_choice),
        found.parallel_tool_calls,
    )
    fields = SamplingFields(
        temperature=found.temperature, top_p=found.top_p, seed=found.seed, top_k=found.top_k,
        cache_salt=found.cache_salt, priority=found.priority,
    )  # fmt: skip
    params = read_params(fields, found.max_output_tokens, _num_logprobs(found))
    schema = _schema(found.text or {})
    if schema is not None:
        params = msgspec.structs.replace(params, constraint=of_schema(schema, "text"))
    options: JsonObject = {} if tools is None else {"tools": tools.listed}
    if effort := _effort(found.reasoning or {}):
        options["reasoning_effort"] = effort
    messages = read_messages(_counted(found))
    is_streamed = bool(found.stream)
    chat = ChatRequest(
        found.model, messages, params, is_streamed, options, True, "text" if schema else "", tools
    )
    repeated = {name: getattr(found, name, None) for name in REPEATED}
    repeated["parallel_tool_calls"] = found.parallel_tool_calls is not False
    return ResponsesRequest(chat, repeated)


def _check_nested(found: ResponsesBody) -> None:
    """Check the types of the fields within objects; an object's reader decides what they mean."""
    check_fields(found.reasoning, Reasoning | None, "reasoning")
    check_fields(found.text, TextConfig | None, "text")
    check_fields(found.metadata, dict[str, str] | None, "metadata")
    for place, tool in enumerate(found.tools or ()):
        if tool.get("type") == "function":
            check_fields(tool, FunctionTool, f"tools[{place}]")
    if isinstance(found.input, list):
        check_items(found.input)


def _num_logprobs(found: ResponsesBody) -> int | None:
    for each in found.include or ():
        if each != LOGPROBS:
            text = f"include: '{each[:40]}' is not supported; expected {LOGPROBS}"
            raise InvalidRequest(text, "include", "unsupported_parameter")
    check_range("top_logprobs", found.top_logprobs, 0, MAX_LOGPROBS)
    return (found.top_logprobs or 0) if found.include else None


def _schema(text: JsonObject) -> object:
    if text.get("verbosity") is not None:
        text_ = "text.verbosity is not supported"
        raise InvalidRequest(text_, "text", "unsupported_parameter")
    form = text.get("format")
    if form is None:
        return None
    if not isinstance(form, Mapping):
        raise InvalidRequest("text.format: expected an object with a type", "text")
    if form.get("type") == "json_schema" and form.get("name") is None:
        raise InvalidRequest("text.format: Object missing required field `name`", "text")
    # Here the schema is in the format itself.
    return read_format({**form, "json_schema": form}, "text")


def _effort(reasoning: JsonObject) -> object:
    for name, value in reasoning.items():
        # A summary of any length is one; the others say how the server may choose.
        is_asked = value is not None and (value != "auto" or name in SUMMARIES)
        if name != "effort" and is_asked:
            text = f"reasoning.{name} is not supported"
            raise InvalidRequest(text, "reasoning", "unsupported_parameter")
    return reasoning.get("effort")


def _chat_tool(tool: JsonObject, place: int) -> JsonObject:
    """Return a tool as chats have it."""
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:40]
        raise InvalidRequest(f"tools[{place}].type is {kind!r}; expected function", "tools")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _chat_choice(choice: object) -> object:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "function":
        return _named(choice)
    if choice.get("type") == "allowed_tools":
        listed = choice.get("tools")
        tools = [_named(each) for each in listed] if isinstance(listed, list) else None
        allowed = {"mode": choice.get("mode"), "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _named(choice: object) -> JsonObject:
    name = choice.get("name") if isinstance(choice, Mapping) else None
    return {"type": "function", "function": {"name": name}}


def _counted(found: ResponsesBody) -> list[Message]:
    """Return the messages of a chat; the error about their number names what the client sent."""
    messages = _messages(found)
    if not 1 <= len(messages) <= MAX_MESSAGES:
        text = f"input: {len(messages)} messages; expected 1 to {MAX_MESSAGES}"
        raise InvalidRequest(text, "input")
    return messages


def _messages(found: ResponsesBody) -> list[Message]:
    """Return the messages of a chat; calls that follow each other are one message's."""
    messages: list[Message] = []
    if found.instructions is not None:
        messages.append({"role": "system", "content": found.instructions})
    if isinstance(found.input, str):
        return [*messages, {"role": "user", "content": found.input}]
    reasoning = ""
    for place, item in enumerate(found.input):
        where = f"input[{place}]"
        if item.get("type") == "reasoning":
            reasoning = _reasoning(item)
            continue
        message = _message(item, where)
        is_answer = message["role"] == "assistant"
        if is_answer and reasoning:
            message["reasoning_content"], reasoning = reasoning, ""
        calls = message.get("tool_calls")
        last = messages[-1] if messages else {}
        if calls and last.get("role") == "assistant":
            known = last.get("tool_calls") or []
            last["tool_calls"] = [*known, *calls] if isinstance(known, list) else calls
        else:
            messages.append(message)
    return messages


def _message(item: JsonObject, where: str) -> Message:
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item.get("role"), "content": _content(item.get("content"), where)}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call: JsonObject = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        content = _content(item.get("output"), where)
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    expected = "message, function_call, function_call_output or reasoning"
    raise InvalidRequest(f"{where}.type is {str(kind)[:40]!r}; expected {expected}", "input")


def _content(content: object, where: str) -> object:
    if not isinstance(content, list):
        return content
    return [_part(part, f"{where}.content[{place}]") for place, part in enumerate(content)]


def _part(part: object, where: str) -> JsonObject:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in TEXT_PARTS:
        raise InvalidRequest(f"{where}: a part of type {str(kind)[:40]!r}; expected text", "input")
    name = TEXT_PARTS[str(kind)]
    return {"type": name, name: part.get(name)}


def _reasoning(item: JsonObject) -> str:
    parts = item.get("content")
    texts = [each.get("text") for each in parts if isinstance(each, Mapping)] if isinstance(
        parts, Sequence
    ) and not isinstance(parts, str) else []  # fmt: skip
    return "".join(each for each in texts if isinstance(each, str))
