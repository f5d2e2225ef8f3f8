"""Logprobs of generated tokens as OpenAI's JSON, for completions and for chats. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The bytes of a token, its logprob, and the most likely tokens, best first."""

    data: bytes
    logprob: float
    top: Sequence[tuple[bytes, float]] = ()
    # Characters of the choice before it. Tokens of one character share its offset.
    offset: int = 0


def encode_completion(logprobs: Sequence[TokenLogprob]) -> dict[str, object]:
    return {
        "tokens": [_completion_token(each.data) for each in logprobs],
        "token_logprobs": [_finite(each.logprob) for each in logprobs],
        "top_logprobs": [_top(each) for each in logprobs] if any(e.top for e in logprobs) else None,
        "text_offset": [each.offset for each in logprobs],
    }


def encode_chat(logprobs: Sequence[TokenLogprob]) -> dict[str, object]:
    content = [
        {
            **_chat_token(each.data, each.logprob),
            "top_logprobs": [_chat_token(*other) for other in each.top],
        }
        for each in logprobs
    ]
    return {"content": content, "refusal": None}


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


def _chat_token(data: bytes, logprob: float) -> dict[str, object]:
    text = data.decode("utf-8", "replace")
    return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float | None:
    """Return a logprob that JSON can hold: at least -9999, None for NaN."""
    return None if logprob != logprob else max(logprob, -9999.0)
