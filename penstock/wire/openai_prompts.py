"""OpenAI's and vLLM's requests that give texts or tokens: completions, embeddings, tokens. Pure.

`openai_v1` has chats, and what all requests share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from penstock.errors import InvalidRequest
from penstock.sampling_params import SamplingParams
from penstock.types import Buffer
from penstock.wire.json_errors import JsonObject
from penstock.wire.openai_constraints import constraint_field
from penstock.wire.openai_fields import OF_CHATS, OF_COMPLETIONS, OF_EMBEDDINGS, OF_TOKENIZE
from penstock.wire.openai_messages import read_messages
from penstock.wire.openai_v1 import (
    LARGEST,
    MAX_LOGPROBS,
    SamplingFields,
    check_range,
    check_served,
    check_tokens,
    decode,
    has_usage,
    read_params,
    wrong_field,
)

# One text, several, one list of tokens, or several.
Given = str | list[str | int | list[int]]
# Per request for embeddings, as in OpenAI's API.
MAX_INPUTS = 2048
DEFAULT_MAX_TOKENS = 16


class CompletionBody(SamplingFields, kw_only=True):
    """The JSON of a completion request."""

    model: str
    prompt: Given
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


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
    # The field that gives `params.constraint`.
    constraint_field: str = ""


_completion = msgspec.json.Decoder(CompletionBody)
_embeddings = msgspec.json.Decoder(EmbeddingsBody)
_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)


def read_completion(body: Buffer) -> CompletionRequest:
    found = decode(_completion, body, OF_COMPLETIONS)
    prompts = _prompts(found.prompt, "prompt")
    num_logprobs = found.logprobs
    check_range("logprobs", num_logprobs, 0, MAX_LOGPROBS)
    # With echo, generating nothing is allowed: the client may want only the prompt.
    least = 0 if found.echo else 1
    most = DEFAULT_MAX_TOKENS if found.max_tokens is None else found.max_tokens
    params = read_params(found, most, num_logprobs, least)
    return CompletionRequest(
        found.model,
        prompts,
        params,
        bool(found.stream),
        bool(found.echo),
        found.add_special_tokens is not False,
        has_usage(found),
        constraint_field(found),
    )


def read_sampling_params(fields: JsonObject) -> SamplingParams:
    """Read sampling parameters of another protocol; unsupported fields are refused."""
    try:
        found = msgspec.convert(fields, SamplingFields, strict=False)
    except msgspec.ValidationError as error:
        raise wrong_field(error) from None
    check_served(fields, {**OF_CHATS, **OF_COMPLETIONS})
    most = DEFAULT_MAX_TOKENS if found.max_tokens is None else found.max_tokens
    return read_params(found, most, None)


def read_embeddings(body: Buffer) -> EmbeddingsBody:
    """Read a request; its `input` is a list of texts, or of lists of tokens."""
    found = decode(_embeddings, body, OF_EMBEDDINGS)
    check_range("dimensions", found.dimensions, 1, LARGEST)
    found.input = [*_prompts(found.input, "input", MAX_INPUTS)]
    return found


def read_tokenize(body: Buffer) -> TokenizeBody:
    """Read a request for the tokens of a text, or of the messages of a chat."""
    found = decode(_tokenize, body, OF_TOKENIZE)
    if (found.prompt is None) == (found.messages is None):
        raise InvalidRequest("expected either prompt or messages", "prompt")
    if found.messages is not None:
        found.messages = read_messages(found.messages)
    return found


def read_detokenize(body: Buffer) -> tuple[str | None, list[int]]:
    """Return the model (None: the only one) and the tokens."""
    found = decode(_detokenize, body)
    check_tokens("tokens", found.tokens, LARGEST + 1)
    return found.model, found.tokens


def _prompts(given: Given, name: str, most: int = 512) -> list[str | list[int]]:
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
