"""An optimisation in the terminal: the verdict, what the accuracy gate did not check, before and
after, the waterfall, and the candidates that lost."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock import units
from penstock.optimizer import first_line, outcomes, wording
from penstock.optimizer.results import Optimization
from penstock.report import before_after, step_times, tried
from penstock.report.tables import TERMINAL_STYLES, figure_table, terminal_table

# Styles of the headline.
PAGE_STYLES = {"kept": "kept", "missed": "missed", "refused": "missed", "failed": "missed"}
PAGE_STYLES |= {"disturbed": "mixed", "interrupted": "mixed"}
OUTCOME_STYLES = {"kept": "green", "equal": "dim", "slower": "dim", "rejected": "red"}
OUTCOME_STYLES |= {"failed": "red", "cut off": "yellow"}


def shown(optimization: Optimization) -> Group:
    colour = TERMINAL_STYLES[style(optimization)]
    parts: list[RenderableType] = [Text(headline(optimization), style=colour)]
    parts += [Text.assemble(("not checked: ", "yellow"), each) for each in optimization.unchecked]
    parts += [Text.assemble(("warning: ", "yellow"), note) for note in optimization.notes]
    head, rows = before_after.table(optimization)
    compared = terminal_table(head, rows) if rows else None
    times_head, times = step_times.step_table(optimization)
    profiled = terminal_table(times_head, times) if times else None
    for part in (compared, _steps(optimization), profiled, _tried(optimization)):
        if part is not None:
            parts += ["", part]
    if optimization.next_options:
        parts += ["", Text("what could be done next", style="bold")]
        parts += [Text(f"  {each}") for each in wording.next_options(optimization)]
    parts += ["", *_ends(optimization)]
    return Group(*parts)


def headline(optimization: Optimization) -> str:
    return optimization.headline or first_line.headline(optimization)


def style(optimization: Optimization) -> str:
    """Return the style of the headline on a page."""
    return PAGE_STYLES[optimization.outcome] if optimization.slo else "plain"


def _steps(optimization: Optimization) -> Table | None:
    """Return the waterfall as a table; predicted figures are marked."""
    phases = optimization.phases
    if len(phases) < 2:
        return None
    metric = wording.metric_of(optimization)
    table = figure_table("step", "highest rate", "p99", metric or "accuracy", "per million")
    for phase in phases:
        about = "" if phase.is_rate_measured else "≈ "
        accuracy, cost = phase.accuracy, phase.cost_per_million
        is_guess = not phase.is_measured and not math.isnan(phase.p99_s)
        table.add_row(
            Text(wording.short_label(phase.label)),
            units.UNKNOWN if math.isnan(phase.max_rate) else about + wording.rate(phase.max_rate),
            ("≈ " if is_guess else "") + wording.latency(phase.p99_s),
            units.UNKNOWN if accuracy is None else wording.score(metric, accuracy),
            about + units.number(cost) if cost is not None and cost < math.inf else units.UNKNOWN,
        )
    return table


def _tried(optimization: Optimization) -> Table | None:
    """Return the candidates that lost, and why."""
    lost = [
        (stage, told.step, told.attempt)
        for stage, group in tried.by_stage(optimization)
        for told in group
        if told.attempt.outcome != "kept" and not told.is_chosen
    ]
    if not lost:
        return None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("stage", "not chosen", "outcome", "why"):
        table.add_column(Text(name), overflow="fold")
    last = ""
    for stage, step, attempt in lost:
        outcome = Text(attempt.outcome, style=OUTCOME_STYLES[attempt.outcome])
        table.add_row("" if stage == last else stage, Text(step), outcome, Text(attempt.reason))
        last = stage
    return table


def _ends(optimization: Optimization) -> list[Text]:
    layers = dict.fromkeys(each.name for one in optimization.tries for each in one.fallback)
    skipped = dict.fromkeys(name for _, name in outcomes.named_skips(optimization))
    known = {
        "kept in float": ", ".join(layers),
        "next": wording.next_step(optimization),
        "not tried": ", ".join(skipped),
        "chosen": "" if optimization.chosen is None else str(optimization.chosen),
        "version": wording.place(optimization) if optimization.version else "",
    }
    return [Text.assemble((f"{name:15}", "dim"), text) for name, text in known.items() if text]
