"""The batcher against Triton's rules, and against a law: nothing is lost, split or reordered."""

import random
from dataclasses import replace

import pytest
from doubles import Outcomes, RecordingSink, simulate
from example_counts import at_most
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import BatchPolicy, QueuePolicy
from penstock.errors import Overloaded
from penstock.serving.batcher import LOOKS, Batcher
from penstock.serving.plan import UNPLANNED, Ticket
from penstock.types import Request

EAGER = BatchPolicy(max_batch_size=8, is_dynamic=True)


def make(rows: int = 1, priority: int = 0, timeout_s: float | None = None) -> Request:
    request = Request(RecordingSink(), (), 0.0)
    request.ticket = Ticket(UNPLANNED)
    request.num_rows = rows
    request.priority = priority
    request.timeout_s = timeout_s
    return request


def fill(batcher: Batcher, rows: list[int], now: float = 0.0, shape: str = "a") -> list[Request]:
    requests = []
    for count in rows:
        request = make(count)
        request.timings.queued = now
        batcher.add(request, shape, now)
        requests.append(request)
    return requests


def sizes(batch: list[Request] | None) -> list[int] | None:
    return None if batch is None else [request.num_rows for request in batch]


def test_without_delay_a_free_instance_takes_what_waits():
    batcher = Batcher(EAGER)
    fill(batcher, [1, 1, 1])
    assert sizes(batcher.next(0.0)) == [1, 1, 1]
    assert batcher.next(0.0) is None
    assert batcher.wake_at is None


@settings(max_examples=at_most(200))
@given(st.floats(0.0, 1e6), st.floats(1e-6, 10.0))
def test_the_delay_is_over_when_the_batcher_says_to_come_back(queued, delay_s):
    """Whatever the rounding: a caller that comes back at `wake_at` would come back for ever."""
    batcher = Batcher(replace(EAGER, max_queue_delay_s=delay_s))
    fill(batcher, [1], now=queued)
    if batcher.next(queued) is None:
        assert batcher.wake_at is not None
        assert sizes(batcher.next(batcher.wake_at)) == [1]


def test_a_batch_never_exceeds_the_limit_and_requests_are_never_split():
    batcher = Batcher(EAGER)
    fill(batcher, [3, 3, 3])
    assert sizes(batcher.next(0.0)) == [3, 3]
    assert sizes(batcher.next(0.0)) == [3]


def test_without_dynamic_batching_each_request_runs_by_itself():
    batcher = Batcher(BatchPolicy(max_batch_size=8, is_dynamic=False))
    fill(batcher, [5, 1])
    assert sizes(batcher.next(0.0)) == [5]
    assert sizes(batcher.next(0.0)) == [1]


def test_a_different_shape_never_closes_a_batch():
    batcher = Batcher(EAGER)
    for index in range(6):
        fill(batcher, [1], now=index, shape="ab"[index % 2])
    assert sizes(batcher.next(9.0)) == [1, 1, 1]
    assert sizes(batcher.next(9.0)) == [1, 1, 1]


def test_the_shape_that_waits_longest_goes_first():
    batcher = Batcher(EAGER)
    (young,) = fill(batcher, [1], now=2.0, shape="a")
    (old,) = fill(batcher, [1], now=1.0, shape="b")
    assert batcher.next(3.0) == [old]
    assert batcher.next(3.0) == [young]


