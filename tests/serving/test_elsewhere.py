"""Batchers of several shards: limits and predictions count all of them; shares are kept."""

import math
from dataclasses import replace

import pytest
from doubles import RecordingSink

from penstock.config import BatchPolicy, QueuePolicy, ladder
from penstock.errors import Overloaded
from penstock.serving.batcher import Batcher
from penstock.serving.elsewhere import NOTHING_ELSEWHERE, ShardLoad
from penstock.serving.plan import UNPLANNED, Ticket
from penstock.serving.shared_page import PageElsewhere, PageLayout, SharedPage
from penstock.serving.shares import BatchShare, Queued
from penstock.serving.slo_batcher import SloBatcher
from penstock.types import Request

FIXED = BatchPolicy(max_batch_size=8, is_dynamic=True)
SLO = BatchPolicy(max_batch_size=8, is_dynamic=True, slo_latency_s=0.025)


def duration_s(num_rows: float) -> float:
    return 0.004 + 0.0005 * num_rows


def make(now: float, rows: int = 1, priority: int = 0, timeout_s: float | None = None) -> Request:
    request = Request(RecordingSink(), (), now)
    request.ticket = Ticket(UNPLANNED)
    request.timings.queued = now
    request.num_rows = rows
    request.priority = priority
    request.timeout_s = timeout_s
    return request


class Shards:
    """Batchers that share a page."""

    def __init__(self, policy: BatchPolicy, num_shards: int = 3, num_slots: int = 1) -> None:
        self.page = SharedPage.in_memory(PageLayout(num_shards, 1, num_slots))
        levels = max(1, policy.num_priorities)
        self.batchers: list[Batcher | SloBatcher] = []
        for shard in range(num_shards):
            elsewhere = PageElsewhere(self.page, 0, shard, num_slots, levels)
            batcher: Batcher | SloBatcher = (
                Batcher(policy, elsewhere)
                if policy.slo_latency_s is None
                else SloBatcher(policy, num_slots, elsewhere)
            )
            batcher.seed({rows: duration_s(rows) for rows in ladder(policy.max_batch_size)})
            self.batchers.append(batcher)

    def add(self, shard: int, request: Request, shape: str = "a") -> None:
        self.batchers[shard].add(request, shape, request.timings.queued)
        self.batchers[shard].publish(request.timings.queued)

    def fill(self, shard: int, count: int, now: float = 0.0) -> None:
        for _ in range(count):
            self.add(shard, make(now))


def num_admitted(shards: Shards) -> int:
    """Return how many requests are queued before the first is refused; with more time between them
    than the page may be old."""
    for index in range(1000):
        try:
            shards.add(index % len(shards.batchers), make(index * 0.0001))
        except Overloaded:
            return index
    return 1000


@pytest.mark.parametrize("policy", [FIXED, SLO], ids=["fixed", "slo"])
class TestLimits:
    def test_queue_size_counts_all_shards(self, policy: BatchPolicy) -> None:
        shards = Shards(replace(policy, policies=(QueuePolicy(max_queue_size=4),)))
        for shard in range(3):
            shards.add(shard, make(0.0))
        shards.add(0, make(0.0))
        with pytest.raises(Overloaded, match="maximum queue size: 4"):
            shards.add(1, make(0.001))

    def test_the_limit_of_all_queues_counts_all_shards(self, policy: BatchPolicy) -> None:
        shards = Shards(replace(policy, max_pending=3))
        for shard in range(3):
            shards.add(shard, make(0.0))
        with pytest.raises(Overloaded, match="maximum queue size: 3"):
            shards.add(2, make(0.001))

    def test_queue_size_is_by_level(self, policy: BatchPolicy) -> None:
        levels = (QueuePolicy(), QueuePolicy(), QueuePolicy(max_queue_size=2))
        shards = Shards(replace(policy, num_priorities=2, default_priority=2, policies=levels))
        for shard in range(3):
            shards.add(shard, make(0.0, priority=1))
        shards.add(0, make(0.0, priority=2))
        shards.add(1, make(0.0, priority=2))
        with pytest.raises(Overloaded, match="maximum queue size: 2"):
            shards.add(2, make(0.001, priority=2))
        shards.add(2, make(0.001, priority=1))

    def test_what_a_dead_shard_had_queued_does_not_count(self, policy: BatchPolicy) -> None:
        shards = Shards(replace(policy, max_pending=2))
        shards.fill(0, 2)
        with pytest.raises(Overloaded):
            shards.add(1, make(0.001))
        shards.page.clear_shard(0)
        shards.add(1, make(0.002))


