"""How long requests may wait without an SLO, and what a restart adds to it."""

import math
import random

import pytest

from penstock.config import BatchPolicy, QueuePolicy
from penstock.serving.batch_times import ADMITTED, LEARN_EVERY_S, MIN_WAIT_S, WaitLimit

POLICY = BatchPolicy(max_batch_size=8, is_dynamic=True)


def make(max_wait_s: float | None = None, batch_s: float = 0.008) -> WaitLimit:
    limit = WaitLimit(BatchPolicy(8, is_dynamic=True, max_wait_s=max_wait_s), 8)
    if batch_s:
        limit.seed({1: batch_s / 2, 8: batch_s})
    return limit


class TestAllowed:
    def test_quick_models_get_a_second(self):
        assert make().allowed_s(0.0) == MIN_WAIT_S

    def test_slow_models_get_ten_of_their_largest_batches(self):
        assert make(batch_s=0.5).allowed_s(0.0) == pytest.approx(5.0)

    def test_an_explicit_limit_wins(self):
        assert make(0.25, batch_s=0.5).allowed_s(0.0) == 0.25

    def test_the_default_waits_for_the_first_time_of_a_batch(self):
        limit = make(batch_s=0.0)
        assert limit.allowed_s(0.0) == math.inf
        limit.observe(8, 0.0, 2.0)
        assert limit.allowed_s(2.0) == pytest.approx(20.0)

    def test_the_table_follows_what_batches_really_take(self):
        limit = make()
        for index in range(100):
            limit.observe(8, index * 1.0, index * 1.0 + 0.5)
        assert limit.allowed_s(100.0) == pytest.approx(5.0, rel=0.05)

    def test_waiting_for_company_on_purpose_does_not_count(self):
        limit = WaitLimit(BatchPolicy(8, True, max_queue_delay_s=5.0, max_wait_s=0.5), 8)
        assert limit.allowed_s(0.0) == 5.5

    def test_batches_are_timed_now_and_then(self):
        limit = make(batch_s=0.0)
        limit.observe(8, 0.0, 1.0)
        limit.observe(8, 0.0, 1.0 + LEARN_EVERY_S / 2)
        assert limit.allowed_s(2.0) == pytest.approx(10.0)
        assert limit.ended_at == 1.0 + LEARN_EVERY_S / 2


@pytest.mark.parametrize(
    ("max_wait_s", "queue", "applies"),
    [
        (None, QueuePolicy(), True),
        (None, QueuePolicy(allow_timeout_override=True), True),
        (None, QueuePolicy(default_timeout_s=5.0), False),
        (None, QueuePolicy(timeout_action="DELAY", default_timeout_s=5.0), False),
        (None, QueuePolicy(max_queue_size=4), False),
        (2.0, QueuePolicy(default_timeout_s=5.0), True),
        (0.0, QueuePolicy(), False),
    ],
)
def test_the_default_leaves_queues_with_a_limit_of_their_own_alone(max_wait_s, queue, applies):
    assert make(max_wait_s).applies(queue) is applies


class TestPrediction:
    def test_an_empty_queue_takes_no_time(self):
        assert make().predicted_s(0, 0) == 0.0

    def test_full_batches_one_after_the_other(self):
        assert make().predicted_s(80, 80) == pytest.approx(0.08)

    def test_more_executors_are_faster(self):
        limit = make()
        limit.count_executors(4, 0.0)
        assert limit.predicted_s(80, 80) == pytest.approx(0.02)

    def test_requests_larger_than_a_batch_count_by_themselves(self):
        limit = WaitLimit(POLICY, 1)
        limit.seed({1: 0.004, 8: 0.008})
        assert limit.predicted_s(80, 10) == pytest.approx(10 * 0.008)


class TestOutage:
    def test_nothing_is_refused_without_an_instance(self):
        limit = make()
        limit.count_executors(0, 10.0)
        assert limit.allowed_s(1000.0) == math.inf

    def test_the_time_without_an_instance_is_added_and_slowly_taken_back(self):
        limit = make()
        limit.count_executors(0, 10.0)
        limit.count_executors(1, 14.0)
        assert limit.allowed_s(14.0) == MIN_WAIT_S + 4.0
        assert limit.allowed_s(22.0) == MIN_WAIT_S + 2.0
        assert limit.allowed_s(1000.0) == MIN_WAIT_S

    def test_a_second_outage_adds_to_the_first(self):
        limit = make()
        limit.count_executors(0, 10.0)
        limit.count_executors(1, 14.0)
        limit.count_executors(0, 22.0)
        limit.count_executors(2, 23.0)
        assert limit.allowed_s(23.0) == MIN_WAIT_S + 3.0

    def test_an_instance_more_or_less_changes_nothing(self):
        limit = make()
        limit.count_executors(2, 1.0)
        limit.count_executors(1, 2.0)
        assert limit.allowed_s(3.0) == MIN_WAIT_S

    @pytest.mark.parametrize("outage_s", [0.5, 3.0, 20.0])
    @pytest.mark.parametrize("load", [0.3, 0.7, 0.8])
    def test_the_backlog_of_a_restart_is_worked_off_without_refusals(self, load, outage_s):
        """A fluid queue: work arrives at `load` and is done at 1 s a second after the outage."""
        limit = make()
        limit.count_executors(0, 0.0)
        limit.count_executors(1, outage_s)
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            # A request that came during the outage starts when the work before it is done.
            arrived = share * outage_s
            started = outage_s + load * arrived
            assert started - arrived <= limit.allowed_s(started)
        drained_s = load * outage_s / (1 - load)
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            after_s = share * drained_s
            backlog_s = load * outage_s - (1 - load) * after_s
            assert backlog_s <= limit.allowed_s(outage_s + after_s)


def test_room_is_what_the_prediction_would_admit() -> None:
    """It never admits more, and for requests of the usual size it admits as many."""
    drawn = random.Random(3)
    limit, now, num_room, num_without = make(0.5), 0.0, 0, 0
    for _ in range(4000):
        now += drawn.expovariate(200)
        kind = drawn.randrange(6)
        if kind == 0:
            limit.observe(drawn.randint(1, 8), now - drawn.uniform(0.001, 0.2), now)
        elif kind == 1:
            limit.count_executors(drawn.randrange(4), now)
        elif kind == 2 and not drawn.randrange(20):
            limit.seed({1: drawn.uniform(0.001, 0.1), 8: drawn.uniform(0.001, 0.3)})
        num_ahead = drawn.randrange(200)
        size_ahead = num_ahead * drawn.choice((1, 1, 3, 9))
        is_admitted = limit.predicted_s(size_ahead, num_ahead) <= ADMITTED * limit.allowed_s(now)
        has_room = limit.has_room(size_ahead, num_ahead)
        assert is_admitted or not has_room
        if size_ahead <= 8 * num_ahead and limit.extra_s(now) == 0:
            assert has_room is is_admitted
        num_room += has_room
        num_without += not is_admitted
    assert num_room > 500 and num_without > 500
