"""slo mode: refused at arrival or served in time; nothing lost; goodput under any overload."""

import random
from dataclasses import replace

import pytest
from doubles import Outcomes, RecordingSink, simulate
from example_counts import at_most
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import BatchPolicy, QueuePolicy, ladder
from penstock.errors import Overloaded
from penstock.serving.batch_times import BatchTimes
from penstock.serving.batcher import Batcher
from penstock.serving.paces import MAX_COST, GeometryPace
from penstock.serving.plan import UNPLANNED, Ticket
from penstock.serving.slo_batcher import SloBatcher
from penstock.types import Request

# T(8) = 8 ms: 1,000 rows a second.
POLICY = BatchPolicy(max_batch_size=8, is_dynamic=True, slo_latency_s=0.025)
CAPACITY = 1000.0
LATE = r"in 2\d\.\d ms; 25 ms are allowed and \d\.\d ms of them are kept free$"


def duration_s(num_rows: float) -> float:
    return 0.004 + 0.0005 * num_rows


def make_batcher(policy: BatchPolicy = POLICY, num_executors: int = 1) -> SloBatcher:
    batcher = SloBatcher(policy, num_executors)
    batcher.seed({rows: duration_s(rows) for rows in ladder(policy.max_batch_size)})
    return batcher


def make(now: float, rows: int = 1, priority: int = 0, timeout_s: float | None = None) -> Request:
    request = Request(RecordingSink(), (), now)
    request.ticket = Ticket(UNPLANNED)
    request.timings.queued = now
    request.num_rows = rows
    request.priority = priority
    request.timeout_s = timeout_s
    return request


def fill(batcher: SloBatcher, count: int, now: float = 0.0, shape: str = "a") -> list[Request]:
    """Add until refused."""
    added = []
    for _ in range(count):
        request = make(now)
        try:
            batcher.add(request, shape, now)
        except Overloaded:
            break
        added.append(request)
    return added


