"""Three digits, a unit that fits, and nothing said that is not known."""

import math

import pytest

from penstock import units
from penstock.benchmark.stats import Interval

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (12.345, "12.3"),
        (1.0, "1.00"),
        (9.996, "10.0"),
        (99.96, "100"),
        (12345.6, "12346"),
        (0.01234, "0.0123"),
        (NAN, "-"),
        (INF, "never"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert units.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.000812, "812 us"),
        (0.0009996, "1.00 ms"),
        (0.0121, "12.1 ms"),
        (0.9999, "1.00 s"),
        (75.0, "75.0 s"),
        (0.0, "0 ms"),
        (INF, "never"),
        (NAN, "-"),
    ],
)
def test_durations_choose_their_unit(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "unit"),
    [
        ([0.0001, 0.0009], "us"),
        ([0.0001, 0.5], "ms"),
        ([0.002, 5.0], "ms"),
        ([1.5, 20.0], "s"),
        ([NAN, INF], "ms"),
        ([], "ms"),
    ],
)
def test_a_column_has_one_unit(seconds: list[float], unit: str) -> None:
    assert units.unit_of(seconds) == unit


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(0.0121, 0.0118, 0.0126), "12.1 ms (11.8-12.6)"),
        (Interval(0.0121, 0.0118, INF), "12.1 ms (> 11.8)"),
        (Interval(0.0121, 0.0, INF), "12.1 ms"),
        (Interval(0.0121, NAN, NAN), "12.1 ms"),
        (Interval(0.0121, NAN, 0.0126), "12.1 ms (< 12.6)"),
        (Interval(0.00099, 0.00095, 0.0012), "990 us (950-1200)"),
        (Interval(INF, 0.1, INF), "never"),
    ],
)
def test_intervals_are_in_the_unit_of_the_estimate(interval: Interval, text: str) -> None:
    assert units.duration_interval(interval) == text


def test_sizes_and_counts() -> None:
    assert units.size(32 * 2**30) == "32.0 GiB"
    assert units.size(1024) == "1.00 KiB"
    assert units.size(3 * 2**50) == "3072 TiB"
    assert units.count(1, "request") == "1 request"
    assert units.count(0, "request") == "0 requests"


@pytest.mark.parametrize(
    ("part", "text"),
    [(0, "0 %"), (1, "0.001 %"), (260, "0.3 %"), (3100, "3.1 %"), (50_000, "50 %")],
)
def test_a_share_that_is_not_nothing_is_never_shown_as_nothing(part: int, text: str) -> None:
    assert units.share(part, 100_000) == text
    assert units.share(part, 0) == "-"