class TestPredictions:
    def test_rows_of_other_shards_are_ahead(self) -> None:
        nums = [num_admitted(Shards(SLO, num_shards)) for num_shards in (1, 3)]
        assert 10 < nums[0] < 30 and abs(nums[0] - nums[1]) <= 2

    def test_running_batches_are_those_that_workers_show(self) -> None:
        shards = Shards(SLO)
        shards.page.show_batch(0, 0, 0.0, 0.020, 8)
        with pytest.raises(Overloaded):
            shards.add(0, make(0.0))
        shards.page.show_idle(0, 0)
        shards.add(0, make(0.001))

    def test_an_idle_model_takes_anything(self) -> None:
        shards = Shards(replace(SLO, slo_latency_s=0.001))
        shards.add(0, make(0.0))

    def test_other_geometries_count_as_work(self) -> None:
        shards = Shards(SLO)
        for shape in ("a", "b"):
            shards.add(0, make(0.0), shape)
        shards.page.show_queue(0, 1, ShardLoad(Queued((3,), due=1.0), (3,), (0.001,)), 0.0)
        shards.add(0, make(0.001), "a")
        shards.page.show_queue(0, 1, ShardLoad(Queued((3,), due=1.0), (3,), (0.030,)), 0.002)
        with pytest.raises(Overloaded):
            shards.add(0, make(0.002), "a")

    def test_waits_without_an_slo_count_all_shards(self) -> None:
        shards = Shards(replace(FIXED, max_wait_s=0.1))
        for index in range(3):
            shards.fill(index, 30, index * 0.001)
        with pytest.raises(Overloaded, match="the queue is"):
            shards.fill(0, 30, 0.01)
        assert sum(batcher.num_queued for batcher in shards.batchers) < 110


class TestShares:
    @pytest.mark.parametrize("policy", [FIXED, SLO], ids=["fixed", "slo"])
    def test_a_shard_gives_no_more_than_its_share(self, policy: BatchPolicy) -> None:
        batcher = Shards(policy).batchers[0]
        for rows in (1, 2, 2):
            batcher.add(make(0.0, rows), "a", 0.0)
        assert [each.num_rows for each in batcher.next(0.0, BatchShare(4)) or []] == [1, 2]
        # A request is never divided, and the sum of the shares is a full batch.
        assert batcher.next(0.0, BatchShare(1)) is None
        assert [each.num_rows for each in batcher.next(0.0, BatchShare(2)) or []] == [2]

    @pytest.mark.parametrize("policy", [FIXED, SLO], ids=["fixed", "slo"])
    def test_only_the_geometry_of_the_claim_is_given(self, policy: BatchPolicy) -> None:
        batcher = Shards(policy).batchers[0]
        batcher.add(make(0.0), "a", 0.0)
        assert batcher.next(0.0, BatchShare(4, geometry="b")) is None
        wanted = batcher.wanted(0.0)
        assert wanted is not None and wanted.geometry == "a"
        assert len(batcher.next(0.0, BatchShare(4, geometry="a")) or []) == 1
        assert batcher.wanted(0.0) is None

    @pytest.mark.parametrize("policy", [FIXED, SLO], ids=["fixed", "slo"])
    def test_a_rerun_answers_a_claim_alone(self, policy: BatchPolicy) -> None:
        batcher = Shards(policy).batchers[0]
        batcher.add(make(0.0), "a", 0.0)
        again = make(0.0)
        batcher.rerun_alone(again)
        assert batcher.next(0.0, BatchShare(4)) == [again]
        assert batcher.closed_by == "rerun"

    def test_late_requests_are_dropped_by_the_end_of_the_merged_batch(self) -> None:
        batcher = Shards(SLO).batchers[0]
        assert isinstance(batcher, SloBatcher)
        urgent, other = make(0.0, timeout_s=0.010), make(0.0)
        batcher.add(urgent, "a", 0.0)
        batcher.add(other, "a", 0.0)
        assert batcher.next(0.0, BatchShare(4, ends_at=0.009)) == [urgent, other]
        batcher.put_back([urgent, other], "a")
        assert batcher.next(0.0, BatchShare(4, ends_at=0.011, drops_late=True)) == [other]
        assert batcher.take_dropped() == [urgent]

    def test_a_prediction_that_refuses_everything_is_tested(self) -> None:
        batcher = Shards(SLO).batchers[0]
        request = make(0.0)
        batcher.add(request, "a", 0.0)
        assert batcher.next(0.0, BatchShare(4, ends_at=1.0)) == [request]

    def test_tokens_are_limited_too(self) -> None:
        batcher = Batcher(replace(FIXED, max_tokens=100), NOTHING_ELSEWHERE)
        for _ in range(3):
            request = make(0.0)
            request.num_tokens = 30
            batcher.add(request, "a", 0.0)
        wanted = batcher.wanted(0.0)
        assert wanted == Queued((3,), (90,), 0.0, 1, 30, "a")
        assert len(batcher.next(0.0, BatchShare(8, max_tokens=60)) or []) == 2


