"""A text request from its arrival to its last token: parameters, progress, and its sink."""

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
    """A new token of one sequence; `reason` is empty until the sequence ends."""

    index: int
    text: str
    token: int
    reason: str
    likelihood: Likelihood | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """Token counts of a finished request."""

    num_prompt: int
    num_generated: int
    # Prompt tokens found in the prefix cache.
    num_found: int


class GenerationSink(Protocol):
    """Receiver of a request's output, called on the core's event loop."""

    def part(self, part: Part) -> None: ...
    def finished(self, totals: Totals) -> None:
        """All sequences have ended, each with its reason."""

    def failed(self, error: PenstockError) -> None:
        """The request has failed; nothing more follows."""


@dataclass(slots=True)
class Going:
    """Progress of one sequence: its detokenizer, stop strings and counts."""

    stream: Stream
    stops: StopTexts
    num_tokens: int = 0
    # Time of its last token.
    last_at: float | None = None
    is_ended: bool = False
    reason: str = ""


@dataclass(slots=True, eq=False)
class Generation:
    """One text request. Ends exactly once: `finished`, `failed`, or cancelled by the client."""

    tokens: Sequence[int]
    sampling: Sampling
    ending: Ending
    sink: GenerationSink
    stops: Sequence[str] = ()
    num: int = 1
    priority: int = 0
    salt: str = ""
    # For prompts submitted together: `leader` is the first of them (None in the leader itself);
    # the leader's `num_following` counts the prompt tokens of the others.
    leader: Generation | None = None
    num_following: int = 0
    # Digest of the request's API key; empty if it came without one.
    caller: bytes = b""
    # Arrival time; 0: the time of admission.
    arrived: float = 0.0
    # The model sets the following fields on admission.
    admitted: float = 0.0
    id: int = -1
    going: list[Going] = field(default_factory=list)
    num_found: int = 0
    # Prompt logprobs, if requested; the first token has none.
    prompt_likelihoods: list[Likelihood | None] = field(default_factory=list)
    first_at: float | None = None
    last_at: float | None = None
    is_ended: bool = False

    @property
    def totals(self) -> Totals:
        return Totals(len(self.tokens), sum(each.num_tokens for each in self.going), self.num_found)
