"""Prints the results: one table per part with ratios to Penstock, and the goals."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from overhead.results import BUSY, GOALS, PARTS, PENSTOCK, Part, Point, Results, best_points


def print_report(results: Results, console: Console) -> None:
    points = best_points(results.runs)
    for part, title in PARTS.items():
        chosen = [point for point in points if point.part == part]
        if chosen:
            console.print(_part_table(part, title, chosen, results))
    console.print(_goal_table(points, results))
    for line in remarks(results):
        console.print(line, markup=False, highlight=False)
    for failure in results.failures:
        where = f"{failure.server} ({failure.variant}), {failure.model}, {failure.part}"
        console.print(
            f"FAILED: {where}, {failure.connections} connections: {failure.reason}",
            style="bold red",
            markup=False,
        )


def remarks(results: Results) -> list[str]:
    """What a reader has to know about the figures besides the figures."""
    lines = [f"{results.titles.get(name, name)}: {why}" for name, why in results.missing.items()]
    lines += [f"{results.titles[name]}: {note}" for name, note in results.notes.items()]
    busy = [run for run in results.runs if run.other_share > BUSY]
    if busy:
        lines.append(
            f"{len(busy)} of {len(results.runs)} runs were disturbed: other programs took more "
            f"than {BUSY:.0%} of the machine (at most {max(run.other_share for run in busy):.0%})"
        )
    return lines


def _part_table(part: Part, title: str, points: list[Point], results: Results) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("model")
    table.add_column("conns", justify="right")
    table.add_column("server (best setting)")
    for heading in ("requests/s", "min to max", "p50 ms", "p99 ms", "CPU-us/request"):
        table.add_column(heading, justify="right")
    table.add_column("Penstock: rate", justify="right")
    table.add_column("p50", justify="right")
    order = list(results.titles)
    loads = sorted({(point.model, point.connections) for point in points}, key=_load_order)
    for model, connections in loads:
        group = [p for p in points if (p.model, p.connections) == (model, connections)]
        ours = next((point for point in group if point.server == PENSTOCK), None)
        for i, point in enumerate(sorted(group, key=lambda p: order.index(p.server))):
            first = (model, str(connections)) if i == 0 else ("", "")
            table.add_row(*first, *_cells(point, ours, results), end_section=i + 1 == len(group))
    expected = {PENSTOCK, *(goal.rival for goal in GOALS if goal.part == part)}
    for name in expected & results.missing.keys():
        table.add_row("", "", f"{results.titles.get(name, name)}: {results.missing[name]}")
    table.caption = (
        f"medians over {results.settings['rounds']} round(s); ratios are Penstock / the other"
    )
    return table


def _load_order(load: tuple[str, int]) -> tuple[bool, str, int]:
    return (load[0] != "identity", *load)


def _cells(point: Point, ours: Point | None, results: Results) -> list[str]:
    ratios = ["", ""]
    if ours and ours is not point:
        rate = ours.requests_per_s / point.requests_per_s
        ratios = [f"{rate:.2f}x", f"{ours.p50_us / point.p50_us:.2f}x"]
    return [
        f"{results.titles[point.server]} ({point.variant})",
        f"{point.requests_per_s:,.0f}",
        f"{point.slowest:,.0f} to {point.fastest:,.0f}",
        f"{point.p50_us / 1000:.2f}",
        f"{point.p99_us / 1000:.2f}",
        f"{point.cpu_us:,.0f}",
        *ratios,
    ]


def goal_rows(points: list[Point], results: Results) -> list[tuple[str, str, str, str]]:
    """Goal, rival, ratio measured, verdict."""
    rows = []
    for goal in GOALS:
        ratio = goal.ratio(points)
        measured = "" if ratio is None else f"{ratio:.2f}x"
        verdict = "not measured" if ratio is None else "met" if goal.is_met(ratio) else "missed"
        rows.append((goal.text, results.titles.get(goal.rival, goal.rival), measured, verdict))
    return rows


def _goal_table(points: list[Point], results: Results) -> Table:
    table = Table(title="Goals", title_justify="left", title_style="bold")
    for heading in ("goal", "against", "measured", "verdict"):
        table.add_column(heading)
    style = {"met": "green", "missed": "red", "not measured": "dim"}
    for row in goal_rows(points, results):
        table.add_row(*row[:3], f"[{style[row[3]]}]{row[3]}[/]")
    return table
