"""Continuous batching: choose the tokens that the next step computes.

Pure: no clock, no tensors. `plan` makes a step, the engine runs it, `commit` takes its sampled
tokens. A step can be planned while the one before it still runs, because the positions of its
tokens are known before the tokens are. Every decoding sequence gets its token first; the rest of
the budget goes to chunked prefill, in order; then waiting sequences are admitted. When blocks run
out, the sequence of the lowest rank is preempted and computed again later. A chunk may end with
drafted tokens: `commit` keeps those that the model would have sampled too (see `speculation`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from penstock.llm.blocks import BlockPool
from penstock.llm.sequence import Reason, Sequence
from penstock.llm.speculation import Speculation

RANK = attrgetter("rank")
# Least prompt tokens per chunk when prompts share a step: smaller chunks are not worth it.
MIN_SHARE = 16
# A step has room for the logits of at least this many tokens, unless it may have fewer tokens.
LEAST_SAMPLED = 64


@dataclass(frozen=True, slots=True)
class StepLimits:
    # Sequences that run at a time; more for throughput, fewer for time per token.
    max_sequences: int
    # Token budget; more for prefill throughput, fewer for time per token.
    max_tokens: int
    # Tokens of a sequence, including its prompt.
    max_length: int

    def __post_init__(self) -> None:
        # Otherwise some decoding sequences would get no token.
        assert self.max_tokens >= self.max_sequences >= 1

    @property
    def max_sampled(self) -> int:
        """Limit of the tokens of a step that are followed by a sampled one."""
        return max(self.max_sequences, min(LEAST_SAMPLED, self.max_tokens))


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence in a step, from `start` on."""

    sequence: Sequence
    start: int
    count: int
    # Whether it ends with the sequence's last token, so that the next token is sampled.
    is_sampled: bool
    # The sequence's `num_evictions` at planning time.
    num_evictions: int
    # The sequence's block list. Blocks may have been appended since; a sequence that loses its
    # blocks gets a new list.
    blocks: Many[int]
    # Drafted tokens, which follow the sequence's last one. They are the last of `count`.
    draft: Many[int] = ()

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def known(self) -> list[int]:
        """Its tokens, without one that is still being sampled."""
        return [*self.sequence.tokens[self.start : self.end], *self.draft]


class SampledPlace(NamedTuple):
    """A token of a chunk that is followed by a sampled one, as are the last and its drafts."""

    chunk: Chunk
    # Drafted tokens up to it.
    num_drafted: int

    @property
    def end(self) -> int:
        """The sequence's number of tokens up to it."""
        return self.chunk.end - len(self.chunk.draft) + self.num_drafted


@dataclass(slots=True)
class BatchStep:
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def sampled(self) -> list[SampledPlace]:
        return [
            SampledPlace(chunk, number)
            for chunk in self.chunks
            if chunk.is_sampled
            for number in range(len(chunk.draft) + 1)
        ]


class NewToken(NamedTuple):
    sequence: Sequence
    token: int
    # Its place among the sampled ones of the step.
    place: int
    # Why the sequence ended with it, or "".
    reason: Reason


