"""Shards and workers on a simulated clock: the real batchers, claims and page; no process.

`simulate_shards` drives several batchers, which each get a part of the arrivals, and executors that
only take time. Messages of claims take `claim_s` there and back; what shards and workers read of
the page is up to `page_delay_s` old. With one shard it does what `doubles.simulate` does.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from doubles import Outcomes, RecordingSink

from penstock.config import BatchPolicy
from penstock.errors import Overloaded
from penstock.serving.batcher import Batcher
from penstock.serving.claims import ClaimRows, Claims, Offer, StartBatch
from penstock.serving.elsewhere import NOTHING_ELSEWHERE, Elsewhere, OtherShards, ShardLoad
from penstock.serving.plan import UNPLANNED, Ticket
from penstock.serving.shared_page import PageElsewhere, PageLayout, SharedPage
from penstock.serving.shares import Queued
from penstock.serving.slo_batcher import SloBatcher
from penstock.types import Request

MODEL = 0
MakeBatcher = Callable[[BatchPolicy, int, Elsewhere], Batcher | SloBatcher]


@dataclass
class ShardedLoad:
    """A load, and what serves it. `split` are the weights of the shards; `prepare` sets what else a
    request has and returns its geometry; `deaths` are times at which a shard dies; `spoil` is
    called with the page before each event."""

    policy: BatchPolicy
    arrivals: Sequence[float]
    duration_of: Callable[[int], float]
    num_executors: int = 1
    num_shards: int = 1
    num_slots: int = 1
    split: Sequence[float] = ()
    page_delay_s: float = 0.0
    claim_s: float = 0.0
    prepare: Callable[[Request, int], Hashable] = lambda request, index: "shape"
    seeds: dict[int, float] = field(default_factory=dict)
    deaths: dict[int, float] = field(default_factory=dict)
    spoil: Callable[[SharedPage], None] | None = None


@dataclass
class ShardedOutcomes(Outcomes):
    # Requests that died with their shard.
    num_lost: int = 0
    by_priority: dict[int, list[float]] = field(default_factory=dict)
    by_shard: dict[int, list[float]] = field(default_factory=dict)


class PageView:
    """The page as it was up to `delay_s` ago."""

    def __init__(self, page: SharedPage, delay_s: float) -> None:
        self._page, self._delay_s = page, delay_s
        self.page = SharedPage.in_memory(page.layout) if delay_s else page
        self._copied_at = -math.inf

    def at(self, now: float) -> SharedPage:
        if self._delay_s and now - self._copied_at >= self._delay_s:
            self._copied_at = now
            self.page.cells[:] = self._page.cells
        return self.page


class ViewElsewhere:
    """Reads an old page and writes the present one."""

    def __init__(self, page: SharedPage, view: PageView, shard: int, load: ShardedLoad) -> None:
        num_slots = load.num_executors * load.num_slots
        levels, has_budget = max(1, load.policy.num_priorities), load.policy.max_tokens is not None
        self._view = view
        self._old = PageElsewhere(view.page, MODEL, shard, num_slots, levels, has_budget)
        self._new = PageElsewhere(page, MODEL, shard, num_slots, levels, has_budget)

    def look(self, now: float, *, is_fresh: bool = False) -> OtherShards:
        self._view.at(now)
        return self._old.look(now, is_fresh=is_fresh)

    def publish(self, load: ShardLoad, now: float) -> None:
        self._new.publish(load, now)

    def arrived(self, level: int, num_requests: int, size: int, due: float | None) -> None:
        self._new.arrived(level, num_requests, size, due)


class ShardedSimulation:
    def __init__(self, load: ShardedLoad) -> None:
        self.load = load
        self.now = -math.inf
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.page = SharedPage.in_memory(
            PageLayout(load.num_shards, 1, load.num_executors * load.num_slots)
        )
        self.view = PageView(self.page, load.page_delay_s)
        self.outcomes = ShardedOutcomes()
        self.workers = [SimulatedWorker(self, index) for index in range(load.num_executors)]
        self.shards = [SimulatedShard(self, index) for index in range(load.num_shards)]

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))

    def run(self) -> ShardedOutcomes:
        rng = random.Random(9)
        weights = self.load.split or [1.0] * self.load.num_shards
        for index, arrival in enumerate(self.load.arrivals):
            shard = self.shards[rng.choices(range(self.load.num_shards), weights)[0]]
            self.at(arrival, lambda shard=shard, index=index: shard.arrive(index))
        for index, when in self.load.deaths.items():
            self.at(when, self.shards[index].die)
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            if self.load.spoil is not None:
                self.load.spoil(self.page)
            action()
        return self.outcomes


class SimulatedShard:
    """Keeps the rules for shards in `penstock.serving.claims`."""

    def __init__(self, simulation: ShardedSimulation, index: int) -> None:
        self._simulation, self.index = simulation, index
        load = simulation.load
        elsewhere: Elsewhere = NOTHING_ELSEWHERE
        self._is_only = load.num_shards == 1
        if not self._is_only:
            elsewhere = ViewElsewhere(simulation.page, simulation.view, index, load)
        num_executors = load.num_executors * load.num_slots
        self.batcher: Batcher | SloBatcher
        if load.policy.slo_latency_s is not None:
            self.batcher = SloBatcher(load.policy, num_executors, elsewhere)
        else:
            self.batcher = Batcher(load.policy, elsewhere)
            self.batcher.count_executors(num_executors, 0.0)
        if load.seeds:
            self.batcher.seed(load.seeds)
        self._sink = RecordingSink()
        # By identity of the request.
        self._geometries: dict[int, Hashable] = {}
        # Workers that have an open Want.
        self._wants: set[int] = set()
        self._wake_at: float | None = None
        self.is_alive = True

    def arrive(self, index: int) -> None:
        now, outcomes = self._simulation.now, self._simulation.outcomes
        if not self.is_alive:
            outcomes.num_lost += 1
            return
        request = Request(self._sink, (), now)
        request.ticket = Ticket(UNPLANNED)
        request.timings.queued = now
        geometry = self._simulation.load.prepare(request, index)
        self._geometries[id(request)] = geometry
        try:
            self.batcher.add(request, geometry, now)
        except Overloaded:
            outcomes.refusals_s.append(0.0)
        self.pump()

    def pump(self) -> None:
        now = self._simulation.now
        if not self.is_alive:
            return
        self._refuse(now)
        has_idle = self._offer_to_idle(now)
        self._refuse(now)
        if not self._is_only:
            self.batcher.publish(now)
            self._want(now)
        batcher = self.batcher
        wake_at = batcher.wake_at if has_idle or not self._is_only else batcher.next_expiry
        if wake_at != self._wake_at:
            self._wake_at = wake_at
            if wake_at is not None:
                self._simulation.at(max(wake_at, now), lambda: self._woken(wake_at))

    def _woken(self, wake_at: float) -> None:
        if wake_at == self._wake_at:
            self._wake_at = None
            self.pump()

    def _offer_to_idle(self, now: float) -> bool:
        """Send batches to slots that the page shows as idle; return whether one is left."""
        # A single shard knows what it has sent.
        simulation = self._simulation
        page = simulation.page if self._is_only else simulation.view.at(now)
        for worker in simulation.workers:
            for slot in worker.slots:
                if not page.is_idle(MODEL, slot):
                    continue
                requests = self.batcher.next(now)
                if requests is None:
                    return True
                if not self._is_only:
                    self.batcher.publish(now)
                worker.receive_offer(self._offer(requests, 0, worker.index))
        return False

    def _want(self, now: float) -> None:
        queued = self.batcher.wanted(now)
        for worker in self._simulation.workers:
            if queued is not None and worker.index not in self._wants:
                self._wants.add(worker.index)
                worker.receive_want(self.index, queued)

    def claimed(self, worker: SimulatedWorker, claim: ClaimRows) -> None:
        if not self.is_alive:
            return
        simulation = self._simulation
        self._refuse(simulation.now)
        requests = self.batcher.next(simulation.now, claim.share)
        back_at = simulation.now + simulation.load.claim_s / 2
        if requests is not None:
            offer = self._offer(requests, claim.round, worker.index)
            simulation.at(back_at, lambda: worker.receive_offer(offer))
        else:
            queued = self._left(worker.index)
            simulation.at(back_at, lambda: worker.receive_pass(self.index, claim.round, queued))
        self.pump()

    def _left(self, worker: int) -> Queued | None:
        queued = None if self._is_only else self.batcher.wanted(self._simulation.now)
        (self._wants.add if queued is not None else self._wants.discard)(worker)
        return queued

    def _offer(self, requests: list[Request], round: int, worker: int) -> Offer:
        num_rows = sum(request.num_rows for request in requests)
        num_tokens = sum(request.num_tokens for request in requests)
        geometry = self._geometries[id(requests[0])]
        is_alone = self.batcher.closed_by == "rerun"
        part = Part(self, self._simulation.now, requests)
        left = self._left(worker)
        return Offer(self.index, num_rows, geometry, round, num_tokens, is_alone, left, part)

    def ended(self, part: Part, size: int) -> None:
        if not self.is_alive:
            self._simulation.outcomes.num_lost += len(part.requests)
            return
        now, outcomes = self._simulation.now, self._simulation.outcomes
        geometry = self._geometries[id(part.requests[0])]
        self.batcher.observe(geometry, size, part.started, now)
        for request in part.requests:
            del self._geometries[id(request)]
            latency_s = now - request.timings.queued
            outcomes.latencies_s.append(latency_s)
            outcomes.by_priority.setdefault(request.priority, []).append(latency_s)
            outcomes.by_shard.setdefault(self.index, []).append(latency_s)

    def die(self) -> None:
        self.is_alive = False
        self._simulation.outcomes.num_lost += len(self.batcher.drain())
        self._simulation.page.clear_shard(self.index)
        for worker in self._simulation.workers:
            worker.forget(self.index)

    def _refuse(self, now: float) -> None:
        for request in self.batcher.expire(now):
            self._simulation.outcomes.refusals_s.append(now - request.timings.queued)


@dataclass(eq=False)
class Part:
    """The `frame` of an offer."""

    shard: SimulatedShard
    started: float
    requests: list[Request]


class SimulatedWorker:
    def __init__(self, simulation: ShardedSimulation, index: int) -> None:
        self._simulation, self.index = simulation, index
        load, view = simulation.load, simulation.view
        self.slots = range(index * load.num_slots, (index + 1) * load.num_slots)
        self._free = list(self.slots)
        num_executors = load.num_executors * load.num_slots

        def read(shard: int, now: float) -> Queued:
            return view.at(now).read_queue(MODEL, shard, now)

        self._claims = Claims(load.policy, num_executors, load.num_slots, read)
        if load.seeds:
            self._claims.seed(load.seeds)
        for shard in range(load.num_shards):
            self._claims.attach(shard)
        self._wake_at = math.inf
        self._waiting: list[Part] = []

    def receive_want(self, shard: int, queued: Queued) -> None:
        self._claims.wanted(shard, queued)
        self.decide()

    def receive_pass(self, shard: int, round: int, queued: Queued | None) -> None:
        self._claims.passed(shard, round, queued)
        self.decide()

    def receive_offer(self, offer: Offer) -> None:
        assert isinstance(offer.frame, Part)
        if not offer.frame.shard.is_alive:
            self._simulation.outcomes.num_lost += len(offer.frame.requests)
            return
        self._waiting.append(offer.frame)
        self._claims.offered(offer)
        self.decide()

    def forget(self, shard: int) -> None:
        self._claims.detach(shard)
        for part in self._waiting:
            if part.shard.index == shard:
                self._simulation.outcomes.num_lost += len(part.requests)
        self._waiting = [part for part in self._waiting if part.shard.index != shard]
        self.decide()

    def decide(self) -> None:
        simulation = self._simulation
        now = simulation.now
        for decision in self._claims.decide(now):
            if isinstance(decision, ClaimRows):
                there_at = now + simulation.load.claim_s / 2
                shard = simulation.shards[decision.shard]
                simulation.at(
                    there_at, lambda shard=shard, claim=decision: shard.claimed(self, claim)
                )
            else:
                self._start(decision)
        if self._claims.is_idle:
            for slot in self._free:
                simulation.page.show_idle(MODEL, slot)
        wake_at = self._claims.wake_at
        if wake_at is not None and wake_at < self._wake_at:
            self._wake_at = wake_at
            simulation.at(wake_at, self._woken)

    def _woken(self) -> None:
        self._wake_at = math.inf
        self.decide()

    def _start(self, batch: StartBatch) -> None:
        simulation = self._simulation
        simulation.outcomes.batch_rows.append(batch.num_rows)
        slot = self._free.pop(0)
        now = simulation.now
        simulation.page.show_batch(MODEL, slot, now, batch.ends_at, batch.num_rows)
        started = {offer.frame for offer in batch.offers}
        for offer in batch.offers:
            if offer.round:
                # Workers tell when what they claimed starts.
                assert isinstance(offer.frame, Part)
                offer.frame.started = max(offer.frame.started, batch.began)
        self._waiting = [part for part in self._waiting if part not in started]
        duration_s = simulation.load.duration_of(batch.num_tokens or batch.num_rows)
        simulation.at(now + duration_s, lambda: self._end(batch, slot))

    def _end(self, batch: StartBatch, slot: int) -> None:
        simulation = self._simulation
        self._claims.ended(batch, simulation.now)
        self._free.append(slot)
        self._free.sort()
        self.decide()
        size = batch.num_tokens or batch.num_rows
        for offer in batch.offers:
            assert isinstance(offer.frame, Part)
            offer.frame.shard.ended(offer.frame, size)
        for shard in {offer.shard for offer in batch.offers}:
            simulation.shards[shard].pump()


def simulate_shards(load: ShardedLoad) -> ShardedOutcomes:
    """Run a load until everything has ended."""
    return ShardedSimulation(load).run()
