"""An optimisation as a self-contained HTML page: the verdict first, then what changed step by step,
what was tried and why it lost, and how to reproduce each candidate."""

from __future__ import annotations

import math

from penstock import units
from penstock.optimizer import outcomes, wording
from penstock.optimizer.results import Optimization, try_of
from penstock.report import before_after, optimize_figures, optimize_table, reproduce, step_times
from penstock.report.page import Card, Remark, drawn, render_fragment, rendered
from penstock.report.plots import Plot
from penstock.report.profile_figures import roof
from penstock.report.tables import Cell
from penstock.report.tried import StepOutcome, by_stage

# Rows of the table without a card.
LESS_TOLD = ("p50", "answers/s", "answered in time")
STEP_PLOTS = {
    "rate_steps": (
        "Highest rate that keeps the SLO",
        "From the original to the chosen candidate, step by step. Higher is better.",
    ),
    "latency_steps": (
        "p99 at the rate of the SLO",
        "From the original to the chosen candidate. A bar with an arrow exceeds the plot.",
    ),
    "accuracy_steps": (
        "Accuracy",
        "On the examples that candidates are chosen by. The axis does not begin at zero.",
    ),
    "cost_steps": ("Cost of a million answers", "At the highest rate and the given price."),
}
PLOTS = {
    "pareto": (
        "What was tried",
        "Right and up is good. Hollow: predicted. Point at a mark for its steps and outcome.",
    ),
    "curves": (
        "Throughput and latency",
        "Each point is an arrival rate. Right and low is good; where a line turns up, more load"
        " only waits.",
    ),
    "ttft_curves": (
        "Rate and time to the first token",
        "Each point is an arrival rate that was served. Right and low is good.",
    ),
    "tpot_curves": ("Rate and time per token", "After the first token. Right and low is good."),
    "members": (
        "The time of each member",
        "Mean per request to the ensemble, at the rate of the SLO. Pale: waiting in its queue."
        " Members that work at the same time count in full.",
    ),
    "phases": ("Where the time of a request goes", "Mean per request at the rate of the SLO."),
    "roofline": (
        "Operators under the roof",
        "What the device can do by operations per byte, as measured. Marks far below a roof have"
        " room.",
    ),
}


def page(optimization: Optimization) -> str:
    has_after = before_after.has_after(optimization)
    head, rows = before_after.table(optimization)
    times_head, times = step_times.step_table(optimization)
    plots = all_plots(optimization)
    chosen, profiled = optimization.chosen, try_of(optimization.tries, optimization.profiled)
    values = {
        "headline": optimize_table.headline(optimization),
        "style": optimize_table.style(optimization),
        "about": about(optimization),
        "unchecked": optimization.unchecked,
        "remarks": [Remark("warning", note) for note in optimization.notes],
        "tiles": tiles(optimization),
        "table_title": "Before and after" if has_after else "The original",
        "head": head,
        "rows": rows,
        "times_head": times_head,
        "times": times,
        "next_options": wording.next_options(optimization),
        "step_figures": drawn(plots, STEP_PLOTS),
        "figures": drawn(plots, PLOTS),
        "has_predictions": any(not phase.is_rate_measured for phase in optimization.phases),
        "stages": by_stage(optimization),
        "skipped": outcomes.named_skips(optimization),
        "fallback": _fallback(optimization),
        "profile": optimization.profile,
        "profiled": "" if profiled is None else str(profiled.candidate),
        "next_step": wording.next_step(optimization),
        "steps_of": reproduce.steps_code,
        "files_of": lambda candidate: reproduce.files(optimization, candidate),
        "build_code": ""
        if chosen is None or optimization.member
        else reproduce.build_code(optimization, chosen),
        "bench": reproduce.bench_commands(optimization),
        "record": _record(optimization),
        "is_text": optimization.form == "text",
        "command": optimization.command,
        "outcome_style": _outcome_style,
    }
    return rendered("optimize.html.jinja", values)


def fragment(optimization: Optimization) -> str:
    return render_fragment(
        optimize_table.headline(optimization),
        optimize_table.style(optimization),
        tiles(optimization)[:5],
        drawn(all_plots(optimization), STEP_PLOTS | PLOTS)[:2],
        before_after.table(optimization),
    )


def all_plots(optimization: Optimization) -> dict[str, Plot | None]:
    profile = optimization.profile
    roofline = None if profile is None else roof(profile.operators, profile.peaks)
    return {**optimize_figures.plots_of(optimization), "roofline": roofline}