class Scheduler:
    """Invariant: a sequence is in `waiting` without blocks, or in `running`, or it has ended. Both
    lists are sorted by rank."""

    def __init__(
        self,
        pool: BlockPool,
        limits: StepLimits,
        *,
        shares_prompts: bool = False,
        speculation: Speculation | None = None,
    ) -> None:
        """`shares_prompts`: prompts share the tokens of a step evenly, so that short ones need not
        wait for a long one; otherwise they are computed in order. `speculation`: who drafts."""
        self.shares_prompts = shares_prompts
        self.speculation = speculation
        self.pool = pool
        self.limits = limits
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        # Tokens computed by all committed steps.
        self.num_computed = 0
        # Drafted tokens of all committed steps, and those of them that sequences kept.
        self.num_drafted = self.num_accepted = 0
        self._waits_s: list[float] = []

    def fits(self, num_prompt: int, max_tokens: int) -> bool:
        """Return whether such a sequence could run alone."""
        # The last token is never computed, so it needs neither a position nor room.
        num_computed = num_prompt + max_tokens - 1
        is_short = num_computed <= self.limits.max_length
        return is_short and self.pool.num_needed(num_computed) <= self.pool.num_blocks

    def add(self, sequence: Sequence) -> None:
        assert self.fits(sequence.num_prompt, sequence.max_tokens)
        insort(self.waiting, sequence, key=RANK)

    def end(self, sequence: Sequence, reason: Reason) -> None:
        """End a sequence. Steps in flight may still write to its freed blocks; this is safe because
        steps run in order, so the next owner writes later."""
        if sequence.state == "ended":
            return
        (self.waiting if sequence.state == "waiting" else self.running).remove(sequence)
        self._let_go(sequence)
        sequence.state, sequence.reason = "ended", reason

    def plan(self, max_tokens: int | None = None) -> BatchStep:
        """Return the next step, of at most `max_tokens` tokens if that is below the limit; empty if
        nothing can run before another step is committed."""
        step, num_before = BatchStep(), self.num_preemptions
        limit = self.limits.max_tokens
        most = limit if max_tokens is None else min(max_tokens, limit)
        self._plan_tokens(step)
        # Drafts take no tokens from prompts.
        most = min(limit, most + sum(len(chunk.draft) for chunk in step.chunks))
        shares = self._shares(most - step.num_tokens)
        self._plan_prompts(step, most, shares)
        if self.num_preemptions == num_before:
            self._admit(step, most, shares)
        return step

    def commit(self, step: BatchStep, sampled: Many[int]) -> list[NewToken]:
        """Take the sampled tokens of a step, in the order of `step.sampled`, and return those that
        sequences which had not ended keep. Steps are committed in the order in which they were
        planned."""
        self.num_computed += step.num_tokens
        new: list[NewToken] = []
        place = 0
        for chunk in step.chunks:
            first = place
            place += len(chunk.draft) + 1 if chunk.is_sampled else 0
            if chunk.sequence.state != "ended":
                new += self._commit_chunk(chunk, sampled[first:place], first)
        return new

    def _commit_chunk(self, chunk: Chunk, sampled: Many[int], first: int) -> list[NewToken]:
        sequence, new = chunk.sequence, list[NewToken]()
        reason: Reason = ""
        for number, token in enumerate(sampled):
            sequence.tokens.append(token)
            reason = sequence.ends_with(token)
            new.append(NewToken(sequence, token, first + number, reason))
            # Tokens sampled after a wrong draft do not count.
            if reason or number == len(chunk.draft) or token != chunk.draft[number]:
                break
        num_rejected = len(chunk.draft) + 1 - len(new) if chunk.is_sampled else 0
        if sequence.num_evictions == chunk.num_evictions:
            # The next chunk overwrites what was computed for rejected drafts.
            end = chunk.end - num_rejected
            self._name(sequence, end)
            sequence.num_computed = end
            sequence.num_planned -= num_rejected
        if chunk.is_sampled:
            sequence.num_ahead -= 1
            sequence.num_drafted = 0
            self.num_drafted += len(chunk.draft)
            self.num_accepted += len(new) - 1
        if reason:
            self.end(sequence, reason)
        return new

    def note_begun(self, step: BatchStep, now: float) -> None:
        """Record the queueing times of requests that this step starts, one for each request."""
        for sequence in (chunk.sequence for chunk in step.chunks):
            if not sequence.is_begun and sequence.leader is None:
                self._waits_s.append(now - sequence.arrived)
            sequence.is_begun = True

    def take_waits(self) -> tuple[float, ...]:
        """Return the queueing times of requests started since the last call."""
        found, self._waits_s = tuple(self._waits_s), []
        return found

    # Planning.

    def _plan_tokens(self, step: BatchStep) -> None:
        """Plan one token for each decoding sequence, whatever the budget."""
        # Leave the other half of a step to prompts, and logits to those that end.
        most = min(self.limits.max_sampled, self.limits.max_tokens // 2)
        num_drafts = most - min(len(self.running) + len(self.waiting), self.limits.max_sequences)
        for sequence in list(self.running):
            is_due = sequence.state == "running" and _is_generating(sequence) and sequence.num_left
            if is_due and not self._awaits_token(sequence):
                draft = self._draft(sequence, num_drafts)
                num_drafts -= len(draft)
                self._plan_chunk(step, sequence, 1 + len(draft), draft)

    def _awaits_token(self, sequence: Sequence) -> bool:
        """Return whether a step in flight must be committed before the sequence's next one: it is
        known then which drafts were accepted, or what to draft."""
        if self.speculation is None or not sequence.num_ahead:
            return False
        return sequence.num_drafted > 0 or self.speculation.length(sequence) > 0

    def _draft(self, sequence: Sequence, most: int) -> list[int]:
        """Draft at most `most` tokens, without preempting other sequences."""
        if self.speculation is None or sequence.num_ahead:
            return []
        pool = self.pool
        num_blocks = len(sequence.blocks) + max(0, pool.num_free - len(self.running))
        room = num_blocks * pool.block_size - sequence.num_planned - 1
        # The last token is never computed.
        left = sequence.max_tokens - sequence.num_generated - 1
        return self.speculation.draft(sequence, min(most, room, left))

    def _plan_prompts(self, step: BatchStep, most: int, shares: Mapping[int, int]) -> None:
        """Plan chunked prefill, including the recomputation of preempted sequences."""
        for sequence in list(self.running):
            if sequence.state != "running" or _is_generating(sequence):
                continue
            share = shares.get(sequence.id, sequence.num_left)
            count = min(most - step.num_tokens, sequence.num_left, share)
            if count > 0:
                self._plan_chunk(step, sequence, count)

    def _admit(self, step: BatchStep, most: int, shares: Mapping[int, int]) -> None:
        """Admit by rank; one that does not fit blocks the others, so long prompts cannot starve."""
        while step.num_tokens < most and len(self.running) < self.limits.max_sequences:
            sequence = self._first_due()
            if sequence is None or not self._begin(sequence):
                return
            share = max(1, shares.get(sequence.id, sequence.num_left))
            count = min(most - step.num_tokens, sequence.num_left, share)
            self._add_chunk(step, sequence, count)

    def _shares(self, budget: int) -> dict[int, int]:
        """Return the tokens of each prompt that shares the step, by sequence id."""
        if not self.shares_prompts or budget <= 0:
            return {}
        prompts = [each for each in self.running if not _is_generating(each) and each.num_left]
        places = self.limits.max_sequences - len(self.running)
        prompts += [each for each in self.waiting if not each.is_held][: max(0, places)]
        prompts = prompts[: max(1, budget // MIN_SHARE)]
        shares = fair_shares([each.num_left for each in prompts], budget)
        return {each.id: share for each, share in zip(prompts, shares, strict=True)}

    def _first_due(self) -> Sequence | None:
        """Return the first waiting sequence that can start: its prompt is not being computed by its
        leader, it has no tokens in flight, and its grammar is compiled."""
        for sequence in self.waiting:
            leader = sequence.leader
            is_led = leader is not None and leader.state == "running" and not _has_prompt(leader)
            if not (sequence.num_ahead or sequence.is_held or is_led):
                return sequence
        return None

    def _begin(self, sequence: Sequence) -> bool:
        """Allocate blocks for all known tokens, reusing cached ones of the same prefix. Running
        sequences then need more blocks only for decode."""
        pool = self.pool
        known = len(sequence.tokens)
        # At least one token must be computed, to sample the next one from it.
        keys = sequence.keys(known - 1, pool.block_size) if sequence.is_cached else []
        shared = pool.find(keys)
        needed = pool.num_needed(known) - len(shared)
        # Headroom: each running sequence will soon need another block.
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
                pool.num_asked += known
                pool.num_found += num_found
        self.waiting.remove(sequence)
        sequence.state = "running"
        insort(self.running, sequence, key=RANK)
        return True

    def _plan_chunk(
        self, step: BatchStep, sequence: Sequence, count: int, draft: Many[int] = ()
    ) -> None:
        """Plan a chunk, preempting sequences of the lowest rank to make room, possibly this one."""
        pool = self.pool
        missing = pool.num_needed(sequence.num_planned + count) - len(sequence.blocks)
        while missing > pool.num_free:
            last = self.running[-1]
            # Sequences behind this one have nothing in this step yet.
            self._preempt(last)
            if last is sequence:
                return
        if missing > 0:
            sequence.blocks += pool.take(missing)
        self._add_chunk(step, sequence, count, draft)

    def _add_chunk(
        self, step: BatchStep, sequence: Sequence, count: int, draft: Many[int] = ()
    ) -> None:
        start = sequence.num_planned
        is_sampled = start + count - len(draft) == len(sequence.tokens) + sequence.num_ahead
        evictions, blocks = sequence.num_evictions, sequence.blocks
        step.chunks.append(Chunk(sequence, start, count, is_sampled, evictions, blocks, draft))
        sequence.num_planned += count
        sequence.num_drafted = len(draft)
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

    def _name(self, sequence: Sequence, num_computed: int) -> None:
        """Register the blocks that are now full in the prefix cache."""
        size = self.pool.block_size
        first = sequence.num_computed // size
        if first < num_computed // size:
            keys = sequence.keys(num_computed, size)
            for number in range(first, len(keys)):
                self.pool.name(sequence.blocks[number], keys[number])


def fair_shares(wanted: Many[int], budget: int) -> list[int]:
    """Split the budget evenly, giving each at most what it wants; unused shares go to the others,
    and the remainder to the first."""
    shares = [0] * len(wanted)
    # Smallest demand first. Among equal demands the earliest comes last and gets the remainder.
    places = sorted(range(len(wanted)), key=lambda place: (wanted[place], -place))
    for number, place in enumerate(places):
        shares[place] = min(wanted[place], budget // (len(places) - number))
        budget -= shares[place]
    return shares


def _is_generating(sequence: Sequence) -> bool:
    """Return whether all tokens but the last are planned, i.e. it decodes."""
    return sequence.num_planned >= len(sequence.tokens) + sequence.num_ahead - 1 and (
        sequence.num_generated + sequence.num_ahead > 0
    )


def _has_prompt(sequence: Sequence) -> bool:
    return sequence.num_computed >= sequence.num_prompt
