"""Scaling on a real trace, with the real batcher on a simulated clock, beside an oracle."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.config import BatchPolicy, ModelConfig, ScalingConfig
from penstock.operate.scaling_replay import KEPT, WINDOW_S, ScaledModel, oracle, replay
from penstock.optimizer.simulate import TimeTable

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def scaled(load_s: float = 2.0, count: int = 1, **config: float) -> ScaledModel:
    """Batches of up to 4 in 0.7 s to 1.6 s, and an SLO of 2 s: the trace needs 1 to 8 of them."""
    settings = {"min_instances": 1, "max_instances": 8, **config}
    batching = BatchPolicy(4, is_dynamic=True, slo_latency_s=2.0)
    table = TimeTable(1, 1, {0: {1: 0.7, 2: 1.0, 4: 1.6}})
    model = ModelConfig(
        "m", "1", "null", "", (), (), 4, batching, count, scaling=ScalingConfig(**settings)
    )
    return ScaledModel(model, table, load_s)


def poisson(rate: float, seconds: float, seed: int = 1) -> list[float]:
    times = np.random.default_rng(seed).exponential(1 / rate, int(2 * rate * seconds)).cumsum()
    return times[times < seconds].tolist()


@pytest.fixture(scope="module")
def resampled() -> Callable[..., list[float]]:
    """Arrivals of the trace between two of its seconds."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from scaling_trace import resampled
    finally:
        sys.path.remove(str(BENCHMARKS))
    return resampled


@pytest.mark.parametrize(
    "first_s", [pytest.param(2400, id="end"), pytest.param(0, id="all", marks=pytest.mark.slow)]
)
def test_on_the_trace_the_slo_is_kept_with_few_more_instances_than_an_oracle_uses(
    resampled, first_s
):
    """The last 18 minutes, until no request comes, or the whole hour."""
    trace, model = resampled(first_s), scaled()
    outcome, fewest = replay(trace, model), oracle(trace, model)
    ratio = outcome.instance_s / (WINDOW_S * sum(fewest))
    print(f"{outcome.share_in_time:.2%} in time, {ratio:.2f} x the oracle's instance-hours,")
    print(f"{len(outcome.decisions)} scalings, oracle {min(fewest)} to {max(fewest)}")
    assert min(fewest) <= 2 and max(fewest) >= 7
    assert outcome.share_in_time >= 0.99
    assert 1.0 <= ratio <= 1.3


def test_a_steady_rate_settles_at_one_number():
    times = poisson(6.0, 600)
    outcome = replay(times, scaled())
    late = [at for at, _ in outcome.decisions if at > 200]
    assert outcome.share_in_time >= 0.98
    assert len(late) <= 6


def test_a_ramp_is_followed_before_it_is_late():
    """From 1/s to 8/s in two minutes, with five seconds to load an instance."""
    times, now = [], 0.0
    random = np.random.default_rng(3)
    while now < 240:
        now += random.exponential(1 / min(8.0, 1.0 + 7.0 * now / 120))
        times.append(now)
    outcome = replay(times, scaled(load_s=5.0, count=2))
    assert outcome.share_in_time >= 0.97
    assert outcome.most >= 6
    reached = [decision.target for at, decision in outcome.decisions if at <= 120]
    down = [b for a, b in zip(reached, reached[1:], strict=False) if b < a]
    assert len(down) <= 2, "after a burst, hardly anything is stopped while load rises"


def test_instances_are_stopped_when_the_load_ends():
    times = [*poisson(8.0, 120), *(120 + time for time in poisson(0.2, 600, seed=2))]
    outcome = replay(times, scaled(scale_down_s=20.0))
    targets = [decision.target for _, decision in outcome.decisions]
    assert max(targets) >= 6 and targets[-1] <= 2
    steps = [b - a for a, b in zip(targets, targets[1:], strict=False) if b < a]
    assert set(steps) == {-1}


def test_a_fixed_number_is_never_changed():
    outcome = replay(poisson(3.0, 100), scaled(count=4, min_instances=4, max_instances=4))
    assert outcome.decisions == [] and outcome.most == 4
    assert outcome.instance_s == pytest.approx(400, abs=5)


def test_an_oracle_uses_the_fewest_instances_of_each_window():
    times = [*poisson(0.3, 20), *(20 + time for time in poisson(7.0, 20, seed=4))]
    fewest = oracle(times, scaled())
    assert len(fewest) == 4
    assert max(fewest[:2]) <= 2 and min(fewest[2:]) >= 3 and max(fewest) >= 5
    assert KEPT == 0.99
