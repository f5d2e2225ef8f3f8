"""Contenders measured as users start them: `penstock serve`, `bench --max-rate`, `optimize`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from serving import Server, penstock, show

from optimizing import FOLDER, RESULTS, ROOT
from optimizing.cases import Case, relative
from penstock import pbtxt, repository

MET, MISSED, REFUSED = 0, 2, 3
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


def optimized(
    console: Console, case: Case, *, is_exhaustive: bool, duration: str
) -> dict[str, Any]:
    """What `penstock optimize --json` found; its version is in `repository_of(case)`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{case.name}.json"
    arguments = ["optimize", case.model, "--data", relative(case.data)]
    arguments += ["--labels", case.labels] if case.labels else []
    arguments += ["--slo", case.slo, "--accuracy", case.accuracy]
    arguments += ["--out", relative(repository_of(case)), "--name", case.name]
    arguments += ["--duration", duration] + ["--exhaustive"] * is_exhaustive
    show(console, arguments)
    page = FOLDER / f"{case.name}.html"
    status = penstock([*arguments, "--html", str(page), "--json", str(path)])
    if status not in (MET, MISSED, REFUSED):
        raise SystemExit(f"penstock optimize ended with {status}")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def repository_of(case: Case) -> Path:
    return FOLDER / case.name / "models"


def max_rate(contender: Contender, case: Case, duration: str) -> float:
    """The highest Poisson rate at which the case's latency terms hold, served."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / "max_rate.json"
    with Server(Console(quiet=True), contender.repository) as server:
        target = f"http://{server.address}/v2/models/{case.name}"
        wishes = ["--slo", case.latency, "--max-rate", "--duration", duration, "--json", str(path)]
        command = ["bench", target, "--data", str(case.requests), *wishes]
        ended = subprocess.run(
            [sys.executable, "-m", "penstock", *command], cwd=ROOT, capture_output=True, text=True
        )
    if ended.returncode:
        raise SystemExit(f"{contender.name}: penstock bench: {ended.stderr or ended.stdout}")
    found = json.loads(path.read_text())["max_rate"]
    return float(found["rate"]["value"] or 0.0)


def interleaved(
    contenders: Sequence[Contender], case: Case, rounds: int, duration: str
) -> dict[str, list[float]]:
    """Highest rates by name, every round each contender once."""
    rates: dict[str, list[float]] = {each.name: [] for each in contenders}
    for number in range(rounds):
        for each in contenders:
            rate = max_rate(each, case, duration)
            rates[each.name].append(rate)
            print(f"round {number + 1}: {each.name}: {rate:.1f}/s", flush=True)
    return rates


def shapes() -> list[tuple[int, int]]:
    """Instances and threads of each that fill the machine, and one more that shares it."""
    cores = os.cpu_count() or 1
    splits = {(count, cores // count) for count in range(1, cores + 1) if cores % count == 0}
    return sorted(splits | {(2, cores)})


def shaped(model: Path, target: Path, shape: tuple[int, int], max_batch: int | None = None) -> Path:
    """A copy of a model's folder with other instances, threads and largest batch, in a repository
    at `target`."""
    [config] = repository.read(model).configs
    shutil.rmtree(target, ignore_errors=True)
    copied = target / model.name
    shutil.copytree(model, copied)
    key = THREADS[config.backend]
    changed = dataclasses.replace(
        config, num_instances=shape[0], options={**config.options, key: str(shape[1])}
    )
    if max_batch is not None and config.max_batch_size:
        batching = dataclasses.replace(changed.batching, max_batch_size=max_batch)
        changed = dataclasses.replace(changed, max_batch_size=max_batch, batching=batching)
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
    versions = {each: importlib.metadata.version(each) for each in ("penstock", "onnxruntime")}
    machine = {"cores": os.cpu_count(), "system": platform.platform(), "versions": versions}
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine, **record}, indent=1) + "\n")
    return path
