"""Every try in text form: its outcome and reason, and the result of each gate. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock import units
from penstock.optimizer import wording
from penstock.optimizer.accuracy import Judgement
from penstock.optimizer.candidates import STAGES, Stage
from penstock.optimizer.facts import Facts
from penstock.optimizer.first_line import chosen_try
from penstock.optimizer.numerics import Numerics
from penstock.optimizer.results import Optimization, ServedMeasurement, Try
from penstock.optimizer.simulate import TimeTable

# Operator types that are listed; the rest are counted.
MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A try in words; `step` is the one it adds to its parent, `gates` the result of each gate."""

    step: str
    accuracy: str
    rate: str
    p99: str
    took: str
    is_chosen: bool
    gates: Mapping[str, str]
    attempt: Try


def by_stage(optimization: Optimization) -> list[tuple[Stage, list[StepOutcome]]]:
    """Return the tries by stage, in search order; stages without a try are left out."""
    chosen = chosen_try(optimization)
    counts = Counter(wording.last_step(each.candidate) for each in optimization.tries)
    groups: dict[Stage, list[StepOutcome]] = {stage: [] for stage in STAGES}
    for each in optimization.tries:
        last, judged, served = wording.last_step(each.candidate), each.accuracy, each.served
        outcome = StepOutcome(
            # If several candidates end with the same step, show all steps.
            step=last if counts[last] == 1 else str(each.candidate),
            accuracy=wording.score(judged.metric, judged.candidate) if judged else units.UNKNOWN,
            rate=rate_text(each),
            p99=units.UNKNOWN if served is None else wording.latency(served.p99.value),
            took=wording.span(each.seconds),
            is_chosen=each is chosen,
            gates=dict(_gates(each)),
            attempt=each,
        )
        groups[each.stage].append(outcome)
    return [(stage, found) for stage, found in groups.items() if found]


def rate_text(attempt: Try) -> str:
    """Return the highest rate: measured, else predicted and marked as approximate."""
    if attempt.served is not None and attempt.served.max_rate is not None:
        return f"{units.number(attempt.served.max_rate.value)}/s"
    if attempt.predicted_rate is not None:
        return f"≈ {units.number(attempt.predicted_rate)}/s"
    return units.UNKNOWN


def _gates(attempt: Try) -> Iterator[tuple[str, str]]:
    """Yield the results in the order of the gates."""
    if attempt.facts is not None:
        yield "read back", read_back(attempt.facts)
    if attempt.numerics is not None:
        yield "numerics", numerics_text(attempt.numerics)
    if attempt.accuracy is not None:
        yield "accuracy", accuracy_text(attempt.accuracy)
    if attempt.times:
        yield "batch times", "; ".join(map(times_text, attempt.times))
    if attempt.predicted_rate is not None:
        shape = f" with {attempt.predicted_shape}" if attempt.predicted_shape else ""
        yield "predicted", f"{units.number(attempt.predicted_rate)}/s{shape}"
    if attempt.served is not None:
        yield "served", _served_text(attempt.served)


def read_back(facts: Facts) -> str:
    """Describe what was really built."""
    parts = [facts.backend]
    if facts.weight_bytes:
        sizes = [f"{units.size(size)} {name}" for name, size in facts.weight_bytes.items()]
        parts.append(f"weights {', '.join(sizes)}")
    if facts.quantised:
        parts.append(f"quantised: {_counts(facts.quantised)}")
    parts += [f"{name} {text}" for name, text in facts.built.items()]
    if facts.batching_problem:
        parts.append(f"not batched: {facts.batching_problem}")
    if facts.padding_problem:
        parts.append(f"not padded: {facts.padding_problem}")
    return "; ".join(parts)


def _counts(counts: Mapping[str, int]) -> str:
    listed = sorted(counts.items(), key=lambda each: -each[1])
    words = [f"{number} {name}" for name, number in listed[:MAX_LISTED]]
    rest = sum(number for _, number in listed[MAX_LISTED:])
    return ", ".join([*words, *([f"{rest} others"] if rest else [])])


def numerics_text(found: Numerics) -> str:
    if found.problems:
        return "; ".join(found.problems)
    parts = [
        units.count(found.num_examples, "example"),
        f"largest difference {found.max_absolute:.2g} ({found.max_relative:.2g} of a column's"
        " range)",
        f"least cosine {found.min_cosine:.6f}",
    ]
    if found.agreement is not None:
        parts.append(f"same first choice in {100 * found.agreement:.4g} %")
    return ", ".join(parts)


def accuracy_text(found: Judgement) -> str:
    """Return the gate's text and the data behind its decision."""
    said = found.text or wording.accuracy(found)
    examples = f"{units.count(found.num_examples, 'example')} ({found.part})"
    pairs = f"better on {found.num_better}, worse on {found.num_worse}"
    return f"{said}; {examples}, {pairs}; {found.method}"


def times_text(table: TimeTable) -> str:
    """Format `2 instances x 1 thread: 1 row 4.00 ms, 8 rows 20.8 ms`."""
    instances = units.count(table.num_instances, "instance")
    head = f"{instances} x {units.count(table.num_threads, 'thread')}"
    buckets = [
        (f"length {bucket}: " if bucket else "")
        + ", ".join(f"{units.count(rows, 'row')} {units.duration(s)}" for rows, s in times.items())
        for bucket, times in table.seconds.items()
    ]
    return f"{head}: {', '.join(buckets)}"


def _served_text(served: ServedMeasurement) -> str:
    terms = [f"{wording.term(each)}: {each.outcome}" for each in served.verdicts]
    failed = f", {served.num_failed} failed" if served.num_failed else ""
    parts = [
        f"{units.count(served.num_requests, 'request')} at {served.load}{failed}",
        f"p50 {wording.latency_interval(served.p50)}",
        f"p99 {wording.latency_interval(served.p99)}",
    ]
    if not math.isnan(served.rows_per_batch):
        parts.append(f"{units.number(served.rows_per_batch)} rows a batch")
    if served.streams is not None:
        parts.append(f"{units.number(served.streams.tokens_per_s)} tokens/s")
    return "; ".join([*parts, *terms])
