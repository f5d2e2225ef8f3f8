"""Triton's generate extension, as its vLLM backend defines it: JSON to a request, and generated
text to JSON, whole or as events.

Pure. Parameters may be beside the text, in `parameters`, or as JSON in `sampling_parameters`; those
beside the text win. As in Triton, a whole answer begins with the input text, unless
`exclude_input_in_output` is true; a stream never does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from penstock.errors import InvalidRequest, PenstockError
from penstock.sampling_params import SamplingParams
from penstock.types import Buffer
from penstock.wire import json_errors
from penstock.wire.json_errors import JsonObject
from penstock.wire.openai_forms import AnswerChoice, TokenUsage
from penstock.wire.openai_prompts import read_sampling_params

# Parameters of Triton's backends and of chats that are not served; only empty values are accepted.
UNSERVED = (
    "return_logprobs", "return_cumulative_logprob", "bad_words", "stop_words", "image",
    "tools", "tool_choice", "parallel_tool_calls",
)  # fmt: skip
# Not in streams, whose events carry no token counts.
WHOLE_ONLY = ("return_num_input_tokens", "return_num_output_tokens")
NOTHING: tuple[object, ...] = (None, False, "", [], [""])
BOOLEANS = ("stream", "exclude_input_in_output", "return_finish_reason", *WHOLE_ONLY)


@dataclass(frozen=True, slots=True)
class TritonRequest:
    text: str
    params: SamplingParams
    is_streamed: bool
    # Whether the answer begins with the text.
    is_echoed: bool
    # Returned unchanged.
    id: str
    has_reason: bool
    has_num_input: bool
    has_num_output: bool


_body = msgspec.json.Decoder(JsonObject)
_encode = msgspec.json.Encoder().encode


def read(body: Buffer, is_streaming: bool) -> TritonRequest:
    """Parse a request; `is_streaming`: the path allows a streamed answer."""
    fields = _object(body, "the body")
    text, id = fields.get("text_input"), fields.get("id", "")
    if not isinstance(text, str):
        raise InvalidRequest("text_input: expected one text", "text_input")
    if not isinstance(id, str):
        raise InvalidRequest("id: expected a string", "id")
    found = _parameters(fields)
    flags = {name: _flag(found, name) for name in BOOLEANS}
    for name in UNSERVED:
        if found.pop(name, None) not in NOTHING:
            raise InvalidRequest(f"{name} is not supported", name)
    is_streamed = is_streaming and flags["stream"] is not False
    _check(flags, is_streaming, is_streamed)
    params = read_sampling_params({**found, "stream": None})
    if is_streamed and params.n > 1:
        raise InvalidRequest(f"n is {params.n}; expected 1 in a stream", "n")
    return TritonRequest(
        text,
        params,
        is_streamed,
        is_echoed=not is_streamed and not flags["exclude_input_in_output"],
        id=id,
        has_reason=bool(flags["return_finish_reason"]),
        has_num_input=bool(flags["return_num_input_tokens"]),
        has_num_output=bool(flags["return_num_output_tokens"]),
    )


def _check(flags: dict[str, bool | None], is_streaming: bool, is_streamed: bool) -> None:
    if flags["stream"] and not is_streaming:
        raise InvalidRequest("stream: generate gives one answer; ask generate_stream", "stream")
    if is_streamed and flags["exclude_input_in_output"] is False:
        text = "exclude_input_in_output: a stream does not hold the input; expected true"
        raise InvalidRequest(text, "exclude_input_in_output")
    for name in WHOLE_ONLY:
        if is_streamed and flags[name]:
            raise InvalidRequest(f"{name} is not supported in streams", name)


def _parameters(fields: JsonObject) -> JsonObject:
    inner = fields.get("parameters")
    if inner is not None and not isinstance(inner, dict):
        raise InvalidRequest("parameters: expected an object", "parameters")
    packed = fields.get("sampling_parameters")
    if packed is not None and not isinstance(packed, str):
        text = "sampling_parameters: expected JSON as a string"
        raise InvalidRequest(text, "sampling_parameters")
    found = _object(packed.encode(), "sampling_parameters") if packed else {}
    found |= inner or {}
    found |= fields
    for name in ("text_input", "id", "parameters", "sampling_parameters"):
        found.pop(name, None)
    return found


def _flag(found: JsonObject, name: str) -> bool | None:
    value = found.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{name}: expected true or false", name)
    return value


def _object(data: Buffer, what: str) -> JsonObject:
    try:
        return _body.decode(data)
    except json_errors.UNREADABLE as error:
        text = json_errors.explain(data, error)
        raise InvalidRequest(f"{what} is not a JSON object: {text}") from None


@dataclass(frozen=True, slots=True)
class GenerateForm:
    """Encodes the choices of an answer, whole or as events."""

    model_name: str
    model_version: str
    asked: TritonRequest

    def whole(self, choices: Sequence[AnswerChoice], usage: TokenUsage) -> bytes:
        asked = self.asked
        found = self._json(_one_or_all([each.text for each in choices]))
        if asked.has_reason:
            found["finish_reason"] = _one_or_all([each.reason for each in choices])
        if asked.has_num_input:
            found["num_input_tokens"] = usage.num_prompt
        if asked.has_num_output:
            found["num_output_tokens"] = usage.num_generated
        return _encode(found)

    def begin(self, index: int) -> bytes:
        return b""

    def piece(self, choice: AnswerChoice) -> bytes:
        found = self._json(choice.text)
        if self.asked.has_reason:
            # "None" until the end, as in vLLM.
            found["finish_reason"] = str(choice.reason)
        return b"data: " + _encode(found) + b"\n\n"

    def end(self, usage: TokenUsage) -> bytes:
        return b""

    def error(self, error: PenstockError) -> bytes:
        return b"data: " + _encode({"error": str(error)}) + b"\n\n"

    def _json(self, text: object) -> dict[str, object]:
        named = {"model_name": self.model_name, "model_version": self.model_version}
        id = {"id": self.asked.id} if self.asked.id else {}
        return {**named, **id, "text_output": text}


def _one_or_all(values: Sequence[object]) -> object:
    return values[0] if len(values) == 1 else values
