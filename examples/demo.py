"""The main job, for real: a trained model and an SLO in, a served version that keeps it out.

Trains a sentiment classifier on published reviews (`sentiment/prepare.py`), has `penstock optimize`
take it from PyTorch eager to an SLO without losing accuracy, serves what was committed, and
measures the original and the result with `penstock bench` under the load of the SLO. Run by `make
demo`; a second run goes on from the journal of the first.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fetch import FetchFailed
from rich.console import Console
from rich.table import Table
from sentiment.prepare import Prepared, prepare, write_original
from serving import ROOT, Server, penstock, show

MODEL = "examples.sentiment.model:factory"
# By batch times in process, two cores with VNNI, in the mix of lengths: eager would reach about
# 140/s, INT8 on two instances about 460/s.
SLO = "p99 < 100 ms at 200/s"
ACCURACY = "top1 drop <= 2 %"
BUDGET = "5m"
PRICE = "0.10"  # of two cores, per hour
FOLDER = ROOT / ".bench" / "demo"
PAGE = ROOT / "demo.html"
KEPT, BEST_EFFORT = 0, 2


@dataclass(frozen=True, slots=True)
class Measured:
    """What users of a served model saw."""

    p50_ms: float | None
    p99_ms: float | None
    per_s: float
    num_failed: int
    verdict: str


def main() -> None:
    began = time.monotonic()
    console = Console()
    try:
        prepared = prepare()
    except FetchFailed as error:
        raise SystemExit(str(error)) from None
    console.print(
        f"A sentiment classifier: MiniLM with a head trained on {prepared.num_training:,} reviews, "
        f"{prepared.top1:.1%} of {prepared.num_held_out:,} held-out ones right."
    )
    FOLDER.mkdir(parents=True, exist_ok=True)
    found = optimize(console, prepared)
    original = write_original(FOLDER / "original").parent
    before = bench(console, original, prepared.requests, "before")
    after = bench(console, FOLDER / "models", prepared.requests, "after")
    console.print(table(before, after, found))
    console.print(found["headline"], highlight=False)
    page = os.path.relpath(PAGE, Path.cwd())
    console.print(f"What was tried, and why: {page}   ({time.monotonic() - began:.0f} s in all)")
    if after.num_failed:
        raise SystemExit(f"{after.num_failed} requests failed")


def optimize(console: Console, prepared: Prepared) -> dict[str, Any]:
    """What `penstock optimize --json` wrote; SystemExit when there is no version to serve."""
    path = FOLDER / "optimization.json"
    data = ["--data", os.path.relpath(prepared.reviews, ROOT), "--labels", "label"]
    wishes = ["--slo", SLO, "--accuracy", ACCURACY, "--price", PRICE, "--budget", BUDGET]
    place = ["--out", os.path.relpath(FOLDER / "models", ROOT), "--name", "sentiment"]
    arguments = ["optimize", MODEL, *data, *wishes, *place, "--duration", "6s"]
    show(console, arguments)
    status = penstock([*arguments, "--html", str(PAGE), "--json", str(path)])
    if status not in (KEPT, BEST_EFFORT):
        raise SystemExit(f"penstock optimize ended with {status}: there is no version to serve")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def bench(console: Console, repository: Path, data: str, name: str) -> Measured:
    """Under the load of the SLO, through a server of its own."""
    path = FOLDER / f"{name}.json"
    with Server(console, repository) as server:
        target = f"http://{server.address}/v2/models/sentiment"
        arguments = ["bench", target, "--data", data, "--slo", SLO, "--duration", "8s"]
        show(console, arguments)
        status = penstock([*arguments, "--json", str(path)])
    if status:
        raise SystemExit(f"penstock bench ended with {status}")
    return measured(json.loads(path.read_text()))


def measured(run: dict[str, Any]) -> Measured:
    [level] = run["levels"]
    summary = level["summary"]
    latencies = summary["latency_ms"]
    return Measured(
        latencies["p50"]["value"],
        latencies["p99"]["value"],
        summary["throughput_per_s"]["value"],
        summary["num_failed"],
        run["verdict"]["slo"],
    )


def table(before: Measured, after: Measured, found: dict[str, Any]) -> Table:
    held_out = found["held_out"] or {}
    result = Table(title=SLO)
    for column in ("", "p50", "p99", "answers/s", "SLO", "accuracy"):
        result.add_column(column, justify="right" if column else "left")
    rows = (("PyTorch eager", before, "original"), ("optimised", after, "candidate"))
    for name, each, key in rows:
        accuracy = f"{held_out[key]:.1%}" if key in held_out else "-"
        figures = [milliseconds(each.p50_ms), milliseconds(each.p99_ms), f"{each.per_s:.0f}"]
        result.add_row(name, *figures, each.verdict, accuracy)
    return result


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} ms"


if __name__ == "__main__":
    main()
