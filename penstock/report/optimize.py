"""An optimisation as a self-contained HTML page: the verdict first, then what changed step by step,
what was tried and why it lost, and how to reproduce each candidate."""

from __future__ import annotations

import math

from penstock import units
from penstock.optimizer import first_line, wording
from penstock.optimizer.results import Optimization, try_of
from penstock.report import before_after, optimize_figures, profile_figures, reproduce, tried
from penstock.report.before_after import BeforeAfterRow
from penstock.report.page import Card, Remark, drawn, rendered
from penstock.report.page import fragment as page_fragment
from penstock.report.plots import Plot
from penstock.report.tables import Cell
from penstock.report.tried import StepOutcome

OUTCOME_STYLES = {
    "kept": "kept",
    "missed": "missed",
    "refused": "missed",
    "disturbed": "mixed",
    "interrupted": "mixed",
    "failed": "missed",
}
# Rows of the table without a card.
LESS_TOLD = ("p50", "answers/s", "answered in time")
BUILD = "Build the chosen candidate by hand; any other with its steps from the table above."
TEXT_BUILD = "config.pbtxt of the chosen candidate; any other by its steps in the table above."
DEFINITIONS = {
    "Highest rate": "The most requests a second, arriving by chance, at which the latency terms of"
    " the SLO hold. The original is compared by it also where it misses the SLO.",
    "Measured": "Sent over the network to a real server, original and chosen in turns, so that a"
    " machine that changes changes for both. The range holds the true value 19 times of 20.",
    "Predicted": "From batch times measured in process, with the server's own batcher on a made-up"
    " clock. Orders candidates; none is accepted by it. Marked ≈, outlined or hollow.",
    "Accuracy": "Original and candidate on the same examples. The loss is at most the bound, 19"
    " times of 20; a bound beyond the limit is refused, also when the loss itself is not. The"
    " held-out part is looked at once, for what was chosen.",
    "Equal, slower": "Compared with the chosen candidate's served figures: no difference beyond the"
    " noise, or behind. Of equal candidates the simplest is chosen.",
    "Cost": "Of a million answers at the highest rate, in the unit of the price given.",
}


TEXT_DEFINITIONS = {
    "Highest rate": "The most requests a second, arriving by chance, at which the SLO holds, to"
    " about 15 %: answers of language models take long, so few come in the time measured.",
    "Measured": "Streamed over the network from a real server, original and chosen in turns. All"
    " answers are as long as was asked for, and prompts that come again begin otherwise, so that"
    " nothing is found in the cache that was not computed.",
    "First token, per token": "From when a request was due to its first piece of text; from that to"
    " the last, by the tokens between them.",
    "Accuracy": "What the engine says of the prompts and of the original's own answers, token by"
    " token. kl: how far the candidate's next-token distribution is from the original's, in nats."
    " agreement: places with the same likeliest token. nll: how unlikely the text is, in nats a"
    " token. The loss is at most the bound, 19 times of 20; the held-out part is looked at once.",
    "Equal": "Faster or slower by less than the noise: the simpler one is taken.",
    "Cost": "Of a million answers at the highest rate, in the unit of the price given.",
}


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
    "phases": ("Where the time of a request goes", "Mean per request at the rate of the SLO."),
    "roofline": (
        "Operators under the roof",
        "What the device can do by operations per byte, as measured. Marks far below a roof have"
        " room.",
    ),
}


def page(optimization: Optimization) -> str:
    has_after = before_after.has_after(optimization)
    profile = optimization.profile
    plots = all_plots(optimization)
    is_text = optimization.form == "text"
    values = {
        "headline": headline(optimization),
        "style": style(optimization),
        "about": about(optimization),
        "unchecked": optimization.unchecked,
        "remarks": [Remark("warning", note) for note in optimization.notes],
        "tiles": tiles(optimization),
        "table_title": "Before and after" if has_after else "The original",
        "head": _head(has_after),
        "rows": [_cells(row, has_after) for row in before_after.rows(optimization)],
        "step_figures": drawn(plots, STEP_PLOTS),
        "figures": drawn(plots, PLOTS),
        "has_predictions": any(not phase.is_rate_measured for phase in optimization.phases),
        "stages": tried.by_stage(optimization),
        "skipped": [(each, str(each.step or each.pass_name)) for each in optimization.skipped],
        "fallback": _fallback(optimization),
        "profile": profile,
        "profiled": _profiled(optimization),
        "next_step": wording.next_step(optimization),
        "steps_of": reproduce.steps_code,
        "files_of": lambda candidate: reproduce.files(optimization, candidate),
        "build_code": reproduce.build_code(optimization, optimization.chosen)
        if optimization.chosen is not None
        else "",
        "bench": reproduce.bench_commands(optimization),
        "record": _record(optimization),
        "definitions": TEXT_DEFINITIONS if is_text else DEFINITIONS,
        "build_title": TEXT_BUILD if is_text else BUILD,
        "command": optimization.command,
        "outcome_style": _outcome_style,
    }
    return rendered("optimize.html.jinja", values)


def fragment(optimization: Optimization) -> str:
    """Return the heart of the page, for notebooks."""
    has_after = before_after.has_after(optimization)
    rows = [_cells(row, has_after) for row in before_after.rows(optimization)]
    return page_fragment(
        headline(optimization),
        style(optimization),
        tiles(optimization)[:5],
        drawn(all_plots(optimization), STEP_PLOTS | PLOTS)[:2],
        (_head(has_after), rows),
    )


def headline(optimization: Optimization) -> str:
    return optimization.headline or first_line.headline(optimization)


