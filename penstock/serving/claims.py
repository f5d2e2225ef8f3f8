"""Which parts of which shards a worker runs as one batch, and when. Pure: time is an argument.

Requests queue in several shards and run in one worker. When a slot of the worker is free, `Claims`
asks the shards that have something queued for their part (a *round*), and starts one batch with
what they answer. It knows no socket, no tensor and no request, only how many rows there are.

How to use it, in the worker:

    events      `attach(shard)`, `wanted(shard, queued)`: a Want came; `offered(offer)`: a Dispatch
                came, asked for or not; `recall(shard, batch)`: an offer is taken back;
                `passed(shard, round, queued)`: the answer to a claim is "nothing";
                `detach(shard)`: its socket closed; `ended(batch, now)`: a batch is done
                or has failed. Report everything that lies in the sockets, then decide.
    decisions   `decide(now)` returns what to do now: `ClaimRows` is to be sent to its shard,
                `StartBatch` is to be run. Call it after events, and at `wake_at`.
                The policy is the batcher's: not dynamic if the model must not be batched.
    page        Publish each slot as idle only while `is_idle`: shards then send offers unasked.
                Between a batch and the claims that follow it, `is_idle` is False.
    ahead       While the only slot is busy, `decide` claims the rows of the next batch shortly
                before it is predicted to be free; `wake_at` is that time.

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
from dataclasses import dataclass, field

import msgspec

from penstock.config import BatchPolicy
from penstock.serving.batch_times import BatchTimes
from penstock.serving.paces import Paces
from penstock.serving.shares import BatchShare, Queued, split

# How long a batch waits for the other answers after the first: this time, but at most this share of
# the batch's own time. Under backlog (24 clients, batches of 4 rows and 100 ms, 4 shards on two
# busy cores) batches had 3.4 rows with 0.3 ms and 3.9 with 2 ms (2026-11-18).
MAX_WAIT_S = 0.002
MAX_WAIT = 0.1
# The next batch is claimed before the current one is predicted to end, so early that in 9 of 10
# cases all shards have answered by then. Rows that arrive later run in the batch after it, so the
# lead is at most MAX_LEAD_S and this share of the batch's time. Batches shorter than AHEAD_S are
# not claimed ahead. On two busy cores a claim took 1.2 ms on average, in which the model was idle,
# and a batch 13 ms (4 shards, test_law[fast], 2026-11-18).
FIRST_LEAD_S = 0.0003
MAX_LEAD_S = 0.002
MAX_LEAD = 0.2
AHEAD_S = 0.002
# Change of the lead after a round that was late, and after one that was not.
LONGER_S, SHORTER_S = 90e-6, 10e-6
# Shards that have not answered by then are left out of the next round, until they answer.
SILENCE_S = 0.002
# A shard with an open Want is claimed after this many rounds without it, whatever the page shows.
MAX_SKIPPED = 100
# A batch is not shrunk below this share of what is queued to save its oldest request: once rows are
# spread over shards, each small batch makes the next heads older, and batches shrink further. The
# head is dropped instead. Goodput of 4 shards in the worst scenario of tests/serving/
# test_shard_law.py, relative to one: 0.971 with 0.5, 0.987 with 0.75 or 0.9 (2026-11-17).
MIN_SHRINK = 0.75


class Offer(msgspec.Struct, frozen=True, eq=False):
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
    # The shard's number of the batch, to recall it.
    batch: int = 0


class ClaimRows(msgspec.Struct, frozen=True):
    """Ask this shard for its part. It answers with an offer of this round or passes."""

    shard: int
    round: int
    share: BatchShare


class StartBatch(msgspec.Struct, frozen=True, eq=False):
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


class Cap(msgspec.Struct, frozen=True):
    """Limits of one batch; `ends_at`, `drops_late` and `is_due` as in `BatchShare`."""

    max_rows: int
    max_tokens: float = math.inf
    ends_at: float = -math.inf
    drops_late: bool = False
    is_due: bool = True


class BatchCap:
    """How large the next batch may be. Learns T(b) from the batches of this worker."""

    def __init__(self, policy: BatchPolicy, num_executors: int) -> None:
        self._policy = policy
        self._max_rows = policy.max_batch_size if policy.is_dynamic else 1
        self._max_preferred = max(policy.preferred_batch_sizes, default=self._max_rows)
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
        if self._has_budget:
            preferred = []
        delay_s = self._policy.max_queue_delay_s
        is_late = delay_s > 0 and now >= head.due + delay_s
        if preferred and not is_late:
            return Cap(min(self._max_rows, max(preferred)))
        enough = self._policy.max_tokens or self._max_preferred
        is_due = delay_s == 0 or is_late or bool(preferred) or total >= enough
        return Cap(self._max_rows, max_tokens, is_due=is_due)

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
    # It has just passed, whatever the page shows.
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
    # No slot was free when it began.
    is_ahead: bool = False


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
    # How long before the end of a batch the next one is claimed.
    _lead_s: float = FIRST_LEAD_S

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

    @property
    def is_claiming(self) -> bool:
        """Whether parts of the next batch are here or claimed: `decide` may start it."""
        return bool(self._offers) or self._round is not None

    def attach(self, shard: int) -> None:
        self._shards[shard] = ShardQueue()

    def detach(self, shard: int) -> None:
        """Forget a shard that died, with its offers."""
        self._shards.pop(shard, None)
        self._offers = [offer for offer in self._offers if offer.shard != shard]

    def wanted(self, shard: int, queued: Queued) -> None:
        if shard in self._shards:
            self._shards[shard].queued = queued
            self._trust_page()

    def offered(self, offer: Offer) -> None:
        if offer.shard in self._shards:
            self._offers.append(offer)
            self._answered(offer.shard, offer.round, offer.queued)

    def recall(self, shard: int, batch: int) -> bool:
        """Forget an offer. False if it runs, or has run."""
        kept = [each for each in self._offers if (each.shard, each.batch) != (shard, batch)]
        was_waiting, self._offers = len(kept) < len(self._offers), kept
        return was_waiting

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
                if self._round.is_ahead:
                    self._reach(self._round, now)
                self.wake_at = self._ask_again_at(self._round, now)
                if now < self.wake_at:
                    return decisions
            began = self._round.began if self._round is not None else now
            self._round, self.wake_at = None, None
            if self._offers:
                decisions.append(self._start(began, now))
            elif not self._claimable():
                break
        return decisions + self._claim_ahead(now)

    def _claim_ahead(self, now: float) -> list[ClaimRows]:
        """Claim for the batch after the one that runs, if that ends soon."""
        if self.num_slots > 1 or self._round is not None or self._offers or not self._merges:
            return []
        if not self._running or self._running[0].offers[0].is_alone:
            return []
        (batch,) = self._running
        batch_s = batch.ends_at - batch.began
        claims_at = batch.ends_at - min(self._lead_s, MAX_LEAD * batch_s)
        if batch_s < AHEAD_S:
            return []
        if now < claims_at:
            self.wake_at = claims_at
            return []
        return self._open_round(max(now, batch.ends_at), is_ahead=True)

    def _reach(self, round: Round, now: float) -> None:
        """Begin a round that was opened ahead, now that the slot is free, and learn the lead."""
        round.is_ahead, round.began = False, now
        is_late = any(state.claimed == round.number for state in self._shards.values())
        lead_s = self._lead_s + (LONGER_S if is_late else -SHORTER_S)
        self._lead_s = min(max(lead_s, 0.0), MAX_LEAD_S)

    def _answered(self, shard: int, round: int, queued: Queued | None) -> None:
        state = self._shards[shard]
        state.queued, state.num_skipped = queued, 0
        if round and state.claimed == round:
            state.claimed = None

    def _trust_page(self) -> None:
        for state in self._shards.values():
            state.has_passed = False

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

    def _open_round(self, now: float, *, is_ahead: bool = False) -> list[ClaimRows]:
        """Claim from the shards that can add to the next batch, which starts now."""
        held = self._mergeable(math.inf, math.inf)
        if held and (held[0].is_alone or not self._merges):
            return []
        queues = self._queues(now, has_offers=bool(held), is_ahead=is_ahead)
        ranked = sorted(queues.items(), key=lambda item: item[1].rank)
        if not ranked:
            return []
        if not self._merges:
            del ranked[1:]
        size_held = sum(offer.num_tokens or offer.num_rows for offer in held)
        cap = self._cap.next([queued for _, queued in ranked], size_held, now)
        shares = self._shares(ranked, held, cap)
        if not shares:
            return []
        self._num_rounds += 1
        self._round = Round(self._num_rounds, now, cap, is_ahead=is_ahead)
        for shard, state in self._shards.items():
            state.num_skipped += state.queued is not None
            if shard in shares:
                state.claimed = self._num_rounds
        return [ClaimRows(shard, self._num_rounds, share) for shard, share in shares.items()]

    def _shares(
        self, ranked: Sequence[tuple[int, Queued]], held: Sequence[Offer], cap: Cap
    ) -> dict[int, BatchShare]:
        """Divide what the cap leaves beside the offers that are here; the oldest queue is first."""
        queues = [queued for _, queued in ranked]
        head = queues[0]
        known = [queued.geometry for queued in queues if queued.geometry is not None]
        geometry = held[0].geometry if held else known[0] if known else None
        num_held = sum(offer.num_rows for offer in held)
        if held and num_held >= cap.max_rows:
            return {}
        max_rows = max(0, cap.max_rows - num_held) if self._merges else head.head_rows
        rows = split([each.rows for each in queues], [each.head_rows for each in queues], max_rows)
        tokens: Sequence[float] = [math.inf] * len(queues)
        if cap.max_tokens != math.inf:
            max_tokens = int(cap.max_tokens) - sum(offer.num_tokens for offer in held)
            heads = [each.head_tokens for each in queues]
            tokens = split([each.tokens for each in queues], heads, max(0, max_tokens))
        expected = [min(grant, queued.num_rows) for grant, queued in zip(rows, queues, strict=True)]
        total = num_held + sum(expected)
        ends_at, drops_late, is_due = cap.ends_at, cap.drops_late, cap.is_due
        shares = {
            shard: BatchShare(grant, total - own, ends_at, drops_late, geometry, limit, is_due)
            for (shard, _), grant, own, limit in zip(ranked, rows, expected, tokens, strict=True)
            if grant > 0 and limit > 0
        }
        if not shares and not held:
            # The page contradicts itself.
            shares[ranked[0][0]] = BatchShare(max(head.head_rows, max_rows), geometry=geometry)
        return shares

    def _queues(self, now: float, *, has_offers: bool, is_ahead: bool) -> dict[int, Queued]:
        """Return the shards to claim from, if one has an open Want: all with rows by the page, even
        if their Want is still on its way; all with an open Want, if there are none and nothing else
        to run. Ahead of time the page is enough: Wants may not have been received."""
        queues: dict[int, Queued] = {}
        empty: dict[int, Queued] = {}
        if not is_ahead and not self._claimable():
            return queues
        for shard, state in self._shards.items():
            if state.claimed is not None:
                continue
            shown, last = self.read(shard, now), state.queued
            if last is not None and state.num_skipped >= MAX_SKIPPED:
                return {shard: last}
            if shown is not None and shown.num_rows and not (last is None and state.has_passed):
                geometry = None if last is None else last.geometry
                queues[shard] = msgspec.structs.replace(shown, geometry=geometry)
            elif last is not None:
                (queues if shown is None else empty)[shard] = last
        return queues if queues or has_offers or is_ahead else empty

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
        self._trust_page()
        size = sum(each.num_tokens for each in merged) or sum(each.num_rows for each in merged)
        ends_at = now + self._cap.mean_s(merged[0].geometry, size)
        batch = StartBatch(tuple(merged), began, ends_at)
        self._running.append(batch)
        return batch
