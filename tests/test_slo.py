"""The SLO grammar: what it says, what it refuses and why, and that it reads what it writes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.slo import (
    ARRIVALS,
    METRICS,
    STATISTICS,
    Cost,
    Goodput,
    Latency,
    Memory,
    Objective,
    Rate,
    Slo,
    Throughput,
    parse,
)


@pytest.mark.parametrize(
    ("text", "term"),
    [
        ("p99 < 20ms", Latency("p99", 0.020)),
        ("p99.9<250us", Latency("p99.9", 0.000250)),
        ("mean latency < 1.5 s", Latency("mean", 1.5)),
        ("p50 ttft < 100ms", Latency("p50", 0.1, "ttft")),
        ("ttft p50 < 100 ms", Latency("p50", 0.1, "ttft")),
        ("tpot mean < 1s", Latency("mean", 1.0, "tpot")),
        ("p95 itl < 1e1ms", Latency("p95", 0.01, "itl")),
        ("throughput >= 500/s", Throughput(500)),
        ("throughput >= 0.5 / s", Throughput(0.5)),
        ("goodput >= 99 %", Goodput(99)),
        ("goodput >= 99.5%", Goodput(99.5)),
        ("cost <= 0.25 per million", Cost(0.25)),
        ("memory <= 2GiB", Memory(2 << 30)),
        ("memory <= 1.5 gb", Memory(1_500_000_000)),
    ],
)
def test_terms(text, term):
    assert parse(text) == Slo((term,))


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("200/s", Rate(200)),
        ("200/s poisson", Rate(200)),
        ("0.5/s constant", Rate(0.5, "constant")),
        ("200/s gamma 3", Rate(200, "gamma", 3)),
    ],
)
def test_rates(text, rate):
    slo = parse(f"p99 < 20ms, throughput >= 100/s at {text}")
    assert slo.rate == rate
    assert len(slo.terms) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "a term is missing"),
        ("p99 < 20ms,", "a term is missing"),
        ("p98 < 20ms", "'p98' is not a term; expected p50, p90"),
        ("< 20ms", "'' is not a term"),
        ("p99", "nothing is compared; expected the form p99 [metric] < 20ms"),
        ("p99 <= 20ms", "'<=' is not possible here; expected '<'"),
        ("throughput < 5/s", "expected '>=', as in throughput >= 500/s"),
        ("p99 speed < 20ms", "'speed' is not a metric; expected one of latency, ttft"),
        ("p99 < 20", "'20' is not a duration; expected one like 250us"),
        ("p99 < 20m", "'20m' is not a duration"),
        ("p99 < -1ms", "'-1' is not a number above zero"),
        ("p99 < 0ms", "'0' is not a number above zero"),
        ("p99 < infs", "not a"),
        ("p99 < 1e999s", "not a number above zero"),
        ("throughput >= 5", "'5' does not fit; expected 500/s"),
        ("throughput per day >= 5/s", "'per day' is too much after 'throughput'"),
        ("goodput >= 101 %", "more than 100 %"),
        ("goodput >= 0.9", "expected 99 %"),
        ("cost <= 5", "expected 0.5 per million"),
        ("memory <= 5", "'5' is not a size; expected one like 512MiB"),
        ("p99 < 1ms at", "at: a rate is missing"),
        ("p99 < 1ms at fast", "at: 'fast' does not fit; expected 500/s"),
        ("p99 < 1ms at 5/s uniform", "at: 'uniform' is not known; expected one of poisson"),
        ("p99 < 1ms at 5/s gamma", "gamma needs one number"),
        ("p99 < 1ms at 5/s gamma x", "'x' is not a number above zero"),
        ("p99 < 1ms at 5/s constant 3", "'3' is too much after 'constant'"),
        ("p99 < 1ms, p99 < 2ms", "p99 latency: given 2 times"),
    ],
)
def test_problems_say_what_was_wrong_and_what_was_expected(text, problem):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert len(caught.value.problems) == 1
    assert problem in caught.value.problems[0]


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        parse("p98 < 20ms, memory <= big, goodput > 5 % at 5")
    assert len(caught.value.problems) == 4


def test_the_latency_of_one_request_is_the_tightest_tail():
    assert parse("p50 < 1ms, p99 < 20ms, p90 < 15ms").latency_s == 0.015
    assert parse("p50 < 1ms, mean < 2ms").latency_s == 0.001
    assert parse("p99 ttft < 1ms, throughput >= 1/s").latency_s is None


@pytest.mark.parametrize(
    ("text", "objectives"),
    [
        ("p99 < 20ms", [("latency", 0.99, 0.02)]),
        ("p99.9 < 20ms", [("latency", 0.999, 0.02)]),
        ("p50 < 1ms, p99 < 20ms, p90 < 15ms", [("latency", 0.9, 0.015)]),
        ("p95 tpot < 30ms, p99 ttft < 1s", [("ttft", 0.99, 1.0), ("tpot", 0.95, 0.03)]),
        # The share of requests that may fail, be refused or be late is given.
        ("p99 < 20ms, goodput >= 95 %", [("latency", 0.95, 0.02)]),
        ("mean ttft < 1s, goodput >= 95 %", [("ttft", 0.95, 1.0)]),
        ("goodput >= 99 %", [("latency", 0.99, math.inf)]),
        ("goodput >= 100 %", [("latency", 0.99999, math.inf)]),
        # No share of requests: the mean, intervals between tokens, anything but latency.
        ("mean < 20ms, p99 itl < 1ms, throughput >= 5/s, memory <= 1GB", []),
    ],
)
def test_objectives_are_shares_of_requests_within_a_limit(text, objectives):
    assert parse(text).objectives == tuple(Objective(*each) for each in objectives)


positive = st.floats(1e-9, 1e12, allow_nan=False)
terms = st.one_of(
    st.builds(Latency, st.sampled_from(STATISTICS), positive.map(float), st.sampled_from(METRICS)),
    st.builds(Throughput, positive),
    st.builds(Goodput, st.floats(0.001, 100)),
    st.builds(Cost, positive),
    st.builds(Memory, st.integers(1, 10**15)),
)
rates = st.one_of(
    st.none(),
    st.builds(Rate, positive, st.sampled_from([a for a in ARRIVALS if a != "gamma"])),
    st.builds(Rate, positive, st.just("gamma"), positive),
)
slos = st.builds(
    Slo, st.lists(terms, min_size=1, max_size=5, unique_by=lambda t: t.name).map(tuple), rates
)


@given(slos)
def test_what_is_written_reads_the_same(slo):
    assert parse(str(slo)) == slo


@given(st.text(alphabet="p95latency<>=/s%,. 0at\n", max_size=40))
def test_junk_is_refused_by_the_same_error(text):
    try:
        parse(text)
    except ConfigError as error:
        assert error.problems


def test_people_can_read_it():
    text = "p99 < 20ms, p50 ttft < 100ms, throughput >= 500/s, goodput >= 99.5%, "
    text += "cost <= 0.5 per million, memory <= 2GiB at 200/s gamma 3"
    assert str(parse(text)) == text


def test_the_rate_may_stand_after_any_term() -> None:
    expected = parse("p99 < 20ms, memory <= 2GiB at 200/s gamma 3")
    assert parse("p99 < 20ms at 200/s gamma 3, memory <= 2GiB") == expected


@pytest.mark.parametrize("text", ["p99 < 1ms at 5/s,", "p99 < 1ms at 5/s, memory <= 1GiB at 6/s"])
def test_a_rate_is_given_once_and_a_comma_is_not_the_end(text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text)
