"""Which rate counts when two servers are asked at the same ones in turns."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
SHARES = (0.80, 0.85, 0.90, 0.95, 1.00, 1.05)
LIMIT_MS = 100.0
KEPT, MISSED, CLEARLY = 50.0, 150.0, 401.0


@pytest.fixture
def rate_ladder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    import rate_ladder

    monkeypatch.setattr(rate_ladder, "SHARES", SHARES)
    return rate_ladder


def made(rate_ladder, rounds: Sequence[Mapping[str, Sequence[float | None]]], failed=()):
    """By round and side p99 of the rates from the lowest on."""
    levels = {}
    for number, sides in enumerate(rounds, 1):
        for side, p99s in sides.items():
            for share, p99_ms in zip(rate_ladder.SHARES, p99s, strict=False):
                turn = rate_ladder.Turn(number, "small", share, side)
                levels[turn] = {"p99_ms": p99_ms, "num_failed": int(turn in failed)}
    return rate_ladder.Ladder(levels, LIMIT_MS)


def both(ours: Sequence[float | None], theirs: Sequence[float | None]) -> dict:
    return {"penstock": ours, "triton": theirs}


def test_both_are_asked_the_same_wherever_it_is_cut(rate_ladder) -> None:
    pairs = list(rate_ladder.pairs(2, ("small", "large")))
    assert len(pairs) == 2 * 2 * len(rate_ladder.SHARES)
    for pair in pairs:
        assert {turn.side for turn in pair} == set(rate_ladder.SIDES)
        assert len({(turn.round, turn.size, turn.share) for turn in pair}) == 1
    order = [(turn.round, turn.size == "large", turn.share) for turn, _ in pairs]
    assert order == sorted(order)


def test_nobody_is_always_the_first(rate_ladder) -> None:
    first = {(pair[0].round, pair[0].share): pair[0].side for pair in rate_ladder.pairs(2, ("s",))}
    for share in rate_ladder.SHARES:
        assert {first[1, share], first[2, share]} == set(rate_ladder.SIDES)
    assert len({first[1, share] for share in rate_ladder.SHARES}) == 2


def test_the_highest_that_is_kept_counts(rate_ladder) -> None:
    ladder = made(rate_ladder, [both([KEPT] * 3 + [MISSED] * 3, [KEPT] + [MISSED] * 5)])
    ours, theirs = (ladder.highest("small", side) for side in rate_ladder.SIDES)
    assert (ours, theirs) == (rate_ladder.Highest(0.9, False), rate_ladder.Highest(0.8, False))
    assert rate_ladder.times(ours, theirs) == "1.12"


def test_none_counts_above_one_that_is_missed(rate_ladder) -> None:
    ladder = made(rate_ladder, [both([KEPT, MISSED, KEPT, KEPT, KEPT, KEPT], [KEPT] * 6)])
    assert ladder.highest("small", "penstock") == rate_ladder.Highest(0.8, False)


@pytest.mark.parametrize(
    ("rounds", "share"),
    [([KEPT, MISSED], 0.85), ([MISSED, KEPT, MISSED], 0.8), ([KEPT, MISSED, KEPT], 0.85)],
)
def test_half_of_the_rounds_are_enough(rate_ladder, rounds: list[float], share: float) -> None:
    found = [both([KEPT, p99_ms, MISSED], [KEPT] * 3) for p99_ms in rounds]
    assert made(rate_ladder, found).highest("small", "penstock").share == share


def test_a_limit_is_to_be_below_and_failures_are_misses(rate_ladder) -> None:
    turn = rate_ladder.Turn(1, "small", 0.8, "penstock")
    assert made(rate_ladder, [both([LIMIT_MS - 1], [])]).is_kept(turn)
    assert not made(rate_ladder, [both([LIMIT_MS], [])]).is_kept(turn)
    assert not made(rate_ladder, [both([None], [])]).is_kept(turn)
    assert not made(rate_ladder, [both([KEPT], [])], failed=[turn]).is_kept(turn)


@pytest.mark.parametrize("first", [CLEARLY, None])
def test_who_missed_clearly_is_not_asked_for_more_in_that_round(rate_ladder, first) -> None:
    ladder = made(rate_ladder, [both([first], [MISSED])])
    open_turns = [
        (turn.round, turn.share, turn.side)
        for pair in rate_ladder.pairs(2, ("small",))
        for turn in ladder.open_turns(pair)
    ]
    assert [each for each in open_turns if each[0] == 1] == [
        (1, share, "triton") for share in rate_ladder.SHARES[1:]
    ]
    assert len([each for each in open_turns if each[0] == 2]) == 2 * len(rate_ladder.SHARES)


def test_failures_are_a_clear_miss_of_that_size_only(rate_ladder) -> None:
    turn = rate_ladder.Turn(1, "small", 0.8, "triton")
    ladder = made(rate_ladder, [both([], [KEPT])], failed=[turn])
    assert ladder.is_decided(rate_ladder.Turn(1, "small", 1.0, "triton"))
    assert not ladder.is_decided(rate_ladder.Turn(1, "large", 1.0, "triton"))


def test_rates_that_are_not_asked_after_a_clear_miss_count_as_missed(rate_ladder) -> None:
    rounds = [both([KEPT] * 6, [KEPT, CLEARLY]), both([KEPT] * 6, [KEPT, KEPT, CLEARLY])]
    ladder = made(rate_ladder, [*rounds, both([KEPT] * 6, [KEPT] * 6)])
    assert ladder.verdicts("small", 0.90, "triton") == [False, False, True]
    assert ladder.highest("small", "triton") == rate_ladder.Highest(0.85, False)
    assert ladder.highest("small", "penstock") == rate_ladder.Highest(1.05, True)


def test_a_rate_that_was_asked_of_one_only_counts_for_neither(rate_ladder) -> None:
    ladder = made(rate_ladder, [both([KEPT] * 3, [KEPT] * 2)])
    for side in rate_ladder.SIDES:
        assert ladder.highest("small", side) == rate_ladder.Highest(0.85, True)
    # In a second round that was cut, too.
    ladder = made(rate_ladder, [both([KEPT] * 6, [KEPT, MISSED]), both([KEPT, MISSED], [KEPT])])
    assert ladder.verdicts("small", 0.85, "penstock") == [True]
    assert ladder.verdicts("small", 0.85, "triton") == [False]


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        ((1.05, True), (0.9, False), ">= 1.17"),
        ((0.9, False), (1.05, True), "<= 0.86"),
        ((0.9, False), (0.0, False), ">= 1.12"),
        ((0.0, False), (0.9, False), "<= 0.89"),
        ((1.05, True), (1.05, True), "?"),
        ((0.0, False), (0.0, False), "?"),
        ((0.0, True), (0.0, True), "?"),
        ((0.9, False), (0.9, False), "1.00"),
    ],
)
def test_no_more_is_told_than_is_known(rate_ladder, ours, theirs, text: str) -> None:
    highest = rate_ladder.Highest
    assert rate_ladder.times(highest(*ours), highest(*theirs)) == text
