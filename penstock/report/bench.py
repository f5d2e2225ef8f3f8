"""A run as a self-contained HTML page: no network, no other file. Its first line says whether the
SLO was kept."""

from __future__ import annotations

import math

from penstock import units
from penstock.benchmark import findings, summary
from penstock.benchmark.headline import Outcome, headline_of, level_outcome
from penstock.benchmark.results import Run
from penstock.benchmark.summary import Figures
from penstock.report import bench_figures, bench_table
from penstock.report.page import Card, Cell, Line, rendered

OUTCOME_STYLES: dict[Outcome, str] = {
    "kept": "kept",
    "missed": "missed",
    "partly kept": "mixed",
    "not measured": "mixed",
    "no SLO": "plain",
}
DEFINITIONS = {
    "Latency": "From the moment a request was due to the last byte of its answer, so that waiting"
    " to be sent counts. In a closed loop a request is due when it can be sent.",
    "Percentiles": "Of good answers, from a histogram whose buckets are at most 0.4 % off. The SLO"
    " is judged with failed requests counted as never answered.",
    "Interval": "Holds the true value 19 times of 20. It widens when latencies hang together, as"
    " they do in queues.",
    "Throughput": "Good answers that arrived in the time measured, per second.",
    "Goodput": "Share of all requests that were answered well and within every limit of the SLO.",
    "Knee": "Where two lines meet: throughput that grows with each client, and its plateau. More"
    " clients than that only wait for each other.",
    "Busy": "The busiest of what can be seen of the server: CPU and GPU when it runs on the same"
    " machine, and the share of time its model instances were computing.",
}
STREAM_DEFINITIONS = {
    "TTFT": "From due to the first piece of the answer.",
    "ITL": "Time between two pieces of an answer.",
    "TPOT": bench_table.TPOT_FORMULA,
}


def page(run: Run) -> str:
    run = summary.in_order(run)
    figures = [summary.figures_of(run, level) for level in run.levels]
    chosen = chosen_level(run, figures)
    verdict = headline_of(run)
    head, rows = _levels(run, figures)
    stream_head, stream_rows = _streams(run, figures)
    values = {
        "verdict": verdict,
        "verdict_style": OUTCOME_STYLES[verdict.outcome],
        "about": bench_table.about(run),
        "cards": [] if chosen is None else _cards(run, figures[chosen]),
        "findings": finding_lines(run),
        "head": head,
        "rows": rows,
        "stream_head": stream_head,
        "stream_rows": stream_rows,
        "labels": [each.label for each in figures],
        "chosen": chosen,
        "machine_note": _machine_note(run),
        "record": _record(run),
        "definitions": DEFINITIONS | (STREAM_DEFINITIONS if stream_rows else {}),
        "command": run.command,
    }
    return rendered("bench.html.jinja", values, bench_figures.figures_of_run(run, figures))


def chosen_level(run: Run, figures: list[Figures]) -> int | None:
    """Choose the level whose figures represent the run: the knee; the highest load that keeps the
    SLO (in a search, the one its answer rests on); else the highest throughput."""
    if not figures:
        return None
    if run.knee is not None and 0 <= run.knee.level < len(figures):
        return run.knee.level
    kept = [
        index
        for index in sorted(findings.deciding_levels(run))
        if level_outcome(run, run.levels[index]) == "kept"
    ]

    def throughput(index: int) -> float:
        value = figures[index].throughput.value
        return -1.0 if math.isnan(value) else value

    return max(kept or range(len(figures)), key=throughput)


