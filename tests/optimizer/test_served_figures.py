"""Figures of served builds: memory, phases, prices, and pauses of the machine."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from served_builds import a_config

from penstock.benchmark import stats
from penstock.benchmark.stats import Interval
from penstock.benchmark.targets import Counters
from penstock.config import Postprocess, Preprocess
from penstock.optimizer import served, served_figures
from penstock.optimizer.machine import Conditions
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import MemberTime, ServedMeasurement, TermVerdict
from penstock.slo import parse

NAN = Interval(math.nan, math.nan, math.nan)


def a_plan(slo: str, **others: object) -> Plan:
    return Plan("m.onnx", "model", "out", slo=parse(slo), **others)


class TestMemory:
    def test_of_a_model_on_gpus_is_theirs(self):
        on_gpus = replace(a_config(), backend="pytorch", device="cuda")
        assert served_figures.ServedAccount(on_gpus, [], [], 500, [70, 30]).promised_bytes == 100

    def test_of_others_is_the_host_s(self):
        assert served_figures.ServedAccount(a_config(), [], [], 500).promised_bytes == 500


def test_times_of_members_are_means_of_a_request_to_the_ensemble() -> None:
    """A member that answered nothing has no time; one may be asked several times."""
    crops = Counters(30, 0, 30, 5, 0, 60_000_000, 3_000_000, 27_000_000, 0)
    idle = Counters(0, 0, 0, 0, 0, 0, 0, 0, 0)
    whole = Counters(10, 0, 10, 0, 0, 0, 0, 0, 0, members={"crops": crops, "idle": idle})
    found = served_figures.members([whole, whole])
    assert found == {"crops": MemberTime(0.006, 0.003, 3.0)}
    assert served_figures.members([crops]) == {}


class TestPhases:
    def test_are_means_of_a_request(self):
        counters = Counters(10, 0, 10, 5, 200_000_000, 40_000_000, 10_000_000, 100_000_000, 0)
        found = served_figures.phases([counters, counters], latency_s=0.025, config=a_config())
        assert found == pytest.approx(
            {
                "queue": 0.004,
                "compute input": 0.001,
                "compute": 0.010,
                "compute output": 0.0,
                "network and codec": 0.010,
            }
        )

    def test_are_called_after_the_functions_around_the_model(self):
        counters = Counters(10, 0, 10, 5, 200_000_000, 0, 20_000_000, 100_000_000, 80_000_000)
        functions = {
            "preprocess": Preprocess("p.py:f", ()),
            "postprocess": Postprocess("p.py:g", ()),
        }
        found = served_figures.phases([counters], 0.03, replace(a_config(), **functions))
        assert list(found) == ["queue", "preprocess", "compute", "postprocess", "network and codec"]
        assert (found["preprocess"], found["postprocess"]) == pytest.approx((0.002, 0.008))

    def test_without_an_account_there_are_none(self):
        assert served_figures.phases([], 0.01, a_config()) == {}


class TestPrice:
    PLAN = a_plan("p99 < 20ms, cost <= 1 per million", price_per_hour=3.6)

    def made(self) -> ServedMeasurement:
        terms = ("p99 < 20ms", "kept", NAN, 0.02, "s"), ("cost", "not measured", None, 1.0, "")
        verdicts = [TermVerdict(*each) for each in terms]
        return ServedMeasurement("", NAN, NAN, NAN, 1.0, verdicts, 1, 0, {}, 1.0, 0)

    def test_is_by_the_million_at_the_highest_rate(self):
        found = served_figures.priced(self.made(), Interval(2000, 1000, 4000), self.PLAN)
        assert found.cost_per_million == pytest.approx(0.5)
        latency, cost = found.verdicts
        assert latency.outcome == cost.outcome == "kept"
        assert (cost.measured.low, cost.measured.high) == pytest.approx((0.25, 1.0))
        assert found.is_met

    def test_that_is_too_high_is_missed(self):
        found = served_figures.priced(self.made(), Interval(500, 400, 600), self.PLAN)
        assert found.verdicts[1].outcome == "missed"

    def test_is_not_known_without_a_rate(self):
        found = served_figures.priced(self.made(), NAN, self.PLAN)
        assert found.verdicts[1].outcome == "not measured"

    def test_is_not_known_without_a_price(self):
        found = served_figures.priced(self.made(), Interval(2000, 1000, 4000), a_plan("p99 < 20ms"))
        assert (found.cost_per_million, found.max_rate.value) == (None, 2000)


@pytest.mark.parametrize(("num_waited", "late_share"), [(0, 0.75), (3, 0.0)])
def test_waiting_for_a_busy_server_is_no_pause_of_the_machine(num_waited, late_share):
    """A generator whose connections are all busy is late because of the server."""
    histogram = stats.DurationHistogram()
    histogram.add(np.full(20, 0.2))
    windows = [
        stats.Window(n / 4, 0.25, 20, 20, 20, metrics={"latency": histogram}, max_late_s=0.5)
        if n > 1
        else stats.Window(n / 4, 0.25, 20, 20, 20, metrics={"latency": histogram})
        for n in range(8)
    ]
    generator = SimpleNamespace(num_waited=num_waited)
    level = SimpleNamespace(windows=windows, server=None, generator=generator)
    account = served_figures.ServedAccount(a_config())
    endpoint = SimpleNamespace(
        conditions=Conditions(own_cpu=0.1), memory_bytes=1, gpu_memory_bytes=()
    )
    account.add(level, endpoint)
    plan = a_plan("p99 < 50 ms at 80/s")
    (turn,) = served_figures.served_of(account, served.load_of(plan.slo), plan).turns
    # The window before the first late one goes with it.
    assert turn.late_share == pytest.approx(late_share + (0.125 if late_share else 0.0))


def test_failed_requests_count_in_every_figure_as_in_the_verdict():
    """Table and first line must not contradict each other."""
    histogram = stats.DurationHistogram()
    histogram.add(np.full(15, 0.002))
    windows = [
        stats.Window(
            n / 4,
            0.25,
            num_due=20,
            num_good=15,
            failures={"503": 5},
            metrics={"latency": histogram},
        )
        for n in range(8)
    ]
    generator = SimpleNamespace(num_waited=0)
    level = SimpleNamespace(windows=windows, server=None, generator=generator)
    endpoint = SimpleNamespace(conditions=Conditions(), memory_bytes=1, gpu_memory_bytes=())
    account = served_figures.ServedAccount(a_config())
    account.add(level, endpoint)
    plan = a_plan("p99 < 50 ms at 80/s")
    found = served_figures.served_of(account, served.load_of(plan.slo), plan)
    (verdict,) = found.verdicts
    assert verdict.outcome == "missed"
    assert found.p99.value == verdict.measured.value == math.inf
    assert found.turns[0].p99_s == math.inf
    assert found.p50.value == pytest.approx(0.002, rel=0.05)