class TestFixedDelay:
    POLICY = replace(FIXED, preferred_batch_sizes=(6,), max_queue_delay_s=0.01)

    def test_rows_of_other_shards_count_towards_preferred_sizes(self) -> None:
        shards = Shards(self.POLICY)
        shards.fill(0, 2)
        shards.fill(1, 2)
        assert shards.batchers[0].wanted(0.001) is None
        assert shards.batchers[0].wake_at == 0.01
        shards.fill(2, 2, 0.002)
        wanted = shards.batchers[2].wanted(0.002)
        assert wanted is not None and wanted.due == 0.002
        # Its own rows are too few to run alone.
        assert shards.batchers[2].next(0.002) is None
        assert len(shards.batchers[2].next(0.002, BatchShare(2, 4)) or []) == 2

    def test_a_claim_for_requests_that_ran_elsewhere_is_not_answered_early(self) -> None:
        shards = Shards(self.POLICY)
        shards.fill(0, 1)
        assert shards.batchers[0].next(0.001, BatchShare(8, 3, is_due=False)) is None
        assert shards.batchers[0].wake_at == 0.01
        assert shards.batchers[0].next(0.001, BatchShare(8, 5, is_due=False)) is not None

    def test_a_delay_that_is_over_wants_a_claim(self) -> None:
        shards = Shards(self.POLICY)
        shards.fill(0, 1)
        assert shards.batchers[0].wanted(0.009) is None
        assert shards.batchers[0].wanted(0.01) is not None


@pytest.mark.parametrize("policy", [FIXED, SLO], ids=["fixed", "slo"])
def test_a_rerun_is_shown_to_workers_and_other_shards(policy: BatchPolicy) -> None:
    """A worker that skipped it would let newer requests run first."""
    shards = Shards(policy)
    again = make(0.0)
    again.num_rows = 3
    shards.batchers[1].rerun_alone(again)
    shards.batchers[1].publish(0.5)
    queued = shards.page.read_queue(0, 1, 0.5)
    assert (queued.num_rows, queued.head_rows, queued.due) == (3, 3, 0.5)
    assert PageElsewhere(shards.page, 0, 0, 1).look(0.5).num_requests == [1.0]
    assert shards.batchers[1].next(0.6) == [again]
    shards.batchers[1].publish(0.6)
    assert shards.page.read_queue(0, 1, 0.6).num_rows == 0


@pytest.mark.parametrize("policy", [FIXED, SLO], ids=["fixed", "slo"])
def test_an_arrival_is_shown_at_once(policy: BatchPolicy) -> None:
    shards = Shards(policy)
    for number in range(3):
        shards.batchers[1].add(make(0.0), "a", 0.0)
        there = PageElsewhere(shards.page, 0, 0, 1).look(0.0)
        assert (there.num_requests, there.sizes) == ([number + 1.0], [number + 1.0])
    due = shards.page.read_queue(0, 1, 0.0).due
    shards.batchers[1].publish(0.0)
    assert shards.page.read_queue(0, 1, 0.0).due == due


def test_one_shard_sees_nothing_elsewhere() -> None:
    there = NOTHING_ELSEWHERE.look(0.0)
    assert (there.sizes[-1], there.num_requests[-1], there.work_s[-1]) == (0, 0, 0.0)
    assert there.ends == [] and there.arrivals_per_s == 0.0
    batcher = Batcher(FIXED)
    batcher.add(make(0.0), "a", 0.0)
    batcher.publish(0.0)
    assert batcher.wanted(0.0) == Queued((1,), (), 0.0, 1, 0, "a")
    assert math.isinf(Queued((0,)).due)
