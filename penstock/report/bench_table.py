"""A run in a terminal: the verdict first, then the target, the levels and the findings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock import units
from penstock.benchmark import findings, headline, summary
from penstock.benchmark.findings import Finding
from penstock.benchmark.headline import Outcome
from penstock.benchmark.results import BenchRun
from penstock.benchmark.summary import Figures
from penstock.report.tables import TERMINAL_STYLES, Cell, bar, figure_table, terminal_table

# Styles of the headline on a page.
OUTCOME_STYLES: dict[Outcome, str] = {
    "kept": "kept",
    "missed": "missed",
    "partly kept": "mixed",
    "not measured": "mixed",
    "no SLO": "plain",
}
SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
# More levels than this are counted, not named.
MAX_PLACES = 3
BAR_WIDTH = 24
MEMBERS_TITLE = "Members, mean per request to them in {}, with those of other clients"
# Requests to the member for each request to the ensemble; rows of an execution.
MEMBER_COLUMNS = ("requests", "rows", "time", "queue", "input", "infer", "output")
TPOT_FORMULA = "TPOT = (last token - first token) / (output tokens - 1)"


def shown(run: BenchRun) -> Group:
    run = summary.in_order(run)
    figures = [summary.figures_of(run, level) for level in run.levels]
    verdict = headline.headline_of(run)
    style = TERMINAL_STYLES[OUTCOME_STYLES[verdict.outcome]]
    parts: list[RenderableType] = [Text(verdict.text, style=style)]
    parts += [Text.assemble((f"{name:8}", "dim"), text) for name, text in about(run).items()]
    if figures:
        head, names = summary.short_loads([level.load for level in run.levels])
        parts += ["", _levels_table(head, names, figures)]
        if any(each.streams for each in figures):
            parts += ["", _streams_table(head, names, figures), Text(TPOT_FORMULA, style="dim")]
        if any(each.breakdown for each in figures):
            parts += ["", *_breakdown_table(head, names, figures)]
        if any(each.members for each in figures):
            unit, member_head, rows = members_of(head, names, figures)
            table = terminal_table(member_head, rows)
            parts += ["", Text(MEMBERS_TITLE.format(unit), style="bold"), table]
    answers = answers_of(run)
    parts += [Text(text, style="bold") for text in ([""] if answers else []) + answers]
    found = findings.grouped(findings.find(run))
    if found:
        parts.append("")
    for group in found:
        place, finding = place_of(run, group), group[0]
        severity = (f"{finding.severity}: ", SEVERITY_STYLES[finding.severity])
        parts.append(Text.assemble(severity, f"{place}: " if place else "", finding.text))
    return Group(*parts)


def about(run: BenchRun) -> dict[str, str]:
    """Describe the target, the model and the inputs."""
    target = run.target
    model = "/".join(part for part in (target.model, target.version) if part)
    server = ", ".join(part for part in (target.server, target.backend) if part)
    found = {"target": f"{target.protocol}, {target.address}"}
    if model or server:
        found["model"] = model + (f" ({server})" if server else "")
    rows = f", {run.batch_size} rows a request" if run.batch_size > 1 else ""
    found["inputs"] = run.origin.text + rows
    measured = units.duration(sum(level.measured_s for level in run.levels))
    found["run"] = f"{run.created}, {measured} measured at {units.count(len(run.levels), 'level')}"
    return found


def answers_of(run: BenchRun) -> list[str]:
    """Return the answers to the run's question, and the cold start."""
    found = []
    if run.knee is not None:
        knee = run.knee
        found.append(
            f"Knee: concurrency {units.number(knee.concurrency)}, the plateau of"
            f" {units.number(knee.throughput)}/s x {units.duration(knee.alone_s)} alone"
            + (f"; {knee.reason}" if knee.reason else "")
        )
    if run.max_rate is not None and math.isfinite(run.max_rate.rate.value):
        rate = headline.rate_text(run.max_rate.rate)
        found.append(f"Highest rate that keeps {run.max_rate.slo}: {rate}")
    if (text := cold_start_text(run)) is not None:
        found.append(f"Cold start: {text}")
    return found


def cold_start_text(run: BenchRun) -> str | None:
    cold = run.cold_start
    if cold is None:
        return None
    named = {"loading": cold.load_s, "connecting": cold.connect_s, "first request": cold.first_s}
    parts = [f"{name} {units.duration(s)}" for name, s in named.items() if s is not None]
    return ", ".join(parts) or None


def place_of(run: BenchRun, group: Sequence[Finding]) -> str:
    """Name the levels that a finding is about; empty when it is about all of them."""
    indices = [each.level for each in group if each.level is not None]
    if not indices or len(run.levels) == 1:
        return ""
    if len(indices) > MAX_PLACES:
        return f"{len(indices)} of {len(run.levels)} levels"
    return ", ".join(run.levels[index].label for index in indices)