class TestMaxWait:
    """T(8) = 8 ms: 1,000 rows a second."""

    def make(self, **policy: object) -> Batcher:
        batcher = Batcher(replace(EAGER, **policy))
        batcher.seed({rows: 0.004 + 0.0005 * rows for rows in (1, 2, 4, 8)})
        return batcher

    def offer(self, batcher: Batcher, load: float) -> Outcomes:
        arrivals = [index / (load * 1000.0) for index in range(int(load * 5000))]
        return simulate(batcher, arrivals, lambda rows: 0.004 + 0.0005 * rows)

    def test_arrivals_are_refused_at_once_when_the_queue_is_nearly_a_second_long(self):
        batcher = self.make()
        waiting = 0
        with pytest.raises(Overloaded, match=r"0\.90 s long; requests may wait 1\.00 s") as e:
            while True:
                fill(batcher, [1])
                waiting += 1
        assert waiting == 901
        assert e.value.reason == "predicted_late"
        assert 0 < e.value.retry_after_s < 0.1

    @pytest.mark.parametrize("load", [2.0, 10.0])
    def test_under_overload_nothing_waits_longer_and_capacity_is_used(self, load):
        outcomes = self.offer(self.make(), load)
        assert max(outcomes.latencies_s) <= 1.0 + 0.016 + 1 / LOOKS
        assert len(outcomes.latencies_s) >= 4900
        assert max(outcomes.refusals_s) == 0.0, "refused at arrival"

    def test_a_shorter_limit_holds(self):
        outcomes = self.offer(self.make(max_wait_s=0.1), 2.0)
        assert max(outcomes.latencies_s) <= 0.1 + 0.016 + 0.1 / LOOKS

    def test_zero_means_unlimited_as_in_triton(self):
        outcomes = self.offer(self.make(max_wait_s=0.0), 2.0)
        assert not outcomes.refusals_s
        assert max(outcomes.latencies_s) > 2.0

    def test_below_capacity_nothing_is_refused(self):
        assert not self.offer(self.make(), 0.95).refusals_s

    def test_without_warm_up_the_limit_is_learnt(self):
        outcomes = self.offer(Batcher(EAGER), 2.0)
        assert max(outcomes.latencies_s) <= 1.1
        assert len(outcomes.refusals_s) > 3000

    def test_a_wrong_prediction_is_made_good_by_the_time_in_the_queue(self):
        batcher = Batcher(replace(EAGER, max_wait_s=0.1))
        batcher.seed(dict.fromkeys((1, 2, 4, 8), 1e-6))
        requests = fill(batcher, [1] * 100)
        batcher.next(0.0)
        batcher.observe("a", 8, 0.0, 0.09)
        assert batcher.expire(0.09) == []
        batcher.observe("a", 8, 0.09, 0.11)
        assert batcher.expire(0.11) == requests[8:]

    def test_nothing_is_refused_while_an_instance_is_stuck(self):
        batcher = self.make()
        fill(batcher, [1] * 8)
        batcher.next(0.0)
        (request,) = fill(batcher, [1], now=0.1)
        assert batcher.expire(100.0) == []
        batcher.observe("a", 8, 99.995, 100.0)
        assert batcher.expire(100.1) == [request]

    def test_higher_levels_do_not_wait_for_lower_ones(self):
        batcher = self.make(num_priorities=2, default_priority=2)
        with pytest.raises(Overloaded):
            fill(batcher, [1] * 2000)
        batcher.add(make(priority=1), "a", 0.0)
        with pytest.raises(Overloaded):
            batcher.add(make(priority=2), "a", 0.0)

    def test_a_level_with_a_time_out_of_its_own_keeps_it(self):
        own = QueuePolicy(default_timeout_s=30.0)
        batcher = self.make(num_priorities=2, default_priority=2, policies=(own, own, own))
        fill(batcher, [1] * 2000)
        assert batcher.num_waiting == 2000

    def test_requests_of_all_shapes_are_one_queue(self):
        batcher = self.make()
        fill(batcher, [1] * 600, shape="a")
        with pytest.raises(Overloaded):
            fill(batcher, [1] * 600, shape="b")


