"""The figures in the evidence of a version, for lists and comparisons. Pure.

Evidence is an open JSON object: a figure that is missing or has another form is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock import units

Evidence = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class FigureKind:
    """A figure: its name, its unit, and its path in the evidence."""

    name: str
    unit: str
    path: tuple[str, ...]

    def find(self, evidence: Evidence) -> float | None:
        return _number(_at(evidence, *self.path))


P99 = FigureKind("p99", "s", ("measured", "p99", "value"))
THROUGHPUT = FigureKind("throughput", "/s", ("measured", "throughput", "value"))
MAX_RATE = FigureKind("max rate", "/s", ("measured", "max_rate", "value"))
ACCURACY = FigureKind("accuracy", "", ("accuracy", "candidate"))
MEMORY = FigureKind("memory", "bytes", ("measured", "memory_bytes"))
COST = FigureKind("cost per million", "", ("measured", "cost_per_million"))
KINDS = (
    FigureKind("p50", "s", ("measured", "p50", "value")),
    P99,
    FigureKind("TTFT p99", "s", ("measured", "streams", "ttft", "value")),
    FigureKind("TPOT p99", "s", ("measured", "streams", "tpot", "value")),
    THROUGHPUT,
    FigureKind("tokens/s", "/s", ("measured", "streams", "tokens_per_s")),
    MAX_RATE,
    ACCURACY,
    MEMORY,
    FigureKind("GPU memory", "bytes", ("gpu_memory_bytes",)),
    COST,
)


def text_at(evidence: Evidence, *path: str) -> str:
    """Return the text at a path; empty if there is none."""
    found = _at(evidence, *path)
    return found if isinstance(found, str) else ""


def steps_of(evidence: Evidence) -> list[str]:
    """Return the steps of the optimisation: `int8(granularity=tensor)`."""
    steps = _at(evidence, "lineage", "steps")
    return [_step(each) for each in steps] if isinstance(steps, list) else []


def hardware_of(evidence: Evidence) -> str:
    """Return the machine in a few words: `EPYC 9354, 16 cores, 2 x H200`."""
    num_cores = _number(_at(evidence, "hardware", "num_cores"))
    cores = "" if num_cores is None else units.count(round(num_cores), "core")
    gpus = _at(evidence, "hardware", "gpus")
    names = sorted(map(str, gpus)) if isinstance(gpus, list) else []
    counted = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return ", ".join(filter(None, [text_at(evidence, "hardware", "cpu"), cores, *counted]))


def _step(step: object) -> str:
    if not isinstance(step, Mapping):
        return str(step)
    settings = step.get("settings")
    listed = ""
    if isinstance(settings, Mapping):
        listed = ", ".join(f"{key}={value}" for key, value in settings.items())
    name = str(step.get("pass", ""))
    return f"{name}({listed})" if listed else name


def _at(evidence: object, *path: str) -> object:
    for key in path:
        evidence = evidence.get(key) if isinstance(evidence, Mapping) else None
    return evidence


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and isinstance(value, int | float) else None
