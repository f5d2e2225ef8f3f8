"""A run as a self-contained HTML page, whose first line says whether the SLO was kept."""

from __future__ import annotations

import math

from penstock import units
from penstock.benchmark import findings, summary
from penstock.benchmark.headline import headline_of, level_outcome
from penstock.benchmark.results import BenchRun
from penstock.benchmark.summary import Figures
from penstock.report import bench_figures, bench_table
from penstock.report.page import Card, Drawn, Remark, drawn, render_fragment, rendered
from penstock.report.tables import Cell

RUN_PLOTS = {
    "curve": (
        "Throughput and latency",
        "Each point is a level, with its 95 % interval. Right and low is good; where the line turns"
        " up, more load only waits.",
    ),
    "cdf": (
        "Latency of good answers",
        "Share of requests answered within a time. Each further nine has the same height.",
    ),
    "breakdown": (
        "Where the time went",
        "Mean per request, as the server reports it; the rest is network and client.",
    ),
}
LEVEL_PLOTS = {
    "over_time": (
        "Latency over time",
        "By when requests were due. A steady server is a level line.",
    ),
    "samples": (
        "Typical and slow requests",
        "Where the time of sampled requests went: what slow ones do that typical ones do not.",
    ),
    "streams": (
        "Streams",
        "Time to the first token, between two pieces, and per output token after the first.",
    ),
    "utilisation": ("Machine of the load generator", ""),
}
# Plots of single levels take at most this much of a page.
MAX_LEVEL_BYTES = 150_000


def page(run: BenchRun) -> str:
    run = summary.in_order(run)
    figures = [summary.figures_of(run, level) for level in run.levels]
    chosen = chosen_level(run, figures)
    verdict = headline_of(run)
    head, rows = _levels(run, figures)
    stream_head, stream_rows = _streams(run, figures)
    load, loads = summary.short_loads([level.load for level in run.levels])
    unit, member_head, member_rows = bench_table.members_of(load, loads, figures)
    levels = _drawn_levels(run, figures, chosen or 0)
    values = {
        "verdict": verdict.text,
        "style": bench_table.OUTCOME_STYLES[verdict.outcome],
        "about": bench_table.about(run),
        "tiles": tiles(run, figures),
        "remarks": [
            Remark(each[0].severity, each[0].text, bench_table.place_of(run, each))
            for each in findings.grouped(findings.find(run))
        ],
        "figures": drawn(bench_figures.run_plots(run, figures), RUN_PLOTS),
        "head": head,
        "rows": rows,
        "stream_head": stream_head,
        "stream_rows": stream_rows,
        "members": bench_table.MEMBERS_TITLE.format(unit),
        "member_head": member_head,
        "member_rows": member_rows,
        "levels": levels,
        "num_left_out": len(figures) - len(levels),
        "chosen": chosen,
        "record": _record(run),
        "tpot": bench_table.TPOT_FORMULA,
        "command": run.command,
    }
    return rendered("bench.html.jinja", values)


def fragment(run: BenchRun) -> str:
    run = summary.in_order(run)
    figures = [summary.figures_of(run, level) for level in run.levels]
    verdict = headline_of(run)
    plots = {**bench_figures.run_plots(run, figures), "breakdown": None}
    if len(figures) == 1:
        plots |= bench_figures.level_plots(run, run.levels[0]) | {"utilisation": None}
    words = {name: (RUN_PLOTS | LEVEL_PLOTS)[name] for name in ("curve", "cdf", "over_time")}
    return render_fragment(
        verdict.text,
        bench_table.OUTCOME_STYLES[verdict.outcome],
        tiles(run, figures)[:5],
        drawn(plots, words)[:2],
        _levels(run, figures),
    )


def _drawn_levels(
    run: BenchRun, figures: list[Figures], chosen: int
) -> list[tuple[int, str, list[Drawn]]]:
    """Draw the levels, beginning with the chosen one and its neighbours, as far as the page has
    room for them."""
    note = "The server runs elsewhere: its work is not in these lines."
    if run.environment.is_server_local:
        note = "The server runs on it too: its work is in these lines."
    words = LEVEL_PLOTS | {"utilisation": (LEVEL_PLOTS["utilisation"][0], note)}
    found: list[tuple[int, str, list[Drawn]]] = []
    num_bytes = 0
    for index in sorted(range(len(figures)), key=lambda each: abs(each - chosen)):
        level = drawn(bench_figures.level_plots(run, run.levels[index]), words)
        num_bytes += sum(len(each.svg) for each in level)
        if found and num_bytes > MAX_LEVEL_BYTES:
            break
        found.append((index, figures[index].label, level))
    return sorted(found, key=lambda each: each[0])


def chosen_level(run: BenchRun, figures: list[Figures]) -> int | None:
    """Choose the level whose figures represent the run: the knee; the highest load that keeps the
    SLO (in a search, the one its answer rests on); else the highest throughput."""
    if not figures:
        return None
    if run.knee is not None and 0 <= run.knee.level < len(figures):
        return run.knee.level
    deciding = sorted(findings.deciding_levels(run))
    kept = [index for index in deciding if level_outcome(run, run.levels[index]) == "kept"]
    return _fastest(figures, kept)


def _fastest(figures: list[Figures], indices: list[int]) -> int:
    """Return which of these levels, or of all if there are none, has the highest throughput."""
    known = {index: figures[index].throughput.value for index in indices or range(len(figures))}
    return max(known, key=lambda index: -1.0 if math.isnan(known[index]) else known[index])


