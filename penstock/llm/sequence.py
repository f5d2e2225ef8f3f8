"""One continuation of one prompt, from when it was asked for until it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.llm.blocks import first_key, next_key

State = Literal["waiting", "running", "ended"]
# As OpenAI names them, and what it has no name for.
Reason = Literal["", "stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Ending:
    """When a sequence ends by itself; text that ends it is somebody else's to see."""

    # Tokens that it generates at most.
    max_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    # Before so many, tokens that would end it do not.
    min_tokens: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """What is known of it belongs to whoever made it; from `blocks` on it is the scheduler's, which
    alone changes it.

    Invariant: num_computed <= num_planned <= len(tokens) + num_ahead. Tokens up to `num_computed`
    are in its blocks, those up to `num_planned` will be when the steps under way have ended;
    `num_ahead` tokens are being sampled by these.
    """

    id: int
    # The prompt, then what was generated.
    tokens: list[int]
    ending: Ending
    arrived: float = 0.0
    # Lower ones come first.
    priority: int = 0
    # Only those with the same salt find its blocks.
    salt: str = ""
    # Whether it may begin with blocks that others have computed.
    is_cached: bool = True
    # Of the same prompt: it computes that first, and this one then finds it.
    leader: Sequence | None = None
    num_prompt: int = field(init=False)
    state: State = "waiting"
    reason: Reason = ""
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_planned: int = 0
    num_ahead: int = 0
    # Raised when its blocks are taken away: what steps under way write there is nobody's.
    num_evictions: int = 0
    # Tokens that it found when it was first admitted.
    num_found: int = 0
    is_admitted: bool = False
    # Whether a step with it was begun.
    is_begun: bool = False
    _keys: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.tokens, "a prompt has at least one token"
        self.num_prompt = len(self.tokens)

    @property
    def rank(self) -> tuple[int, float, int]:
        """Who comes first; no two have the same."""
        return self.priority, self.arrived, self.id

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens that no step computes yet; of those that are being sampled the place is known."""
        if self.num_generated + self.num_ahead >= self.ending.max_tokens:
            # The last one is never computed.
            return max(0, len(self.tokens) + self.num_ahead - 1 - self.num_planned)
        return len(self.tokens) + self.num_ahead - self.num_planned

    def keys(self, num_tokens: int, block_size: int) -> list[bytes]:
        """Of the full blocks among so many first tokens, which are known."""
        for start in range(len(self._keys) * block_size, num_tokens - block_size + 1, block_size):
            parent = self._keys[-1] if self._keys else first_key(self.salt)
            self._keys.append(next_key(parent, self.tokens[start : start + block_size]))
        return self._keys[: num_tokens // block_size]

    def ends_with(self, token: int) -> Reason:
        """Whether it ends with this token, which it has just got."""
        if token in self.ending.stop_tokens and self.num_generated > self.ending.min_tokens:
            return "stop"
        return "length" if self.num_generated >= self.ending.max_tokens else ""
