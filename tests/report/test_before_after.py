"""Original and chosen side by side."""

import math

from optimizer import made_optimizations as made

from penstock.benchmark.stats import Interval
from penstock.optimizer.first_line import headline
from penstock.optimizer.results import Optimization
from penstock.report.before_after import (
    BeforeAfterRow,
    has_after,
    keeps_up,
    rows,
)


def by_name(optimization: Optimization) -> dict[str, BeforeAfterRow]:
    return {row.name: row for row in rows(optimization)}


def test_every_figure_has_its_range_and_its_change() -> None:
    found = by_name(made.kept())
    assert list(found) == [
        "highest rate",
        "p50",
        "p99",
        "answers/s",
        "answered in time",
        "cost per million",
        "memory",
        "top1 (held out)",
    ]
    rate = found["highest rate"]
    assert (str(rate.before), str(rate.after)) == ("98.0/s (96.0-100)", "304/s (298-310)")
    assert (rate.change, rate.is_better) == ("3.1x more", True)
    assert (found["memory"].change, found["memory"].is_better) == ("2.9x less", True)
    assert found["top1 (held out)"].change == "loss at most 0.6 points"


def test_latency_of_an_overloaded_server_is_compared_with_nothing() -> None:
    found = made.kept()
    assert found.before is not None and not keeps_up(found.before)
    assert (by_name(found)["p99"].change, by_name(found)["p99"].is_better) == ("overloaded", None)
    found.before.throughput = Interval(199.0, 198.0, 200.0)
    assert keeps_up(found.before)
    assert (by_name(found)["p99"].change, by_name(found)["p99"].is_better) == ("35x less", True)


def test_a_load_without_a_rate_cannot_be_too_high() -> None:
    found = made.kept()
    assert found.before is not None
    found.before.load = "concurrency 8"
    assert keeps_up(found.before)


def test_ranges_that_overlap_show_no_difference() -> None:
    found = made.kept()
    assert found.before is not None and found.after is not None
    found.before.max_rate = Interval(300.0, 290.0, 310.0)
    row = by_name(found)["highest rate"]
    assert (row.change, row.is_better) == ("no difference shown", None)
    found.before.max_rate = Interval(400.0, 390.0, 410.0)
    row = by_name(found)["highest rate"]
    assert (row.change, row.is_better) == ("1.32x less", False)


def test_what_is_infinite_is_said_in_words_and_compared_with_nothing() -> None:
    found = by_name(made.unknown_figures())
    assert str(found["highest rate"].before) == "none"
    assert str(found["p99"].before) == "infinite (too many requests failed)"
    assert str(found["cost per million"].before) == "without end"
    assert found["highest rate"].change == found["cost per million"].change == ""


def test_the_cost_at_a_rate_that_nobody_knows_is_not_known() -> None:
    assert str(by_name(made.served_otherwise())["cost per million"].after) == "-"


def test_what_nobody_knows_has_no_row() -> None:
    assert rows(made.nothing()) == []
    assert "cost per million" not in by_name(made.without_data())
    found = made.interrupted()
    assert found.before is not None
    found.before.p50 = Interval(math.nan, math.nan, math.nan)
    assert "p50" not in by_name(found)


def test_an_original_that_was_chosen_is_no_second_column() -> None:
    assert has_after(made.kept()) and has_after(made.missed())
    assert not has_after(made.already_met())
    assert not has_after(made.interrupted())


def test_answers_in_pieces_are_told_by_their_tokens() -> None:
    found = {row.name: row for row in rows(made.text())}
    first, later = found["p99 first token"], found["p99 per token"]
    assert str(first.before).startswith("360 ms") and first.change == "2.0x less"
    assert first.is_better and later.is_better
    assert found["tokens/s"].after.text == "60.0/s" and found["tokens/s"].change == ""
    assert not {"p99 first token", "tokens/s"} & {each.name for each in rows(made.kept())}


def test_few_long_answers_are_no_overload() -> None:
    served = made.served_text(3.0, 0.06)
    served.throughput = Interval(1.2, 0.9, 2.1)
    assert keeps_up(served)
    served.throughput = Interval(1.2, 0.9, 1.5)
    assert not keeps_up(served)


def test_disturbed_figures_claim_no_gain() -> None:
    found = made.kept()
    assert any(row.is_better for row in rows(found))
    assert found.before is not None
    found.before.disturbances = ["original: SLO missed at 200/s, but kept at 900/s"]
    measured = [row for row in rows(found) if "held out" not in row.name]
    assert {row.change for row in measured} == {"disturbed"}
    assert not any(row.is_better for row in measured)
    assert "the original's highest rate" not in headline(found)
