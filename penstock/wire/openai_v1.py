"""OpenAI's chat requests, and what all requests for text share: sampling fields and checks.

Pure. Each field of OpenAI's API and vLLM's extensions works, is refused by name if its value
requests something, or is harmless (`openai_fields`); unknown fields are ignored. Errors name their
field, for `param`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from penstock.errors import InvalidRequest
from penstock.sampling_params import SamplingParams
from penstock.types import Buffer
from penstock.wire import json_errors
from penstock.wire.json_errors import JsonObject
from penstock.wire.openai_constraints import ConstraintFields, constraint_field, read_constraint
from penstock.wire.openai_fields import OF_CHATS, OF_STREAMS, Asks
from penstock.wire.openai_messages import Message, read_messages
from penstock.wire.openai_tools import ToolRequest, read_tools

if TYPE_CHECKING:
    from penstock.wire.openai_prompts import TokenizeBody

Body = TypeVar("Body", bound=msgspec.Struct)
MAX_N, MAX_STOPS, MAX_STOP_CHARS, MAX_BIASES = 128, 16, 256, 1024
MAX_LOGPROBS = 20
# Largest count or token id.
LARGEST = (1 << 31) - 1
MAX_DIGITS, MAX_SHOWN = 10, 40
# Sampling fields that are numbers, with what they may be.
RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, LARGEST),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 10.0),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "n": (1, MAX_N),
    "priority": (-LARGEST, LARGEST),
}
MISSING = re.compile(r"Object missing required field `(\w+)`")
NOTHING_REFUSED: Mapping[str, Asks] = {}
MAX_MODEL_CHARS = 512


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(ConstraintFields, kw_only=True):
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    user: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    priority: int | None = None
    cache_salt: str | None = None


class ChatBody(SamplingFields, kw_only=True):
    """The JSON of a chat request."""

    model: str
    messages: list[JsonObject]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: JsonObject | None = None
    # Passed to the template, as in vLLM.
    reasoning_effort: str | None = None
    documents: list[JsonObject] | None = None
    add_generation_prompt: bool | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    model: str
    messages: Sequence[Message]
    params: SamplingParams
    is_streamed: bool
    template_options: JsonObject
    has_usage: bool
    # The field that gives `params.constraint`.
    constraint_field: str = ""
    tools: ToolRequest | None = None


_chat = msgspec.json.Decoder(ChatBody)
_any = msgspec.json.Decoder(JsonObject)


def read_chat(body: Buffer) -> ChatRequest:
    found = decode(_chat, body, OF_CHATS)
    messages = read_messages(found.messages)
    if found.top_logprobs and not found.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    check_range("top_logprobs", found.top_logprobs, 0, MAX_LOGPROBS)
    num_logprobs = (found.top_logprobs or 0) if found.logprobs else None
    newer = found.max_completion_tokens
    params = read_params(found, found.max_tokens if newer is None else newer, num_logprobs)
    tools = read_tools(found.tools, found.tool_choice, found.parallel_tool_calls)
    options = template_options(found)
    constrained = constraint_field(found)
    if tools is not None:
        options["tools"] = tools.listed
        if tools.is_forced and constrained not in ("", "response_format"):
            text = f"{constrained}: is for a whole text; tool_choice asks for a call"
            raise InvalidRequest(text, constrained)
    return ChatRequest(
        found.model,
        messages,
        params,
        bool(found.stream),
        options,
        has_usage(found),
        constrained,
        tools,
    )


def template_options(found: ChatBody | TokenizeBody) -> JsonObject:
    """Return what a request passes to the chat template besides its messages."""
    names = ("reasoning_effort", "documents", "add_generation_prompt")
    own = {name: getattr(found, name, None) for name in names}
    given = {name: value for name, value in own.items() if value is not None}
    return {**(found.chat_template_kwargs or {}), **given}


def decode(
    decoder: msgspec.json.Decoder[Body], body: Buffer, refused: Mapping[str, Asks] = NOTHING_REFUSED
) -> Body:
    try:
        found, fields = decoder.decode(body), _any.decode(body)
    except msgspec.ValidationError as error:
        raise wrong_field(error) from None
    except json_errors.UNREADABLE as error:
        raise InvalidRequest(f"the body is not JSON: {json_errors.explain(body, error)}") from None
    check_served(fields, refused)
    model = fields.get("model")
    if isinstance(model, str) and len(model) > MAX_MODEL_CHARS:
        text = f"model: a name of {len(model)} characters; expected at most {MAX_MODEL_CHARS}"
        raise InvalidRequest(text, "model")
    return found


def wrong_field(error: msgspec.ValidationError) -> InvalidRequest:
    text, _, path = str(error).partition(" - at `$")
    field = path.strip("`.").split(".")[0].split("[")[0] or None
    if field is None and (match := MISSING.match(text)):
        return InvalidRequest(text, match[1])
    return InvalidRequest(f"{field}: {text}" if field else text, field)


def find_refused(fields: Mapping[str, object], refused: Mapping[str, Asks]) -> str | None:
    """Return the first field whose value requests something that is refused."""
    for name, value in fields.items():
        if name in refused and not any(_is_same(value, each) for each in refused[name]):
            return name
    return None


def _is_same(value: object, other: object) -> bool:
    """Compare as JSON does: true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def check_served(fields: JsonObject, refused: Mapping[str, Asks]) -> None:
    name = find_refused(fields, refused)
    if name is not None:
        raise InvalidRequest(f"{name} is not supported", name, "unsupported_parameter")
    options = fields.get("stream_options")
    inner = find_refused(options, OF_STREAMS) if isinstance(options, Mapping) else None
    if inner is not None:
        text = f"stream_options.{inner} is not supported"
        raise InvalidRequest(text, "stream_options", "unsupported_parameter")


