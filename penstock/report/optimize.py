"""An optimisation as a self-contained HTML page: the verdict first, then what changed step by step,
what was tried and why it lost, and how to reproduce each candidate."""

from __future__ import annotations

import math
from collections.abc import Iterator

from penstock import units
from penstock.optimizer import first_line, outcomes, wording
from penstock.optimizer.results import Optimization
from penstock.report import before_after, optimize_figures, profile_figures, reproduce, tried
from penstock.report.before_after import Row
from penstock.report.page import (
    Card,
    Cell,
    Line,
    rendered,
)
from penstock.report.tried import Told

OUTCOME_STYLES = {
    "kept": "kept",
    "missed": "missed",
    "refused": "missed",
    "disturbed": "mixed",
    "interrupted": "mixed",
    "failed": "missed",
}
STEP_PLOTS = {"rate_steps", "latency_steps", "accuracy_steps", "cost_steps"}
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
    " clock. Orders candidates; none is accepted by it. Marked ≈, hatched or hollow.",
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


def page(optimization: Optimization) -> str:
    headline = optimization.headline or first_line.headline(optimization)
    profile = optimization.profile
    has_after = before_after.has_after(optimization)
    figures = optimize_figures.figures_of(optimization)
    figures["roofline"] = [
        None if profile is None else profile_figures.roof(profile.operators, profile.peaks)
    ]
    values = {
        "has_steps": any(figures[name][0] for name in STEP_PLOTS),
        "has_plots": any(figures[name][0] for name in figures.keys() - STEP_PLOTS),
        "headline": headline,
        "style": _style(optimization),
        "about": about(optimization),
        "unchecked": optimization.unchecked,
        "notes": _notes(optimization),
        "cards": list(_cards(optimization)),
        "table_title": "Before and after" if has_after else "The original",
        "head": ["", "original", *(["chosen", "change"] if has_after else [])],
        "rows": [_cells(row, has_after) for row in before_after.rows(optimization)],
        "chosen": optimization.chosen,
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
        "definitions": TEXT_DEFINITIONS if optimization.form == "text" else DEFINITIONS,
        "build_title": TEXT_BUILD if optimization.form == "text" else BUILD,
        "is_text": optimization.form == "text",
        "command": optimization.command,
        "outcome_style": _outcome_style,
    }
    return rendered("optimize.html.jinja", values, figures)


def _style(optimization: Optimization) -> str:
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
    found = outcomes.try_of(optimization.tries, optimization.profiled)
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


def _notes(optimization: Optimization) -> list[Line]:
    return [Line("warning", note) for note in optimization.notes]


def _cards(optimization: Optimization) -> Iterator[Card]:
    """Yield a card for each main figure of the table: the new value, with the original's below."""
    has_after = before_after.has_after(optimization)
    for row in before_after.rows(optimization):
        if row.name not in LESS_TOLD:
            value = row.after if has_after else row.before
            detail = f"original: {row.before.text}" if has_after else row.before.range
            yield Card(row.name, value.text, detail)


def _cells(row: Row, has_after: bool) -> list[Cell]:
    cells = [Cell(row.name), Cell(row.before.text, row.before.range)]
    if not has_after:
        return cells
    style = {True: "kept-text", False: "missed-text", None: ""}[row.is_better]
    return [*cells, Cell(row.after.text, row.after.range), Cell(row.change, style=style)]


def _outcome_style(told: Told) -> str:
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
