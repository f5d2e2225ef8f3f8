"""A profile as a self-contained HTML page; its first line is the verdict."""

from __future__ import annotations

from penstock import units
from penstock.optimizer.profile.results import Profile
from penstock.report import profile_figures, profile_table
from penstock.report.page import Card, Cell, Line, rendered

TEMPLATE = "profile.html.jinja"
NUM_OPERATORS = 40
HEAD = ["operator", "type", "bound", "time", "share", "FLOP", "bytes", "FLOP/B", "of roof"]
DEFINITIONS = {
    "Roof": "The least time for an operator's work: its operations at the peak of their datatype,"
    " or its bytes at the bandwidth of where they lie, or one launch, whichever is longest.",
    "Of roof": "That time over the time it took. Far below 100 %: a poor kernel, threads that wait,"
    " memory in the wrong order.",
    "Peaks": "Measured on this device with these threads, never taken from a data sheet; no lower"
    " than what an operator was seen to reach.",
    "Bytes": "Inputs read once and outputs written once. Weights count as memory unless all of the"
    " model's fit the caches.",
    "Ceiling": "What a step could give if it were perfect and the rest stayed as it is (Amdahl).",
    "One request": "Through codec, batcher and worker loop in one process, alone. Sockets are not"
    " in it; penstock bench shows them.",
}


def page(profile: Profile, command: str = "") -> str:
    values = {
        "title": f"{profile.model}: {profile.bound}",
        "verdict": profile.recommendation,
        "about": profile_table.about(profile),
        "cards": _cards(profile),
        "findings": [Line("note", text) for text in profile.findings],
        "steps": [(f"{step.ceiling:.2g}x", step.text) for step in profile.steps],
        "head": HEAD,
        "rows": _rows(profile),
        "num_operators": len(profile.operators),
        "record": _record(profile),
        "definitions": DEFINITIONS,
        "command": command,
    }
    figures = profile_figures.figures(profile)
    return rendered(TEMPLATE, values, figures)


def _cards(profile: Profile) -> list[Card]:
    cards = [
        Card("one batch", units.duration(profile.total_s), profile.batch),
        Card("bound by", profile.bound),
        *_ceiling_cards(profile),
    ]
    if profile.single_thread_s:
        gained = profile.single_thread_s / profile.total_s
        threads = units.count(profile.peaks.num_threads, "thread")
        cards.append(Card(threads, f"{gained:.2g}x", "as fast as one"))
    return cards


def _ceiling_cards(profile: Profile) -> list[Card]:
    """Return cards on possible speed-ups; empty if the runs were disturbed."""
    cards = []
    if profile.headroom is not None:
        headroom = f"{profile.headroom:.2g}x"
        cards.append(Card("at the peaks", headroom, "as fast, same operators and datatypes"))
    if profile.limit_share is not None:
        limit = f"{profile.limit_share:.0%}"
        cards.append(Card("of its limit", limit, "the model's FLOP and bytes at the peaks"))
    if profile.steps:
        cards.append(Card("next step", f"{profile.ceiling:.2g}x", "at most"))
    return cards


def _rows(profile: Profile) -> list[list[Cell]]:
    whole = profile_table.whole_s(profile)
    return [
        [
            Cell(each.name, style="words"),
            Cell(each.type, detail=f"x{each.num_calls}" if each.num_calls > 1 else ""),
            Cell(each.bound),
            Cell(units.duration(each.seconds)),
            Cell(units.share(each.seconds, whole)),
            Cell(profile_table.scaled(each.flops, "")),
            Cell(profile_table.scaled(each.num_bytes, "B")),
            Cell(profile_table.intensity_text(each)),
            Cell(profile_table.efficiency_text([each])),
        ]
        for each in profile.operators[:NUM_OPERATORS]
    ]


def _record(profile: Profile) -> dict[str, str]:
    known = {
        "model": f"{profile.model} on {profile.backend}",
        "batch": profile.batch,
        "inputs": profile.inputs,
        "peaks": profile_table.peaks_text(profile.peaks),
        "with the profiler": units.duration(profile.profiled_s) if profile.operators else "",
        "versions": ", ".join(f"{name} {text}" for name, text in profile.versions.items()),
    }
    return {name: text for name, text in known.items() if text}