def tiles(run: BenchRun, figures: list[Figures]) -> list[Card]:
    """Return the figures of the level that represents the run; first, what came of it."""
    chosen = chosen_level(run, figures)
    if chosen is None:
        return []
    row = figures[chosen]
    p50, p99 = row.latency["p50"], row.latency["p99"]
    unit = units.unit_of([p99.value])
    interval = units.range_of(p99, units.SECONDS[unit])
    cards = [
        first_tile(run, figures),
        Card("throughput", f"{units.number(row.throughput.value)}/s", f"at {row.label}"),
        Card("p50", units.duration(p50.value), "median latency"),
        Card("p99", units.duration(p99.value), f"{interval} {unit}" if interval else ""),
    ]
    if row.output_tokens_per_s is not None:
        ttft = units.duration(bench_table.stream_s(row, "ttft", "p99"))
        cards.append(Card("TTFT p99", ttft, "time to the first token"))
        cards.append(Card("tokens", f"{units.number(row.output_tokens_per_s)}/s", "output"))
    cards.append(Card("failed", str(row.num_failed), f"of {row.num_requests} requests"))
    if row.goodput_percent is not None:
        cards.append(Card("goodput", f"{row.goodput_percent:.4g} %", "answered within the SLO"))
    if run.knee is not None:
        at = f"plateau {units.number(run.knee.throughput)}/s"
        cards.append(Card("knee", units.number(run.knee.concurrency), f"concurrency; {at}"))
    if row.busiest is not None:
        cards.append(Card("busy", f"{row.busiest[1]:.0f} %", row.busiest[0]))
    return cards


def first_tile(run: BenchRun, figures: list[Figures]) -> Card:
    """Say at which rate the SLO is kept or missed; without an SLO, the highest throughput."""
    outcome = headline_of(run).outcome
    if run.max_rate is not None and run.max_rate.rate.value > 0:
        rate = run.max_rate.rate
        text = f"{run.max_rate.slo}; 95 % interval {units.range_of(rate)}/s"
        return Card("highest rate", f"SLO kept at {units.number(rate.value)}/s", text)
    if outcome == "not measured":
        return Card("result", "SLO not judged", run.slo)
    wanted = {"kept": "kept", "partly kept": "kept", "missed": "missed"}.get(outcome, "")
    indices = [
        index
        for index, level in enumerate(run.levels)
        if not wanted or level_outcome(run, level) == wanted
    ]
    best = _fastest(figures, indices)
    text = f"{units.number(figures[best].throughput.value)}/s"
    if not wanted:
        return Card("highest throughput", text, f"at {figures[best].label}")
    return Card("result", f"SLO {wanted} at {text}", f"{run.slo}; {figures[best].label}")


def _levels(run: BenchRun, figures: list[Figures]) -> tuple[list[str], list[list[Cell]]]:
    unit = units.unit_of(each.value for row in figures for each in row.latency.values())
    names = [f"{name}, {unit}" for name in summary.PERCENTILES]
    load, loads = summary.short_loads([level.load for level in run.levels])
    head = [load, "answers/s", *names, "requests", "failed", "busy"]
    rows, scale = [], units.SECONDS[unit]
    for index, row in enumerate(figures):
        rate = Cell(units.number(row.throughput.value), units.range_of(row.throughput))
        cells = [Cell(loads[index]), rate]
        for name, each in row.latency.items():
            detail = units.range_of(each, scale) if name in ("p50", "p99") else ""
            cells.append(Cell(units.number(each.value / scale), detail))
        failed = Cell(str(row.num_failed), style="missed-text" if row.num_failed else "")
        cells += [Cell(str(row.num_requests)), failed, Cell(bench_table.busy_text(row))]
        if run.slo:
            outcome = level_outcome(run, run.levels[index])
            cells.append(Cell(outcome, style=f"{outcome.replace(' ', '-')}-text"))
        rows.append(cells)
    return head + (["SLO"] if run.slo else []), rows


def _streams(run: BenchRun, figures: list[Figures]) -> tuple[list[str], list[list[Cell]]]:
    if not any(row.streams for row in figures):
        return [], []
    load, loads = summary.short_loads([level.load for level in run.levels])
    columns = [(metric, name) for metric in summary.STREAM_METRICS for name in ("p50", "p99")]
    head = [load, *(f"{metric.upper()} {name}" for metric, name in columns)]
    rows = []
    for name, row in zip(loads, figures, strict=True):
        times = [units.duration(bench_table.stream_s(row, *column)) for column in columns]
        rates = [row.input_tokens_per_s, row.output_tokens_per_s]
        tokens = [units.UNKNOWN if rate is None else units.number(rate) for rate in rates]
        rows.append([*map(Cell, (name, *times, *tokens))])
    return [*head, "tokens in/s", "tokens out/s"], rows


def _record(run: BenchRun) -> dict[str, str]:
    target, machine = run.target, run.environment
    cores, memory = units.count(machine.num_cores, "core"), units.size(machine.memory_bytes)
    return {
        "target": f"{target.protocol}, {target.address}",
        "model": " ".join(part for part in (target.model, target.version) if part),
        "server": " ".join(part for part in (target.server, target.backend) if part),
        "instances": "" if target.num_instances is None else str(target.num_instances),
        "model digest": target.model_digest,
        "config digest": target.config_digest,
        "inputs": run.origin.text,
        "inputs digest": run.origin.digest,
        "machine": f"{machine.host_cpu}, {cores}, {memory}",
        "GPU": ", ".join(machine.gpus),
        "system": machine.system,
        "versions": ", ".join(f"{name} {text}" for name, text in machine.versions.items()),
        "cold start": bench_table.cold_start_text(run) or "",
        "SLO": run.slo,
        "started": run.created,
        "seed": str(run.seed),
    }