class TestTokens:
    """At most 8 rows and 100 tokens."""

    policy = replace(EAGER, max_tokens=100)

    def fill(self, batcher: Batcher, tokens: list[int]) -> list[Request]:
        requests = [make() for _ in tokens]
        for request, num_tokens in zip(requests, tokens, strict=True):
            request.num_tokens = num_tokens
            batcher.add(request, "a", 0.0)
        return requests

    def batches(self, tokens: list[int], policy: BatchPolicy | None = None) -> list[list[int]]:
        batcher = Batcher(policy or self.policy)
        self.fill(batcher, tokens)
        found = []
        while (batch := batcher.next(0.0)) is not None:
            found.append([request.num_tokens for request in batch])
        return found

    def test_a_batch_closes_when_the_next_would_exceed_the_budget(self):
        assert self.batches([40, 40, 40, 10]) == [[40, 40], [40, 10]]

    def test_it_closes_at_the_budget_and_at_the_most_rows(self):
        assert self.batches([60, 40, 1]) == [[60, 40], [1]]
        assert self.batches([1] * 9) == [[1] * 8, [1]]

    def test_a_long_one_is_not_overtaken_by_short_ones_that_would_fit(self):
        assert self.batches([50, 90, 50, 1]) == [[50], [90], [50, 1]]

    def test_whoever_has_more_by_itself_runs_alone(self):
        assert self.batches([10, 250, 10]) == [[10], [250], [10]]

    def test_a_batch_that_cannot_grow_does_not_wait_for_the_delay(self):
        delayed = replace(self.policy, max_queue_delay_s=1.0)
        assert self.batches([60, 60], delayed) == [[60]]
        assert self.batches([60, 40], delayed) == [[60, 40]]
        assert self.batches([60, 39], delayed) == []

    def test_a_preferred_size_within_the_budget_is_preferred(self):
        preferred = replace(self.policy, preferred_batch_sizes=(2, 4), max_queue_delay_s=1.0)
        assert self.batches([30, 30, 30, 30], preferred) == [[30, 30], [30, 30]]

    @pytest.mark.parametrize(
        ("tokens", "closed_by"),
        [
            ([60, 60], "token budget"),
            ([100], "token budget"),
            ([60, 39], "queue empty"),
            ([1] * 9, "full"),
        ],
    )
    def test_why_it_closed(self, tokens, closed_by):
        batcher = Batcher(self.policy)
        self.fill(batcher, tokens)
        batcher.next(0.0)
        assert batcher.closed_by == closed_by


@settings(deadline=None, max_examples=at_most(200))
@given(
    st.integers(1, 6),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.5]),
    st.lists(st.integers(1, 6), max_size=2),
    st.integers(0, 2**32),
)
def test_with_equal_lengths_tokens_are_batched_as_rows_are(most, length, delay_s, preferred, seed):
    sizes = tuple(min(size, most) for size in preferred)
    policy = BatchPolicy(most, True, sizes, delay_s)
    both = Batcher(policy), Batcher(replace(policy, max_batch_size=99, max_tokens=most * length))
    chance = random.Random(seed)
    names: dict[Request, int] = {}
    now = 0.0
    for name in range(60):
        now += chance.choice([0.0, 0.1, 0.3])
        rows = chance.randint(1, most)
        for batcher in both:
            request = make(rows)
            request.num_tokens = rows * length
            request.timings.queued = now
            names[request] = name
            batcher.add(request, "a", now)
        if chance.random() < 0.5:
            found = [[names[each] for each in batcher.next(now) or []] for batcher in both]
            assert found[0] == found[1]
            assert both[0].wake_at == both[1].wake_at


class TestDelay:
    policy = replace(EAGER, max_queue_delay_s=0.010)

    def test_waits_for_a_full_batch_until_the_oldest_is_late(self):
        batcher = Batcher(self.policy)
        fill(batcher, [1], now=0.0)
        fill(batcher, [1], now=0.004)
        assert batcher.next(0.005) is None
        assert batcher.wake_at == pytest.approx(0.010)
        assert sizes(batcher.next(0.010)) == [1, 1]

    def test_a_full_batch_goes_at_once(self):
        batcher = Batcher(self.policy)
        fill(batcher, [4, 4])
        assert sizes(batcher.next(0.0)) == [4, 4]

    def test_a_batch_that_cannot_grow_goes_at_once(self):
        batcher = Batcher(self.policy)
        fill(batcher, [5, 5])
        assert sizes(batcher.next(0.0)) == [5]