class TestAdmission:
    def test_takes_as_many_as_can_be_answered_in_time(self):
        # Two batches of 8 end at 16 ms, 2 more rows at 21 ms; more would use up the margin.
        assert len(fill(make_batcher(), 100)) == 18

    def test_refuses_with_a_reason_and_when_to_come_back(self):
        batcher = make_batcher()
        fill(batcher, 100)
        with pytest.raises(Overloaded, match=LATE) as e:
            batcher.add(make(0.0), "a", 0.0)
        assert 0.008 <= e.value.retry_after_s <= 0.025

    def test_counts_the_rest_of_the_batch_that_runs(self):
        early, late = make_batcher(), make_batcher()
        for batcher in (early, late):
            fill(batcher, 8)
            batcher.next(0.0)
        assert len(fill(late, 100, now=0.007)) > len(fill(early, 100, now=0.0001))

    def test_more_executors_take_more(self):
        one, four = make_batcher(), make_batcher(num_executors=4)
        assert len(fill(four, 500)) > 3 * len(fill(one, 500))

    def test_an_executor_that_is_late_is_not_believed_to_be_free(self):
        batcher = make_batcher()
        fill(batcher, 8)
        batcher.next(0.0)
        assert fill(batcher, 1, now=0.009)
        assert batcher.expire(1.0)
        assert fill(batcher, 1, now=1.0) == []
        batcher.ended(0.0)
        assert fill(batcher, 1, now=1.0)

    def test_a_request_with_less_time_is_refused_earlier(self):
        batcher = make_batcher()
        fill(batcher, 8)
        batcher.next(0.0)
        with pytest.raises(Overloaded, match="10 ms are allowed"):
            batcher.add(make(0.001, timeout_s=0.010), "a", 0.001)
        batcher.add(make(0.001, timeout_s=1.0), "a", 0.001)

    def test_long_turns_of_the_event_loop_are_allowed_for(self):
        quick, slow = make_batcher(), make_batcher()
        for batcher, turn_s in ((quick, 0.0), (slow, 0.003)):
            fill(batcher, 1)
            batcher.expire(turn_s)
            batcher.next(0.003)
            batcher.ended(0.003)
        assert len(fill(slow, 100, now=0.1)) < len(fill(quick, 100, now=0.1))

    def test_waiting_for_a_processor_is_allowed_for_and_forgotten(self):
        quick, slow = make_batcher(), make_batcher()
        slow.note_wait(0.008)
        assert len(fill(slow, 100)) < len(fill(quick, 100))
        later = make_batcher()
        later.note_wait(0.008)
        for second in range(10):
            assert fill(later, 1, now=float(second))
            later.next(float(second))
            later.ended(float(second))
        assert len(fill(later, 100, now=10.0)) == len(fill(make_batcher(), 100, now=10.0))

    def test_however_long_the_wait_something_is_admitted(self):
        batcher = make_batcher()
        batcher.note_wait(1e9)
        batcher.next(1.0)
        fill(batcher, 8, now=1.0)
        assert batcher.next(1.0)
        assert fill(batcher, 1, now=1.0)

    def test_work_of_other_shapes_counts(self):
        batcher = make_batcher()
        before = len(fill(batcher, 100, shape="a"))
        assert len(fill(batcher, 100, shape="b")) < before / 2

    def test_an_idle_model_takes_what_it_predicts_to_be_late(self):
        """Otherwise a wrong table would never be put right."""
        batcher = SloBatcher(POLICY)
        batcher.seed(dict.fromkeys(ladder(8), 5.0))
        request = make(0.0)
        batcher.add(request, "a", 0.0)
        with pytest.raises(Overloaded):
            batcher.add(make(0.0), "a", 0.0)
        assert batcher.next(0.0) == [request]

    def test_without_any_time_everything_is_taken(self):
        assert len(fill(SloBatcher(POLICY), 100)) == 100

    def test_the_limits_of_the_queues_hold_too(self):
        batcher = make_batcher(replace(POLICY, max_pending=2))
        assert len(fill(batcher, 100)) == 2
        policy = replace(POLICY, policies=(QueuePolicy(max_queue_size=3),))
        assert len(fill(make_batcher(policy), 100)) == 3