def _levels_table(head: str, names: Sequence[str], figures: Sequence[Figures]) -> Table:
    unit = units.unit_of(each.value for row in figures for each in row.latency.values())
    has_utilisation = any(row.busiest for row in figures)
    columns = ["answers/s", "p50", "p90", "p95", f"p99 {unit} (95 % CI)", "p99.9", "failed"]
    table = figure_table(head, *columns, *(["busy"] if has_utilisation else []))
    for name, row in zip(names, figures, strict=True):
        scale, style = units.SECONDS[unit], "red" if row.num_failed else ""
        latencies = [
            units.interval(each, scale) if percentile == "p99" else units.number(each.value / scale)
            for percentile, each in row.latency.items()
        ]
        failed = Text(str(row.num_failed), style=style)
        busy = [busy_text(row)] if has_utilisation else []
        table.add_row(Text(name), units.number(row.throughput.value), *latencies, failed, *busy)
    return table


def busy_text(row: Figures) -> str:
    return units.UNKNOWN if row.busiest is None else f"{row.busiest[1]:.0f} %"


def _streams_table(head: str, names: Sequence[str], figures: Sequence[Figures]) -> Table:
    columns, in_units = [], {}
    for metric in summary.STREAM_METRICS:
        found = [row.streams[metric] for row in figures if metric in row.streams]
        if found:
            unit = units.unit_of(each[p].value for each in found for p in ("p50", "p99"))
            in_units[metric] = unit
            columns += [f"{metric.upper()} p50", f"p99 {unit}"]
    table = figure_table(head, *columns, "tokens/s")
    for name, row in zip(names, figures, strict=True):
        cells = [
            units.in_unit(stream_s(row, metric, percentile), unit)
            for metric, unit in in_units.items()
            for percentile in ("p50", "p99")
        ]
        tokens = row.output_tokens_per_s
        cells.append(units.UNKNOWN if tokens is None else units.number(tokens))
        table.add_row(Text(name), *cells)
    return table


def stream_s(row: Figures, metric: str, percentile: str) -> float:
    """Return a percentile of a streaming metric; NaN if it was not measured."""
    values = row.streams.get(metric)
    return math.nan if values is None else values[percentile].value


def _breakdown_table(
    head: str, names: Sequence[str], figures: Sequence[Figures]
) -> tuple[RenderableType, RenderableType]:
    parts = [row.breakdown for row in figures]
    unit = units.unit_of(each.server_s for each in parts if each is not None)
    columns = ("request", "overhead", "queue", "input", "infer", "output", "outside")
    table = figure_table(head, *columns)
    for name, part in zip(names, parts, strict=True):
        cells = [units.UNKNOWN] * len(columns)
        if part is not None:
            inside = (part.server_s, part.overhead_s, part.queue_s)
            compute = (part.input_s, part.infer_s, part.output_s)
            cells = [units.in_unit(each, unit) for each in (*inside, *compute, part.outside_s)]
        table.add_row(Text(name), *cells)
    title = f"In the server, mean per request in {unit} (outside: network and client)"
    return Text(title, style="bold"), table


def members_of(
    head: str, names: Sequence[str], figures: Sequence[Figures]
) -> tuple[str, list[str], list[list[Cell]]]:
    """Return the unit, the head and the rows of the table of an ensemble's members."""
    means = [each.breakdown for row in figures for each in row.members.values()]
    unit = units.unit_of(each.server_s for each in means)
    rows: list[list[Cell]] = []
    for name, row in zip(names, figures, strict=True):
        for member, each in row.members.items():
            part = each.breakdown
            times = (part.server_s, part.queue_s, part.input_s, part.infer_s, part.output_s)
            counts = map(units.number, (each.num_requests, each.num_rows))
            cells = [member, name, *counts, *(units.in_unit(time, unit) for time in times)]
            rows.append([Cell(text) for text in cells])
    return unit, ["member", head, *MEMBER_COLUMNS], rows


def sweep(runs: Sequence[BenchRun]) -> Group:
    """Show runs of several batch sizes: a row for each size and load; inferences count rows."""
    rows = [(run, summary.figures_of(run, level)) for run in runs for level in run.levels]
    rates = [row.throughput.value * run.batch_size for run, row in rows]
    best = max(rates, default=0.0)
    columns = "load", "requests/s", "inferences/s", "", "p50", "p99", "failed"
    table = figure_table("batch size", *columns, words=("load", ""))
    table.columns[0].justify = "right"
    for (run, row), rate in zip(rows, rates, strict=True):
        p50, p99 = (units.duration(row.latency[name].value) for name in ("p50", "p99"))
        figures = (units.number(row.throughput.value), units.number(rate))
        curve = bar(rate, best, BAR_WIDTH) if best else ""
        failed = str(row.num_failed)
        table.add_row(str(run.batch_size), row.label, *figures, curve, p50, p99, failed)
    target = runs[0].target
    parts = [Text(sweep_headline(runs), style="bold"), Text(f"target  {target.address}", "dim")]
    problems = [Text(run.problem, style="red") for run in runs if run.problem]
    return Group(*parts, table, *problems)


def sweep_headline(runs: Sequence[BenchRun]) -> str:
    """Say at which batch size most rows are computed."""
    rows = [
        (summary.figures_of(run, level), run.batch_size) for run in runs for level in run.levels
    ]
    rates = [(row.throughput.value * size, size) for row, size in rows]
    rate, size = max(rates, default=(0.0, 0), key=lambda each: each[0])
    if not rate:
        return "nothing was measured"
    return f"highest throughput: {units.number(rate)} inferences/s at batch size {size}"