class TestPreferred:
    policy = replace(EAGER, preferred_batch_sizes=(2, 4), max_queue_delay_s=0.010)

    @pytest.mark.parametrize(
        ("waiting", "batch"),
        [
            ([1], None),
            ([1, 1], [1, 1]),
            ([1, 1, 1], [1, 1]),  # the largest preferred size reached so far
            ([1, 1, 1, 1], [1, 1, 1, 1]),
            ([1] * 6, [1] * 4),
            ([3, 3], [3]),  # over every preferred size: what fits below counts as preferred
            ([8], [8]),
        ],
    )
    def test_sizes(self, waiting, batch):
        batcher = Batcher(self.policy)
        fill(batcher, waiting)
        assert sizes(batcher.next(0.0)) == batch

    def test_when_late_everything_goes(self):
        batcher = Batcher(self.policy)
        fill(batcher, [1, 1, 1])
        assert sizes(batcher.next(0.011)) == [1, 1, 1]

    def test_without_delay_an_unpreferred_rest_is_not_held_back(self):
        batcher = Batcher(replace(self.policy, max_queue_delay_s=0.0))
        fill(batcher, [1, 1, 1])
        assert sizes(batcher.next(0.0)) == [1, 1]
        assert sizes(batcher.next(0.0)) == [1]


class TestPriorities:
    policy = replace(EAGER, max_batch_size=2, num_priorities=3, default_priority=2)

    def test_levels_are_strict_and_unknown_levels_get_the_default(self):
        batcher = Batcher(self.policy)
        order = [make(priority=p) for p in (3, 0, 1, 9)]
        for request in order:
            batcher.add(request, "a", 0.0)
        low, unset, high, unknown = order
        assert batcher.next(0.0) == [high, unset]
        assert batcher.next(0.0) == [unknown, low]

    def test_each_level_has_its_own_queue_limit(self):
        policies = (QueuePolicy(), QueuePolicy(max_queue_size=1), QueuePolicy(), QueuePolicy())
        batcher = Batcher(replace(self.policy, policies=policies))
        batcher.add(make(priority=1), "a", 0.0)
        with pytest.raises(Overloaded, match="Exceeds maximum queue size"):
            batcher.add(make(priority=1), "b", 0.0)
        batcher.add(make(priority=2), "a", 0.0)


class TestTimeouts:
    def batcher(self, **policy) -> Batcher:
        return Batcher(replace(EAGER, policies=(QueuePolicy(**policy),)))

    def test_reject_returns_those_whose_time_is_up(self):
        batcher = self.batcher(default_timeout_s=1.0)
        (early,) = fill(batcher, [1], now=0.0)
        (late,) = fill(batcher, [1], now=0.5)
        assert batcher.next_expiry == 1.0
        assert batcher.expire(0.9) == []
        assert batcher.expire(1.0) == [early]
        assert batcher.next(1.0) == [late]

    def test_delay_serves_them_after_the_others(self):
        batcher = self.batcher(default_timeout_s=1.0, timeout_action="DELAY")
        (early,) = fill(batcher, [1], now=0.0)
        (late,) = fill(batcher, [1], now=0.5)
        assert batcher.expire(1.0) == []
        assert batcher.next(1.0) == [late, early]

    @pytest.mark.parametrize(
        ("asked", "allowed", "expires_at"),
        [(0.2, True, 0.2), (5.0, True, 1.0), (0.2, False, 1.0), (None, True, 1.0)],
    )
    def test_a_request_may_only_shorten_the_default(self, asked, allowed, expires_at):
        batcher = self.batcher(default_timeout_s=1.0, allow_timeout_override=allowed)
        batcher.add(make(timeout_s=asked), "a", 0.0)
        assert batcher.next_expiry == expires_at

    def test_a_request_that_left_does_not_expire(self):
        batcher = self.batcher(default_timeout_s=1.0)
        fill(batcher, [1], now=0.0)
        assert batcher.next(0.0) is not None
        assert batcher.expire(2.0) == []


