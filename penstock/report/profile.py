"""A profile as a self-contained HTML page; its first line is the verdict."""

from __future__ import annotations

from penstock import units
from penstock.profiling.results import Profile
from penstock.report import profile_figures, profile_table
from penstock.report.page import Card, Remark, drawn, render_fragment, rendered
from penstock.report.tables import Cell

NUM_OPERATORS = 40
HEAD = ["operator", "type", "bound", "time", "share", "FLOP", "bytes", "FLOP/B", "of roof"]
PLOTS = {
    "roofline": (
        "Roofline",
        "Each dot is an operator, as large as its share of the time. A dot on a line is as fast as"
        " this device was measured to be; below is room.",
    ),
    "types": ("Time by type of operator", "Coloured by the bottleneck."),
    "buckets": ("One request, alone", "From request bytes to response bytes, without the network."),
    "timeline": (
        "Timeline of the GPU",
        "Copies and kernels of a few batches; what is above each other happened at the same time.",
    ),
    "steps": ("Ceilings", "What each step could give at most. No step gives all of it."),
}


def page(profile: Profile, command: str = "") -> str:
    values = {
        "title": f"{profile.model}: {profile.bound}",
        "verdict": profile.recommendation,
        "about": about(profile),
        "tiles": tiles(profile),
        "remarks": [Remark("note", text) for text in profile.findings],
        "steps": [(f"{step.ceiling:.2g}x", step.text) for step in profile.steps],
        "figures": drawn(profile_figures.plots_of(profile), PLOTS),
        "head": HEAD,
        "rows": _rows(profile),
        "num_operators": len(profile.operators),
        "record": _record(profile),
        "command": command,
    }
    return rendered("profile.html.jinja", values)


def fragment(profile: Profile) -> str:
    shown = drawn(profile_figures.plots_of(profile), PLOTS)
    return render_fragment(profile.recommendation, "plain", tiles(profile), shown[:2])


def about(profile: Profile) -> dict[str, str]:
    runs = units.count(profile.num_runs, "run")
    return {
        "model": f"{profile.model} on {profile.backend}",
        "batch": profile.batch,
        "time": f"{units.duration(profile.total_s)}, median of {runs}",
        "inputs": profile.inputs,
    }


def tiles(profile: Profile) -> list[Card]:
    cards = [first_tile(profile), Card("one batch", units.duration(profile.total_s), profile.batch)]
    if profile.steps:
        cards.append(Card("bound by", profile.bound))
    # Possible speed-ups are unknown if the runs were disturbed.
    if profile.headroom is not None:
        headroom = f"{profile.headroom:.2g}x"
        cards.append(Card("at the peaks", headroom, "as fast, same operators and datatypes"))
    if profile.limit_share is not None:
        limit = f"{profile.limit_share:.0%}"
        cards.append(Card("of its limit", limit, "the model's FLOP and bytes at the peaks"))
    if profile.single_thread_s:
        gained = profile.single_thread_s / profile.total_s
        threads = units.count(profile.peaks.num_threads, "thread")
        cards.append(Card(threads, f"{gained:.2g}x", "as fast as one"))
    return cards


def first_tile(profile: Profile) -> Card:
    """Say how much the next step could give; without one, what the model is bound by."""
    if not profile.steps:
        return Card("result", f"bound by {profile.bound}", "no step is recommended")
    times = f"{profile.ceiling:.2g} times faster at most"
    return Card("next step", times, profile.steps[0].name)


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
    return {
        **about(profile),
        "peaks": profile_table.peaks_text(profile.peaks),
        "with the profiler": units.duration(profile.profiled_s) if profile.operators else "",
        "versions": ", ".join(f"{name} {text}" for name, text in profile.versions.items()),
    }
