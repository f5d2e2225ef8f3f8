"""What an SLO asks of a candidate, and which of several is the best."""

import math

import pytest

from penstock import slo
from penstock.benchmark.stats import Interval
from penstock.optimizer import goals
from penstock.optimizer.results import ServedMeasurement, TermVerdict


def around(value: float, share: float = 0.02) -> Interval:
    return Interval(value, value * (1 - share), value * (1 + share))


def served(
    p99_s: float,
    *,
    is_met: bool = True,
    spread: float = 0.02,
    max_rate: float | None = None,
    goodput: float = 1.0,
    phases: dict[str, float] | None = None,
) -> ServedMeasurement:
    outcome = "kept" if is_met else "missed"
    return ServedMeasurement(
        load="200/s poisson",
        p50=around(p99_s / 2),
        p99=around(p99_s, spread),
        throughput=around(200),
        goodput=goodput,
        verdicts=[TermVerdict("p99 < 20ms", outcome, around(p99_s, spread), 0.02, "s")],
        num_requests=2000,
        num_failed=0 if goodput == 1 else round(2000 * (1 - goodput)),
        phases=phases or {},
        rows_per_batch=2.0,
        memory_bytes=10**8,
        max_rate=None if max_rate is None else around(max_rate),
    )


@pytest.mark.parametrize(
    ("text", "price", "rate"),
    [
        ("p99 < 20ms", None, 0.0),
        ("p99 < 20ms at 200/s", None, 200.0),
        ("p99 < 20ms, throughput >= 500/s", None, 500.0),
        ("p99 < 20ms, throughput >= 100/s at 200/s", None, 200.0),
        # 3.6 an hour is 0.001 a second; 0.5 for a million are 2000 of them a second.
        ("cost <= 0.5 per million", 3.6, 2000.0),
        ("cost <= 0.5 per million", None, 0.0),
    ],
)
def test_how_many_requests_a_second(text: str, price: float | None, rate: float) -> None:
    assert goals.required_rate(slo.parse(text), price) == pytest.approx(rate)


def test_what_comes_near_is_worth_a_measurement() -> None:
    wish = slo.parse("p99 < 20ms at 200/s")
    assert goals.is_within_reach(180, wish, None)
    assert not goals.is_within_reach(100, wish, None)


def test_keeping_the_slo_goes_before_everything() -> None:
    assert goals.order([served(0.01, is_met=False), served(0.019)], [0, 100]) == [1, 0]


def test_faster_goes_before_simpler() -> None:
    assert goals.order([served(0.015), served(0.010)], [0, 100]) == [1, 0]


def test_simpler_goes_first_within_the_noise() -> None:
    assert goals.order([served(0.0100), served(0.0103)], [5, 1]) == [1, 0]
    assert goals.order([served(0.010, spread=0.4), served(0.013, spread=0.4)], [5, 1]) == [1, 0]


def test_the_highest_rate_decides_where_it_is_known() -> None:
    pair = [served(0.010, max_rate=300), served(0.012, max_rate=400)]
    assert goals.order(pair, [0, 1]) == [1, 0]


def test_where_no_rate_was_found_for_either_the_rest_decides() -> None:
    """As of an SLO that nothing keeps at any rate."""
    pair = [served(each, is_met=False, max_rate=math.nan) for each in (0.060, 0.015)]
    assert goals.order(pair, [0, 1]) == [1, 0]


def test_refusing_requests_is_no_speed() -> None:
    """A server in slo mode answers in time whatever it answers; the others were refused."""
    pair = [
        served(0.012, is_met=False, goodput=0.4),
        served(0.018, is_met=False, goodput=0.9),
    ]
    assert goals.order(pair, [0, 1]) == [1, 0]


def test_order_of_many_is_whole() -> None:
    many = [served(0.02), served(0.01), served(0.03), served(0.01, is_met=False)]
    assert goals.order(many, [0, 1, 2, 3]) == [1, 0, 2, 3]


def test_what_binds() -> None:
    found = served(0.03, phases={"queue": 0.002, "compute": 0.015, "network and codec": 0.001})
    text = goals.binding(found, slo.parse("p99 < 20ms at 200/s"), can_add_instances=True)
    assert text == "compute (83 % of a request's 18.0 ms)"


@pytest.mark.parametrize(
    ("can_add_instances", "advice"),
    [(True, "more instances or a faster machine"), (False, "a faster machine")],
)
def test_a_queue_that_binds_says_what_would_help(can_add_instances: bool, advice: str) -> None:
    found = served(0.03, phases={"queue": 0.02, "compute": 0.005})
    wish = slo.parse("p99 < 20ms at 200/s")
    text = goals.binding(found, wish, can_add_instances=can_add_instances)
    assert text == f"queue (80 % of a request's 25.0 ms); {advice} would shorten the queue"


def test_two_are_compared_beyond_chance() -> None:
    better, worse = served(0.010), served(0.015)
    assert (goals.compare(better, worse), goals.compare(worse, better)) == (1, -1)
    assert goals.compare(better, served(0.0101)) == 0 == goals.compare(better, better)


def test_goodput_at_the_slos_load_decides_before_highest_rates() -> None:
    """Seen: 8 % in time was chosen before 92 %, by a rate search made on a busy machine."""
    original = served(0.5, is_met=False, goodput=0.08, max_rate=327)
    half = served(0.03, is_met=False, goodput=0.92, max_rate=287)
    assert goals.order([original, half], [0, 101]) == [1, 0]


def test_highest_rates_rank_what_is_equal_at_the_slos_load() -> None:
    pair = [served(0.010, max_rate=300), served(0.010, max_rate=math.nan)]
    assert goals.order(pair, [5, 1]) == [0, 1]
    overrun = [served(0.5, is_met=False, goodput=0.0, max_rate=rate) for rate in (80, 120)]
    assert goals.order(overrun, [0, 1]) == [1, 0]
