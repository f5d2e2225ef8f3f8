"""Is the optimiser's choice the best there is: beside every combination, served and measured.

    python benchmarks/optimize_brute_force.py                     three models, hours
    python benchmarks/optimize_brute_force.py --models mnist_8    one of them

Models, data, SLOs and budgets are those of optimize_minilm and optimize_vision. Brute force is
every build that passed the gates (all passes, --exhaustive) times every instances x threads that
fill the cores times largest batches of 8 and 32, by Triton's rules and by the SLO, each served and
measured by the highest rate that keeps the SLO's latency. Its best and the version that the
optimiser committed are then measured in turns.

Counted as measurements: one served run of one candidate, at one load or searching a rate.

Goals: the optimiser's choice at least 0.95 of the best by brute force on every model, with at most
a quarter of its measurements.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from optimizing import FOLDER
from optimizing.cases import CASES, Case, fetch
from optimizing.measure import (
    Contender,
    Shape,
    interleaved,
    max_rates,
    median_ratio,
    optimized,
    repository_of,
    shaped,
    shapes,
    steps_text,
    write,
)
from rich.console import Console
from rich.table import Table

from penstock import repository
from penstock.optimizer.candidates import Candidate

# What makes another model's file; the other stages only change how it is served.
STAGES = ("baseline", "compile", "precision", "quantise")
PASSED = ("kept", "equal", "slower")
BATCHES = (8, 32)
GOAL, SHARE_GOAL = 0.95, 0.25


def builds(found: dict[str, Any], case: Case) -> dict[str, Path]:
    """The folder of every build that passed the gates, by what it is."""
    work = repository_of(case) / ".optimize" / case.name
    made: dict[str, Path] = {}
    for each in found["tries"]:
        if each["stage"] not in STAGES or each["outcome"] not in PASSED:
            continue
        candidate = msgspec.convert(each["candidate"], Candidate)
        place = f"builds/{candidate.key}" if candidate.steps else "original"
        folders = sorted(work.glob(f"*/{place}/{case.name}"), key=lambda path: path.stat().st_mtime)
        if folders:
            made[str(candidate)] = folders[-1]
        else:
            print(f"left out, its files are gone: {candidate}")
    return made


def combinations(made: dict[str, Path]) -> Iterator[tuple[str, Path, Shape]]:
    for name, folder in made.items():
        [config] = repository.read(folder).configs
        batches: tuple[int | None, ...] = BATCHES if config.max_batch_size else (None,)
        for pair in shapes():
            for batch in batches:
                for is_slo in (False, True) if batch else (False,):
                    shape = Shape(*pair, batch, is_slo)
                    yield f"{name}, {shape}", folder, shape


def num_served(found: dict[str, Any]) -> int:
    """Served runs that the optimiser made, the final comparison included."""
    every = [each["served"] for each in found["tries"]] + [found["before"], found["after"]]
    return sum(each["num_runs"] for each in every if each is not None)


def compared(console: Console, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    found = optimized(console, case, is_exhaustive=True, duration=options.duration)
    rates: dict[str, float] = {}
    place = FOLDER / "brute" / case.name
    points = list(combinations(builds(found, case)))
    for number, (name, folder, shape) in enumerate(points):
        tried = shaped(folder, place / str(number), shape, case.latency)
        [rates[name]] = max_rates([Contender(name, tried)], case, options.duration)
        print(f"{number + 1} of {len(points)}: {name}: {rates[name]:.1f}/s", flush=True)
    best = max(rates, key=lambda name: rates[name])
    index = [point[0] for point in points].index(best)
    contenders = [
        Contender("brute force", place / str(index)),
        Contender("optimiser", repository_of(case)),
    ]
    both = interleaved(contenders, case, options.rounds, options.duration)
    return {
        "best": best,
        "chosen": steps_text(found["chosen"]),
        "rates": both,
        "ratio": median_ratio(both, "optimiser", "brute force"),
        "num_measured": num_served(found),
        "num_brute_force": len(points),
        "all": rates,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--duration", default="6s")
    options = parser.parse_args()
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
    print(write("optimize_brute_force", record))
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
