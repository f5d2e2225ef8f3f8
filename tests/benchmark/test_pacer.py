"""When requests are due: rates, spreads and profiles as asked for; numbers and no clock."""

import itertools
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.benchmark.pacer import (
    Closed,
    Flat,
    Load,
    Open,
    Ramp,
    RateStep,
    Replay,
    Steps,
    due_times,
    duration_s,
    label,
    mean_rate,
    parse_concurrency,
    parse_ramp,
    parse_rates,
    parse_steps,
)

KINDS = [("constant", 1.0), ("poisson", 1.0), ("gamma", 0.5), ("gamma", 3.0)]


def first_times(load, num, seed=0):
    """The first so many due times of an endless load, or all of a finite one."""
    chunks, total = [], 0
    for chunk in due_times(load, seed):
        chunks.append(chunk)
        total += len(chunk)
        if total >= num:
            break
    return np.concatenate(chunks)[:num]


def all_times(load, seed=0):
    return np.concatenate([*due_times(load, seed), np.array([])])


@pytest.mark.parametrize(("arrivals", "cv"), KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_gaps_have_the_mean_and_the_spread_asked_for(arrivals, cv, seed):
    gaps = np.diff(first_times(Open(Flat(200), arrivals, cv), 40_000, seed))
    spread = 0.0 if arrivals == "constant" else cv
    assert gaps.mean() == pytest.approx(1 / 200, rel=0.02 * max(1, spread))
    assert gaps.std() / gaps.mean() == pytest.approx(spread, abs=0.05 * max(1, spread))


def test_constant_arrivals_begin_at_zero_and_do_not_drift():
    times = first_times(Open(Flat(3), "constant"), 30_001)
    assert times[0] == 0
    assert times[-1] == 10_000


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_the_first_second_is_like_any_other(cv):
    """Bursty arrivals that began with a whole gap would send too many or too few at first."""
    load = Open(Flat(2), "gamma", cv)
    counts = [np.count_nonzero(first_times(load, 64, seed) < 1) for seed in range(2000)]
    assert np.mean(counts) == pytest.approx(2, abs=0.3)


@pytest.mark.parametrize(("arrivals", "cv"), KINDS)
@pytest.mark.parametrize(
    "profile",
    [
        Flat(50),
        Ramp(0, 900, 20),
        Ramp(900, 100, 20),
        Steps((RateStep(5, 7), RateStep(0, 3), RateStep(400, 9))),
    ],
)
@pytest.mark.parametrize("num_processes", [1, 3])
def test_shares_of_all_processes_are_the_whole_in_order(profile, arrivals, cv, num_processes):
    load = Open(profile, arrivals, cv)
    whole = first_times(load, 10_000, seed=7)
    again = first_times(load, 10_000, seed=7)
    shares = [again[i::num_processes] for i in range(num_processes)]
    assert np.array_equal(np.sort(np.concatenate(shares)), whole)
    assert (np.diff(whole) >= 0).all()
    assert whole[0] >= 0
    assert whole[-1] < (duration_s(load) or math.inf)


def test_another_seed_is_another_sequence():
    assert not np.array_equal(*(first_times(Open(Flat(1)), 10, seed) for seed in (1, 2)))


@pytest.mark.parametrize(("arrivals", "cv"), KINDS)
@pytest.mark.parametrize(("first", "last"), [(100, 1000), (1000, 0), (300, 300), (0, 500)])
def test_a_ramp_sends_in_every_second_what_its_rate_says(arrivals, cv, first, last):
    ramp = Ramp(first, last, 40)
    counts, _ = np.histogram(all_times(Open(ramp, arrivals, cv)), bins=40, range=(0, 40))
    expected = first + (last - first) * (np.arange(40) + 0.5) / 40
    noise = 1 if arrivals == "constant" else 5 * cv * np.sqrt(expected) + 5
    assert (np.abs(counts - expected) <= noise).all()


def test_a_constant_ramp_is_known_to_the_last_request():
    """0 to 2/s in 3 s: the summed rate is t²/3, which reaches k at √3k."""
    assert all_times(Open(Ramp(0, 2, 3), "constant")) == pytest.approx(np.sqrt([0, 3, 6]))


def test_steps_change_at_their_times_and_a_rate_of_zero_pauses():
    load = Open(Steps((RateStep(2, 2), RateStep(0, 5), RateStep(4, 1), RateStep(0, 9))), "constant")
    expected = [0, 0.5, 1, 1.5, 7, 7.25, 7.5, 7.75]
    assert all_times(load) == pytest.approx(np.array(expected))
    assert duration_s(load) == 17
    assert mean_rate(load) == pytest.approx(8 / 17)


def test_a_replay_is_sorted_begins_at_zero_and_is_scaled():
    load = Replay((12.0, 10.0, 11.0), scale=0.5)
    assert all_times(load).tolist() == [0, 2, 4]
    assert duration_s(load) == 4
    assert mean_rate(load) == pytest.approx(3 / 4)


def test_a_long_replay_comes_in_chunks_and_complete():
    times = tuple(float(i) for i in range(10_000))
    chunks = list(due_times(Replay(times), 0))
    assert len(chunks) > 1
    assert np.concatenate(chunks).tolist() == list(times)


def test_replays_of_little_or_nothing():
    assert all_times(Replay(())).tolist() == []
    assert duration_s(Replay(())) == 0
    assert all_times(Replay((5.0,))).tolist() == [0]
    assert math.isinf(mean_rate(Replay((5.0,))))


def test_arrivals_of_no_known_kind_are_refused():
    with pytest.raises(ValueError, match="'regular' is not known; expected one of poisson"):
        next(due_times(Open(Flat(1), "regular"), 0))


@pytest.mark.parametrize(
    ("load", "text"),
    [
        (Closed(8), "concurrency 8"),
        (Open(Flat(200)), "200/s poisson"),
        (Open(Flat(353.5533906), "constant"), "353.6/s constant"),
        (Open(Flat(0.5), "gamma", 3), "0.5/s gamma 3"),
        (Open(Flat(2e6)), "2000000/s poisson"),
        (Open(Ramp(100, 1000, 60)), "ramp 100/s to 1000/s over 60 s, poisson"),
        (
            Open(Steps((RateStep(100, 10), RateStep(5, 2.5)))),
            "100/s for 10 s, 5/s for 2.5 s, poisson",
        ),
        (Replay((0.0, 1.0, 4.0), 0.1, "conv.csv"), "trace conv.csv x 0.1 (3 requests, 0.075/s)"),
        (Replay((0.0, 0.01), 1, "a.csv"), "trace a.csv (2 requests, 200/s)"),
        (Replay((3.0,), 1, "a.csv"), "trace a.csv (1 requests)"),
    ],
)
def test_labels(load, text):
    assert label(load) == text


def test_rate_and_duration_of_the_others():
    assert duration_s(Closed(4)) is None
    assert duration_s(Open(Flat(3))) is None
    assert mean_rate(Open(Flat(3))) == 3
    assert (duration_s(Open(Ramp(0, 10, 6))), mean_rate(Open(Ramp(0, 10, 6)))) == (6, 5)


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("8", [8]),
        ("1:64", [1, 2, 4, 8, 16, 32, 64]),
        ("1:48", [1, 2, 4, 8, 16, 32, 48]),
        ("3:3", [3]),
        ("1, 8,32", [1, 8, 32]),
    ],
)
def test_concurrency(text, levels):
    assert parse_concurrency(text) == levels


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("200", [200]),
        ("0.5/s", [0.5]),
        ("100:1000", [100, 200, 400, 800, 1000]),
        ("100/s:400 /s", [100, 200, 400]),
        ("1e3,12.5", [1000, 12.5]),
    ],
)
def test_rates(text, levels):
    assert parse_rates(text) == levels


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_a_sweep_holds_both_ends_and_never_more_than_doubles(first, more):
    levels = parse_concurrency(f"{first}:{first + more}")
    assert (levels[0], levels[-1]) == (first, first + more)
    assert all(low < high <= 2 * low for low, high in itertools.pairwise(levels))


