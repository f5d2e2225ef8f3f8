"""One continuation of one prompt, from arrival to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.llm.blocks import first_key, next_key
from penstock.llm.ngrams import NgramHistory
from penstock.sampling_params import SamplingParams

State = Literal["waiting", "running", "ended"]
# Finish reasons of OpenAI, and two of our own.
Reason = Literal["", "stop", "length", "abort", "error"]


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of one sequence, and its state in the scheduler, which alone changes the fields from
    `state` on.

    Invariant: num_computed <= num_planned <= len(tokens) + num_ahead + num_drafted. Tokens up to
    `num_computed` are in its blocks, those up to `num_planned` will be once the steps in flight
    have ended; `num_ahead` tokens are being sampled by those steps, `num_drafted` ones are compared
    with what they sample.
    """

    id: int
    # The prompt, then the generated tokens.
    tokens: list[int]
    # With `max_tokens` set. Stop strings are checked elsewhere.
    params: SamplingParams
    arrived: float = 0.0
    # Its request, and its place among the request's sequences.
    request: int = -1
    index: int = 0
    # Whether it may reuse cached blocks of other sequences.
    is_cached: bool = True
    # Sequence with the same prompt that computes it first; this one then finds it in the cache.
    leader: Sequence | None = None
    num_prompt: int = field(init=False)
    max_tokens: int = field(init=False)
    state: State = "waiting"
    reason: Reason = ""
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_planned: int = 0
    num_ahead: int = 0
    num_drafted: int = 0
    # Raised when it loses its blocks: results of steps in flight do not count any more.
    num_evictions: int = 0
    # Cached tokens found when it was first admitted.
    num_found: int = 0
    # Its grammar is being compiled; until then it waits without delaying others.
    is_held: bool = False
    is_admitted: bool = False
    # Whether a step with it was launched.
    is_begun: bool = False
    # Made when it may draft for the first time.
    history: NgramHistory | None = None
    _keys: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.tokens, "a prompt has at least one token"
        assert self.params.max_tokens is not None
        self.num_prompt, self.max_tokens = len(self.tokens), self.params.max_tokens

    @property
    def rank(self) -> tuple[int, float, int]:
        """Scheduling order; unique for each sequence."""
        return self.params.priority, self.arrived, self.id

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens not planned yet, including those being sampled, whose positions are known."""
        if self.num_generated + self.num_ahead >= self.max_tokens:
            # The last token is never computed.
            return max(0, len(self.tokens) + self.num_ahead - 1 - self.num_planned)
        return len(self.tokens) + self.num_ahead - self.num_planned

    def keys(self, num_tokens: int, block_size: int) -> list[bytes]:
        """Return the keys of the full blocks among the first `num_tokens` known tokens."""
        for start in range(len(self._keys) * block_size, num_tokens - block_size + 1, block_size):
            parent = self._keys[-1] if self._keys else first_key(self.params.cache_salt)
            self._keys.append(next_key(parent, self.tokens[start : start + block_size]))
        return self._keys[: num_tokens // block_size]

    def ends_with(self, token: int) -> Reason:
        """Return the reason if the sequence ends with this token, which it has just got, or ""."""
        if token in self.params.stop_token_ids and self.num_generated > self.params.min_tokens:
            return "stop"
        return "length" if self.num_generated >= self.max_tokens else ""