class TestBatches:
    def test_a_free_executor_takes_what_waits(self):
        batcher = make_batcher()
        waiting = fill(batcher, 3)
        assert batcher.next(0.0) == waiting
        assert batcher.next(0.0) is None

    def test_the_size_aimed_at_follows_the_slo(self):
        # T(b)(1 + 1/1) within 13 ms less the margin: b = 4.
        batcher = make_batcher(replace(POLICY, slo_latency_s=0.013))
        requests = [make(0.0) for _ in range(8)]
        batcher.add(requests[0], "a", 0.0)
        batcher.next(0.0)
        batcher.put_back(requests, "a")
        assert len(batcher.next(0.0)) == 4

    def test_under_backlog_heads_that_would_be_late_are_dropped(self):
        batcher = make_batcher()
        old = fill(batcher, 4, now=0.0)
        young = [make(0.020) for _ in range(9)]
        batcher.put_back(young, "a")
        for request in old:
            batcher.remove(request)
        batcher.put_back(old, "a")
        assert batcher.next(0.020) == young[:8]
        assert batcher.next_expiry < 0.020
        assert batcher.num_waiting == 5
        assert batcher.expire(0.020) == old
        assert batcher.num_waiting == 1

    def test_without_backlog_the_batch_shrinks_to_save_the_head(self):
        batcher = make_batcher()
        (old,) = fill(batcher, 1, now=0.0)
        young = fill(batcher, 4, now=0.0195)
        # T(2) = 5 ms still fits into the 5.5 ms that are left, T(4) does not.
        batch = batcher.next(0.0195)
        assert batch[0] is old
        assert 1 < len(batch) < 5
        assert set(batch) < {old, *young}

    def test_a_head_that_is_lost_even_alone_is_dropped(self):
        batcher = make_batcher()
        (old,) = fill(batcher, 1, now=0.0)
        (young,) = fill(batcher, 1, now=0.010)
        assert batcher.next(0.022) == [young]
        assert batcher.expire(0.022) == [old]

    def test_a_dropped_request_can_still_be_cancelled(self):
        batcher = make_batcher()
        (old,) = fill(batcher, 1, now=0.0)
        assert batcher.next(0.022) is None
        assert batcher.num_waiting == 1
        assert batcher.remove(old)
        assert batcher.num_waiting == 0
        assert batcher.expire(1.0) == []

    def test_past_the_deadline_requests_expire_without_a_free_executor(self):
        batcher = make_batcher()
        (one,) = fill(batcher, 1, now=0.0)
        short = make(0.0, timeout_s=0.015)
        batcher.add(short, "a", 0.0)
        assert batcher.next_expiry == pytest.approx(0.015)
        assert batcher.expire(0.016) == [short]
        assert batcher.next_expiry == pytest.approx(0.025)
        assert batcher.expire(0.026) == [one]
        assert batcher.next_expiry is None

    def test_levels_are_strict(self):
        policy = replace(POLICY, num_priorities=2, default_priority=2)
        batcher = make_batcher(policy)
        low = [make(0.0, priority=2) for _ in range(8)]
        high = [make(0.0, priority=1) for _ in range(3)]
        for request in low + high:
            batcher.add(request, "a", 0.0)
        assert batcher.next(0.0) == high + low[:5]

    def test_reruns_go_first_and_alone(self):
        batcher = make_batcher()
        waiting = fill(batcher, 2)
        again = make(0.0)
        batcher.rerun_alone(again)
        assert batcher.next(10.0) == [again]
        assert batcher.next(0.0) == waiting

    def test_drain_empties_everything(self):
        batcher = make_batcher()
        waiting = fill(batcher, 2) + fill(batcher, 1, shape="b")
        again = make(0.0)
        batcher.rerun_alone(again)
        assert set(batcher.drain()) == {*waiting, again}
        assert batcher.num_waiting == 0
        assert batcher.next(0.0) is None


def make_arrivals(rate: float, cv: float, count: int, seed: int = 1) -> list[float]:
    chance = random.Random(seed)
    shape = 1 / cv**2
    now, times = 0.0, []
    for _ in range(count):
        now += chance.gammavariate(shape, 1 / (shape * rate))
        times.append(now)
    return times


def goodput(batcher, arrivals: list[float], times=duration_s, num_executors: int = 1) -> float:
    outcomes = simulate(batcher, arrivals, times, num_executors)
    assert len(outcomes.latencies_s) + len(outcomes.refusals_s) == len(arrivals)
    return outcomes.num_within(0.025) / arrivals[-1]


