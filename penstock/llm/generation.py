"""A text request in the core, from its arrival to its last token: its progress and its sink."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from penstock.errors import PenstockError
from penstock.llm.messages import GenerateRequest, Logprobs, TokenEvent
from penstock.llm.stops import StopTexts
from penstock.wire.openai_forms import TokenUsage

if TYPE_CHECKING:
    from penstock.llm.token_bytes import Detokenizer


class GenerationSink(Protocol):
    """Receiver of a request's output, called on the core's event loop."""

    def token(self, event: TokenEvent) -> None:
        """A sequence has got a token, with its text."""

    def finished(self, totals: TokenUsage) -> None:
        """All sequences have ended, each with its reason."""

    def failed(self, error: PenstockError) -> None:
        """The request has failed; nothing more follows."""


@dataclass(slots=True)
class SequenceOutput:
    """Progress of one sequence: its detokenizer, stop strings and counts."""

    stream: Detokenizer
    stops: StopTexts
    num_tokens: int = 0
    # Time of its last token.
    last_at: float | None = None
    is_ended: bool = False
    reason: str = ""


@dataclass(slots=True, eq=False)
class Generation:
    """One text request. Ends exactly once: `finished`, `failed`, or cancelled by the client."""

    request: GenerateRequest
    sink: GenerationSink
    # Digest of the request's API key; empty if it came without one.
    caller: bytes = b""
    # Arrival time; 0: the time of admission.
    arrived: float = 0.0
    # What the client asked, for recordings: {"prompt"} or {"messages"}.
    asked: Mapping[str, object] | None = None
    # Special tokens that are part of the text.
    shown_tokens: frozenset[int] = frozenset()
    # A copy of a client's request, for another version: it counts in no metric of requests.
    is_mirror: bool = False
    # Called when the client cancels it, of which its sink does not hear.
    on_cancel: Callable[[], None] | None = None
    # The model sets the following fields on admission.
    admitted: float = 0.0
    outputs: list[SequenceOutput] = field(default_factory=list)
    num_cached: int = 0
    # Prompt logprobs, if requested; the first token has none.
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)
    first_at: float | None = None
    last_at: float | None = None
    is_ended: bool = False

    @property
    def num_prompt(self) -> int:
        return len(self.request.tokens)

    @property
    def totals(self) -> TokenUsage:
        num_generated = sum(each.num_tokens for each in self.outputs)
        return TokenUsage(self.num_prompt, num_generated, self.num_cached)

    @property
    def mean_token_s(self) -> float | None:
        """Time per output token of the longest sequence; None before the second token."""
        most = max((each.num_tokens for each in self.outputs), default=0)
        if self.first_at is None or self.last_at is None or most < 2:
            return None
        return (self.last_at - self.first_at) / (most - 1)
