"""Contenders measured as users start them: `penstock optimize`, `penstock serve` with the bench."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from serving import penstock, show

from optimizing import FOLDER, RESULTS
from optimizing.cases import Case, relative
from penstock.benchmark import plan as bench
from penstock.benchmark.pacer import Flat, Open
from penstock.benchmark.targets import TargetSpec
from penstock.config import SLO_OFF
from penstock.data import InputSpec
from penstock.optimizer import plan_file, served
from penstock.optimizer.candidates import Build, Candidate
from penstock.optimizer.endpoints import Servers, patience_s
from penstock.optimizer.examples import open_examples
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import Curve
from penstock.optimizer.simulate import Row
from penstock.optimizer.subject import open_subject
from penstock.optimizer.this_machine import read_machine
from penstock.optimizer.time_plan import SEARCH_S, MeasurementLimits
from penstock.repository import layout, pbtxt
from penstock.slo import parse

MET, MISSED, REFUSED = 0, 2, 3
ANY_LATENCY = "throughput >= 1/s"
IN_TIME = 0.99
THREADS = {
    "onnxruntime": "intra_op_thread_count",
    "pytorch": "intra_op_thread_count",
    "openvino": "inference_num_threads",
}


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    # A repository with the case's model in it.
    repository: Path


@dataclass(frozen=True, slots=True)
class Rate:
    """The highest that keeps the latency terms; 0: none does."""

    per_s: float
    # Served runs at one load each, that it took to find it.
    num_runs: int


def optimized(
    console: Console, case: Case, *, is_exhaustive: bool, duration: str, budget: str = ""
) -> dict[str, Any]:
    """What `penstock optimize --json` found; its version is in `repository_of(case)`. Without a
    budget it takes as long as it takes."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{case.name}.json"
    arguments = ["optimize", case.model, "--data", relative(case.data)]
    arguments += ["--labels", case.labels] if case.labels else []
    arguments += ["--slo", case.slo, "--accuracy", case.accuracy]
    arguments += ["--out", relative(repository_of(case)), "--name", case.name]
    arguments += ["--duration", duration] + ["--exhaustive"] * is_exhaustive
    arguments += ["--budget", budget] if budget else []
    show(console, arguments)
    page = FOLDER / f"{case.name}.html"
    status = penstock([*arguments, "--html", str(page), "--json", str(path)])
    if status not in (MET, MISSED, REFUSED):
        raise SystemExit(f"penstock optimize ended with {status}")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def repository_of(case: Case) -> Path:
    return FOLDER / case.name / "models"


def max_rates(
    contenders: Sequence[Contender],
    case: Case,
    duration: str,
    search_s: float = SEARCH_S,
) -> list[Rate]:
    """The highest Poisson rate of each at which the case's latency terms hold, served and searched
    in turns, about `search_s` each."""
    return _max_rates(contenders, case, case.latency, duration, search_s)


def most(contender: Contender, case: Case, duration: str) -> Rate:
    """What it answers a second when it never has to wait for requests, however late: no rate that
    keeps a latency is higher."""
    [rate] = _max_rates([contender], case, ANY_LATENCY, duration, SEARCH_S)
    return rate


def _max_rates(
    contenders: Sequence[Contender], case: Case, slo: str, duration: str, search_s: float
) -> list[Rate]:
    plan = _plan(case, slo, duration)
    builds = _builds(contenders, case)
    with tempfile.TemporaryDirectory() as scratch:
        rows = _rows(plan, open_subject(plan, Path(scratch) / case.name).build)
    rates = [
        (each.max_rate, each.curve) for each in _bench(plan, rows, search_s).with_rates(builds)
    ]
    return [
        Rate(0.0 if rate is None or math.isnan(rate.value) else rate.value, num_runs_of(curve))
        for rate, curve in rates
    ]


def _bench(plan: Plan, rows: Sequence[Row], search_s: float = SEARCH_S) -> served.ServedBench:
    limits = MeasurementLimits(search_s=search_s)
    return served.ServedBench(plan, rows, lambda doing: None, limits=limits)


