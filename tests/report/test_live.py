"""Progress while a run goes on."""

import io
import math
from dataclasses import replace

from rich.console import Console

from penstock.benchmark.stats import Interval
from penstock.report.live import (
    LevelProgress,
    Live,
)

NOW = LevelProgress(
    level="concurrency 8",
    phase="measuring",
    elapsed_s=4.0,
    of_s=10.0,
    rate=912.3,
    p99_s=0.0123,
    num_requests=3650,
    num_failed=0,
    interval=Interval(0.0121, 0.0118, 0.0126),
    index=4,
    num_levels=7,
)


def test_a_file_gets_one_line_for_each_level() -> None:
    out = io.StringIO()
    with Live(Console(file=out, width=200)) as live:
        for elapsed_s in (1.0, 2.0, 4.0):
            live.update(replace(NOW, elapsed_s=elapsed_s))
        assert out.getvalue() == ""
        live.update(replace(NOW, level="concurrency 16", index=5, num_failed=3))
    assert out.getvalue().splitlines() == [
        "[4/7] concurrency 8: 3650 requests in 4.00 s, 912/s, p99 12.1 ms (11.8-12.6)",
        "[5/7] concurrency 16: 3650 requests in 4.00 s, 912/s, p99 12.1 ms (11.8-12.6), 3 failed",
    ]


def test_a_level_that_is_over_has_the_rate_of_its_whole_time() -> None:
    out = io.StringIO()
    with Live(Console(file=out, width=200)) as live:
        live.update(replace(NOW, rate=99.0, num_requests=3800, num_failed=200))
    assert " 3800 requests in 4.00 s, 900/s, " in out.getvalue()


def test_a_warm_up_alone_is_no_result() -> None:
    out = io.StringIO()
    with Live(Console(file=out, width=200)) as live:
        live.update(replace(NOW, phase="warm-up", level="11/s poisson"))
        live.update(replace(NOW, level="trace conv.csv"))
    (line,) = out.getvalue().splitlines()
    assert line.startswith("[4/7] trace conv.csv: ")


def test_the_same_load_twice_is_two_levels() -> None:
    out = io.StringIO()
    with Live(Console(file=out, width=200)) as live:
        live.update(replace(NOW, num_levels=None))
        live.update(replace(NOW, num_levels=None, index=5))
    assert [line.split(":")[0] for line in out.getvalue().splitlines()] == [
        "[4] concurrency 8",
        "[5] concurrency 8",
    ]


def in_terminal(progress: LevelProgress, width: int = 80) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    with Live(console) as live:
        live.update(progress)
        return out.getvalue()


def test_a_terminal_shows_the_level_as_it_is_now() -> None:
    text = in_terminal(NOW)
    assert "[4/7] concurrency 8" in text and "measuring" in text and "4/10 s" in text
    assert "912/s, p99 12.3 ms now, p99 12.1 ms (11.8-12.6) so far, 3650 requests" in text
    assert "failed" not in text


def test_failures_and_what_is_not_known_yet() -> None:
    early = replace(NOW, phase="warm-up", of_s=None, p99_s=math.nan, interval=None, num_failed=2)
    text = in_terminal(replace(early, num_levels=1))
    assert "warm-up" in text and "4 s" in text and "[4" not in text
    assert "912/s, p99 - now, 3650 requests, 2 failed" in text


def test_names_are_not_obeyed_as_markup() -> None:
    assert "[bold]trace" in in_terminal(replace(NOW, level="[bold]trace"))


def test_nothing_is_said_of_no_level() -> None:
    out = io.StringIO()
    with Live(Console(file=out)):
        pass
    assert out.getvalue() == ""


def test_the_last_level_is_told_also_when_the_run_fails() -> None:
    out = io.StringIO()
    try:
        with Live(Console(file=out, width=200)) as live:
            live.update(NOW)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert out.getvalue().startswith("[4/7] concurrency 8: 3650 requests")
