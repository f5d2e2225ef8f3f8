"""OpenAI's requests and answers: JSON to requests, and generated text to JSON, whole or in chunks.

Pure. Each field of OpenAI's API and vLLM's extensions works, is refused by name if its value
requests something, or is harmless (`openai_fields`); unknown fields are ignored. Errors name their
field, for `param`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import msgspec

from penstock.errors import InvalidRequest, NotAllowed, NotFound, PenstockError
from penstock.sampling_params import SamplingParams
from penstock.wire import json_errors
from penstock.wire.json_errors import JsonObject
from penstock.wire.openai_fields import (
    OF_CHATS,
    OF_COMPLETIONS,
    OF_EMBEDDINGS,
    OF_STREAMS,
    OF_TOKENIZE,
    Asks,
    find_refused,
)
from penstock.wire.openai_messages import Message, read_messages
from penstock.wire.statuses import status_of

Raw = bytes | bytearray | memoryview
Body = TypeVar("Body", bound=msgspec.Struct)
# One text, several, one list of tokens, or several.
Given = str | list[str | int | list[int]]
MAX_N, MAX_STOPS, MAX_STOP_CHARS, MAX_BIASES = 128, 16, 256, 1024
MAX_LOGPROBS, MAX_PROMPTS = 20, 512
# Per request for embeddings, as in OpenAI's API.
MAX_INPUTS = 2048
DEFAULT_MAX_TOKENS = 16
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
DONE = b"data: [DONE]\n\n"
MISSING = re.compile(r"Object missing required field `(\w+)`")
NOTHING_REFUSED: Mapping[str, Asks] = {}
# Characters of an error, which may quote the request.
MAX_ERROR_CHARS = 1000
MAX_MODEL_CHARS = 512


# Requests.


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
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


class CompletionBody(SamplingFields, kw_only=True):
    """The JSON of a completion request."""

    model: str
    prompt: Given
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


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


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    """The JSON of an embeddings request."""

    model: str
    input: Given
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """The JSON of a request for the tokens of a text."""

    model: str | None = None
    prompt: str | None = None
    messages: list[JsonObject] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: JsonObject | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """The JSON of a request for the text of tokens."""

    model: str | None = None
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    model: str
    # Texts, or lists of tokens.
    prompts: Sequence[str | list[int]]
    params: SamplingParams
    is_streamed: bool
    # Return the prompt too, with its logprobs if those are requested.
    is_echoed: bool
    has_special_tokens: bool
    # Whether a stream ends with the usage.
    has_usage: bool


@dataclass(frozen=True, slots=True)
class ChatRequest:
    model: str
    messages: Sequence[Message]
    params: SamplingParams
    is_streamed: bool
    template_options: JsonObject
    has_usage: bool


_completion = msgspec.json.Decoder(CompletionBody)
_chat = msgspec.json.Decoder(ChatBody)
_embeddings = msgspec.json.Decoder(EmbeddingsBody)
_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)
_any = msgspec.json.Decoder(JsonObject)


def read_completion(body: Raw) -> CompletionRequest:
    found = _decoded(_completion, body, OF_COMPLETIONS)
    prompts = _prompts(found.prompt, "prompt")
    num_logprobs = found.logprobs
    _check_range("logprobs", num_logprobs, 0, MAX_LOGPROBS)
    # With echo, generating nothing is allowed: the client may want only the prompt.
    least = 0 if found.echo else 1
    most = DEFAULT_MAX_TOKENS if found.max_tokens is None else found.max_tokens
    params = _params(found, most, num_logprobs, least)
    return CompletionRequest(
        found.model,
        prompts,
        params,
        bool(found.stream),
        bool(found.echo),
        found.add_special_tokens is not False,
        _has_usage(found),
    )


def read_chat(body: Raw) -> ChatRequest:
    found = _decoded(_chat, body, OF_CHATS)
    messages = read_messages(found.messages)
    if found.top_logprobs and not found.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    _check_range("top_logprobs", found.top_logprobs, 0, MAX_LOGPROBS)
    num_logprobs = (found.top_logprobs or 0) if found.logprobs else None
    newer = found.max_completion_tokens
    params = _params(found, found.max_tokens if newer is None else newer, num_logprobs)
    return ChatRequest(
        found.model,
        messages,
        params,
        bool(found.stream),
        template_options(found),
        _has_usage(found),
    )


def template_options(found: ChatBody | TokenizeBody) -> JsonObject:
    """Return what a request passes to the chat template besides its messages."""
    names = ("reasoning_effort", "documents", "add_generation_prompt")
    own = {name: getattr(found, name, None) for name in names}
    given = {name: value for name, value in own.items() if value is not None}
    return {**(found.chat_template_kwargs or {}), **given}


def read_sampling_params(fields: JsonObject) -> SamplingParams:
    """Read sampling parameters of another protocol; unsupported fields are refused."""
    try:
        found = msgspec.convert(fields, SamplingFields, strict=False)
    except msgspec.ValidationError as error:
        raise _wrong(error) from None
    _check_served(fields, {**OF_CHATS, **OF_COMPLETIONS})
    most = DEFAULT_MAX_TOKENS if found.max_tokens is None else found.max_tokens
    return _params(found, most, None)


def read_embeddings(body: Raw) -> EmbeddingsBody:
    """Read a request; its `input` is a list of texts, or of lists of tokens."""
    found = _decoded(_embeddings, body, OF_EMBEDDINGS)
    _check_range("dimensions", found.dimensions, 1, LARGEST)
    found.input = [*_prompts(found.input, "input", MAX_INPUTS)]
    return found


def read_tokenize(body: Raw) -> TokenizeBody:
    """Read a request for the tokens of a text, or of the messages of a chat."""
    found = _decoded(_tokenize, body, OF_TOKENIZE)
    if (found.prompt is None) == (found.messages is None):
        raise InvalidRequest("expected either prompt or messages", "prompt")
    if found.messages is not None:
        found.messages = read_messages(found.messages)
    return found


def read_detokenize(body: Raw) -> tuple[str | None, list[int]]:
    """Return the model (None: the only one) and the tokens."""
    found = _decoded(_detokenize, body)
    check_tokens("tokens", found.tokens, LARGEST + 1)
    return found.model, found.tokens


def _decoded(
    decoder: msgspec.json.Decoder[Body], body: Raw, refused: Mapping[str, Asks] = NOTHING_REFUSED
) -> Body:
    try:
        found, fields = decoder.decode(body), _any.decode(body)
    except msgspec.ValidationError as error:
        raise _wrong(error) from None
    except json_errors.UNREADABLE as error:
        raise InvalidRequest(f"the body is not JSON: {json_errors.explain(body, error)}") from None
    _check_served(fields, refused)
    model = fields.get("model")
    if isinstance(model, str) and len(model) > MAX_MODEL_CHARS:
        text = f"model: a name of {len(model)} characters; expected at most {MAX_MODEL_CHARS}"
        raise InvalidRequest(text, "model")
    return found


def _wrong(error: msgspec.ValidationError) -> InvalidRequest:
    text, _, path = str(error).partition(" - at `$")
    field = path.strip("`.").split(".")[0].split("[")[0] or None
    if field is None and (match := MISSING.match(text)):
        return InvalidRequest(text, match[1])
    return InvalidRequest(f"{field}: {text}" if field else text, field)


def _check_served(fields: JsonObject, refused: Mapping[str, Asks]) -> None:
    name = find_refused(fields, refused)
    if name is not None:
        raise InvalidRequest(f"{name} is not supported", name, "unsupported_parameter")
    options = fields.get("stream_options")
    inner = find_refused(options, OF_STREAMS) if isinstance(options, Mapping) else None
    if inner is not None:
        text = f"stream_options.{inner} is not supported"
        raise InvalidRequest(text, "stream_options", "unsupported_parameter")


def _prompts(given: Given, name: str, most: int = MAX_PROMPTS) -> list[str | list[int]]:
    if isinstance(given, str):
        return [given]
    texts = [each for each in given if isinstance(each, str)]
    lists = [each for each in given if isinstance(each, list)]
    tokens = [each for each in given if isinstance(each, int)]
    if max(len(texts), len(lists), len(tokens)) < len(given) or not given:
        raise InvalidRequest(f"{name}: expected texts, or tokens, or lists of tokens", name)
    if max(len(texts), len(lists)) > most:
        raise InvalidRequest(f"{name}: {len(given)} of them; expected at most {most}", name)
    if not all(lists):
        raise InvalidRequest(f"{name}: one of them has no token", name)
    if not all(0 <= each <= LARGEST for part in (tokens, *lists) for each in part):
        raise InvalidRequest(f"{name}: expected tokens from 0 on", name)
    return [tokens] if tokens else [*texts, *lists]


def _params(
    found: SamplingFields, max_tokens: int | None, num_logprobs: int | None, least: int = 1
) -> SamplingParams:
    """Check the sampling fields of a request; fields that are null have their defaults."""
    _check_range("max_tokens", max_tokens, least, LARGEST)
    _check_range("min_tokens", found.min_tokens, 0, max_tokens)
    _check_stop_tokens(found.stop_token_ids or ())
    given: JsonObject = {}
    for name, (low, high) in RANGES.items():
        value = getattr(found, name)
        if value is not None:
            _check_range(name, value, low, high)
            given[name] = value
    # vLLM's -1 means all; here it is 0.
    given["top_k"] = max(0, found.top_k or 0)
    return SamplingParams(
        **given,
        max_tokens=max_tokens,
        min_tokens=found.min_tokens or 0,
        logit_bias=_bias(found.logit_bias or {}),
        stop=_stops(found.stop),
        stop_token_ids=frozenset(found.stop_token_ids or ()),
        ignore_eos=bool(found.ignore_eos),
        num_logprobs=num_logprobs,
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


def _check_range(name: str, value: float | None, least: float | None, most: float | None) -> None:
    if value is None:
        return
    is_low = least is not None and not value >= least
    if is_low or (most is not None and not value <= most):
        limits = f"at least {least}" if most is None else f"{least} to {most}"
        raise InvalidRequest(f"{name} is {str(value)[:MAX_SHOWN]}; expected {limits}", name)


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stops) > MAX_STOPS or any(not 1 <= len(each) <= MAX_STOP_CHARS for each in stops):
        raise InvalidRequest(
            f"stop: expected at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters", "stop"
        )
    return stops


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    if len(given) > MAX_BIASES:
        raise InvalidRequest(
            f"logit_bias: {len(given)}; expected at most {MAX_BIASES}", "logit_bias"
        )
    for token, value in given.items():
        is_token = token.isdecimal() and len(token) <= MAX_DIGITS
        if not is_token or not -100 <= value <= 100:
            shown = f"'{token[:MAX_SHOWN]}': {value}"
            raise InvalidRequest(
                f"logit_bias: {shown}; expected tokens with -100 to 100", "logit_bias"
            )
    return {int(token): value for token, value in given.items()}


def _has_usage(found: SamplingFields) -> bool:
    if found.stream_options is None:
        return False
    if not found.stream:
        raise InvalidRequest(
            "stream_options is for streams; expected stream to be true", "stream_options"
        )
    return bool(found.stream_options.include_usage)


# Answers.


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The bytes of a token, its logprob, and the most likely tokens, best first."""

    data: bytes
    logprob: float
    top: Sequence[tuple[bytes, float]] = ()
    # Characters of the choice before it. Tokens of one character share its offset.
    offset: int = 0