def read_params(
    found: SamplingFields, max_tokens: int | None, num_logprobs: int | None, least: int = 1
) -> SamplingParams:
    """Check the sampling fields of a request; fields that are null have their defaults."""
    check_range("max_tokens", max_tokens, least, LARGEST)
    check_range("min_tokens", found.min_tokens, 0, max_tokens)
    _check_stop_tokens(found.stop_token_ids or ())
    given: JsonObject = {}
    for name, (low, high) in RANGES.items():
        value = getattr(found, name)
        if value is not None:
            check_range(name, value, low, high)
            given[name] = value
    # vLLM's -1 means all; here it is 0.
    given["top_k"] = max(0, found.top_k or 0)
    constrained = read_constraint(found)
    return SamplingParams(
        **given,
        max_tokens=max_tokens,
        min_tokens=found.min_tokens or 0,
        logit_bias=_bias(found.logit_bias or {}),
        stop=_stops(found.stop),
        stop_token_ids=frozenset(found.stop_token_ids or ()),
        ignore_eos=bool(found.ignore_eos),
        num_logprobs=num_logprobs,
        constraint=None if constrained is None else constrained.constraint,
        cache_salt=found.cache_salt or "",
    )


def check_tokens(name: str, tokens: Sequence[int], num_known: int) -> None:
    """Raise InvalidRequest that names the first token outside a vocabulary of this size."""
    for token in tokens:
        if not 0 <= token < num_known:
            text = f"{name}: token {str(token)[:MAX_SHOWN]}; expected 0 to {num_known - 1}"
            raise InvalidRequest(text, name)


def _check_stop_tokens(tokens: Sequence[int]) -> None:
    name = "stop_token_ids"
    if len(tokens) > MAX_STOPS:
        raise InvalidRequest(f"{name}: {len(tokens)} tokens; expected at most {MAX_STOPS}", name)
    check_tokens(name, tokens, LARGEST + 1)


def check_range(name: str, value: float | None, least: float | None, most: float | None) -> None:
    if value is None:
        return
    is_low = least is not None and not value >= least
    if is_low or (most is not None and not value <= most):
        limits = f"at least {least}" if most is None else f"{least} to {most}"
        raise InvalidRequest(f"{name} is {str(value)[:MAX_SHOWN]}; expected {limits}", name)


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stops) > MAX_STOPS or any(not 1 <= len(each) <= MAX_STOP_CHARS for each in stops):
        text = f"stop: expected at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters"
        raise InvalidRequest(text, "stop")
    return stops


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    if len(given) > MAX_BIASES:
        text = f"logit_bias: {len(given)}; expected at most {MAX_BIASES}"
        raise InvalidRequest(text, "logit_bias")
    for token, value in given.items():
        is_token = token.isdecimal() and len(token) <= MAX_DIGITS
        if not is_token or not -100 <= value <= 100:
            shown = f"'{token[:MAX_SHOWN]}': {value}"
            text = f"logit_bias: {shown}; expected tokens with -100 to 100"
            raise InvalidRequest(text, "logit_bias")
    return {int(token): value for token, value in given.items()}


def has_usage(found: SamplingFields) -> bool:
    if found.stream_options is None:
        return False
    if not found.stream:
        text = "stream_options is for streams; expected stream to be true"
        raise InvalidRequest(text, "stream_options")
    return bool(found.stream_options.include_usage)