def _cards(run: Run, row: Figures) -> list[Card]:
    p99 = row.latency["p99"]
    unit = units.unit_of([p99.value])
    interval = units.range_of(p99, units.SECONDS[unit])
    cards = [
        Card("throughput", f"{units.number(row.throughput.value)}/s", f"at {row.label}"),
        Card("p50", units.duration(row.latency["p50"].value), "median latency"),
        Card("p99", units.duration(p99.value), f"{interval} {unit}" if interval else ""),
        Card("failed", str(row.num_failed), f"of {row.num_requests} requests"),
    ]
    if row.output_tokens_per_s is not None:
        cards.append(Card("tokens", f"{units.number(row.output_tokens_per_s)}/s", "output"))
        cards.append(Card("TTFT p99", _stream_value(row, "ttft"), "time to the first token"))
    else:
        cards.insert(3, Card("p99.9", units.duration(row.latency["p99.9"].value)))
    if row.goodput_percent is not None:
        cards.append(Card("goodput", f"{row.goodput_percent:.4g} %", "answered within the SLO"))
    if row.busiest is not None:
        cards.append(Card("busy", f"{row.busiest[1]:.0f} %", row.busiest[0]))
    if run.max_rate is not None and math.isfinite(run.max_rate.rate.value):
        rate = run.max_rate.rate
        card = Card("highest rate", f"{units.number(rate.value)}/s", units.range_of(rate))
        cards.insert(0, card)
    if run.knee is not None:
        at = f"plateau {units.number(run.knee.throughput)}/s"
        cards.insert(0, Card("knee", units.number(run.knee.concurrency), f"concurrency; {at}"))
    return cards


def _stream_value(row: Figures, metric: str) -> str:
    measured = row.streams.get(metric)
    return units.UNKNOWN if measured is None else units.duration(measured["p99"].value)


def finding_lines(run: Run) -> list[Line]:
    grouped = findings.grouped(findings.find(run))
    return [
        Line(each[0].severity, each[0].text, bench_table.place_of(run, each)) for each in grouped
    ]


def _levels(run: Run, figures: list[Figures]) -> tuple[list[str], list[list[Cell]]]:
    unit = units.unit_of(each.value for row in figures for each in row.latency.values())
    names = [f"{name}, {unit}" for name in summary.PERCENTILES]
    load, loads = summary.short_loads([level.load for level in run.levels])
    head = [load, "answers/s", *names, "requests", "failed", "busy"]
    rows = []
    for index, row in enumerate(figures):
        scale = units.SECONDS[unit]
        cells = [Cell(loads[index])]
        cells.append(Cell(units.number(row.throughput.value), units.range_of(row.throughput)))
        for name, each in row.latency.items():
            detail = units.range_of(each, scale) if name in ("p50", "p99") else ""
            cells.append(Cell(units.number(each.value / scale), detail))
        style = "missed-text" if row.num_failed else ""
        cells += [Cell(str(row.num_requests)), Cell(str(row.num_failed), style=style)]
        busy = units.UNKNOWN if row.busiest is None else f"{row.busiest[1]:.0f} %"
        cells.append(Cell(busy))
        if run.slo:
            outcome = level_outcome(run, run.levels[index])
            cells.append(Cell(outcome, style=f"{outcome.replace(' ', '-')}-text"))
        rows.append(cells)
    return head + (["SLO"] if run.slo else []), rows


def _streams(run: Run, figures: list[Figures]) -> tuple[list[str], list[list[Cell]]]:
    if not any(row.streams for row in figures):
        return [], []
    load, loads = summary.short_loads([level.load for level in run.levels])
    head = [load]
    for metric in summary.STREAM_METRICS:
        head += [f"{metric.upper()} {name}" for name in ("p50", "p99")]
    rows = []
    for name, row in zip(loads, figures, strict=True):
        cells = [Cell(name)]
        for metric in summary.STREAM_METRICS:
            measured = row.streams.get(metric)
            for percentile in ("p50", "p99"):
                value = math.nan if measured is None else measured[percentile].value
                cells.append(Cell(units.duration(value)))
        for rate in (row.input_tokens_per_s, row.output_tokens_per_s):
            cells.append(Cell(units.UNKNOWN if rate is None else units.number(rate)))
        rows.append(cells)
    return [*head, "tokens in/s", "tokens out/s"], rows


def _machine_note(run: Run) -> str:
    if run.environment.is_server_local:
        return "The server runs on it too: its work is in these lines."
    return "The server runs elsewhere: its work is not in these lines."


def _record(run: Run) -> dict[str, str]:
    target, machine = run.target, run.environment
    cores, memory = units.count(machine.num_cores, "core"), units.size(machine.memory_bytes)
    known = {
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
    return {name: text for name, text in known.items() if text}