def _builds(contenders: Sequence[Contender], case: Case) -> list[Build]:
    folders = [each.repository / case.name for each in contenders]
    return [Build(Candidate(), each, layout.read(each).configs[-1]) for each in folders]


def num_runs_of(curve: Curve | None) -> int:
    """Of a search: its probe, and its rates."""
    return 1 + (len(curve.rates) if curve else 0)


def saturated(case: Case, duration: str) -> float:
    """What the original answers a second, as the optimiser would serve it at first, when it never
    has to wait for requests."""
    plan = _plan(case, ANY_LATENCY, duration)
    with tempfile.TemporaryDirectory() as scratch:
        build = open_subject(plan, Path(scratch) / case.name).build
        [found] = _bench(plan, _rows(plan, build)).with_rates([build])
    assert found.max_rate is not None
    return found.max_rate.value


def _plan(case: Case, slo: str, duration: str) -> Plan:
    wishes = {"model": case.model, "name": case.name, "data": str(case.data), "slo": slo}
    wishes |= {"out": str(FOLDER), "duration": duration}
    return plan_file.make_plan(wishes | ({"labels": case.labels} if case.labels else {}))


def _rows(plan: Plan, original: Build) -> Sequence[Row]:
    """What is sent, in the form that the original takes: builds may take batches where it cannot,
    and are sent the same rows in theirs."""
    config = original.config
    return open_examples(plan, config.inputs, config.max_batch_size > 0).rows


def interleaved(
    contenders: Sequence[Contender],
    case: Case,
    rounds: int,
    duration: str,
    search_s: float = SEARCH_S,
) -> dict[str, list[float]]:
    """Highest rates by name, every round each contender once."""
    rates: dict[str, list[float]] = {each.name: [] for each in contenders}
    for number in range(rounds):
        found = max_rates(contenders, case, duration, search_s)
        for each, rate in zip(contenders, found, strict=True):
            rates[each.name].append(rate.per_s)
            print(f"round {number + 1}: {each.name}: {rate.per_s:.1f}/s", flush=True)
    return rates


@dataclass(frozen=True, slots=True)
class Duel:
    """Contenders at the same rates, one right after the other, round by round: by name and rate the
    share of requests that kept the latency, one for each round. What disturbs the machine for a
    while meets all of them, and less than half of the rounds."""

    rates: Sequence[float]
    shares: dict[str, list[list[float]]]

    def kept(self, name: str) -> float:
        """The highest rate at which 99 % keep it in half of the rounds; 0: none."""
        highest = 0.0
        for number, rate in enumerate(self.rates):
            share = statistics.median(self.shares[name][number])
            if share < IN_TIME:
                return highest and self._between(name, number)
            highest = rate
        return highest

    def _between(self, name: str, number: int) -> float:
        """Where the line from the last rate that is kept to the first that is not crosses it."""
        last, first = (statistics.median(self.shares[name][each]) for each in (number - 1, number))
        part = (last - IN_TIME) / (last - first)
        return self.rates[number - 1] + part * (self.rates[number] - self.rates[number - 1])


def duel(
    contenders: Sequence[Contender],
    case: Case,
    rates: Sequence[float],
    rounds: int,
    duration_s: float,
) -> Duel:
    """All are up all the time; whoever is not asked sleeps."""
    plan = _plan(case, case.latency, f"{duration_s:g}s")
    builds = _builds(contenders, case)
    with tempfile.TemporaryDirectory() as scratch:
        rows = _rows(plan, open_subject(plan, Path(scratch) / case.name).build)
    shares = {each.name: [[] for _ in rates] for each in contenders}
    servers = Servers()
    try:
        endpoints = servers.open(builds, rows)
        for turn in range(rounds):
            for number, rate in enumerate(rates):
                pairs = list(zip(contenders, endpoints, strict=True))
                # Nobody is always the first.
                for each, endpoint in pairs if turn % 2 else reversed(pairs):
                    asked = bench.BenchPlan(
                        TargetSpec(endpoint.address, timeout_s=patience_s(plan.slo.latency_s)),
                        InputSpec(path=endpoint.data, seed=plan.seed),
                        (Open(Flat(rate)),),
                        slo=plan.slo,
                        duration_s=duration_s,
                        max_warm_up_s=0.5,
                        seed=turn,
                    )
                    windows = endpoint.measured(asked, lambda doing: None).levels[0].windows
                    due = sum(window.num_due for window in windows)
                    kept = sum(window.num_in_slo or 0 for window in windows)
                    shares[each.name][number].append(kept / due if due else 0.0)
            print(f"round {turn + 1} of {rounds}", flush=True)
    finally:
        servers.close()
    return Duel(rates, shares)