@pytest.mark.parametrize("cv", [1.0, 3.0])
@pytest.mark.parametrize("load", [2, 10])
def test_overload_costs_no_goodput(load, cv):
    arrivals = make_arrivals(load * CAPACITY, cv, 8000 * load // 2)
    outcomes = simulate(make_batcher(), arrivals, duration_s)
    assert outcomes.num_within(0.025) / arrivals[-1] >= 0.90 * CAPACITY
    assert sorted(outcomes.latencies_s)[int(0.99 * len(outcomes.latencies_s))] <= 0.025
    late_refusals = sum(waited_s > 0.010 for waited_s in outcomes.refusals_s)
    assert late_refusals <= 0.01 * len(outcomes.refusals_s)
    assert goodput(Batcher(POLICY), arrivals) < 0.2 * CAPACITY


def test_at_moderate_load_nothing_is_refused():
    outcomes = simulate(make_batcher(), make_arrivals(0.6 * CAPACITY, 1.0, 5000), duration_s)
    assert len(outcomes.refusals_s) <= 0.002 * 5000
    assert outcomes.num_within(0.025) == len(outcomes.latencies_s)


def test_times_that_vary_are_absorbed_by_the_margin():
    chance = random.Random(5)

    def jittery(num_rows: int) -> float:
        return duration_s(num_rows) * (1 + chance.expovariate(10))

    arrivals = make_arrivals(2 * CAPACITY, 1.0, 20_000)
    outcomes = simulate(make_batcher(), arrivals, jittery)
    assert outcomes.num_within(0.025) >= 0.99 * len(outcomes.latencies_s)
    assert outcomes.num_within(0.025) / arrivals[-1] >= 0.9 * CAPACITY / 1.1


def test_it_learns_without_a_warm_up():
    arrivals = make_arrivals(2 * CAPACITY, 1.0, 10_000)
    assert goodput(SloBatcher(POLICY), arrivals) >= 0.88 * CAPACITY


@pytest.mark.parametrize("factor", [0.6, 1.5])
def test_it_follows_a_model_that_becomes_slower_or_faster(factor):
    batcher = make_batcher()
    arrivals = make_arrivals(2 * CAPACITY / factor, 1.0, 10_000)
    got = goodput(batcher, arrivals, lambda num_rows: factor * duration_s(num_rows))
    assert got >= 0.85 * CAPACITY / factor


def test_several_executors():
    arrivals = make_arrivals(2 * 4 * CAPACITY, 1.0, 20_000)
    assert goodput(make_batcher(num_executors=4), arrivals, num_executors=4) >= 0.9 * 4 * CAPACITY


def test_it_recovers_from_a_stall():
    """One batch takes a second; what comes afterwards is served as before."""
    num_batches = 0

    def stalling(num_rows: int) -> float:
        nonlocal num_batches
        num_batches += 1
        return 1.0 if num_batches == 50 else duration_s(num_rows)

    arrivals = make_arrivals(2 * CAPACITY, 1.0, 10_000)
    assert goodput(make_batcher(), arrivals, stalling) >= 0.9 * CAPACITY * (1 - 1 / arrivals[-1])


# 4 ms and 0.5 ms for 10 tokens.
TOKENS = replace(POLICY, max_batch_size=64, max_tokens=80)


def tokens_s(num_tokens: float) -> float:
    return duration_s(num_tokens / 10)


def make_by_tokens(policy: BatchPolicy = TOKENS) -> SloBatcher:
    batcher = SloBatcher(policy)
    batcher.seed({tokens: tokens_s(tokens) for tokens in (1, 40, 80)})
    return batcher


def add_tokens(batcher: SloBatcher, tokens: list[int], now: float = 0.0) -> list[Request]:
    """Those that were let in."""
    added = []
    for num_tokens in tokens:
        request = make(now)
        request.num_tokens = num_tokens
        try:
            batcher.add(request, "a", now)
        except Overloaded:
            continue
        added.append(request)
    return added


class TestTokens:
    def test_more_short_ones_than_long_ones_can_be_in_time(self):
        short = add_tokens(make_by_tokens(), [5] * 100)
        long = add_tokens(make_by_tokens(), [20] * 100)
        # Two batches of 80 tokens end at 16 ms, and a little more before the margin.
        assert len(short) == 36 and len(long) == 9

    def test_rows_that_are_many_and_short_take_more_batches_than_their_tokens(self):
        policy = replace(TOKENS, max_batch_size=4)
        assert len(add_tokens(make_by_tokens(policy), [1] * 100)) < 25

    @pytest.mark.parametrize("most", [2, 3, 4, 8])
    def test_where_rows_are_the_limit_as_many_are_let_in_as_without_tokens(self, most):
        by_rows = fill(make_batcher(replace(POLICY, max_batch_size=most)), 100)
        by_tokens = make_by_tokens(replace(TOKENS, max_batch_size=most))
        assert len(add_tokens(by_tokens, [10] * 100)) == len(by_rows)

    def test_a_batch_closes_at_the_budget(self):
        batcher = make_by_tokens()
        added = add_tokens(batcher, [30, 30, 30, 5])
        assert batcher.next(0.0) == added[:2]
        assert batcher.closed_by == "token budget"
        assert batcher.next(0.0) == added[2:]
        assert batcher.closed_by == "queue empty"

    def test_or_at_the_most_rows(self):
        batcher = make_by_tokens(replace(TOKENS, max_batch_size=3))
        added = add_tokens(batcher, [1] * 4)
        assert batcher.next(0.0) == added[:3]
        assert batcher.closed_by == "full"

    def test_or_at_the_tokens_that_the_slo_has_room_for(self):
        # T(b)(1 + 1/1) within 13 ms less the margin: 43 tokens.
        batcher = make_by_tokens(replace(TOKENS, slo_latency_s=0.013))
        requests = add_tokens(batcher, [1])
        batcher.next(0.0)
        requests = [make(0.0) for _ in range(9)]
        for request in requests:
            request.num_tokens = 10
        batcher.put_back(requests, "a")
        assert batcher.next(0.0) == requests[:4]
        assert batcher.closed_by == "SLO target"

    def test_whoever_has_more_than_the_budget_runs_alone_and_teaches_nothing(self):
        batcher = make_by_tokens()
        (large,) = add_tokens(batcher, [200])
        assert batcher.next(0.0) == [large]
        before = batcher.paces["a"].times.means_s
        batcher.observe("a", 200, 0.0, 5.0)
        assert batcher.paces["a"].times.means_s == before
        assert len(add_tokens(batcher, [5], now=5.0)) == 1

    def test_a_wrong_prediction_locks_nobody_out(self):
        """Of fewer tokens than were warmed up only a guess is known, as slow as those."""
        batcher = SloBatcher(TOKENS)
        batcher.seed({40: 0.1, 80: 0.2}, "a")
        num_run = 0
        for turn in range(40):
            add_tokens(batcher, [40], now=turn)
            if batcher.next(turn):
                batcher.observe("a", 40, turn, turn + tokens_s(40))
                num_run += 1
        assert num_run == 40
        assert batcher.paces["a"].times.mean_s(40) == pytest.approx(tokens_s(40), rel=0.5)

    def test_a_request_larger_than_the_size_aimed_at_is_one_batch_to_those_behind_it(self):
        batcher = SloBatcher(replace(TOKENS, slo_latency_s=0.1))
        batcher.seed({40: 0.03, 80: 0.06}, "long")
        batcher.seed({1: 0.004, 80: 0.008}, "short")
        assert batcher.paces["long"].target_size == 1
        for shape, now in (("long", 0.0), ("long", 0.045), ("short", 0.045)):
            request = make(now)
            request.num_tokens = 40 if shape == "long" else 4
            batcher.add(request, shape, now)
            if now == 0.0:
                assert batcher.next(now) == [request]
        # What was waiting when it came: the rest of one long batch, and another.
        with pytest.raises(Overloaded, match=r"would be answered in 99\.\d ms"):
            request = make(0.045)
            request.num_tokens = 40
            batcher.add(request, "long", 0.045)

    def test_goodput_where_lengths_differ_by_much(self):
        """What is predicted by rows is wrong for every batch, and more is late or refused."""
        chance = random.Random(7)
        arrivals = make_arrivals(4 * CAPACITY, 1.0, 8000)
        tokens = [chance.choice([1, 1, 1, 19]) for _ in arrivals]
        large = make_by_tokens(replace(TOKENS, max_tokens=640))
        large.seed({640: tokens_s(640)})
        by_tokens = simulate(large, arrivals, tokens_s, tokens=tokens)
        rows = SloBatcher(replace(POLICY, max_batch_size=64))
        rows.seed({rung: tokens_s(5.5 * rung) for rung in ladder(64)})
        by_rows = simulate(rows, arrivals, tokens_s, tokens=tokens)
        late = sorted(by_tokens.latencies_s)[int(0.99 * len(by_tokens.latencies_s))]
        assert late <= 0.025
        assert by_tokens.num_within(0.025) > 1.2 * by_rows.num_within(0.025)

    def test_times_are_learnt_by_tokens(self):
        chance = random.Random(3)
        batcher = SloBatcher(TOKENS)
        arrivals = make_arrivals(0.7 * CAPACITY, 1.0, 4000)
        tokens = [chance.randint(1, 19) for _ in arrivals]
        simulate(batcher, arrivals, tokens_s, tokens=tokens)
        (pace,) = batcher.paces.values()
        for num_tokens in (20, 40, 64):
            assert pace.times.mean_s(num_tokens) == pytest.approx(tokens_s(num_tokens), rel=0.1)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 3), st.integers(0, 2**32))