@dataclass(frozen=True, slots=True)
class AnswerChoice:
    index: int
    text: str
    # None while it is being generated.
    reason: str | None
    # None if not requested. The first token of a prompt has no logprob (NaN).
    logprobs: Sequence[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class TokenUsage:
    num_prompt: int
    num_generated: int
    num_cached: int = 0

    def json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_generated,
            "total_tokens": self.num_prompt + self.num_generated,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }


class OpenAiModel(msgspec.Struct):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET


_encode = msgspec.json.Encoder().encode


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
        return b"data: " + encode_error(error) + b"\n\n" + DONE

    def _json(self, kind: str, choices: Sequence[object]) -> dict[str, object]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices}

    def _choice(self, choice: AnswerChoice) -> dict[str, object]:
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": _completion_logprobs(choice.logprobs),
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
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return _chat_choice(choice, "message", message)

    def _piece(self, choice: AnswerChoice) -> dict[str, object]:
        return _chat_choice(choice, "delta", {"content": choice.text} if choice.text else {})


def describe_model(
    name: str, created: int, max_length: int | msgspec.UnsetType = msgspec.UNSET
) -> OpenAiModel:
    """Describe a model: when it was loaded (seconds since 1970), and its context length."""
    return OpenAiModel(name, "model", created, "penstock", max_length)


