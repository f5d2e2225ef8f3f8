"""Which tokens of which sequences the next step computes.

Pure: no clock, no tensors. `plan` makes a step, somebody runs it, `commit` tells what it sampled; a
step may be planned while the one before it still runs, for where its tokens go is known before they
are. Every sequence that generates gets its one token first; what is left of the budget goes to
prompts, in order, a long one in several steps; then whoever waits is admitted. Where blocks run out
the last in rank gives its up and computes them again later.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from operator import attrgetter

from penstock.llm.blocks import BlockPool
from penstock.llm.sequence import Reason, Sequence

RANK = attrgetter("rank")
# Tokens of a prompt in a step, where prompts share it: fewer are not worth a chunk.
MIN_SHARE = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one step."""

    # Sequences that run together; more for throughput, fewer for time per token.
    max_sequences: int
    # Tokens; more for throughput of prompts, fewer for time per token.
    max_tokens: int
    # Of a sequence, prompt and all.
    max_length: int

    def __post_init__(self) -> None:
        # Or some that generate would get nothing.
        assert self.max_tokens >= self.max_sequences >= 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence, from `start` on."""

    sequence: Sequence
    start: int
    count: int
    # Whether a token comes out: it computes the last that there is.
    is_sampled: bool
    # `num_evictions` when it was planned.
    num_evictions: int
    # The sequence's then. Some may have been added since, at its end: a sequence that loses its
    # blocks gets another list.
    blocks: Many[int]

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(slots=True)
class Step:
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def num_sampled(self) -> int:
        return sum(chunk.is_sampled for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class New:
    """A token that a sequence got; its reason is set if that was its last."""

    sequence: Sequence
    token: int


class Scheduler:
    """Invariant: a sequence is in `waiting` and has no blocks, or in `running`, both by rank, or it
    has ended."""

    def __init__(self, pool: BlockPool, limits: Limits, *, shares_prompts: bool = False) -> None:
        """`shares_prompts`: prompts share the tokens of a step evenly, so that short ones need not
        wait for a long one; otherwise they are computed in order."""
        self.shares_prompts = shares_prompts
        self.pool = pool
        self.limits = limits
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        # Tokens, by all steps that are committed.
        self.num_computed = 0
        self._waits_s: list[float] = []

    def fits(self, num_prompt: int, max_tokens: int) -> bool:
        """Whether such a sequence could run if it were alone."""
        # The last one is never computed, so it needs neither a position nor room.
        num_computed = num_prompt + max_tokens - 1
        is_short = num_computed <= self.limits.max_length
        return is_short and self.pool.num_needed(num_computed) <= self.pool.num_blocks

    def add(self, sequence: Sequence) -> None:
        assert self.fits(sequence.num_prompt, sequence.ending.max_tokens)
        insort(self.waiting, sequence, key=RANK)

    def end(self, sequence: Sequence, reason: Reason) -> None:
        """Nothing more of it is wanted. Steps under way may still compute it, in blocks that others
        may have by then: what those write comes later."""
        if sequence.state == "ended":
            return
        (self.waiting if sequence.state == "waiting" else self.running).remove(sequence)
        self._let_go(sequence)
        sequence.state, sequence.reason = "ended", reason

    def plan(self, max_tokens: int | None = None) -> Step:
        """The next step, of at most so many tokens where that is less than the limit; an empty one
        where there is nothing to do before another is committed."""
        step = Step()
        most = self.limits.max_tokens if max_tokens is None else max_tokens
        num_before = self.num_preemptions
        self._plan_tokens(step)
        most = min(most, self.limits.max_tokens)
        shares = self._shares(most - step.num_tokens)
        self._plan_prompts(step, most, shares)
        if self.num_preemptions == num_before:
            self._admit(step, most, shares)
        return step

    def commit(self, step: Step, sampled: Many[int]) -> list[New]:
        """What it sampled, one for each chunk that is sampled, in order. Steps are committed in the
        order in which they were planned."""
        self.num_computed += step.num_tokens
        tokens = iter(sampled)
        new: list[New] = []
        for chunk in step.chunks:
            new.extend(self._commit(chunk, tokens))
        return new

    def note_begun(self, step: Step, now: float) -> None:
        """Those that it begins have waited until now; those of one request once."""
        for sequence in (chunk.sequence for chunk in step.chunks):
            if not sequence.is_begun and sequence.leader is None:
                self._waits_s.append(now - sequence.arrived)
            sequence.is_begun = True

    def take_waits(self) -> tuple[float, ...]:
        """How long those waited that were begun since this was last asked."""
        found, self._waits_s = tuple(self._waits_s), []
        return found

    # Planning.

    def _plan_tokens(self, step: Step) -> None:
        """One for each that generates, whatever the budget."""
        for sequence in list(self.running):
            if sequence.state == "running" and _is_generating(sequence) and sequence.num_left:
                self._plan_chunk(step, sequence, 1)

    def _plan_prompts(self, step: Step, most: int, shares: Mapping[int, int]) -> None:
        """What was computed once and lost to others is a prompt, too."""
        for sequence in list(self.running):
            if sequence.state != "running" or _is_generating(sequence):
                continue
            share = shares.get(sequence.id, sequence.num_left)
            count = min(most - step.num_tokens, sequence.num_left, share)
            if count > 0:
                self._plan_chunk(step, sequence, count)

    def _admit(self, step: Step, most: int, shares: Mapping[int, int]) -> None:
        """In order: whoever does not fit holds up those behind him, or he might wait for ever."""
        while step.num_tokens < most and len(self.running) < self.limits.max_sequences:
            sequence = self._first_due()
            if sequence is None or not self._begin(sequence):
                return
            share = max(1, shares.get(sequence.id, sequence.num_left))
            count = min(most - step.num_tokens, sequence.num_left, share)
            self._add_chunk(step, sequence, count)

    def _shares(self, budget: int) -> dict[int, int]:
        """Tokens of each prompt that shares a step, by the ids of sequences."""
        if not self.shares_prompts or budget <= 0:
            return {}
        prompts = [each for each in self.running if not _is_generating(each) and each.num_left]
        places = self.limits.max_sequences - len(self.running)
        prompts += self.waiting[: max(0, places)]
        prompts = prompts[: max(1, budget // MIN_SHARE)]
        shares = fair_shares([each.num_left for each in prompts], budget)
        return {each.id: share for each, share in zip(prompts, shares, strict=True)}

    def _first_due(self) -> Sequence | None:
        """Of those that wait; not one whose prompt another computes just now, nor one whose next
        token is not known."""
        for sequence in self.waiting:
            leader = sequence.leader
            is_led = leader is not None and leader.state == "running" and not _has_prompt(leader)
            if not sequence.num_ahead and not is_led:
                return sequence
        return None

    def _begin(self, sequence: Sequence) -> bool:
        """Give it blocks for all its tokens, so that of those that run only the ones that generate
        ever need more; those with the same beginning first."""
        pool = self.pool
        known = len(sequence.tokens)
        # One token at least is computed: the next is sampled from it.
        keys = sequence.keys(known - 1, pool.block_size) if sequence.is_cached else []
        shared = pool.found(keys)
        needed = pool.num_needed(known) - len(shared)
        # Those that run will need a block each before long.
        spare = len(self.running)
        if pool.num_free_without(shared) < needed + spare:
            return False
        pool.hold(shared)
        sequence.blocks = shared + pool.take(needed)
        num_found = len(shared) * pool.block_size
        sequence.num_computed = sequence.num_planned = num_found
        if not sequence.is_admitted:
            sequence.is_admitted, sequence.num_found = True, num_found
            if sequence.is_cached:
                pool.counts.num_asked += known
                pool.counts.num_found += num_found
        self.waiting.remove(sequence)
        sequence.state = "running"
        insort(self.running, sequence, key=RANK)
        return True

    def _plan_chunk(self, step: Step, sequence: Sequence, count: int) -> None:
        """With room for it, which the last in rank give up; perhaps it is the last itself."""
        pool = self.pool
        missing = pool.num_needed(sequence.num_planned + count) - len(sequence.blocks)
        while missing > pool.num_free:
            last = self.running[-1]
            # Those behind this one have nothing in this step yet.
            self._preempt(last)
            if last is sequence:
                return
        if missing > 0:
            sequence.blocks += pool.take(missing)
        self._add_chunk(step, sequence, count)

    def _add_chunk(self, step: Step, sequence: Sequence, count: int) -> None:
        start = sequence.num_planned
        is_sampled = start + count == len(sequence.tokens) + sequence.num_ahead
        evictions, blocks = sequence.num_evictions, sequence.blocks
        step.chunks.append(Chunk(sequence, start, count, is_sampled, evictions, blocks))
        sequence.num_planned += count
        sequence.num_ahead += is_sampled

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self.running.remove(sequence)
        self._let_go(sequence)
        sequence.state = "waiting"
        insort(self.waiting, sequence, key=RANK)

    def _let_go(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = sequence.num_planned = 0
        sequence.num_evictions += 1

    # What came of it.

    def _commit(self, chunk: Chunk, tokens: Iterator[int]) -> Iterator[New]:
        sequence = chunk.sequence
        token = next(tokens) if chunk.is_sampled else None
        if sequence.state == "ended":
            return
        if sequence.num_evictions == chunk.num_evictions:
            self._name(sequence, chunk.end)
            sequence.num_computed = chunk.end
        if token is None:
            return
        sequence.num_ahead -= 1
        sequence.tokens.append(token)
        reason = sequence.ends_with(token)
        if reason:
            self.end(sequence, reason)
        yield New(sequence, token)

    def _name(self, sequence: Sequence, num_computed: int) -> None:
        """The blocks that are full now."""
        size = self.pool.block_size
        first = sequence.num_computed // size
        if first < num_computed // size:
            keys = sequence.keys(num_computed, size)
            for number in range(first, len(keys)):
                self.pool.name(sequence.blocks[number], keys[number])


def fair_shares(wanted: Many[int], budget: int) -> list[int]:
    """As much for each as for the others, and at most what it wants; what one does not want is for
    the others. The first get what cannot be divided."""
    shares = [0] * len(wanted)
    # Smallest demand first. Among equal demands the earliest comes last and gets the remainder.
    places = sorted(range(len(wanted)), key=lambda place: (wanted[place], -place))
    for number, place in enumerate(places):
        shares[place] = min(wanted[place], budget // (len(places) - number))
        budget -= shares[place]
    return shares


def _is_generating(sequence: Sequence) -> bool:
    """Whether all but its last token are planned."""
    return sequence.num_planned >= len(sequence.tokens) + sequence.num_ahead - 1 and (
        sequence.num_generated + sequence.num_ahead > 0
    )


def _has_prompt(sequence: Sequence) -> bool:
    return sequence.num_computed >= sequence.num_prompt
