"""Which parts of which shards a worker runs as one batch, and when. Pure: time is an argument.

Requests queue in several shards and run in one worker. When a slot of the worker is free, `Claims`
asks the shards that have something queued for their part (a *round*), and starts one batch with
what they answer. It knows no socket, no tensor and no request, only how many rows there are.

How to use it, in the worker:

    events      `attach(shard)`, `wanted(shard, queued)`: a Want came; `offered(offer)`: a Dispatch
                came, asked for or not; `passed(shard, round, queued)`: the answer to a claim is
                "nothing"; `detach(shard)`: its socket closed; `ended(batch, now)`: a batch is done
                or has failed. Report everything that lies in the sockets, then decide.
    decisions   `decide(now)` returns what to do now: `ClaimRows` is to be sent to its shard,
                `StartBatch` is to be run. Call it after events, and at `wake_at`.
    page        Publish each slot as idle only while `is_idle`: shards then send offers unasked.
                Between a batch and the claims that follow it, `is_idle` is False.

What shards must do: answer each claim exactly once, with an offer or by passing, even if an offer
of theirs is on its way; say with every answer what is left (`queued`; None: nothing that could be
given now); and send a Want when they have something to give after they said None. So each open Want
leads to a claim, and no wake-up can be lost. A shard with an unanswered claim is not asked again;
its late answer is an offer for the next batch. Offers run in the order in which they came, so none
waits for ever. The offers of a shard that died are forgotten; those that run are the worker's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.config import BatchPolicy
from penstock.serving.batch_times import BatchTimes
from penstock.serving.paces import Paces
from penstock.serving.shares import BatchShare, Queued, split

# How long a batch waits for the other answers after the first: this time, but at most this share of
# the batch's own time.
MAX_WAIT_S = 0.0003
MAX_WAIT = 0.1
# Shards that have not answered by then are left out of the next round, until they answer.
SILENCE_S = 0.002
# A shard with an open Want is claimed after this many rounds without it, whatever the page shows.
MAX_SKIPPED = 100
# A batch is not shrunk below this share of what is queued to save its oldest request: once rows are
# spread over shards, each small batch makes the next heads older, and batches shrink to one row.
# The head is dropped instead.
MIN_SHRINK = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A part of a batch: a Dispatch that has arrived and not run. `frame` is the caller's."""

    shard: int
    num_rows: int
    # Parts of equal geometry can be merged.
    geometry: Hashable
    # The round of the claim that it answers; 0: it was sent unasked.
    round: int = 0
    num_tokens: int = 0
    # A rerun or a suspect: nothing is merged with it, and nothing else runs meanwhile.
    is_alone: bool = False
    # What the shard still has queued; None: nothing to give.
    queued: Queued | None = None
    frame: object = None


@dataclass(frozen=True, slots=True)
class ClaimRows:
    """Ask this shard for its part. It answers with an offer of this round or passes."""

    shard: int
    round: int
    share: BatchShare


@dataclass(frozen=True, slots=True, eq=False)
class StartBatch:
    """Run these parts as one batch; the first one's shard counts the execution."""

    offers: tuple[Offer, ...]
    # When the slot became free for it: the time of claiming belongs to the batch.
    began: float
    # When it is predicted to end; equal to `began` if nothing is known.
    ends_at: float

    @property
    def num_rows(self) -> int:
        return sum(offer.num_rows for offer in self.offers)

    @property
    def num_tokens(self) -> int:
        return sum(offer.num_tokens for offer in self.offers)


@dataclass(frozen=True, slots=True)
class Cap:
    """Limits of one batch; `ends_at` and `drops_late` as in `BatchShare`."""

    max_rows: int
    max_tokens: float = math.inf
    ends_at: float = -math.inf
    drops_late: bool = False