def shapes() -> list[tuple[int, int]]:
    """Instances and threads of each that fill the cores this process may use, and those that leave
    a core or half of them to the server and its clients."""
    cores = len(os.sched_getaffinity(0))
    found = {
        (count, used // count)
        for used in {cores, max(1, cores - 1), max(1, cores // 2)}
        for count in range(1, used + 1)
        if used % count == 0
    }
    return sorted(found | {(1, 1)})


@dataclass(frozen=True, slots=True)
class Shape:
    """How a model is served. Without a largest batch it stays as it was; `is_slo` lets the server
    batch by the SLO instead of Triton's rules."""

    num_instances: int
    num_threads: int
    max_batch: int | None = None
    is_slo: bool = False

    def __str__(self) -> str:
        batch = "" if self.max_batch is None else f", batch {self.max_batch}"
        return f"{self.num_instances} x {self.num_threads}{batch}{', by SLO' * self.is_slo}"


def shaped(model: Path, target: Path, shape: Shape, slo: str = "") -> Path:
    """A copy of a model's folder, served so, in a repository at `target`."""
    [config] = layout.read(model).configs
    shutil.rmtree(target, ignore_errors=True)
    copied = target / model.name
    shutil.copytree(model, copied)
    key = THREADS[config.backend]
    changed = dataclasses.replace(
        config,
        num_instances=shape.num_instances,
        options={**config.options, key: str(shape.num_threads)},
        slo=slo if shape.is_slo else SLO_OFF,
    )
    if shape.max_batch is not None and config.max_batch_size:
        batching = dataclasses.replace(
            changed.batching,
            max_batch_size=shape.max_batch,
            slo_latency_s=parse(slo).latency_s if shape.is_slo else None,
        )
        changed = dataclasses.replace(changed, max_batch_size=shape.max_batch, batching=batching)
    (copied / "config.pbtxt").write_text(pbtxt.write(changed))
    return target


def tries(found: dict[str, Any]) -> Table:
    """Everything that was tried, and why it was kept or not."""
    table = Table(title=f"{found['name']}: {found['source_text']}; {found['slo']}")
    for column in ("stage", "candidate", "outcome", "why"):
        table.add_column(column, overflow="fold")
    for each in found["tries"]:
        table.add_row(each["stage"], steps_text(each["candidate"]), each["outcome"], each["reason"])
    for each in found["skipped"]:
        table.add_row("", each["pass_name"], "skipped", each["reason"])
    return table


def steps_text(candidate: dict[str, Any] | None) -> str:
    if candidate is None:
        return "none"
    texts = []
    for step in candidate["steps"]:
        settings = ", ".join(f"{key}={value}" for key, value in step.get("settings", {}).items())
        texts.append(f"{step['pass_name']}({settings})" if settings else step["pass_name"])
    return " → ".join(texts) or "original"


def median_ratio(rates: dict[str, list[float]], name: str, base: str) -> float:
    """Of medians; NaN when the base kept the SLO at no rate: never infinity."""
    bottom = statistics.median(rates[base])
    return statistics.median(rates[name]) / bottom if bottom > 0 else float("nan")


def write(name: str, record: dict[str, Any]) -> Path:
    seen = read_machine()
    machine = {
        "cpu": seen.cpu,
        "cores": f"{seen.num_cores} of {os.cpu_count()}",
        "isa": seen.isa,
        "system": platform.platform(),
        "versions": seen.versions,
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine, **record}, indent=1) + "\n")
    return path
