"""The controller of the number of instances: decisions from observations, without a process."""

from dataclasses import replace

import pytest

from penstock.config import BatchPolicy, ScalingConfig
from penstock.serving.arrival_rates import Arrivals
from penstock.serving.scaling import InstanceCounts, Observation, ScalingDecision, ScalingPolicy
from penstock.serving.sustained_rate import ExecutorModel

BATCHING = BatchPolicy(4, is_dynamic=True, slo_latency_s=0.5)
TIMES = {1: 0.1, 2: 0.15, 4: 0.25}
MODEL = ExecutorModel.of(BATCHING, TIMES)


def policy(least: int = 1, most: int = 8, **config: float) -> ScalingPolicy:
    return ScalingPolicy(least, most, ScalingConfig(**config), BATCHING)


def seen(rate: float, current: int, **more: object) -> Observation:
    steady = Arrivals(rate, rate, 1.0, 0.0 if rate else 1000.0)
    return Observation(steady, InstanceCounts(current), times_s=TIMES, **more)


def test_the_load_decides_at_once_how_many_are_started():
    rate = 0.9 * MODEL.max_rate(6)
    decision = policy().decide(seen(rate, 1), 0.0)
    assert decision.target == 6
    sustained = f"6 instances sustain {MODEL.max_rate(6):.3g}/s within 500 ms"
    assert decision.reason == f"{rate:.3g}/s arrive; {sustained}"


def test_instances_that_load_count():
    counts = InstanceCounts(2, 4)
    observed = replace(seen(0.9 * MODEL.max_rate(6), 0), instances=counts)
    assert policy().decide(observed, 0.0).target == 6


@pytest.mark.parametrize("rate", [0.0, 1e6])
def test_the_limits_hold(rate):
    controller = policy(2, 5, scale_down_s=1.0)
    for now in range(100):
        target = controller.decide(seen(rate, 3), float(now)).target
        assert 2 <= target <= 5
    assert controller.decide(seen(0.0, 2), 200.0).target == 2


def test_a_burst_is_extrapolated_to_the_time_at_which_an_instance_is_loaded():
    rising = Arrivals(1.5 * MODEL.max_rate(2), MODEL.max_rate(2), 1.0)
    slow, quick = (
        policy().decide(replace(seen(0, 2, load_s=load_s), arrivals=rising), 0.0)
        for load_s in (8.0, 0.0)
    )
    assert rising.has_burst
    assert 2 < quick.target < slow.target
    assert "once an instance is loaded" in slow.reason


def test_a_queue_that_cannot_be_worked_off_in_time_counts():
    rate = 0.5 * MODEL.max_rate(2)
    assert policy().decide(seen(rate, 2), 0.0).target == 2
    decision = policy().decide(seen(rate, 2, num_queued=60.0), 0.0)
    assert decision.target > 4 and "60 are queued" in decision.reason


def test_memory_limits_what_is_started_and_the_reason_says_so():
    observed = replace(seen(0.9 * MODEL.max_rate(6), 0), instances=InstanceCounts(2, 0, room=1))
    decision = policy().decide(observed, 0.0)
    assert decision.target == 3
    assert decision.reason.endswith("; memory has room for 3")
    full = replace(observed, instances=InstanceCounts(2, 0, room=0))
    assert policy().decide(full, 0.0).target == 2


def test_one_instance_at_a_time_is_stopped_after_each_quiet_period():
    controller, current, stopped = policy(scale_down_s=10.0), 5, []
    for now in range(100):
        target = controller.decide(seen(1.0, current), float(now)).target
        assert target >= current - 1
        if target < current:
            stopped.append(now)
        current = target
    assert stopped == [10, 20, 30, 40]
    assert current == 1


def test_load_that_returns_starts_the_quiet_period_again():
    controller = policy(scale_down_s=10.0)
    high, low = seen(0.99 * MODEL.max_rate(4), 4), seen(1.0, 4)
    assert controller.decide(low, 0.0).target == 4
    assert controller.decide(high, 9.0).target == 4
    assert controller.decide(low, 10.0).target == 4
    assert controller.decide(low, 19.0).target == 4
    assert controller.decide(low, 20.0).target == 3


def test_an_instance_is_kept_if_the_others_would_only_just_do():
    controller = policy(scale_down_s=1.0)
    just = seen(0.98 * MODEL.max_rate(3), 4)
    assert MODEL.num_needed(just.arrivals.long, 8) == 3
    assert {controller.decide(just, float(now)).target for now in range(100)} == {4}
    less = seen(0.9 * MODEL.max_rate(3), 4)
    controller.decide(less, 100.0)
    assert controller.decide(less, 101.0).target == 3


