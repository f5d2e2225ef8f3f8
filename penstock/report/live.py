"""Live progress of a run: a moving line in a terminal, otherwise one line per level."""

from __future__ import annotations

from typing import Self

from rich.console import Console, Group
from rich.live import Live as Screen
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock import units
from penstock.benchmark.plan import LevelProgress
from penstock.benchmark.stats import Interval

PHASE_STYLES = {"warm-up": "yellow", "measuring": "green", "draining": "dim"}
BAR_WIDTH = 20


class BenchDisplay:
    """Progress on stderr, so that stdout holds only the report."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._screen: Screen | None = None
        self._last: LevelProgress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._screen = Screen(console=self._console, auto_refresh=False, transient=True)
            self._screen.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_level()
        if self._screen is not None:
            self._screen.stop()
            self._screen = None

    def update(self, progress: LevelProgress) -> None:
        if self._last is not None and _place(self._last) != _place(progress):
            self._end_level()
        self._last = progress
        if self._screen is not None:
            self._screen.update(line(progress), refresh=True)

    def _end_level(self) -> None:
        """Print the final line of a level; a warm-up is not a result."""
        if self._last is not None and self._last.phase != "warm-up":
            self._console.print(done(self._last), soft_wrap=True)
        self._last = None


def _place(progress: LevelProgress) -> tuple[int, str]:
    return progress.index, progress.level


def _name(progress: LevelProgress) -> str:
    if progress.num_levels == 1:
        return progress.level
    of = "" if progress.num_levels is None else f"/{progress.num_levels}"
    return f"[{progress.index}{of}] {progress.level}"


def line(progress: LevelProgress) -> Group:
    table = Table.grid(padding=(0, 1), expand=False)
    elapsed = f"{progress.elapsed_s:.0f} s"
    bar: ProgressBar | str = ""
    if progress.of_s is not None:
        elapsed = f"{progress.elapsed_s:.0f}/{progress.of_s:.0f} s"
        share = min(progress.elapsed_s / progress.of_s, 1.0) if progress.of_s > 0 else 1.0
        bar = ProgressBar(total=1.0, completed=share, width=BAR_WIDTH)
    phase = Text(progress.phase, style=PHASE_STYLES[progress.phase])
    table.add_row(Text(_name(progress), style="bold"), phase, bar, elapsed)
    parts = [f"{units.number(progress.rate)}/s", f"p99 {units.duration(progress.p99_s)} now"]
    if progress.interval is not None:
        parts.append(f"{progress.statistic} {units.duration_interval(progress.interval)} so far")
    parts.append(units.count(progress.num_requests, "request"))
    return Group(table, _with_failures("  " + ", ".join(parts), progress))


def _with_failures(text: str, progress: LevelProgress) -> Text:
    failed = f", {progress.num_failed} failed" if progress.num_failed else ""
    return Text.assemble(text, (failed, "red"))


def done(progress: LevelProgress) -> Text:
    """Render one line for a finished level."""
    measured = progress.interval or Interval(progress.p99_s, float("nan"), float("nan"))
    num_good = progress.num_requests - progress.num_failed
    # Over the whole level, unlike `rate`.
    rate = num_good / progress.elapsed_s if progress.elapsed_s > 0 else 0.0
    text = f"{_name(progress)}: {units.count(progress.num_requests, 'request')}"
    text += f" in {units.duration(progress.elapsed_s)}, {units.number(rate)}/s,"
    text += f" {progress.statistic} {units.duration_interval(measured)}"
    return _with_failures(text, progress)