def tokenizer_info(names: Mapping[str, str], template: str) -> bytes:
    """Encode the special tokens' names and the chat template; null for missing ones."""
    return _encode(
        {"eos_token": None, "bos_token": None, **names, "chat_template": template or None}
    )


def error(text: str, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    if len(text) > MAX_ERROR_CHARS:
        text = f"{text[:MAX_ERROR_CHARS]}…"
    return _encode({"error": {"message": text, "type": kind, "param": param, "code": code}})


def encode_error(failure: PenstockError) -> bytes:
    """Encode an error with the invalid field and OpenAI's code for it."""
    param: str | None = None
    code: str | None = None
    match failure:
        case InvalidRequest():
            param, code = failure.field, failure.code
        case NotFound():
            param, code = "model", "model_not_found"
        case NotAllowed(needs_key=True):
            code = "invalid_api_key"
    return error(str(failure), status_of(failure).openai_type, param, code)


def _event(value: object) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def _chat_choice(choice: AnswerChoice, name: str, content: object) -> dict[str, object]:
    return {
        "index": choice.index,
        name: content,
        "logprobs": _chat_logprobs(choice.logprobs),
        "finish_reason": choice.reason,
    }


def _completion_logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, object] | None:
    if logprobs is None:
        return None
    return {
        "tokens": [_completion_token(each.data) for each in logprobs],
        "token_logprobs": [_finite(each.logprob) for each in logprobs],
        "top_logprobs": [_top(each) for each in logprobs] if any(e.top for e in logprobs) else None,
        "text_offset": [each.offset for each in logprobs],
    }


def _completion_token(data: bytes) -> str:
    """Decode a token as OpenAI does: an incomplete character is shown as its bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _top(token: TokenLogprob) -> dict[str, float | None] | None:
    """Return the most likely tokens, best first; of those with the same text only the best."""
    found: dict[str, float | None] = {}
    for data, logprob in token.top:
        found.setdefault(_completion_token(data), _finite(logprob))
    return found or None


def _chat_logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, object] | None:
    if logprobs is None:
        return None
    content = [
        {
            **_chat_token(each.data, each.logprob),
            "top_logprobs": [_chat_token(*other) for other in each.top],
        }
        for each in logprobs
    ]
    return {"content": content, "refusal": None}


def _chat_token(data: bytes, logprob: float) -> dict[str, object]:
    text = data.decode("utf-8", "replace")
    return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float | None:
    """Return a logprob that JSON can hold: at least -9999, None for NaN."""
    return None if logprob != logprob else max(logprob, -9999.0)
