"""A request for text, from when it came until its last piece: what was asked, and where it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from penstock.errors import PenstockError
from penstock.llm.params import Likelihood, Sampling
from penstock.llm.sequence import Ending
from penstock.llm.stops import StopTexts

if TYPE_CHECKING:
    from penstock.llm.token_bytes import Stream


@dataclass(frozen=True, slots=True)
class Part:
    """What one of its sequences got; the reason is empty while it goes on."""

    index: int
    text: str
    token: int
    reason: str
    likelihood: Likelihood | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """Tokens."""

    num_prompt: int
    num_generated: int
    # Of the prompt, found in the cache.
    num_found: int


class GenerationSink(Protocol):
    """Who waits. On the core's event loop."""

    def part(self, part: Part) -> None: ...
    def finished(self, totals: Totals) -> None:
        """All sequences have ended, each with its reason."""

    def failed(self, error: PenstockError) -> None:
        """Instead of what is missing."""


@dataclass(slots=True)
class Going:
    """One sequence as text."""

    stream: Stream
    stops: StopTexts
    num_tokens: int = 0
    # Of its last token.
    last_at: float | None = None
    is_ended: bool = False
    reason: str = ""


@dataclass(slots=True, eq=False)
class Generation:
    """Ends exactly once: `finished`, `failed`, or given up by whoever asked."""

    tokens: Sequence[int]
    sampling: Sampling
    ending: Ending
    sink: GenerationSink
    stops: Sequence[str] = ()
    num: int = 1
    priority: int = 0
    salt: str = ""
    # Of several that are asked for together the first, for the others; and tokens of the others'
    # prompts, for the first.
    leader: Generation | None = None
    num_following: int = 0
    # Digest of the API key that came with it; empty where clients need none.
    caller: bytes = b""
    # When it was asked for; 0: when it is admitted.
    arrived: float = 0.0
    # The model's, from when it was admitted.
    admitted: float = 0.0
    id: int = -1
    going: list[Going] = field(default_factory=list)
    num_found: int = 0
    # How likely each token of the prompt was, where that was asked for; of the first nobody knows.
    prompt_likelihoods: list[Likelihood | None] = field(default_factory=list)
    first_at: float | None = None
    last_at: float | None = None
    is_ended: bool = False

    @property
    def totals(self) -> Totals:
        return Totals(len(self.tokens), sum(each.num_tokens for each in self.going), self.num_found)