def test_all_queues_together_are_bounded():
    batcher = Batcher(replace(EAGER, max_pending=2))
    fill(batcher, [1, 1])
    with pytest.raises(Overloaded, match="Exceeds maximum queue size"):
        fill(batcher, [1])
    batcher.next(0.0)
    fill(batcher, [1])


def test_a_removed_request_is_never_returned():
    batcher = Batcher(EAGER)
    first, second, third = fill(batcher, [1, 1, 1])
    assert batcher.remove(second)
    assert not batcher.remove(second)
    assert batcher.next(0.0) == [first, third]
    assert not batcher.remove(first)
    assert batcher.num_waiting == 0


def test_reruns_go_first_and_alone():
    batcher = Batcher(EAGER)
    waiting = fill(batcher, [1, 1])
    again = [make(), make()]
    for request in again:
        batcher.rerun_alone(request)
    assert batcher.next(0.0) == [again[0]]
    assert batcher.next(0.0) == [again[1]]
    assert batcher.next(0.0) == waiting


def test_put_back_keeps_the_order():
    batcher = Batcher(EAGER)
    requests = fill(batcher, [1, 1, 1])
    batch = batcher.next(0.0)
    fill(batcher, [2])
    batcher.put_back(batch[1:], "a")
    assert batcher.next(0.0)[:2] == requests[1:]


def test_drain_empties_everything():
    batcher = Batcher(EAGER)
    waiting = fill(batcher, [1, 1]) + fill(batcher, [1], shape="b")
    again = make()
    batcher.rerun_alone(again)
    assert set(batcher.drain()) == {*waiting, again}
    assert batcher.num_waiting == 0
    assert batcher.next(0.0) is None


policies = st.builds(
    BatchPolicy,
    max_batch_size=st.integers(1, 12),
    is_dynamic=st.booleans(),
    preferred_batch_sizes=st.lists(st.integers(1, 12), max_size=3).map(tuple),
    max_queue_delay_s=st.sampled_from([0.0, 0.5, 3.0]),
    num_priorities=st.sampled_from([0, 3]),
    default_priority=st.just(2),
    policies=st.builds(
        QueuePolicy,
        timeout_action=st.sampled_from(["REJECT", "DELAY"]),
        default_timeout_s=st.sampled_from([0.0, 2.0]),
        allow_timeout_override=st.booleans(),
        max_queue_size=st.sampled_from([0, 5]),
    ).map(lambda policy: (policy,)),
    max_pending=st.just(20),
    max_tokens=st.sampled_from([None, 9, 30]),
)


@settings(deadline=None, max_examples=at_most(400))
@given(policies, st.integers(0, 2**32))
def test_law_each_request_leaves_exactly_once(policy, seed):
    chance = random.Random(seed)
    batcher = Batcher(policy)
    shape_of: dict[Request, str] = {}
    left: list[Request] = []
    now = 0.0
    for _ in range(chance.randrange(120)):
        now += chance.choice([0.0, 0.1, 1.0])
        match chance.randrange(6):
            case 0 | 1 | 2:
                request = make(
                    chance.randint(1, policy.max_batch_size),
                    chance.randrange(4),
                    chance.choice([None, 0.5]),
                )
                request.num_tokens = request.num_rows * chance.randint(1, 9)
                request.timings.queued = now
                shape = chance.choice("abc")
                try:
                    batcher.add(request, shape, now)
                except Overloaded:
                    continue
                shape_of[request] = shape
            case 3:
                waiting = [request for request in shape_of if request not in left]
                if waiting:
                    request = chance.choice(waiting)
                    assert batcher.remove(request)
                    left.append(request)
            case 4:
                left += batcher.expire(now)
            case 5:
                left += check(policy, batcher.next(now), shape_of)
    assert batcher.num_waiting == len(shape_of) - len(left)
    # After every delay has run out, everything still waiting can be had.
    while (batch := batcher.next(now + 1e6)) is not None:
        left += check(policy, batch, shape_of)
    assert len(left) == len(set(left)) == len(shape_of)
    assert batcher.num_waiting == 0


