"""A profile in the terminal: verdict, operators, peaks, and the parts of a request."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock import units
from penstock.profiling import roofline
from penstock.profiling.results import GpuTime, Operator, Peaks, Profile, RequestPhase
from penstock.report.tables import bar, figure_table, section

NUM_OPERATORS = 12
NUM_TYPES = 8
NAME_WIDTH, KERNEL_WIDTH = 44, 60
# Width of a full bar, and what is shown of one that is shorter than a letter.
BAR = (20, "▏")
BOUND_STYLES = {
    "compute": "green",
    "memory": "yellow",
    "launch": "magenta",
    "overhead": "red",
    "unknown": "dim",
}


def shown(profile: Profile) -> Group:
    parts: list[RenderableType] = [Text(profile.recommendation, style="bold")]
    parts.append(Text(about(profile), style="dim"))
    parts += [Text(f"- {line}") for line in profile.findings]
    if profile.operators:
        parts += [section("By type"), _types(profile)]
        parts += [section("Longest operators"), _operators(profile)]
    if profile.gpu is not None:
        parts += [section("Longest kernels"), _kernels(profile.gpu)]
    parts += [section("Peaks of this device"), Text(peaks_text(profile.peaks))]
    parts += [section("One request, alone"), _buckets(profile.buckets)]
    if profile.steps:
        parts += [section("What could be done (ceilings, not promises)")]
        parts += [Text(f"- {step.text}") for step in profile.steps]
    return Group(*parts)


def about(profile: Profile) -> str:
    runs = units.count(profile.num_runs, "run")
    text = f"{profile.model} on {profile.backend}, {profile.batch}; median of {runs}"
    text += f": {units.duration(profile.total_s)}"
    if profile.operators:
        text += f", {units.duration(profile.profiled_s)} while profiled"
    return f"{text}. Inputs: {profile.inputs}" if profile.inputs else text


def peaks_text(peaks: Peaks) -> str:
    flops = [f"{name.upper()} {scaled(value, 'FLOP/s')}" for name, value in peaks.flops.items()]
    threads, memory = units.count(peaks.num_threads, "thread"), scaled(peaks.bytes_per_s, "B/s")
    text = f"{peaks.device}, {threads}: {', '.join(flops)}; memory {memory}"
    if peaks.cache_bytes_per_s:
        text += f", caches {scaled(peaks.cache_bytes_per_s, 'B/s')}"
    if peaks.host_bytes_per_s:
        text += f", from the host {scaled(peaks.host_bytes_per_s, 'B/s')}"
    return f"{text}; launch {units.duration(peaks.launch_s)}"


def scaled(value: float | None, unit: str) -> str:
    """Format as `186 GFLOP/s`, with SI prefixes."""
    if value is None:
        return units.UNKNOWN
    for prefix in ("", "k", "M", "G"):
        if value < 1000:
            return f"{units.number(value)} {prefix}{unit}"
        value /= 1000
    return f"{units.number(value)} T{unit}"


def efficiency_text(operators: Sequence[Operator]) -> str:
    """Return the time all of them need at the peaks as a share of the time they take."""
    known = [each for each in operators if each.needed_s is not None]
    seconds = sum(each.seconds for each in known)
    if not seconds:
        return units.UNKNOWN
    needed = sum(min(each.seconds, each.needed_s or 0.0) for each in known)
    return units.share(needed, seconds)


def whole_s(profile: Profile) -> float:
    """Return the total for shares: a run, or its operators if the profiler made them longer."""
    return max(profile.total_s, sum(each.seconds for each in profile.operators))


def _types(profile: Profile) -> Table:
    whole = whole_s(profile)
    unit = units.unit_of([whole])
    columns = ("", "share", unit, "calls", "FLOP", "bytes", "of roof")
    table = figure_table("type", *columns, words=("",))
    groups = roofline.by_type(profile.operators)
    for kind, operators in groups[:NUM_TYPES]:
        seconds = sum(each.seconds for each in operators)
        table.add_row(
            Text(kind),
            bar(seconds, whole, *BAR),
            units.share(seconds, whole),
            units.in_unit(seconds, unit),
            str(sum(each.num_calls for each in operators)),
            scaled(_total([each.flops for each in operators]), ""),
            scaled(_total([each.num_bytes for each in operators]), "B"),
            efficiency_text(operators),
        )
    if len(groups) > NUM_TYPES:
        rest = [each for _, operators in groups[NUM_TYPES:] for each in operators]
        seconds = sum(each.seconds for each in rest)
        name = Text(f"{len(groups) - NUM_TYPES} others", style="dim")
        share = units.share(seconds, whole)
        table.add_row(name, bar(seconds, whole, *BAR), share, units.in_unit(seconds, unit))
    return table


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _operators(profile: Profile) -> Table:
    whole = whole_s(profile)
    unit = units.unit_of(each.seconds for each in profile.operators[:NUM_OPERATORS])
    columns = "type", "bound", "share", unit, "FLOP/B", "of roof"
    table = figure_table("operator", *columns, words=("type", "bound"))
    for each in profile.operators[:NUM_OPERATORS]:
        table.add_row(
            # The end of a name says most.
            Text(each.name if len(each.name) <= NAME_WIDTH else f"…{each.name[1 - NAME_WIDTH :]}"),
            Text(each.type),
            Text(each.bound, style=BOUND_STYLES[each.bound]),
            units.share(each.seconds, whole),
            units.in_unit(each.seconds, unit),
            intensity_text(each),
            efficiency_text([each]),
        )
    return table


def _kernels(gpu: GpuTime) -> Table:
    whole = sum(each.seconds for each in gpu.kernels)
    unit = units.unit_of(each.seconds for each in gpu.kernels[:NUM_OPERATORS])
    table = figure_table("kernel", "share", unit, "calls")
    for each in gpu.kernels[:NUM_OPERATORS]:
        name = Text(each.name if len(each.name) <= KERNEL_WIDTH else f"{each.name[:KERNEL_WIDTH]}…")
        share = units.share(each.seconds, whole)
        table.add_row(name, share, units.in_unit(each.seconds, unit), f"{each.num_calls:.3g}")
    return table


def tool_commands(model: str, name: str, batch_size: int) -> list[str]:
    """Return commands for NVIDIA's profilers on the same model in one process. They use `penstock
    bench`, because two profilers cannot watch a GPU at once."""
    bench = ["penstock", "bench", model, "--concurrency", "1", "-b", str(batch_size)]
    bench += ["--model", name] if name else []
    nsys = ["nsys", "profile", "--trace=cuda,nvtx,cublas,cudnn", "--output=penstock"]
    # Skip the launches of the warm-up; counters make each of the others slow.
    ncu = ["ncu", "--set=roofline", "--launch-skip=2000", "--launch-count=50", "--export=penstock"]
    return [
        shlex.join([*tool, *bench, "--duration", length])
        for tool, length in ((nsys, "5s"), (ncu, "60s"))
    ]


def intensity_text(operator: Operator) -> str:
    if not operator.num_bytes or operator.flops is None:
        return units.UNKNOWN
    return units.number(operator.flops / operator.num_bytes)


def _buckets(buckets: Sequence[RequestPhase]) -> Table:
    whole = sum(each.seconds for each in buckets)
    table = figure_table("part", "", "share", "time", words=("",))
    for each in buckets:
        share, time = units.share(each.seconds, whole), units.duration(each.seconds)
        table.add_row(each.name, bar(each.seconds, whole, *BAR), share, time)
    return table