class BatchCap:
    """How large the next batch may be. Learns T(b) from the batches of this worker."""

    def __init__(self, policy: BatchPolicy, num_executors: int) -> None:
        self._policy = policy
        self._max_rows = policy.max_batch_size if policy.is_dynamic else 1
        self._has_budget = policy.max_tokens is not None
        has_slo = policy.slo_latency_s is not None
        self._paces = Paces(policy, num_executors) if has_slo else None
        self._times = BatchTimes(policy.max_tokens or policy.max_batch_size)

    def count_executors(self, num_executors: int) -> None:
        if self._paces is not None:
            self._paces.num_executors = max(1, num_executors)

    def seed(self, timings: Mapping[int, float], geometry: Hashable = None) -> None:
        if self._paces is not None:
            self._paces.seed(timings, geometry)
        elif (geometry is None) is not self._has_budget:
            self._times.seed_between(timings)

    def observe(self, geometry: Hashable, size: int, started: float, now: float) -> None:
        if self._paces is not None:
            self._paces.observe(geometry, size, started, now)
        else:
            self._times.observe(size, now - started, now)

    def mean_s(self, geometry: Hashable, size: int) -> float:
        if self._paces is not None:
            return self._paces.get(geometry).times.mean_s(size)
        return self._times.mean_s(size)

    def size(self, queued: Queued) -> int:
        """Return how much is queued, in the unit of T(b)."""
        return sum(queued.tokens) if self._has_budget else queued.num_rows

    def next(self, queues: Sequence[Queued], size_held: int, now: float) -> Cap:
        """Return the limits of a batch from these queues, of which the first has the oldest
        request, and offers of `size_held` rows (or tokens)."""
        total = sum(map(self.size, queues)) + size_held
        if self._paces is not None:
            return self._within_slo(self._paces, queues, total, now)
        head = queues[0]
        max_tokens = self._policy.max_tokens or math.inf
        preferred = [size for size in self._policy.preferred_batch_sizes if size <= total]
        delay_s = self._policy.max_queue_delay_s
        is_late = delay_s > 0 and now >= head.due + delay_s
        if preferred and not is_late and not self._has_budget:
            return Cap(min(self._max_rows, max(preferred)))
        return Cap(self._max_rows, max_tokens)

    def in_time(self, queued: Queued, cap: Cap, now: float) -> Queued:
        """Return the queue without the part that will probably be dropped: requests are about
        evenly spread from the oldest to one that arrived just now."""
        slo_s = self._policy.slo_latency_s
        if slo_s is None or not cap.drops_late or queued.due >= cap.ends_at:
            return queued
        share = max(0.0, (now + slo_s - cap.ends_at) / max(1e-9, now + slo_s - queued.due))
        rows = tuple(math.ceil(share * each) for each in queued.rows)
        tokens = tuple(math.ceil(share * each) for each in queued.tokens)
        return replace(queued, rows=rows, tokens=tokens)

    def _within_slo(self, paces: Paces, queues: Sequence[Queued], total: int, now: float) -> Cap:
        """As `SloBatcher` does for one queue: the target size under backlog, otherwise as much as
        the oldest request has time for."""
        if now >= paces.refresh_at:
            paces.refresh(now)
        head = queues[0]
        pace = paces.get(head.geometry)
        # Shards admit requests for batches of their target size: smaller ones would be too few.
        targets = [queued.target_size for queued in queues if queued.target_size]
        target = round(sum(targets) / len(targets)) if targets else pace.target_size
        arrivals_per_s = sum(queued.arrivals_per_s for queued in queues)
        is_backlogged = total > target and paces.is_too_slow_for(arrivals_per_s, pace)
        size = target
        if not is_backlogged:
            most = self._policy.max_tokens or self._max_rows
            size = paces.largest_by(pace, head.due - now, most)
            if size < MIN_SHRINK * min(total, target):
                size, is_backlogged = target, True
        batch_s = pace.times.mean_s(min(size, max(1, total)))
        ends_at = now + batch_s + paces.spread_s(batch_s)
        if self._has_budget:
            return Cap(self._max_rows, size, ends_at, is_backlogged)
        return Cap(min(size, self._max_rows), math.inf, ends_at, is_backlogged)


@dataclass(slots=True, eq=False)
class ShardQueue:
    """What the worker knows of one shard."""

    # Its last Want, or what was left after its last answer; None: it has nothing to give.
    queued: Queued | None = None
    # The round of its unanswered claim.
    claimed: int | None = None
    # It has passed since the last batch started, whatever the page shows.
    has_passed: bool = False
    # Rounds without a claim from it, since its Want.
    num_skipped: int = 0


@dataclass(slots=True, eq=False)
class Round:
    """Claims that were sent for the next batch."""

    number: int
    began: float
    cap: Cap
    # When the first part of the batch was there.
    first_at: float | None = None


