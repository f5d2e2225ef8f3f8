"""Verdicts on simulated rollouts: good candidates rise, bad ones are rolled back with a reason."""

from dataclasses import replace

import pytest
from operate.rollout_streams import P99, PLAN, Behaviour, Traffic, follow, outcome

from penstock.operate.rollout_judge import RolloutJudge
from penstock.operate.rollout_measures import RolloutReading
from penstock.operate.rollout_promise import RolloutPromise
from penstock.operate.rollout_state import RolloutPlan
from penstock.serving.split_counts import LENGTH, TPOT, TTFT, SplitCounts

NO_SLO = RolloutPromise(source="none")


def from_second(begins: int, fault: Behaviour):
    return lambda second: fault if second >= begins else Behaviour()


def test_all_checks_together_are_wrong_in_one_of_a_hundred_rollouts() -> None:
    for promise in (P99, NO_SLO):
        verdict = RolloutJudge(PLAN, promise, 0.0).tick(RolloutReading(SplitCounts()), 1.0)
        limits = [each.e_limit for each in verdict.checks if each.e_limit]
        assert len(limits) >= 3
        assert sum(1 / limit for limit in limits) == pytest.approx(0.01, rel=0.01)


def test_a_good_candidate_rises_in_steps_and_is_promoted() -> None:
    actions = [verdict.action for _, verdict in follow(Traffic())]
    assert [each for each in actions if each != "wait"] == ["step", "step", "promote"]
    assert len(actions) >= 3 * PLAN.step_s


def test_no_good_candidate_of_many_is_rolled_back() -> None:
    """1 % may be; 100 rollouts of a minute and more each."""
    actions = [
        outcome(Traffic(seed=seed, candidate=lambda second: Behaviour(late=0.008)))[1].action
        for seed in range(100)
    ]
    assert actions.count("roll back") <= 2
    assert actions.count("promote") > 50


@pytest.mark.parametrize("begins", [0, 40])
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        pytest.param(Behaviour(late=0.5), "p99 < 20ms", id="slow"),
        pytest.param(Behaviour(failed=0.2), "errors", id="errors"),
        pytest.param(Behaviour(disagree=0.9), "agreement", id="wrong"),
        pytest.param(Behaviour(infer_s=0.03), "cost", id="costly"),
        pytest.param(Behaviour(is_ready=False), "ready", id="not ready"),
    ],
)
def test_a_fault_is_rolled_back_within_30_s(fault: Behaviour, name: str, begins: int) -> None:
    plan = replace(PLAN, step_s=100.0)
    second, verdict = outcome(Traffic(candidate=from_second(begins, fault)), plan)
    assert verdict.action == "roll back"
    assert begins <= second <= begins + 30
    assert verdict.reason.startswith(f"{name}: ")
    broken = [each for each in verdict.checks if each.state == "broken"]
    assert [each.name for each in broken] == [name]


def test_a_lower_cost_is_found_when_both_versions_have_equal_load() -> None:
    plan = replace(PLAN, step_s=100.0, steps=(0.5, 1.0))
    second, verdict = outcome(Traffic(candidate=lambda second: Behaviour(infer_s=0.008)), plan)
    assert verdict.action == "roll back" and second <= 30
    assert verdict.reason.startswith("cost: ")


def test_a_candidate_that_is_too_costly_gets_no_more_load() -> None:
    """Not even before the check is broken."""
    plan = replace(PLAN, step_s=1.0, steps=(0.5, 1.0))
    traffic = Traffic(rate=2000, candidate=lambda second: Behaviour(infer_s=0.02))
    actions = [verdict.action for _, verdict in follow(traffic, plan, replace(P99, latencies=()))]
    assert set(actions) == {"wait", "roll back"}


def test_a_rarely_used_candidate_may_take_longer_for_a_batch() -> None:
    """Its weights are not in the caches."""

    def cold(second: int) -> Behaviour:
        return Behaviour(infer_s=0.012 if second < 30 else 0.004)

    _, verdict = outcome(Traffic(candidate=cold), replace(PLAN, steps=(0.05, 1.0), step_s=30.0))
    assert verdict.action == "promote"


def test_deaths_of_workers_are_rolled_back_unless_the_stable_version_has_them_too() -> None:
    dying = from_second(3, Behaviour(deaths=1))
    second, verdict = outcome(Traffic(candidate=dying))
    assert (second, verdict.action) == (5, "roll back")
    assert "workers died 3 times, those of the stable version 0 times" in verdict.reason
    _, verdict = outcome(Traffic(candidate=dying, stable=dying))
    assert verdict.action == "promote"


def test_a_disturbance_of_both_versions_is_not_the_candidates_fault() -> None:
    def disturbed(second: int) -> Behaviour:
        return Behaviour(late=0.6 if 20 <= second < 40 else 0.002)

    verdicts = list(follow(Traffic(stable=disturbed, candidate=disturbed)))
    assert verdicts[-1][1].action == "promote"
    meanwhile = next(verdict for second, verdict in verdicts if second == 35)
    check = next(each for each in meanwhile.checks if each.name == "p99 < 20ms")
    assert "the stable version misses it too" in check.text
    assert check.state == "open"


def test_a_candidate_that_is_much_worse_in_a_disturbance_is_rolled_back() -> None:
    traffic = Traffic(
        stable=lambda second: Behaviour(late=0.05), candidate=lambda second: Behaviour(late=0.9)
    )
    second, verdict = outcome(traffic)
    assert verdict.action == "roll back"
    assert second <= 30