def test_a_rate_near_a_limit_never_makes_it_flap():
    controller, current, changes = policy(scale_down_s=5.0), 1, 0
    for tick in range(2000):
        rate = MODEL.max_rate(3) * (1.0 + 0.04 * (-1) ** (tick // 7))
        target = controller.decide(seen(rate, current), tick / 2).target
        changes += target != current
        current = target
    assert changes <= 2 and current == 4


def test_zero_is_reached_only_after_the_time_without_requests():
    controller = policy(0, scale_to_zero_s=60.0, scale_down_s=5.0)
    idle = replace(seen(0.0, 1), arrivals=Arrivals(idle_s=59.0))
    assert controller.decide(idle, 1000.0).target == 1
    longer = replace(idle, arrivals=Arrivals(idle_s=60.0))
    assert controller.decide(longer, 1001.0) == ScalingDecision(0, "no request for 60 s")
    assert controller.decide(replace(longer, num_queued=1.0), 1001.0).target == 1
    assert policy(1, scale_to_zero_s=60.0).decide(longer, 1001.0).target == 1


def test_zero_stays_zero_until_a_request_comes():
    controller = policy(0)
    assert controller.decide(seen(0.0, 0), 0.0) == ScalingDecision(0, "no request for 1000 s")
    asked = replace(seen(0.0, 0), arrivals=Arrivals(0.3, 0.03, 1.0, 0.4))
    assert controller.decide(asked, 1.0).target == 1
    assert controller.decide(seen(0.0, 0, num_queued=1.0), 1.0).target == 1
    crowd = replace(asked, arrivals=Arrivals(MODEL.max_rate(3), 1.0, 1.0, 0.0))
    assert controller.decide(crowd, 1.0).target == 3


def test_several_idle_instances_go_one_by_one_before_the_last():
    controller = policy(0, scale_to_zero_s=1.0, scale_down_s=10.0)
    idle = seen(0.0, 2)
    assert controller.decide(idle, 0.0).target == 2
    assert controller.decide(idle, 10.0).target == 1
    assert controller.decide(seen(0.0, 1), 10.5).target == 0


def test_without_requests_one_instance_is_enough_even_if_it_cannot_keep_the_slo():
    slow = {1: 0.3, 2: 0.31, 4: 0.32}
    model = ExecutorModel.of(BATCHING, slow)
    assert model.max_rate(1) == 0 < model.max_rate(3)
    controller, current = policy(0, scale_to_zero_s=60.0, scale_down_s=5.0), 3
    for now in range(20):
        current = controller.decide(replace(seen(0.0, current), times_s=slow), float(now)).target
    assert current == 0
    assert policy().decide(replace(seen(1.0, 1), times_s=slow), 0.0).target > 1


def test_an_instance_that_was_stopped_soon_after_a_request_stays_stopped():
    controller = policy(0, scale_to_zero_s=1.0)
    idle = replace(seen(0.0, 1), arrivals=Arrivals(0.1, 0.1, 1.0, 1.0))
    assert controller.decide(idle, 0.0).target == 0
    after = replace(seen(0.0, 0), arrivals=Arrivals(0.1, 0.1, 1.0, 1.5))
    assert controller.decide(after, 0.5).target == 0


def test_without_batch_times_the_busy_share_decides():
    busy = replace(seen(5.0, 4, busy=0.9), times_s={})
    decision = policy().decide(busy, 0.0)
    assert decision.target == 6
    assert decision.reason == "4 instances computed for 90% of the time"
    assert policy().decide(replace(busy, busy=0.6), 0.0).target == 4
    controller = policy(scale_down_s=10.0)
    quiet = replace(busy, busy=0.2)
    assert controller.decide(quiet, 0.0).target == 4
    assert controller.decide(quiet, 10.0).target == 3


def test_without_an_slo_instances_follow_the_time_in_the_queue():
    fixed = BatchPolicy(4, is_dynamic=True)
    model = ExecutorModel.of(fixed, TIMES)
    controller = ScalingPolicy(1, 8, ScalingConfig(), fixed)
    decision = controller.decide(seen(0.95 * model.max_rate(5), 2), 0.0)
    assert decision.target == 5 and decision.reason.endswith("within 2500 ms")


def late_requests(controller: ScalingPolicy, share: float, ticks: int, **more: object) -> list[int]:
    """Targets at a rate that three instances should sustain, with this share of late requests."""
    current, targets = 3, []
    for tick in range(ticks):
        observed = replace(
            seen(0.8 * MODEL.max_rate(3), current, **more),
            num_requests=20.0 * tick,
            num_late=share * 20.0 * tick,
        )
        current = controller.decide(observed, tick / 2).target
        targets.append(current)
    return targets


def test_late_requests_add_an_instance_whatever_was_predicted():
    assert set(late_requests(policy(), 0.005, 60)) == {3}
    targets = late_requests(policy(), 0.05, 10)
    assert targets[0] == 3 and max(targets) > 3
    assert set(late_requests(policy(most=3), 0.05, 10)) == {3}


def test_another_is_added_only_after_the_last_one_is_ready_and_requests_are_late_still():
    targets = late_requests(policy(), 0.05, 60, load_s=10.0)
    steps = [at / 2 for at in range(1, 60) if targets[at] > targets[at - 1]]
    assert len(steps) >= 2
    assert min(b - a for a, b in zip(steps, steps[1:], strict=False)) > 10.0


def test_a_few_late_requests_mean_nothing():
    controller = policy()
    observed = replace(seen(1.0, 1), num_requests=10.0, num_late=2.0)
    controller.decide(seen(1.0, 1), 0.0)
    assert controller.decide(observed, 1.0).target == 1
    more = replace(observed, num_requests=20.0, num_late=3.0)
    decision = controller.decide(more, 2.0)
    assert decision.target == 2 and decision.reason.endswith("; 15.0% of the requests are late")


def test_no_instance_is_stopped_while_requests_are_late():
    controller = policy(most=3, scale_down_s=1.0)
    for tick in range(20):
        observed = replace(seen(0.1, 3), num_requests=20.0 * tick, num_late=4.0 * tick)
        assert controller.decide(observed, float(tick)).target == 3
