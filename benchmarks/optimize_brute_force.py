"""Is the optimiser's choice the best there is: beside every combination, served and measured.

    python benchmarks/optimize_brute_force.py                     four models, hours
    python benchmarks/optimize_brute_force.py --models mnist_8    one of them
    taskset -c 2,3 python benchmarks/optimize_brute_force.py --cores 2,3 4,5 6,7 --search-seconds 30

Models, data, latencies and accuracy budgets are those of optimize_minilm and optimize_vision. The
rate that the optimiser is asked for is four times what the original answers when it never has to
wait for requests, more than any build gives here: whoever is asked for what can be had has no
reason to look for the highest rate. Brute force is every build that passed the gates (all passes,
one calibrator each, --exhaustive) times every instances x threads that fill the cores, or leave one
or half of them to the server and its clients, times batches of 1, and of at most 8 and 32 by
Triton's rules and by the SLO. Each is served: first it is asked what it answers when it never has
to wait for requests, which no rate that keeps a latency can exceed (what is batched by the SLO
counts as its twin by Triton's rules); then, the most promising first, for the highest rate that
keeps the SLO's latency, until what is left cannot come near the best that was found, 15 % given for
noise. Its two best and the version that the optimiser committed then meet at the same rates, one
right after the other, in rounds: what counts is the highest rate at which 99 % are in time in half
of the rounds. A search by itself says little on a machine that others disturb: the same combination
was found to differ by up to 2.7 times. With `--cores` the combinations are spread over these groups
of cores, each as many as this process has; all that is compared in turns runs on the cores of this
process. A search needs six or seven levels of about `--duration` and two seconds; one that is cut
short says less than is true, most of all of what is batched by the SLO.

Counted as measurements: served runs at one load each; the search for a rate is a probe and some
five to ten of them. The optimiser's are in its journal: the original, finalists, their rates, the
proof.

Goals: the optimiser's choice at least 0.95 of the best by brute force on every model, with at most
a quarter of its measurements.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import msgspec
from optimizing import FOLDER
from optimizing.cases import CASES, Case, fetch
from optimizing.measure import (
    Contender,
    Rate,
    Shape,
    duel,
    max_rates,
    most,
    num_runs_of,
    repository_of,
    saturated,
    shaped,
    shapes,
    steps_text,
    write,
)
from optimizing.measure import optimized as run_optimizer
from rich.console import Console
from rich.table import Table

from penstock.errors import PenstockError
from penstock.optimizer import journal
from penstock.optimizer.candidates import Candidate
from penstock.optimizer.results import ServedMeasurement
from penstock.optimizer.time_plan import SEARCH_S
from penstock.repository import layout

MODELS = ("sentiment_onnx", "mobilenet_v2", "mnist_8", "residual_traced")
# What makes another model's file; the other stages only change how it is served.
STAGES = ("baseline", "compile", "precision", "quantise")
PASSED = ("kept", "equal", "slower")
BATCHES = (1, 8, 32)
CALIBRATOR = re.compile(r"calibrator=\w+")
BEYOND = 4
NUM_BEST = 2
# Of the highest rate that was found.
FINAL_STEPS = (0.4, 0.55, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25)
# By how much noise may have lowered what somebody answers at most.
SLACK = 1.15
GOAL, SHARE_GOAL = 0.95, 0.25
# Of the journal.
SERVED = ("served", "served with rates", "proof", "proof with rates")

Cores = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One combination, in a repository of its own."""

    contender: Contender
    case: Case
    duration: str
    search_s: float
    # The same by Triton's rules, where this one is batched by the SLO.
    twin: str = ""


def builds(found: dict[str, Any], case: Case) -> dict[str, Path]:
    """The folder of every build that passed the gates, by what it is. Builds that differ only in
    their calibrator run the same operators, so one stands for all of them."""
    work = Path(found["work"])
    made: dict[str, Path] = {}
    known: set[str] = set()
    for each in found["tries"]:
        if each["stage"] not in STAGES or each["outcome"] not in PASSED:
            continue
        candidate = msgspec.convert(each["candidate"], Candidate)
        kind = CALIBRATOR.sub("", str(candidate))
        if kind in known:
            continue
        known.add(kind)
        place = f"builds/{candidate.key}" if candidate.steps else "original"
        folder = work / place / case.name
        if folder.is_dir():
            made[str(candidate)] = folder
        else:
            print(f"left out, its files are gone: {candidate}")
    return made