def test_without_traffic_nothing_is_decided() -> None:
    *_, (_, verdict) = follow(Traffic(rate=0.0), num_seconds=200)
    assert verdict.action == "wait"
    assert "no request has reached the candidate for 200 s" in verdict.reason


def test_too_few_requests_are_waited_for_and_the_number_is_said() -> None:
    verdicts = [verdict for _, verdict in follow(Traffic(rate=4.0), num_seconds=60)]
    assert {verdict.action for verdict in verdicts} == {"wait"}
    assert "90 % is needed (at least " in verdicts[-1].reason


def test_a_step_takes_its_time() -> None:
    plan = replace(PLAN, step_s=100.0)
    seconds = [second for second, each in follow(Traffic(), plan) if each.action == "step"]
    assert seconds[0] >= 99
    assert "this step lasts" in list(follow(Traffic(), plan, num_seconds=80))[-1][1].reason


def test_each_step_needs_its_own_requests() -> None:
    """What was seen with little traffic says nothing about more of it."""
    plan = replace(PLAN, step_s=1.0, steps=(0.25, 0.5, 1.0))
    seconds = [second for second, each in follow(Traffic(rate=100.0), plan) if each.action]
    steps = [second for second, each in follow(Traffic(rate=100.0), plan) if each.action == "step"]
    assert len(steps) == 1
    assert seconds[-1] - steps[0] >= 4


def test_without_an_slo_the_stable_version_is_the_measure() -> None:
    _, verdict = outcome(Traffic(), promise=NO_SLO)
    assert verdict.action == "promote"
    slow = Traffic(candidate=from_second(30, Behaviour(median_s=0.008)))
    second, verdict = outcome(slow, promise=NO_SLO, plan=replace(PLAN, step_s=100.0))
    assert verdict.action == "roll back"
    assert verdict.reason.startswith("latency: ")
    assert 30 <= second <= 60


def test_a_shadow_stays_one_without_steps() -> None:
    plan = RolloutPlan(mode="shadow", steps=(), step_s=10.0)
    *_, (_, verdict) = follow(Traffic(), plan, num_seconds=100)
    assert verdict.action == "wait"
    assert verdict.reason.startswith("all checks hold")


def test_a_shadow_with_steps_becomes_a_canary() -> None:
    judge = RolloutJudge(RolloutPlan(mode="shadow", step_s=10.0), P99, 0.0)
    assert (judge.step, judge.share) == (-1, 0.0)
    traffic = Traffic()
    for second in range(100):
        verdict = judge.tick(traffic.second(second, 0.2, P99.limits), second + 1.0)
        if verdict.action == "step":
            break
    assert (judge.step, judge.share) == (0, 0.05)


def test_a_wrong_shadow_is_rolled_back() -> None:
    plan = RolloutPlan(mode="shadow", steps=(), step_s=10.0)
    wrong = Traffic(candidate=lambda second: Behaviour(disagree=0.5))
    second, verdict = outcome(wrong, plan)
    assert verdict.action == "roll back"
    assert second <= 10


def text_counts(
    ttft_s: float, tokens: int, counts: SplitCounts, number: int, wrong: int = 0
) -> None:
    for side, first_s, length in (
        (counts.stable, 0.1, 100),
        (counts.candidate, ttft_s, tokens),
    ):
        for index in range(number):
            side.add("latency", 1.0, ())
            side.add(TTFT, first_s, ())
            side.add(TPOT, 0.01, ())
            side.add(LENGTH, length * (0.7 + 0.6 * index / number), ())
    counts.num_compared += 10
    counts.num_disagreeing += wrong


@pytest.mark.parametrize(
    ("ttft_s", "tokens", "wrong", "name"),
    [
        (0.1, 100, 0, ""),
        (0.3, 100, 0, "ttft"),
        (0.1, 160, 0, "longer texts"),
        (0.1, 60, 0, "shorter texts"),
        (0.1, 100, 9, "agreement"),
    ],
)
def test_generated_texts_are_compared_by_ttft_length_and_likelihood(
    ttft_s: float, tokens: int, wrong: int, name: str
) -> None:
    judge = RolloutJudge(PLAN, RolloutPromise(is_text=True, max_cost=None), 0)
    counts = SplitCounts()
    # What the stable version usually does must be known before anything is compared with it.
    text_counts(0.1, 100, counts, 150)
    for second in range(60):
        text_counts(ttft_s, tokens, counts, 20, wrong)
        verdict = judge.tick(RolloutReading(counts), second + 1.0)
        if verdict.action == "roll back":
            break
    broken = [each.name for each in verdict.checks if each.state == "broken"]
    assert broken == [name] * bool(name)
    told = {each.name: each.text for each in verdict.checks}
    assert "texts disagree" in told["agreement"]


def test_texts_of_one_length_can_be_promoted() -> None:
    judge = RolloutJudge(PLAN, RolloutPromise(is_text=True, max_cost=None), 0)
    counts, actions = SplitCounts(), set()
    for second in range(600):
        for side in (counts.stable, counts.candidate):
            for metric, value in (("latency", 1.0), (TTFT, 0.1), (TPOT, 0.01), (LENGTH, 256)):
                for _ in range(5 + second % 3):
                    side.add(metric, value, ())
        counts.num_compared += 5
        actions.add(judge.tick(RolloutReading(counts), second + 1.0).action)
    assert actions >= {"step", "promote"} and "roll back" not in actions