@dataclass(eq=False)
class Claims:
    """One worker's view of its shards. Owned by the thread that reads the sockets. `read` returns
    a shard's queue at a time from the shared page, newer than its Want; None: there is no page."""

    policy: BatchPolicy
    num_executors: int = 1
    num_slots: int = 1
    read: Callable[[int, float], Queued | None] = lambda shard, now: None
    # When to decide again even without an event; None: not before one.
    wake_at: float | None = None
    _shards: dict[int, ShardQueue] = field(default_factory=dict)
    # In order of arrival.
    _offers: list[Offer] = field(default_factory=list)
    _running: list[StartBatch] = field(default_factory=list)
    _round: Round | None = None
    _num_rounds: int = 0

    def __post_init__(self) -> None:
        self._cap = BatchCap(self.policy, self.num_executors)
        self.seed, self.count_executors = self._cap.seed, self._cap.count_executors
        self._merges = self.policy.is_dynamic

    @property
    def is_idle(self) -> bool:
        """Whether a slot is free and nothing is known that could run in it."""
        is_free = len(self._running) < self.num_slots
        return is_free and self._round is None and not self._offers and not self._claimable()

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs, is offered, queued or claimed."""
        states = self._shards.values()
        return not (self._running or self._offers or self._round) and all(
            state.queued is None and state.claimed is None for state in states
        )

    def attach(self, shard: int) -> None:
        self._shards[shard] = ShardQueue()

    def detach(self, shard: int) -> None:
        """Forget a shard that died, with its offers."""
        self._shards.pop(shard, None)
        self._offers = [offer for offer in self._offers if offer.shard != shard]

    def wanted(self, shard: int, queued: Queued) -> None:
        if shard in self._shards:
            self._shards[shard].queued = queued

    def offered(self, offer: Offer) -> None:
        if offer.shard in self._shards:
            self._offers.append(offer)
            self._answered(offer.shard, offer.round, offer.queued)

    def passed(self, shard: int, round: int, queued: Queued | None = None) -> None:
        """Note that a shard has nothing for this claim; `queued`: it has other geometries."""
        if shard in self._shards:
            self._answered(shard, round, queued)
            self._shards[shard].has_passed = True

    def ended(self, batch: StartBatch, now: float, *, has_failed: bool = False) -> None:
        self._running.remove(batch)
        if not has_failed:
            size = batch.num_tokens or batch.num_rows
            self._cap.observe(batch.offers[0].geometry, size, batch.began, now)

    def decide(self, now: float) -> list[ClaimRows | StartBatch]:
        """Return what to do now, in this order."""
        decisions: list[ClaimRows | StartBatch] = []
        self.wake_at = None
        while self._has_slot():
            if self._round is None:
                decisions += self._open_round(now)
            if self._round is not None:
                self.wake_at = self._ask_again_at(self._round, now)
                if now < self.wake_at:
                    return decisions
            began = self._round.began if self._round is not None else now
            self._round, self.wake_at = None, None
            if self._offers:
                decisions.append(self._start(began, now))
            elif not self._claimable():
                break
        return decisions

    def _answered(self, shard: int, round: int, queued: Queued | None) -> None:
        state = self._shards[shard]
        state.queued, state.num_skipped = queued, 0
        if round and state.claimed == round:
            state.claimed = None

    def _has_slot(self) -> bool:
        """Whether another batch may start: a slot is free, and nothing that runs or is next has to
        run alone."""
        if len(self._running) >= self.num_slots:
            return False
        if not self._running:
            return True
        is_next_alone = bool(self._offers) and self._offers[0].is_alone
        return not is_next_alone and not self._running[0].offers[0].is_alone

    def _claimable(self) -> list[int]:
        return [
            shard
            for shard, state in self._shards.items()
            if state.queued is not None and state.claimed is None
        ]

    def _open_round(self, now: float) -> list[ClaimRows]:
        """Claim from the shards that can add to the next batch."""
        held = self._mergeable(math.inf, math.inf)
        if held and (held[0].is_alone or not self._merges):
            return []
        queues = self._queues(now, has_offers=bool(held))
        if not queues:
            return []
        if not self._merges:
            queues = dict([min(queues.items(), key=lambda item: item[1].rank)])
        ranked = sorted(queues, key=lambda shard: queues[shard].rank)
        head = queues[ranked[0]]
        geometry = held[0].geometry if held else head.geometry
        num_held = sum(offer.num_rows for offer in held)
        tokens_held = sum(offer.num_tokens for offer in held)
        cap = self._cap.next([queues[shard] for shard in ranked], tokens_held or num_held, now)
        queues = {shard: self._cap.in_time(queued, cap, now) for shard, queued in queues.items()}
        max_rows = max(0, cap.max_rows - num_held) if self._merges else head.head_rows
        rows = split(
            [queues[s].rows for s in ranked], [queues[s].head_rows for s in ranked], max_rows
        )
        tokens: list[float] = [math.inf] * len(ranked)
        if cap.max_tokens != math.inf:
            amounts = [queues[s].tokens for s in ranked]
            heads = [queues[s].head_tokens for s in ranked]
            tokens = [*split(amounts, heads, max(0, int(cap.max_tokens) - tokens_held))]
        expected = {
            shard: min(grant, queues[shard].num_rows)
            for shard, grant in zip(ranked, rows, strict=True)
        }
        claims: list[ClaimRows] = []
        for shard, grant, max_tokens in zip(ranked, rows, tokens, strict=True):
            if grant <= 0 or max_tokens <= 0:
                continue
            others = num_held + sum(expected.values()) - expected[shard]
            share = BatchShare(grant, others, cap.ends_at, cap.drops_late, geometry, max_tokens)
            claims.append(ClaimRows(shard, self._num_rounds + 1, share))
        if claims:
            self._num_rounds += 1
            self._round = Round(self._num_rounds, now, cap)
            for state in self._shards.values():
                state.num_skipped += state.queued is not None
            for claim in claims:
                self._shards[claim.shard].claimed = self._num_rounds
        return claims

    def _queues(self, now: float, *, has_offers: bool) -> dict[int, Queued]:
        """Return the shards to claim from, if one has an open Want: all with rows by the page, even
        if their Want is still on its way; all with an open Want, if there are none and nothing else
        to run."""
        queues: dict[int, Queued] = {}
        empty: dict[int, Queued] = {}
        if not self._claimable():
            return queues
        for shard, state in self._shards.items():
            if state.claimed is not None:
                continue
            shown, last = self.read(shard, now), state.queued
            if last is not None and state.num_skipped >= MAX_SKIPPED:
                return {shard: last}
            if shown is not None and shown.num_rows and not (last is None and state.has_passed):
                geometry = None if last is None else last.geometry
                queues[shard] = replace(shown, geometry=geometry)
            elif last is not None:
                (queues if shown is None else empty)[shard] = last
        return queues if queues or has_offers else empty

    def _ask_again_at(self, round: Round, now: float) -> float:
        """Return when the batch of this round starts, or the round is given up; now, if all have
        answered or the batch is full."""
        if all(state.claimed != round.number for state in self._shards.values()):
            return now
        held = self._mergeable(round.cap.max_rows, round.cap.max_tokens)
        if not held:
            return max(now, round.began + SILENCE_S)
        num_rows = sum(offer.num_rows for offer in held)
        if round.first_at is None:
            round.first_at = now
        if held[0].is_alone or num_rows >= round.cap.max_rows:
            return now
        size = sum(offer.num_tokens for offer in held) or num_rows
        batch_s = self._cap.mean_s(held[0].geometry, size)
        return max(now, round.first_at + min(MAX_WAIT_S, MAX_WAIT * batch_s or MAX_WAIT_S))

    def _mergeable(self, max_rows: float, max_tokens: float) -> list[Offer]:
        """Return the first offer and those that can run with it, within these limits."""
        merged = self._offers[:1]
        if not merged or merged[0].is_alone or not self._merges:
            return merged
        num_rows, num_tokens = merged[0].num_rows, merged[0].num_tokens
        for offer in self._offers[1:]:
            if offer.is_alone or offer.geometry != merged[0].geometry:
                continue
            if num_rows + offer.num_rows > max_rows or num_tokens + offer.num_tokens > max_tokens:
                continue
            merged.append(offer)
            num_rows, num_tokens = num_rows + offer.num_rows, num_tokens + offer.num_tokens
        return merged

    def _start(self, began: float, now: float) -> StartBatch:
        max_tokens = self.policy.max_tokens or math.inf
        merged = self._mergeable(self.policy.max_batch_size, max_tokens)
        self._offers = [offer for offer in self._offers if offer not in merged]
        for state in self._shards.values():
            state.has_passed = False
        size = sum(each.num_tokens for each in merged) or sum(each.num_rows for each in merged)
        ends_at = now + self._cap.mean_s(merged[0].geometry, size)
        batch = StartBatch(tuple(merged), began, ends_at)
        self._running.append(batch)
        return batch