def combinations(
    made: dict[str, Path], sizes: Sequence[int]
) -> Iterator[tuple[str, Path, Shape, str]]:
    """Name, files, how they are served, and the name of the twin by Triton's rules."""
    for name, folder in made.items():
        [config] = layout.read(folder).configs
        batches: Sequence[int | None] = sizes if config.max_batch_size else (None,)
        for pair in shapes():
            for batch in batches:
                for is_slo in (False, True) if batch and batch > 1 else (False,):
                    shape = Shape(*pair, batch, is_slo)
                    twin = f"{name}, {Shape(*pair, batch)}" if is_slo else ""
                    yield f"{name}, {shape}", folder, shape, twin


def num_served(found: dict[str, Any]) -> int:
    """Served runs that the optimiser made, those of its searches for a rate among them."""
    count = 0
    for line in (Path(found["work"]) / journal.FILE).read_text().splitlines():
        record = json.loads(line)
        if record["kind"] not in SERVED:
            continue
        for each in msgspec.convert(record.get("value", []), list[ServedMeasurement]):
            count += each.num_runs + (0 if each.max_rate is None else num_runs_of(each.curve))
    return count


def saturated_at(point: Point) -> Rate:
    """What it answers at most; 0 for what cannot be served."""
    try:
        rate = most(point.contender, point.case, point.duration)
    except PenstockError as error:
        print(f"{point.contender.name}: not served: {error}", flush=True)
        return Rate(0.0, 0)
    print(f"{point.contender.name}: {rate.per_s:.1f}/s at most", flush=True)
    return rate


def searched(point: Point) -> Rate:
    """Its highest; 0 where it fails."""
    try:
        [rate] = max_rates([point.contender], point.case, point.duration, point.search_s)
    except PenstockError as error:
        print(f"{point.contender.name}: {error}", flush=True)
        return Rate(0.0, 0)
    print(f"{point.contender.name}: {rate.per_s:.1f}/s", flush=True)
    return rate


def take_cores(free: Queue[Cores]) -> None:
    os.sched_setaffinity(0, free.get())


@dataclass(slots=True)
class Found:
    """By name: what each answers at most, and the highest rates of those that could be the best."""

    most: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    num_runs: int = 0


def all_searched(points: Sequence[Point], groups: Sequence[Cores]) -> Found:
    """One combination at a time on each group of cores."""
    context = multiprocessing.get_context("spawn")
    free: Queue[Cores] = context.Queue()
    for cores in groups:
        free.put(cores)
    found = Found()
    with ProcessPoolExecutor(len(groups), context, take_cores, (free,)) as pool:
        own = [point for point in points if not point.twin]
        for point, rate in zip(own, pool.map(saturated_at, own), strict=True):
            found.most[point.contender.name] = rate.per_s
            found.num_runs += rate.num_runs
        for point in points:
            if point.twin:
                # One whose twin cannot be served is looked at all the same.
                found.most[point.contender.name] = found.most[point.twin] or math.inf
        for wave in waves(points, found, len(groups)):
            for point, rate in zip(wave, pool.map(searched, wave), strict=True):
                found.rates[point.contender.name] = rate.per_s
                found.num_runs += rate.num_runs
    return found


def waves(points: Sequence[Point], found: Found, size: int) -> Iterator[list[Point]]:
    """The most promising first, so many together, until the rest cannot be the best."""
    left = sorted(points, key=lambda point: -found.most[point.contender.name])
    while left:
        best = max(found.rates.values(), default=0.0)
        wave, left = left[:size], left[size:]
        wave = [each for each in wave if SLACK * found.most[each.contender.name] >= best]
        if not wave:
            return
        yield wave


def pressed(case: Case, duration: str) -> Case:
    """Asked for more than the original can do."""
    most = saturated(case, duration)
    asked = float(f"{BEYOND * most:.2g}")
    print(f"{case.name}: the original answers {most:.1f}/s at most, asked for {asked:g}/s")
    return dataclasses.replace(case, slo=f"{case.latency} at {asked:g}/s")