def about(optimization: Optimization) -> dict[str, str]:
    tries = units.count(len(optimization.tries), "candidate")
    run = f"{tries} in {wording.span(optimization.elapsed_s)}"
    if optimization.num_measured or optimization.num_remembered:
        run += f", {units.count(optimization.num_measured, 'measurement')}"
    if optimization.num_remembered:
        run += f" and {optimization.num_remembered} remembered from an earlier run"
    return {
        "model": f"{optimization.source} ({optimization.source_text})",
        "SLO": optimization.slo,
        "accuracy": optimization.accuracy_budget,
        "data": optimization.data_text,
        "member": optimization.member,
        "chosen": "" if optimization.chosen is None else str(optimization.chosen),
        "version": wording.place(optimization),
        "run": run,
    }


def tiles(optimization: Optimization) -> list[Card]:
    """Return what came of it, then each main figure: the new value, with the original's below."""
    has_after = before_after.has_after(optimization)
    found = []
    for row in before_after.rows(optimization):
        if row.name not in LESS_TOLD:
            value = row.after if has_after else row.before
            detail = f"original: {row.before.text}" if has_after else row.before.detail
            found.append(Card(row.name, value.text, detail))
    return [first_tile(optimization), *found] if found else []


def first_tile(optimization: Optimization) -> Card:
    """Say how many times faster it is, or at which rate the SLO is kept."""
    if (faster := _faster(optimization)) is not None:
        return faster
    served = optimization.after or optimization.before
    rate = None if served is None else served.max_rate
    if optimization.outcome == "kept" and optimization.slo:
        at = "" if rate is None or not rate.value > 0 else f" at {units.number(rate.value)}/s"
        by = optimization.slo if before_after.has_after(optimization) else "by the original"
        return Card("result", f"SLO kept{at}", by)
    return Card("result", optimize_table.headline(optimization).partition(":")[0], optimization.slo)


def _faster(optimization: Optimization) -> Card | None:
    """Compare the highest rates, or else the latencies; None if no gain is shown."""
    before, after = optimization.before, optimization.after
    if before is None or after is None or not before_after.has_after(optimization):
        return None
    rows = {row.name: row for row in before_after.rows(optimization)}
    sides = {
        "highest rate": (before.max_rate, after.max_rate),
        "p99": (after.p99, before.p99),
        "p50": (after.p50, before.p50),
    }
    for name, (low, high) in sides.items():
        row, ratio = rows.get(name), wording.ratio(low, high)
        if row is not None and row.is_better and ratio is not None:
            times = wording.times(ratio).removesuffix("x")
            return Card(name, f"{times} times faster", f"{row.before.text} → {row.after.text}")
    return None


def _outcome_style(told: StepOutcome) -> str:
    """Return the style of the chip with a try's outcome."""
    if told.is_chosen:
        return "chosen"
    styles = {"kept": "kept", "rejected": "error", "failed": "error"}
    return styles.get(told.attempt.outcome, "note")


def _fallback(optimization: Optimization) -> list[list[Cell]]:
    """Return the layers kept in float by the chosen candidate, or else by all that have some."""
    steps = () if optimization.chosen is None else optimization.chosen.steps
    found = [each for each in optimization.tries if each.fallback]
    of_chosen = [t for t in found if t.candidate.steps == steps[: len(t.candidate.steps)]]
    rows = []
    for each in of_chosen or found:
        step = Cell(wording.last_step(each.candidate), style="words")
        for layer in each.fallback:
            is_known = not math.isnan(layer.regained)
            regained = f"{100 * layer.regained:.0f} %" if is_known else units.UNKNOWN
            texts = layer.name, layer.operator, regained, units.duration(layer.lost_s)
            rows.append([*map(Cell, texts), step])
    return rows


def _record(optimization: Optimization) -> dict[str, str]:
    machine = optimization.machine
    cores, memory = units.count(machine.num_cores, "core"), units.size(machine.memory_bytes)
    price = optimization.price_per_hour
    return {
        "started": optimization.created,
        "machine": f"{machine.cpu}, {cores}, {memory}",
        "instructions": ", ".join(machine.isa),
        "GPU": ", ".join(machine.gpus),
        "versions": ", ".join(f"{name} {text}" for name, text in machine.versions.items()),
        "price": "" if price is None else f"{units.number(price)} per hour",
        "version": wording.place(optimization),
        "candidate": "" if optimization.chosen is None else optimization.chosen.key,
    }
