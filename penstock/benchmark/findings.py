"""Warnings and advice about a finished run. Pure.

An error means the numbers are wrong or void, a warning that they are doubtful or the server is at
risk; a note explains.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from penstock import units
from penstock.benchmark import headline, pacer, stats, steadiness, summary
from penstock.benchmark.pacer import Closed
from penstock.benchmark.results import BenchRun, Level
from penstock.benchmark.summary import PERCENTILES, Figures

Severity = Literal["error", "warning", "note"]
Told = tuple[Severity, str]
ORDER: tuple[Severity, ...] = ("error", "warning", "note")

# Above this share of a core, the generator process itself delays requests.
MAX_CPU_SHARE = 0.85
MIN_LATENESS_S = 1e-3
MAX_LATENESS_SHARE = 0.10
LITTLE_TOLERANCE = 0.05
# Little's law needs at least this many requests.
MIN_REQUESTS = 100
# A percentile needs this many requests above it to be more than chance.
MIN_BEYOND = 10
CLOSE_TO_FULL_PERCENT = 90.0
HEADROOM_PERCENT = 60.0
SHARED_CPU_PERCENT = 95.0
# A silence lasts at least MIN_SILENCE_S and SILENCE_RATIO times the median latency, and at least
# MIN_MISSING answers are missing.
MIN_SILENCE_S = 0.5
SILENCE_RATIO = 5
MIN_MISSING = 20
# Never advise measuring a level for longer than this.
LONGEST_ADVICE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding; `level` is an index into `BenchRun.levels`, or None for the whole run."""

    severity: Severity
    text: str
    level: int | None = None


def find(run: BenchRun) -> list[Finding]:
    """Return all findings, most severe first, then in the order of the levels."""
    figures = [summary.figures_of(run, level) for level in run.levels]
    found = [*_of_run(run), *_too_few(run, figures), *_load_of_server(run, figures)]
    found += _imprecision(run, figures)
    for index, (level, row) in enumerate(zip(run.levels, figures, strict=True)):
        found += [Finding(severity, text, index) for severity, text in _of_level(run, level, row)]
    deciding = deciding_levels(run)
    told = [each for each in found if each.level is None or each.level in deciding]
    return sorted(told, key=lambda each: ORDER.index(each.severity))


def deciding_levels(run: BenchRun) -> set[int]:
    """Return the indices of the levels that the answer rests on. A rate search overloads the server
    on purpose, so findings about those levels are left out."""
    if run.max_rate is None:
        return set(range(len(run.levels)))
    flat = {index: pacer.flat_rate(level.load) for index, level in enumerate(run.levels)}
    rates = {index: rate for index, rate in flat.items() if rate is not None}
    answer = run.max_rate.rate.value
    kept = [rate for rate in rates.values() if rate <= answer * (1 + 1e-9)]
    best = max(kept, default=min(rates.values(), default=0.0))
    return {index for index, rate in rates.items() if rate == best}


def grouped(found: Sequence[Finding]) -> list[list[Finding]]:
    """Group findings that say the same of several levels."""
    groups: dict[tuple[Severity, str], list[Finding]] = {}
    for each in found:
        groups.setdefault((each.severity, each.text), []).append(each)
    return list(groups.values())


def _of_run(run: BenchRun) -> Iterator[Finding]:
    if run.is_partial:
        reason = run.problem or "it was stopped before its end"
        yield Finding("error", f"This run is partial: {reason}.")
    elif run.problem:
        yield Finding("warning", run.problem)
    for text in run.origin.warnings:
        yield Finding("warning", text)
    if run.origin.is_random:
        text = "Inputs are random: what depends on real data (branches, caches, lengths) is not"
        yield Finding("note", f"{text} seen.")
    if any(isinstance(level.load, Closed) for level in run.levels):
        text = "Closed loop: a client sends only when its last request was answered, so waiting"
        yield Finding("note", f"{text} that real arrivals would see is not in these percentiles.")


def _of_level(run: BenchRun, level: Level, figures: Figures) -> list[Told]:
    if not figures.num_requests:
        return [("error", "No request was due in the time measured: nothing can be said.")]
    found = [_failures(figures), _generator_limits(level, figures), _shared_machine(run, level)]
    found += [_silence(level, figures), _warm_up(level), _agreement(level)]
    # Little's law means nothing while the queue grows.
    found.append(_growth(level) or _little(level, figures))
    return [each for each in found if each is not None]


def _agreement(level: Level) -> Told | None:
    """Say how many answers of a replay are the recorded ones."""
    if level.agreement is None:
        return None
    agreed, compared = level.agreement.num_agreed, level.agreement.num_compared
    share = units.share(agreed, compared)
    text = f"Agreement with the recorded answers: {agreed:,} of {compared:,} answers, {share}."
    return ("note" if agreed == compared else "warning"), text