def compared(console: Console, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    case = pressed(case, options.duration)
    duration, search_s = options.duration, options.search_seconds
    found = run_optimizer(
        console, case, is_exhaustive=True, duration=duration, budget=options.budget
    )
    began = time.monotonic()
    place = FOLDER / "brute" / case.name
    points = []
    made = combinations(builds(found, case), options.batches)
    for number, (name, folder, shape, twin) in enumerate(made):
        tried = shaped(folder, place / str(number), shape, case.latency)
        points.append(Point(Contender(name, tried), case, duration, search_s, twin))
    brute = all_searched(points, options.cores or [tuple(os.sched_getaffinity(0))])
    searched_s = time.monotonic() - began
    found_rates = {name: rate for name, rate in brute.rates.items() if rate > 0}
    found_points = [point for point in points if point.contender.name in found_rates]
    found_points.sort(key=lambda point: -found_rates[point.contender.name])
    contenders = [point.contender for point in found_points[:NUM_BEST]]
    contenders.append(Contender("optimiser", repository_of(case)))
    top = max(found_rates.values())
    steps = [float(f"{top * part:.3g}") for part in FINAL_STEPS]
    both = duel(contenders, case, steps, options.rounds, options.final_seconds)
    kept = {each.name: both.kept(each.name) for each in contenders}
    chosen = kept.pop("optimiser")
    best = max(kept, key=lambda name: kept[name])
    return {
        "slo": case.slo,
        "headline": found["headline"],
        "best": best,
        "chosen": steps_text(found["chosen"]),
        "rates": {**kept, "optimiser": chosen},
        "at_rates": dataclasses.asdict(both),
        "ratio": chosen / kept[best] if kept[best] else float("nan"),
        "num_measured": num_served(found),
        "num_brute_force": brute.num_runs,
        "num_combinations": len(points),
        "optimiser_s": found["elapsed_s"],
        "brute_force_core_group_s": searched_s * max(1, len(options.cores)),
        "all": brute.rates,
        "at_most": brute.most,
        "tries": [
            {
                "candidate": steps_text(each["candidate"]),
                "outcome": each["outcome"],
                "why": each["reason"],
                "predicted": each["predicted_rate"],
                "shape": each["predicted_shape"],
            }
            for each in found["tries"]
        ],
    }


def cores_of(text: str) -> Cores:
    return tuple(int(each) for each in text.split(","))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=MODELS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="largest ones")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--duration", default="6s")
    parser.add_argument("--budget", default="", help="of the optimiser, such as 6m")
    parser.add_argument("--search-seconds", type=float, default=SEARCH_S)
    parser.add_argument("--final-seconds", type=float, default=2.0, help="at one rate")
    parser.add_argument("--cores", nargs="+", type=cores_of, default=[])
    parser.add_argument("--result", default="optimize_brute_force")
    options = parser.parse_args()
    num_cores = len(os.sched_getaffinity(0))
    if any(len(set(each)) != num_cores for each in options.cores):
        parser.error(f"--cores: expected groups of {num_cores}, as many as this process may use")
    return options


def main() -> None:
    options = read_options()
    console = Console(width=150)
    record: dict[str, Any] = {}
    for name in options.models:
        try:
            record[name] = compared(console, CASES[name](), options)
        except fetch.FetchFailed as error:
            console.print(f"{name}: skipped: {error}")
    if not record:
        raise SystemExit("no model could be fetched")
    table = Table(title="The optimiser's choice beside the best of all combinations")
    for column in ("model", "ratio", "measurements", "chosen", "best by brute force"):
        table.add_column(column, overflow="fold")
    for name, each in record.items():
        counts = f"{each['num_measured']} of {each['num_brute_force']}"
        table.add_row(name, f"{each['ratio']:.3f}", counts, each["chosen"], each["best"])
    console.print(table)
    print(write(options.result, record))
    missed = [
        name
        for name, each in record.items()
        if not (
            each["ratio"] >= GOAL and each["num_measured"] <= SHARE_GOAL * each["num_brute_force"]
        )
    ]
    if missed:
        raise SystemExit(f"goals missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
