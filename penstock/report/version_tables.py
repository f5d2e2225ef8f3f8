"""Versions of models in a terminal: lists, history, comparisons, and what a command has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock import units
from penstock.operate import promotion
from penstock.operate.rollout_records import CANARY, SHADOW, STOPPED
from penstock.report.tables import figure_table, section
from penstock.repository import history
from penstock.wire.version_rows import (
    FigureRow,
    HistoryEvent,
    PruneAnswer,
    VerifyRow,
    VersionDiff,
    VersionRow,
)

OUTCOME_STYLES = {"kept": "green", "met": "green", "missed": "red", "refused": "red"}
KIND_STYLES = {history.FORCED: "yellow", history.ROLLED_BACK: "yellow", history.FAILED: "red"}
STATE_STYLES = {"whole": "green", "damaged": "red"}
LINE_STYLES = {"+": "green", "-": "red", "@": "cyan"}
# Figures of which a smaller one is better; of all others a larger one is.
LOWER_IS_BETTER = ("p50", "p99", "TTFT p99", "TPOT p99", "memory", "GPU memory", "cost per million")
# A ratio this close to 1 is no change worth a colour.
SAME = 0.02


def show_versions(rows: Sequence[VersionRow]) -> RenderableType:
    if not rows:
        return Text("no versions", style="dim")
    table = figure_table(
        *("model", "version", "state", "outcome", "SLO", "p99", "max rate", "accuracy", "size"),
        *("committed", "measured on"),
        words=("state", "outcome", "SLO", "committed", "measured on"),
    )
    for name in ("SLO", "measured on"):
        _wrap(table, name)
    # Narrow terminals lose the columns that wrap first.
    table.columns[0].no_wrap, table.columns[0].overflow = True, "ellipsis"
    last = ""
    for row in rows:
        table.add_row(Text(row.model if row.model != last else ""), *_cells(row))
        last = row.model
    problems = [f"{row.model}: {text}" for row in rows for text in row.problems]
    return Group(table, *(_line(problem, "red") for problem in problems))


def _cells(row: VersionRow) -> list[Text]:
    outcome = row.outcome or ("unreadable" if row.problems else "unknown")
    accuracy = "" if row.accuracy is None else units.number(row.accuracy)
    rate = "" if row.max_rate is None else f"{units.number(row.max_rate)}/s"
    return [
        Text(row.version or "-"),
        Text(_state(row), "bold green" if row.is_served else ""),
        Text(outcome, OUTCOME_STYLES.get(row.outcome, "dim")),
        _short(row.slo),
        Text("" if row.p99_s is None else units.duration(row.p99_s)),
        Text(rate),
        Text(accuracy),
        Text(units.size(row.num_bytes) if row.version else ""),
        Text(row.created[:10] or _uncommitted(row)),
        _short(row.hardware),
    ]


def _uncommitted(row: VersionRow) -> str:
    """Return why a version has no date."""
    if not row.version:
        return "no versions"
    return "" if row.problems else "by hand"


def _state(row: VersionRow) -> str:
    words = {
        "served": row.is_served,
        "loaded": row.is_loaded and not row.is_served,
        "rollback": row.is_rollback_target,
    }
    return ", ".join(word for word, is_so in words.items() if is_so)


def show_history(events: Sequence[HistoryEvent]) -> RenderableType:
    """Show events, the newest last."""
    if not events:
        return Text("nothing was promoted yet", style="dim")
    table = figure_table(
        *("time", "what", "version", "before", "by", "reason"),
        words=("what", "before", "by", "reason"),
    )
    _wrap(table, "reason")
    for event in events:
        reasons = [event.reason, *_problems(event)]
        table.add_row(
            Text(event.time[:19].replace("T", " ")),
            Text(event.kind, KIND_STYLES.get(event.kind, "")),
            Text(event.version),
            Text(", ".join(event.previous)),
            Text(printable(event.actor)),
            Text(printable("; ".join(filter(None, reasons)))),
        )
    return table


def show_diff(diff: VersionDiff) -> RenderableType:
    parts: list[RenderableType] = [
        Text(f"{diff.model}: version {diff.b} compared with {diff.a}", "bold")
    ]
    parts += [_line(f"note: {note}", "yellow") for note in diff.notes]
    parts.append(section("Evidence"))
    parts.append(_figures(diff) if diff.figures else Text("none", "dim"))
    steps = [("steps of " + diff.a, diff.a_steps), ("steps of " + diff.b, diff.b_steps)]
    parts += [_line(f"{name}: {' → '.join(each) or 'none'}") for name, each in steps]
    parts.append(section("Files"))
    if not diff.files:
        parts.append(Text("all the same", "dim"))
    else:
        table = figure_table("file", "", diff.a, diff.b, words=("",))
        for file in diff.files:
            style = {"added": "green", "removed": "red"}.get(file.change, "yellow")
            sizes = (file.a_bytes, file.b_bytes)
            cells = [Text("" if each is None else units.size(each)) for each in sizes]
            table.add_row(Text(file.name), Text(file.change, style), *cells)
        parts.append(table)
    parts.append(section("Configuration"))
    lines = [_line(line, LINE_STYLES.get(line[:1], "")) for line in diff.config]
    parts += lines or [Text("the same", "dim")]
    return Group(*parts)


def _figures(diff: VersionDiff) -> Table:
    table = figure_table("", f"version {diff.a}", f"version {diff.b}", "ratio")
    for row in diff.figures:
        format_value = _formats(row)
        values = ["-" if each is None else format_value(each) for each in (row.a, row.b)]
        ratio = "" if row.ratio is None else f"{units.number(row.ratio)}x"
        table.add_row(Text(row.name), *map(Text, values), Text(ratio, _ratio_style(row)))
    return table


def _formats(row: FigureRow) -> Callable[[float], str]:
    match row.unit:
        case "s":
            return units.duration
        case "/s":
            return lambda value: f"{units.number(value)}/s"
        case "bytes":
            return units.size
    return units.number


def _ratio_style(row: FigureRow) -> str:
    if row.ratio is None or abs(row.ratio - 1) < SAME:
        return "dim"
    is_better = (row.ratio < 1) == (row.name in LOWER_IS_BETTER)
    return "green" if is_better else "red"


def show_change(event: HistoryEvent, model: str, is_live: bool) -> RenderableType:
    """Show a promotion or rollback; `is_live`: a server has switched."""
    before = ", ".join(event.previous)
    if event.kind in (CANARY, SHADOW, STOPPED):
        return _line(f"{model}: version {event.version}: {event.kind}: {event.reason}", "green")
    when = "serves now" if is_live else "is served from the next start or load on"
    parts: list[RenderableType] = [
        Text(f"{model}: version {event.version} {when}; before: {before or 'none'}", "green")
    ]
    parts += [_line(f"forced: {problem}", "yellow") for problem in _problems(event)]
    warnings = promotion.warnings_of(event.figures)
    parts += [_line(f"warning: {warning}", "yellow") for warning in warnings]
    return Group(*parts)


def show_verification(rows: Sequence[VerifyRow]) -> RenderableType:
    if not rows:
        return Text("no versions", style="dim")
    table = figure_table("model", "version", "state", words=("state",))
    for row in rows:
        state = Text(row.state, STATE_STYLES.get(row.state, "dim"))
        table.add_row(Text(row.model), Text(row.version or "-"), state)
    problems = [f"{row.model}: {text}" for row in rows for text in row.problems]
    return Group(table, *(_line(problem, "red") for problem in problems))


def show_pruning(answer: PruneAnswer) -> RenderableType:
    done = "would be removed" if answer.dry_run else "removed"
    removed = ", ".join(answer.removed)
    text = f"{answer.model}: {done}: {removed} ({units.size(answer.freed_bytes)})"
    parts = [Text(text if removed else f"{answer.model}: nothing to remove", "bold")]
    parts += [_line(f"  kept {version}: {reason}") for version, reason in answer.kept.items()]
    return Group(*parts)


def _problems(event: HistoryEvent) -> list[str]:
    found = event.figures.get(promotion.PROBLEMS)
    return [str(each) for each in found] if isinstance(found, list) else []


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style)


def _short(text: str) -> Text:
    """Return a text that is cut where its column is too narrow."""
    return Text(printable(text), no_wrap=True, overflow="ellipsis")


def printable(text: str) -> str:
    """Replace what a terminal would interpret: texts come from files and requests of others."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def _wrap(table: Table, name: str) -> None:
    [column] = [each for each in table.columns if str(each.header) == name]
    column.no_wrap, column.overflow, column.header = False, "fold", _short(name)
