"""Progress of an optimisation: a few live lines in a terminal, else one line for each activity that
starts. Both keep a line for each new best and for what Ctrl-C does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live as Screen
from rich.text import Text

from penstock.optimizer import wording
from penstock.optimizer.candidates import STAGES
from penstock.optimizer.progress import Progress

REFRESH_PER_S = 2
RESUME = "run the same command again to resume"


class OptimizeDisplay:
    """Progress display. Call `update` at any rate. All output goes to stderr: stdout is for the
    report. In a terminal a thread redraws the lines, so that the clock runs during long steps."""

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._screen: Screen | None = None
        # The last progress, and when it arrived.
        self._last: tuple[Progress, float] | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._screen = Screen(
                console=self._console,
                get_renderable=self.render,
                refresh_per_second=REFRESH_PER_S,
                transient=True,
            )
            self._screen.start()
        return self

    def render(self) -> RenderableType:
        """Return what a terminal shows now."""
        progress = self._now()
        return "" if progress is None else lines(progress)

    def _now(self) -> Progress | None:
        if self._last is None:
            return None
        progress, came_at = self._last
        seconds = self._clock() - came_at
        left_s = None if progress.left_s is None else progress.left_s - seconds
        return replace(progress, elapsed_s=progress.elapsed_s + seconds, left_s=left_s)

    def acknowledge(self, count: int) -> None:
        """Say what this Ctrl-C does; callable from any thread."""
        is_first = count == 1
        text = stopping_text(self._now()) if is_first else f"stopping now without saving; {RESUME}"
        self._console.print(Text(text, style="yellow"), soft_wrap=True)

    def __exit__(self, *_: object) -> None:
        if self._screen is not None:
            self._screen.stop()
            self._screen = None

    def update(self, progress: Progress) -> None:
        last = None if self._last is None else self._last[0]
        self._last = progress, self._clock()
        if progress.note:
            self._console.print(Text(progress.note), soft_wrap=True)
        best = _best(progress)
        if best and (last is None or _best(last) != best):
            self._console.print(Text.assemble(("best so far: ", "green"), best), soft_wrap=True)
        if self._screen is not None:
            self._screen.refresh()
        elif last is None or _place(last) != _place(progress):
            # For a file or a log: `[1 min 20 s] quantise: int8-static: accuracy`.
            text = f"[{wording.span(progress.elapsed_s)}] {': '.join(_place(progress))}"
            self._console.print(Text(text), soft_wrap=True)


def stopping_text(progress: Progress | None) -> str:
    """Say what the first Ctrl-C does, and how to stop sooner."""
    if progress is None or not progress.to_save:
        return f"stopping: nothing to save yet, the original is not measured; {RESUME}"
    running = ": ".join(_place(replace(progress, stage="")))
    about = "" if progress.finish_s is None else f" (about {wording.span(progress.finish_s)})"
    saving = f"saving {progress.to_save}"
    if progress.to_measure:
        saving = f"measuring {progress.to_measure}; saving it if it is better, else"
        saving += f" {progress.to_save}"
    hint = "press Ctrl-C again to stop now without saving"
    return f"stopping: {running} is dropped; {saving}{about}; {hint}"


def _best(progress: Progress) -> str:
    return progress.best + (f" ({progress.best_text})" if progress.best_text else "")


def _place(progress: Progress) -> list[str]:
    """Return what is known of stage, candidate and activity, without how far it is (", 3 of 5")."""
    parts = (progress.stage, progress.candidate, progress.doing.partition(",")[0])
    return [part for part in parts if part]


def lines(progress: Progress) -> Group:
    """Show the position in the sequence, the current candidate, and the best so far."""
    name = f"{progress.candidate}: " if progress.candidate else ""
    now = Text.assemble((name, "bold"), progress.doing, (f"  {clock(progress)}", "dim"))
    found = [sequence(progress.stage, progress.stages), now]
    if progress.best:
        found.append(Text.assemble(("best so far  ", "dim"), _best(progress)))
    return Group(*found)


def sequence(stage: str, stages: Sequence[str] = STAGES) -> Text:
    """Show the stages in order: finished, current and to come."""
    if stage not in stages:
        return Text(stage, style="bold")
    present = stages.index(stage)
    text = Text()
    for index, name in enumerate(stages):
        text.append(" › " if index else "", style="dim")
        style = "green" if index < present else "reverse bold" if index == present else "dim"
        text.append(f" {name} " if index == present else name, style=style)
    return text


def clock(progress: Progress) -> str:
    """Format `4 tried, 1 min 20 s, at most 8 min 40 s left`."""
    parts = [f"{progress.num_tried} tried", wording.span(progress.elapsed_s)]
    if progress.left_s is not None:
        parts.append(f"at most {wording.span(max(progress.left_s, 0.0))} left")
    return ", ".join(parts)