def _failures(figures: Figures) -> Told | None:
    if not figures.num_failed:
        return None
    causes = ", ".join(f"{amount} x {cause}" for cause, amount in figures.failures.items())
    share = units.share(figures.num_failed, figures.num_requests)
    text = f"{figures.num_failed} of {figures.num_requests} requests failed ({share}): {causes}."
    is_most = figures.num_failed * 2 > figures.num_requests
    return "error" if is_most else "warning", f"{text} Percentiles are of the good answers only."


def _generator_limits(level: Level, figures: Figures) -> Told | None:
    use = level.generator
    causes = []
    busiest = max(use.cpu_shares, default=0.0)
    if busiest >= MAX_CPU_SHARE:
        used = f"used {busiest * 100:.0f} % of its core"
        causes.append(f"a generator process {used} (try --processes)")
    if (text := _lateness(level, figures)) is not None:
        causes.append(text)
    if use.num_waited:
        waited = units.count(use.num_waited, "request")
        causes.append(f"{waited} waited for a connection (--max-connections)")
    text = f"LIMITED BY THE GENERATOR: {'; '.join(causes)}. The figures are partly its own, not"
    return ("error", f"{text} the server's.") if causes else None


def _lateness(level: Level, figures: Figures) -> str | None:
    """Say whether the generator's lateness affects a percentile up to p99."""
    lateness = level.generator.lateness
    for name, percent in PERCENTILES.items():
        if percent > 99 or lateness.total * (1 - percent / 100) < MIN_BEYOND - 1e-6:
            break
        late_s, latency_s = lateness.percentile(percent), figures.latency[name].value
        share_s = 0.0 if math.isnan(latency_s) else MAX_LATENESS_SHARE * latency_s
        if late_s > max(MIN_LATENESS_S, share_s):
            share = f"{100 - percent:g} % of requests"
            return f"{share} left {units.duration(late_s)} late or more"
    return None


def _shared_machine(run: BenchRun, level: Level) -> Told | None:
    if not run.environment.is_server_local or not level.system:
        return None
    cpu = fmean(sample.cpu_percent for sample in level.system)
    if cpu <= SHARED_CPU_PERCENT:
        return None
    text = f"Server and generator share a machine whose CPU was {cpu:.0f} % busy: they took time"
    return "warning", f"{text} from each other. Another machine for the load would not."


def _silence(level: Level, figures: Figures) -> Told | None:
    """Report a period with no answers where many were expected. In a closed loop it affects hardly
    any request, so no percentile shows it."""
    is_even = isinstance(level.load, Closed) or pacer.flat_rate(level.load) is not None
    if not is_even or level.ending in ("interrupted", "lost"):
        return None
    longest_s = silent_s = 0.0
    for window in level.windows:
        silent_s = 0.0 if window.num_arrived else silent_s + window.length_s
        longest_s = max(longest_s, silent_s)
    missing = figures.throughput.value * longest_s
    usual_s = max(MIN_SILENCE_S, SILENCE_RATIO * figures.latency["p50"].value)
    if not (longest_s >= usual_s and missing >= MIN_MISSING):
        return None
    span = f"{units.duration(longest_s)} of {units.duration(level.measured_s)}"
    if silent_s == longest_s:
        return "error", f"No answer came in the last {span}: the server stopped answering."
    return "warning", f"For {span} no answer came at all: the server stood still."


def _little(level: Level, figures: Figures) -> Told | None:
    """Check Little's law (N = X R) within the confidence intervals of its factors."""
    if figures.num_requests < MIN_REQUESTS or figures.num_failed or not level.service.total:
        return None
    if isinstance(level.load, Closed):
        expected = float(level.load.concurrency)
        seen = figures.throughput.value * level.service.mean()
        words = f"throughput x service time is {units.number(seen)}, concurrency is"
        allowed = (LITTLE_TOLERANCE + figures.throughput.relative_error) * expected
    else:
        expected = level.generator.mean_in_flight
        seen = figures.num_requests / level.measured_s * figures.mean_s
        words = f"rate x latency is {units.number(seen)}, the mean number under way was"
        error = stats.mean_interval(level.windows).relative_error
        # Small sampled numbers are imprecise.
        allowed = max((LITTLE_TOLERANCE + error) * expected, 0.5)
    # NaN, an unknown tolerance, is not reported.
    if not abs(seen - expected) > allowed:
        return None
    text = f"Little's law does not hold: {words} {units.number(expected)}."
    return "warning", f"{text} The level was not steady, or clients were idle between requests."


def _warm_up(level: Level) -> Told | None:
    warm_up = level.warm_up
    if warm_up is None or warm_up.is_steady or level.ending in ("interrupted", "lost"):
        return None
    ends_s = (warm_up.first_s, warm_up.last_s)
    first, last = ("no answer" if each is None else units.duration(each) for each in ends_s)
    medians = f"(median {first} at first, {last} at last)."
    warming = f"warm-up of {warm_up.duration_s:.0f} s was"
    known_s = [each for each in ends_s if each is not None]
    if len(known_s) == 2 and math.isclose(*known_s, rel_tol=steadiness.TOLERANCE):
        text = f"The {warming} too short, or the load too uneven, to tell that latency was steady"
    else:
        text = f"Latency still changed when the {warming} over"
    return "warning", f"{text} {medians}"