def test_where_each_row_is_one_token_nothing_changes(most, num_executors, seed):
    policy = BatchPolicy(most, is_dynamic=True, slo_latency_s=0.025)
    arrivals = make_arrivals(2 * CAPACITY, 2.0, 300, seed)
    outcomes = [
        simulate(SloBatcher(each, num_executors), arrivals, duration_s, num_executors, tokens)
        for each, tokens in (
            (policy, ()),
            (replace(policy, max_batch_size=99, max_tokens=most), [1] * len(arrivals)),
        )
    ]
    assert outcomes[0] == outcomes[1]


class TestUnsteadyBatches:
    """On a machine that others use too, T(32) = 148 ms is anything from 89 ms to 266 ms. The SLO is
    250 ms, and more requests come than can be served."""

    policy = BatchPolicy(max_batch_size=32, is_dynamic=True, slo_latency_s=0.25)

    def mean_s(self, num_rows: float) -> float:
        return 0.02 + 0.004 * num_rows

    def offer(self, load: float, least: float, most: float) -> Outcomes:
        chance = random.Random(5)
        batcher = SloBatcher(self.policy)
        batcher.seed({rows: self.mean_s(rows) for rows in ladder(32)})
        now, arrivals = 0.0, []
        while now < 40.0:
            now += chance.expovariate(load * 32 / self.mean_s(32))
            arrivals.append(now)
        return simulate(
            batcher, arrivals, lambda rows: self.mean_s(rows) * chance.uniform(least, most)
        )

    @pytest.mark.parametrize("load", [2.0, 5.0])
    def test_the_slowest_hundredth_is_in_time(self, load: float):
        outcomes = self.offer(load, 0.6, 1.8)
        settled = outcomes.latencies_s[len(outcomes.latencies_s) // 4 :]
        late = sum(latency > 0.25 for latency in settled) / len(settled)
        assert late <= 0.015
        assert outcomes.num_within(0.25) / 40.0 >= 0.55 * 32 / self.mean_s(32)

    def test_steady_batches_pay_nothing_for_it(self):
        outcomes = self.offer(5.0, 1.0, 1.0)
        assert outcomes.num_within(0.25) == len(outcomes.latencies_s)
        assert outcomes.num_within(0.25) / 40.0 >= 0.9 * 32 / self.mean_s(32)

    def test_room_for_slow_batches_costs_a_third_of_the_throughput_at_most(self):
        times = BatchTimes(32)
        for rows in ladder(32):
            times.seed(rows, self.mean_s(rows))
        pace = GeometryPace(times)
        pace.aim(1.0, 32)
        whole_per_s = pace.target_size / pace.target_s
        for limit_s in (0.2, 0.1, 0.05, 0.001):
            pace.aim(1.0, 32)
            pace.aim_lower(limit_s)
            assert pace.target_size / pace.target_s >= (1 - MAX_COST) * whole_per_s
        assert pace.target_size < 32


policies = st.builds(
    BatchPolicy,
    max_batch_size=st.integers(1, 12),
    is_dynamic=st.booleans(),
    num_priorities=st.sampled_from([0, 3]),
    default_priority=st.just(2),
    max_pending=st.just(20),
    slo_latency_s=st.sampled_from([0.5, 2.0, 100.0]),
    max_tokens=st.sampled_from([None, 9, 30]),
)


@settings(deadline=None, max_examples=at_most(400))
@given(policies, st.integers(1, 3), st.integers(0, 2**32))
def test_law_each_request_leaves_exactly_once(policy, num_executors, seed):
    chance = random.Random(seed)
    batcher = SloBatcher(policy, num_executors)
    if chance.random() < 0.5:
        batcher.seed({1: 0.3, 4: 0.5})
    shape_of: dict[Request, str] = {}
    running: list[tuple[float, list[Request]]] = []
    left: list[Request] = []
    now = 0.0
    for _ in range(chance.randrange(120)):
        now += chance.choice([0.0, 0.1, 1.0])
        match chance.randrange(8):
            case 0 | 1 | 2:
                rows = chance.randint(1, policy.max_batch_size)
                request = make(now, rows, chance.randrange(4), chance.choice([None, 0.5]))
                request.num_tokens = rows * chance.randint(1, 9)
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
            case 5 | 6:
                if len(running) >= num_executors or (batch := batcher.next(now)) is None:
                    continue
                check(policy, batch, shape_of)
                kept = chance.randint(1, len(batch))
                batcher.put_back(batch[kept:], shape_of[batch[0]])
                left += batch[:kept]
                running.append((now, batch[:kept]))
            case 7:
                if running:
                    started, batch = running.pop(0)
                    has_budget = policy.max_tokens is not None
                    size = sum(each.num_tokens if has_budget else each.num_rows for each in batch)
                    batcher.observe(shape_of[batch[0]], size, started, now)
    assert batcher.num_waiting == len(shape_of) - len(left)
    while batcher.num_waiting:
        left += batcher.expire(now)
        left += batcher.next(now) or []
    assert len(left) == len(set(left)) == len(shape_of)


def check(policy: BatchPolicy, batch: list[Request], shape_of: dict[Request, str]) -> None:
    assert batch
    assert len({shape_of[request] for request in batch}) == 1
    total = sum(request.num_rows for request in batch)
    assert len(batch) == 1 or (policy.is_dynamic and total <= policy.max_batch_size)
    tokens = sum(request.num_tokens for request in batch)
    assert len(batch) == 1 or policy.max_tokens is None or tokens <= policy.max_tokens
    for first, second in zip(batch, batch[1:], strict=False):
        assert first.priority <= second.priority


class TestWhyABatchClosed:
    def test_everything_went_along(self):
        batcher = make_batcher()
        fill(batcher, 3)
        batcher.next(0.0)
        assert batcher.closed_by == "queue empty"

    def test_it_has_the_most_rows(self):
        batcher = make_batcher()
        fill(batcher, 8)
        batcher.next(0.0)
        assert batcher.closed_by == "full"

    def test_it_has_the_size_aimed_at(self):
        # T(b)(1 + 1/1) within 15 ms less the margin: fewer than 8 rows.
        batcher = make_batcher(replace(POLICY, slo_latency_s=0.015))
        added = fill(batcher, 100)
        batch = batcher.next(0.0)
        assert len(batch) < min(8, len(added))
        assert batcher.closed_by == "SLO target"

    def test_more_would_make_the_most_urgent_late(self):
        batcher = make_batcher()
        batcher.add(make(0.0, timeout_s=0.006), "a", 0.0)
        fill(batcher, 7)
        assert len(batcher.next(0.0)) < 8
        assert batcher.closed_by == "SLO deadline"

    def test_dropped_requests_are_told_from_those_that_timed_out(self):
        batcher = make_batcher()
        old = fill(batcher, 18)
        batcher.next(0.020)
        dropped = batcher.take_dropped()
        assert dropped and set(dropped) <= set(old)
        assert not set(batcher.expire(0.020)) & set(dropped)


def test_a_request_that_was_put_back_expires_once():
    batcher = make_batcher()
    (request,) = fill(batcher, 1)
    assert batcher.next(0.0) == [request]
    batcher.put_back([request], "a")
    assert batcher.expire(1.0) == [request]
    assert batcher.num_waiting == 0 and batcher.expire(2.0) == []