def check(policy: BatchPolicy, batch: list[Request] | None, shape_of: dict) -> list[Request]:
    if batch is None:
        return []
    assert batch
    assert len({shape_of[request] for request in batch}) == 1
    total = sum(request.num_rows for request in batch)
    assert len(batch) == 1 or (policy.is_dynamic and total <= policy.max_batch_size)
    tokens = sum(request.num_tokens for request in batch)
    assert len(batch) == 1 or policy.max_tokens is None or tokens <= policy.max_tokens
    for first, second in zip(batch, batch[1:], strict=False):
        assert first.priority <= second.priority
    return batch


@settings(deadline=None, max_examples=at_most(200))
@given(st.integers(5, 40), st.integers(1, 6), st.integers(0, 2**32))
def test_law_with_a_budget_nobody_of_a_level_is_overtaken(max_tokens, max_rows, seed):
    chance = random.Random(seed)
    policy = BatchPolicy(
        max_rows, is_dynamic=True, num_priorities=2, default_priority=1, max_tokens=max_tokens
    )
    batcher = Batcher(policy)
    came: list[Request] = []
    left: list[Request] = []
    for now in range(chance.randrange(60)):
        request = make(1, chance.choice([1, 2]))
        request.num_tokens = chance.choice([1, 2, 5, max_tokens, max_tokens + 1])
        request.timings.queued = float(now)
        batcher.add(request, "a", float(now))
        came.append(request)
        if chance.random() < 0.3:
            left += batcher.next(float(now)) or []
    while (batch := batcher.next(1e6)) is not None:
        left += batch
    for level in (0, 1):
        assert [r for r in left if r.priority == level] == [r for r in came if r.priority == level]


class TestWhyABatchClosed:
    def closed(self, policy: BatchPolicy, rows: list[int], now: float = 0.0) -> str:
        batcher = Batcher(policy)
        fill(batcher, rows)
        assert batcher.next(now) is not None
        return batcher.closed_by

    def test_nobody_else_waited(self):
        assert self.closed(EAGER, [1, 2]) == "queue empty"

    @pytest.mark.parametrize("rows", [[8], [4, 4], [7, 2], [1] * 20])
    def test_it_has_the_most_rows_or_the_next_does_not_fit(self, rows):
        assert self.closed(EAGER, rows) == "full"

    def test_only_other_shapes_wait(self):
        batcher = Batcher(EAGER)
        fill(batcher, [1], shape="a")
        fill(batcher, [1], shape="b")
        batcher.next(0.0)
        assert batcher.closed_by == "other shape"
        batcher.next(0.0)
        assert batcher.closed_by == "queue empty"

    def test_a_preferred_size(self):
        policy = replace(EAGER, preferred_batch_sizes=(4,), max_queue_delay_s=1.0)
        assert self.closed(policy, [1] * 5) == "preferred size"

    def test_the_delay_is_over(self):
        policy = replace(EAGER, max_queue_delay_s=1.0)
        assert self.closed(policy, [1], now=1.0) == "delay expired"
        assert self.closed(policy, [8], now=1.0) == "full"

    def test_a_model_that_does_not_batch(self):
        assert self.closed(replace(EAGER, is_dynamic=False), [1, 1]) == "unbatched"

    def test_a_rerun_and_a_batch_that_had_no_room(self):
        batcher = Batcher(EAGER)
        (request,) = fill(batcher, [1])
        batch = batcher.next(0.0)
        batcher.put_back(batch, "a")
        assert batcher.closed_by == "no room"
        batcher.rerun_alone(make())
        batcher.next(0.0)
        assert batcher.closed_by == "rerun"
