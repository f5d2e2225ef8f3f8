"""What was measured: raw runs, their medians per point, and the goals held against them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Part = Literal["binary", "json"]
PENSTOCK = "penstock"
BUSY = 0.1  # share of the machine that other programs may take without disturbing a run
PARTS: dict[Part, str] = {
    "binary": "Binary tensors over HTTP (KServe v2 with the binary extension)",
    "json": "JSON in, JSON out",
}


@dataclass(frozen=True, slots=True)
class Run:
    server: str
    variant: str
    part: Part
    model: str
    connections: int
    round: int
    num_requests: int
    requests_per_s: float
    p50_us: float
    p90_us: float
    p99_us: float
    max_us: float
    cpu_us: float  # user and system time of the server's processes, per request
    num_checked: int  # answers compared in the checked run before this one
    generator_share: float  # of all cores, taken by wrk
    other_share: float  # of all cores, taken by anything that is neither server nor wrk


@dataclass(frozen=True, slots=True)
class Failure:
    """A run with errors or wrong answers. One of them fails the benchmark."""

    server: str
    variant: str
    part: Part
    model: str
    connections: int
    reason: str


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that is kept.

    missing: servers that could not run, and why. disturbed: runs beside busy other programs that
    were done again; they count for nothing.
    """

    machine: dict[str, str]
    settings: dict[str, str]
    titles: dict[str, str]
    notes: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    disturbed: list[Run] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        saved = json.loads(path.read_text())
        for name in ("runs", "disturbed"):
            saved[name] = [Run(**run) for run in saved[name]]
        saved["failures"] = [Failure(**failure) for failure in saved["failures"]]
        return cls(**saved)


@dataclass(frozen=True, slots=True)
class Point:
    """Medians over the rounds of one variant of a server under one load."""

    server: str
    variant: str
    part: Part
    model: str
    connections: int
    num_runs: int
    requests_per_s: float
    slowest: float
    fastest: float
    p50_us: float
    p99_us: float
    cpu_us: float


def summarise(runs: Sequence[Run]) -> Point:
    first = runs[0]
    rates = [run.requests_per_s for run in runs]
    return Point(
        first.server,
        first.variant,
        first.part,
        first.model,
        first.connections,
        num_runs=len(runs),
        requests_per_s=statistics.median(rates),
        slowest=min(rates),
        fastest=max(rates),
        p50_us=statistics.median(run.p50_us for run in runs),
        p99_us=statistics.median(run.p99_us for run in runs),
        cpu_us=statistics.median(run.cpu_us for run in runs),
    )


def all_points(runs: Iterable[Run]) -> list[Point]:
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        key = (run.server, run.variant, run.part, run.model, run.connections)
        groups.setdefault(key, []).append(run)
    return [summarise(group) for group in groups.values()]


def best_points(runs: Iterable[Run]) -> list[Point]:
    """Per server and load, the variant with the most requests/s among those run in all rounds."""
    best: dict[tuple[object, ...], Point] = {}
    for point in all_points(runs):
        key = (point.part, point.model, point.connections, point.server)
        known = best.get(key)
        rank = (point.num_runs, point.requests_per_s)
        if known is None or rank > (known.num_runs, known.requests_per_s):
            best[key] = point
    return list(best.values())


def contenders(runs: Iterable[Run], margin: float) -> set[tuple[str, str, str]]:
    """(server, variant, model) that lead at some load, or are within the margin of the leader."""
    points = all_points(runs)
    top: dict[tuple[str, Part, str, int], float] = {}
    for point in points:
        load = (point.server, point.part, point.model, point.connections)
        top[load] = max(top.get(load, 0.0), point.requests_per_s)
    return {
        (point.server, point.variant, point.model)
        for point in points
        if point.requests_per_s
        >= (1 - margin) * top[point.server, point.part, point.model, point.connections]
    }


@dataclass(frozen=True, slots=True)
class Goal:
    rival: str
    part: Part
    model: str
    connections: int
    measure: Literal["requests_per_s", "p50_us"]
    bound: float  # of Penstock's figure divided by the rival's

    @property
    def text(self) -> str:
        kind = "requests/s at least" if self.measure == "requests_per_s" else "p50 at most"
        load = f"{self.connections} connection{'s' if self.connections > 1 else ''}"
        return f"{self.model}, {self.part}, {load}: {kind} {self.bound}x"

    def ratio(self, points: Iterable[Point]) -> float | None:
        """None when one of the two was not measured."""
        wanted = (self.part, self.model, self.connections)
        figures = {
            point.server: float(getattr(point, self.measure))
            for point in points
            if (point.part, point.model, point.connections) == wanted
        }
        if PENSTOCK not in figures or self.rival not in figures:
            return None
        return figures[PENSTOCK] / figures[self.rival]

    def is_met(self, ratio: float) -> bool:
        return ratio >= self.bound if self.measure == "requests_per_s" else ratio <= self.bound


GOALS = (
    Goal("triton", "binary", "identity", 64, "requests_per_s", 2.5),
    Goal("triton", "binary", "identity", 1, "p50_us", 0.7),
    *(
        Goal(rival, "json", model, 64, "requests_per_s", 10)
        for model in ("identity", "digits")
        for rival in ("mlserver", "litserve", "bentoml")
    ),
)