def test_ramp_and_steps():
    assert parse_ramp("100:1000/s", 60) == Ramp(100, 1000, 60)
    assert parse_ramp("0:50", 1) == Ramp(0, 50, 1)
    steps = Steps((RateStep(100, 10), RateStep(0, 0.5), RateStep(100, 10)))
    assert parse_steps("100:10s, 0:500ms,100/s:10s") == steps


@pytest.mark.parametrize(
    ("parse", "text", "problem"),
    [
        (parse_concurrency, "", "'' is not a number; expected a concurrency like 8"),
        (parse_concurrency, "0", "0 is not possible; expected a concurrency"),
        (parse_concurrency, "1.5", "1.5 is not a whole number of requests"),
        (parse_concurrency, "64:1", "goes down; expected the lower end first, as in 1:64"),
        (parse_concurrency, "1:2:4", "'1:2:4' does not fit"),
        (parse_concurrency, "1:4,8", "'1:4,8' does not fit"),
        (parse_concurrency, "-3", "'-3' is not a number"),
        (parse_concurrency, "many", "'many' is not a number"),
        (parse_rates, "5/m", "'5/m' is not a number; expected a rate like 200"),
        (parse_rates, "nan", "'nan' is not a number"),
        (parse_rates, "1e999", "'1e999' is not a number"),
        (parse_rates, "1,,2", "'' is not a number"),
        (lambda text: parse_ramp(text, 5), "100", "'100' is not a ramp; expected two rates"),
        (lambda text: parse_ramp(text, 5), "0:0", "sends nothing"),
        (lambda text: parse_ramp(text, 0), "1:2", "needs a duration above 0 s"),
        (parse_steps, "100", "'100' is not a step; expected a rate and a time"),
        (parse_steps, "100:10", "'10' is not a duration; expected one like"),
        (parse_steps, "0:10s", "sends nothing"),
        (parse_steps, "x:10s", "'x' is not a number; expected a step"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(parse, text, problem):
    with pytest.raises(ValueError) as raised:
        parse(text)
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    "load",
    [
        Closed(2),
        Open(Ramp(1, 2, 3), "gamma", 2),
        Open(Steps((RateStep(1, 2),))),
        Replay((0.0, 1.5)),
    ],
)
def test_loads_survive_json(load):
    assert msgspec.json.decode(msgspec.json.encode(load), type=Load) == load
