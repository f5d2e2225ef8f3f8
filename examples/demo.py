"""The main job, for real: a trained model and an SLO in, a served version that keeps it out.

Trains a sentiment classifier on published reviews (`sentiment/prepare.py`), measures what it does
in PyTorch eager, asks for 1.6 times that with a p99 below 100 ms, has `penstock optimize` get there
without losing accuracy, serves what was committed and measures that. Run by `make demo`; a second
run with the same SLO goes on from the journal of the first.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fetch import FetchFailed
from rich.console import Console
from rich.table import Table
from sentiment.prepare import Prepared, prepare, write_original
from serving import ROOT, Server, penstock, show

MODEL = "examples.sentiment.model:factory"
# Whatever the machine: more than the original can, not more than the sequence can give.
FACTOR = 1.6
LATENCY = "p99 < 100 ms"
CLIENTS = 16
ACCURACY = "top1 drop <= 2 %"
BUDGET = "10m"
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
    original = write_original(FOLDER / "original").parent
    load = ["--concurrency", str(CLIENTS)]
    [before] = bench(console, original, prepared.requests, [load])
    slo = f"{LATENCY} at {max(10, round(FACTOR * before.per_s, -1)):.0f}/s"
    console.print(f"\n{before.per_s:.0f} answers/s at best. What is wanted: [bold]{slo}[/bold]")
    found = optimize(console, prepared, slo)
    loads = [load, ["--slo", slo]]
    after, promised = bench(console, FOLDER / "models", prepared.requests, loads)
    console.print(table(slo, before, after, promised, found))
    console.print(found["headline"], highlight=False)
    page = os.path.relpath(PAGE, Path.cwd())
    console.print(f"What was tried, and why: {page}   ({time.monotonic() - began:.0f} s in all)")
    # In slo mode some of what nobody could answer in time is refused; that is no failure.
    if not promised.per_s:
        raise SystemExit("the version that was committed answers nothing")


def optimize(console: Console, prepared: Prepared, slo: str) -> dict[str, Any]:
    """What `penstock optimize --json` wrote; SystemExit when there is no version to serve."""
    path = FOLDER / "optimization.json"
    data = ["--data", os.path.relpath(prepared.reviews, ROOT), "--labels", "label"]
    wishes = ["--slo", slo, "--accuracy", ACCURACY, "--price", PRICE, "--budget", BUDGET]
    place = ["--out", os.path.relpath(FOLDER / "models", ROOT), "--name", "sentiment"]
    arguments = ["optimize", MODEL, *data, *wishes, *place, "--duration", "6s"]
    show(console, arguments)
    status = penstock([*arguments, "--html", str(PAGE), "--json", str(path)])
    if status not in (KEPT, BEST_EFFORT):
        raise SystemExit(f"penstock optimize ended with {status}: there is no version to serve")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def bench(
    console: Console, repository: Path, data: str, loads: Sequence[Sequence[str]]
) -> list[Measured]:
    """Each load in turn, through one server."""
    path = FOLDER / "bench.json"
    found = []
    with Server(console, repository) as server:
        target = f"http://{server.address}/v2/models/sentiment"
        for load in loads:
            arguments = ["bench", target, "--data", data, *load, "--duration", "6s"]
            show(console, arguments)
            if status := penstock([*arguments, "--json", str(path)]):
                raise SystemExit(f"penstock bench ended with {status}")
            found.append(measured(json.loads(path.read_text())))
    return found


def measured(run: dict[str, Any]) -> Measured:
    [level] = run["levels"]
    summary = level["summary"]
    latencies = summary["latency_ms"]
    return Measured(
        latencies["p50"]["value"],
        latencies["p99"]["value"],
        summary["throughput_per_s"]["value"],
        summary["num_failed"],
        (run.get("verdict") or {}).get("slo", ""),
    )


def table(
    slo: str, before: Measured, after: Measured, promised: Measured, found: dict[str, Any]
) -> Table:
    """Before and after with clients that never pause, and under the load of the SLO."""
    held_out = found["held_out"] or {}
    result = Table(title=slo)
    load = slo.rpartition(" at ")[2]
    columns = (f"answers/s, {CLIENTS} clients", "p99", f"p99 at {load}", "SLO", "accuracy")
    for column in ("", *columns):
        result.add_column(column, justify="right" if column else "left")
    first = (found["before"] or {}).get("p99", {}).get("value")
    overloaded_ms = None if first is None else 1e3 * first
    verdicts = [each["outcome"] for each in (found["before"] or {}).get("verdicts", [])]
    kept = "kept" if verdicts and set(verdicts) == {"kept"} else "missed"
    rows = (
        ("PyTorch eager", before, overloaded_ms, kept, "original"),
        ("optimised", after, promised.p99_ms, promised.verdict, "candidate"),
    )
    for name, each, p99_ms, verdict, key in rows:
        accuracy = f"{held_out[key]:.1%}" if key in held_out else "-"
        figures = [f"{each.per_s:.0f}", milliseconds(each.p99_ms), milliseconds(p99_ms)]
        result.add_row(name, *figures, verdict, accuracy)
    return result


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} ms"


if __name__ == "__main__":
    main()