def all_plots(optimization: Optimization) -> dict[str, Plot | None]:
    """Return the plots of the page by name."""
    profile = optimization.profile
    roof = None if profile is None else profile_figures.roof(profile.operators, profile.peaks)
    return {**optimize_figures.plots_of(optimization), "roofline": roof}


def _head(has_after: bool) -> list[str]:
    return ["", "original", *(["chosen", "change"] if has_after else [])]


def style(optimization: Optimization) -> str:
    return OUTCOME_STYLES[optimization.outcome] if optimization.slo else "plain"


def about(optimization: Optimization) -> dict[str, str]:
    """Return the inputs, the targets and the result."""
    known = {
        "model": f"{optimization.source} ({optimization.source_text})",
        "SLO": optimization.slo,
        "accuracy": optimization.accuracy_budget,
        "data": optimization.data_text,
        "chosen": "" if optimization.chosen is None else str(optimization.chosen),
        "version": wording.place(optimization),
        "run": _run_text(optimization),
    }
    return {name: text for name, text in known.items() if text}


def _profiled(optimization: Optimization) -> str:
    """Return the candidate that was profiled; empty if unknown."""
    found = try_of(optimization.tries, optimization.profiled)
    return "" if found is None else str(found.candidate)


def _run_text(optimization: Optimization) -> str:
    tries = (
        "1 candidate" if len(optimization.tries) == 1 else f"{len(optimization.tries)} candidates"
    )
    text = f"{tries} in {wording.span(optimization.elapsed_s)}"
    if optimization.num_measured or optimization.num_remembered:
        text += f", {units.count(optimization.num_measured, 'measurement')}"
    if optimization.num_remembered:
        text += f" and {optimization.num_remembered} remembered from an earlier run"
    return text


def tiles(optimization: Optimization) -> list[Card]:
    """Return what came of it, then a tile for each main figure of the table: the new value, with
    the original's below."""
    has_after = before_after.has_after(optimization)
    rows = before_after.rows(optimization)
    found = []
    for row in rows:
        if row.name not in LESS_TOLD:
            value = row.after if has_after else row.before
            detail = f"original: {row.before.text}" if has_after else row.before.range
            found.append(Card(row.name, value.text, detail))
    return [first_tile(optimization), *found] if found else []


def first_tile(optimization: Optimization) -> Card:
    """Say how many times faster it is, or at which rate the SLO is kept."""
    faster = _faster(optimization)
    if faster is not None:
        return faster
    served = optimization.after or optimization.before
    rate = None if served is None else served.max_rate
    if optimization.outcome == "kept" and optimization.slo:
        at = "" if rate is None or not rate.value > 0 else f" at {units.number(rate.value)}/s"
        by = "by the original" if not before_after.has_after(optimization) else ""
        return Card("result", f"SLO kept{at}", by or optimization.slo)
    return Card("result", headline(optimization).partition(":")[0], optimization.slo)


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
        row = rows.get(name)
        if row is None or not row.is_better or low is None or high is None:
            continue
        ratio = wording.ratio(low, high)
        if ratio is not None:
            times = wording.times(ratio).removesuffix("x")
            return Card(name, f"{times} times faster", f"{row.before.text} → {row.after.text}")
    return None


def _cells(row: BeforeAfterRow, has_after: bool) -> list[Cell]:
    cells = [Cell(row.name), Cell(row.before.text, row.before.range)]
    if not has_after:
        return cells
    style = {True: "kept-text", False: "missed-text", None: ""}[row.is_better]
    return [*cells, Cell(row.after.text, row.after.range), Cell(row.change, style=style)]


def _outcome_style(told: StepOutcome) -> str:
    """Return the style of the chip with a try's outcome."""
    if told.is_chosen:
        return "chosen"
    return {"kept": "kept", "rejected": "error", "failed": "error"}.get(told.outcome, "note")


def _fallback(optimization: Optimization) -> list[list[Cell]]:
    """Return the layers kept in float by the chosen candidate, or else by all that have some."""
    chosen = optimization.chosen
    line = [] if chosen is None else [chosen.key, *_parents(optimization)]
    found = [each for each in optimization.tries if each.fallback]
    of_chosen = [each for each in found if each.candidate.key in line]
    return [
        [
            Cell(layer.name),
            Cell(layer.operator),
            Cell(_share(layer.regained)),
            Cell(units.duration(layer.lost_s)),
            Cell(wording.last_step(each.candidate), style="words"),
        ]
        for each in of_chosen or found
        for layer in each.fallback
    ]


def _share(part: float) -> str:
    return units.UNKNOWN if math.isnan(part) else f"{100 * part:.0f} %"


def _parents(optimization: Optimization) -> list[str]:
    found = []
    candidate = optimization.chosen
    while candidate is not None and candidate.steps:
        candidate = candidate.parent
        found.append(candidate.key)
    return found


def _record(optimization: Optimization) -> dict[str, str]:
    machine = optimization.machine
    cores, memory = units.count(machine.num_cores, "core"), units.size(machine.memory_bytes)
    price = optimization.price_per_hour
    known = {
        "started": optimization.created,
        "machine": f"{machine.cpu}, {cores}, {memory}",
        "instructions": ", ".join(machine.isa),
        "GPU": ", ".join(machine.gpus),
        "versions": ", ".join(f"{name} {text}" for name, text in machine.versions.items()),
        "price": "" if price is None else f"{units.number(price)} per hour",
        "version": wording.place(optimization),
        "candidate": "" if optimization.chosen is None else optimization.chosen.key,
    }
    return {name: text for name, text in known.items() if text}