def _growth(level: Level) -> Told | None:
    if not _is_growing(level):
        return None
    text = "Latency grew all the time: more arrives than the server can answer, the queue grows,"
    return "error", f"{text} and percentiles say how long was measured, nothing else."


def _is_growing(level: Level) -> bool:
    """Whether latency keeps growing; only for open loops at a constant rate."""
    is_flat = pacer.flat_rate(level.load) is not None
    return is_flat and steadiness.is_growing(level.windows)


def _imprecision(run: BenchRun, figures: Sequence[Figures]) -> Iterator[Finding]:
    """Report levels that ended before they were precise enough; the worst one sets the advice."""
    bounded: dict[int, float] = {}
    unbounded: list[int] = []
    for index in sorted(deciding_levels(run)) if run.precision_percent > 0 else ():
        level, measured = run.levels[index], figures[index].latency.get(run.statistic)
        if level.ending != "time" or _is_growing(level) or measured is None:
            continue
        error = 100 * measured.relative_error
        if measured.value > 0 and not math.isfinite(error):
            unbounded.append(index)
        elif measured.value > 0 and error > run.precision_percent:
            bounded[index] = error
    for index in bounded:
        yield Finding("warning", _wide_text(run, bounded), index)
    for index in unbounded:
        span = units.duration(max(run.levels[each].measured_s for each in unbounded))
        text = f"How high {run.statistic} may be cannot be said from {span}: measure longer."
        yield Finding("warning", text, index)


def _wide_text(run: BenchRun, errors: Mapping[int, float]) -> str:
    """Describe the relative errors of levels, in percent by their index."""
    lowest, highest = (units.number(each(errors.values())) for each in (min, max))
    known = f"±{highest} %" if lowest == highest else f"±{lowest} to ±{highest} %"
    spans_s = {index: run.levels[index].measured_s for index in errors}
    # The width of an interval shrinks with the square root of the time.
    needed_s = max(spans_s[i] * (errors[i] / run.precision_percent) ** 2 for i in errors)
    span = units.duration(max(spans_s.values()))
    text = f"{run.statistic} is known to {known} only: {span} were not"
    if needed_s > LONGEST_ADVICE_S:
        return f"{text} enough, by far; or something disturbs the server, or its machine."
    a_level = "" if len(errors) == 1 else " a level"
    # Rounded up to two significant digits.
    step = int(10 ** max(0, math.floor(math.log10(needed_s)) - 1))
    return f"{text} enough; about {math.ceil(needed_s / step) * step} s{a_level} would be."


def _too_few(run: BenchRun, figures: Sequence[Figures]) -> Iterator[Finding]:
    """Report percentiles with too few requests beyond them: their value is mostly chance."""
    answered = [row.num_good for row in figures if row.num_good]
    short: dict[str, list[int]] = {}
    for name, percent in PERCENTILES.items():
        needed = math.ceil(MIN_BEYOND / (1 - percent / 100) - 1e-6)
        if found := [num_good for num_good in answered if num_good < needed]:
            short[name] = found
            text = f"{name} comes from {_amount(found, len(figures))}; below {needed} it is mostly"
            if name == run.statistic:
                yield Finding("warning", f"{text} chance.")
    others = [name for name in short if name != run.statistic]
    if others:
        verb = "comes" if len(others) == 1 else "come"
        amount = _amount(short[others[-1]], len(figures))
        yield Finding("note", f"{units.listed(others)} {verb} from {amount}: mostly chance.")


def _amount(short: Sequence[int], num_levels: int) -> str:
    at = "" if num_levels == 1 else f" at {len(short)} of {num_levels} levels"
    if len(set(short)) > 1:
        return f"{min(short)} to {max(short)} good answers{at}"
    return f"{units.count(short[0], 'good answer')}{at}"


def _load_of_server(run: BenchRun, figures: Sequence[Figures]) -> Iterator[Finding]:
    """Report the headroom at the highest load that keeps the SLO."""
    kept = [i for i, level in enumerate(run.levels) if headline.level_outcome(run, level) == "kept"]
    if not kept:
        return
    index = max(kept, key=lambda i: (figures[i].throughput.value, -i))
    if (busiest := figures[index].busiest) is None:
        return
    name, percent = busiest
    verb = "were" if name == "instances" else "was"
    if percent >= CLOSE_TO_FULL_PERCENT:
        text = f"The SLO is kept, but {name} {verb} {percent:.0f} % busy: one traffic spike from"
        yield Finding("warning", f"{text} trouble.", index)
    elif percent <= HEADROOM_PERCENT:
        text = f"Headroom: the SLO is kept and {name} {verb} only {percent:.0f} % busy."
        yield Finding("note", text, index)
