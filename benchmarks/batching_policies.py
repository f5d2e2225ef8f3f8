"""Batching policies under load, simulated: our two batchers beside rules from the literature.

    python benchmarks/batching_policies.py           the table, about a minute
    python benchmarks/batching_policies.py --quick   a tenth of the requests

Executors take T(b) = a + c*b for b rows and do not disturb each other. b* is the largest batch with
T(b*)(1 + 1/N) within the SLO and N*b*/T(b*) is called the capacity. For every policy, as shares of
the capacity: the largest rate at which 99 % of the requests are answered within the SLO, and how
many are (goodput) at 1.5, 2 and 10 times the capacity; Poisson arrivals and gamma with CV 3.
The rows "Penstock" run the server's own classes, started with the times of a warm-up; the others
are a few lines each, below, and know a, c and b* exactly. Deterministic.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock.config import BatchPolicy, ladder
from penstock.serving.batcher import Batcher
from penstock.serving.slo_batcher import SloBatcher

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from doubles import simulate

RESULTS = Path(__file__).with_name("results") / "batching_policies.json"
OVERLOADS = (1.5, 2.0, 10.0)
SPREADS = {"Poisson": 1.0, "gamma CV 3": 3.0}


@dataclass(frozen=True)
class Scenario:
    name: str
    a_s: float
    c_s: float
    max_batch: int
    slo_s: float
    num_executors: int

    def duration_s(self, num_rows: int) -> float:
        return self.a_s + self.c_s * num_rows

    @property
    def target(self) -> int:
        """b*."""
        longest_s = self.slo_s / (1 + 1 / self.num_executors)
        return max(1, min(self.max_batch, int((longest_s - self.a_s) / self.c_s)))

    @property
    def capacity(self) -> float:
        return self.num_executors * self.target / self.duration_s(self.target)


SCENARIOS = (
    Scenario("GPU encoder", 0.0015, 0.00011, 256, 0.020, 1),
    Scenario("4 GPUs", 0.0015, 0.00011, 256, 0.020, 4),
    Scenario("4 CPU instances", 0.002, 0.006, 16, 0.060, 4),
    Scenario("GPU, tight SLO", 0.0015, 0.00011, 256, 0.008, 1),
)


class Rule:
    """FIFO, eager, never drops. The others change one thing each."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.max_rows = scenario.max_batch

    def accepts(self, queue: deque[float]) -> bool:
        return True

    def drop(self, queue: deque[float], now: float) -> None:
        """Remove from the front what shall not run."""

    def num_rows(self, queue: deque[float], now: float) -> int:
        return min(len(queue), self.max_rows)

    def start_at(self, queue: deque[float], now: float) -> float:
        return now


class Delayed(Rule):
    """Waits for a full batch, but no longer than a tenth of the SLO."""

    def start_at(self, queue: deque[float], now: float) -> float:
        is_full = len(queue) >= self.max_rows
        return now if is_full else max(now, queue[0] + self.scenario.slo_s / 10)


class LazyDrop(Rule):
    """Drops what is lost even alone and shrinks the batch to save the oldest."""

    def drop(self, queue: deque[float], now: float) -> None:
        while queue and now + self.scenario.duration_s(1) > queue[0] + self.scenario.slo_s:
            queue.popleft()

    def num_rows(self, queue: deque[float], now: float) -> int:
        slack_s = queue[0] + self.scenario.slo_s - now
        fitting = int((slack_s - self.scenario.a_s) / self.scenario.c_s + 1e-9)
        return max(1, min(len(queue), self.max_rows, fitting))


class EarlyDrop(Rule):
    """Drops the oldest while a batch of b* would be too late for it (Nexus)."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.max_rows = scenario.target

    def drop(self, queue: deque[float], now: float) -> None:
        duration_s, slo_s = self.scenario.duration_s, self.scenario.slo_s
        while queue and now + duration_s(min(len(queue), self.max_rows)) > queue[0] + slo_s:
            queue.popleft()


class Bounded(Rule):
    """Refuses arrivals while b* wait."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.max_rows = scenario.target

    def accepts(self, queue: deque[float]) -> bool:
        return len(queue) < self.max_rows


def run_rule(rule: Rule, arrivals: list[float]) -> int:
    """How many requests are answered within the SLO."""
    scenario = rule.scenario
    free = [0.0] * scenario.num_executors
    queue: deque[float] = deque()
    coming = iter([*arrivals, float("inf")])
    arrival = next(coming)
    num_good = 0
    now = 0.0
    while queue or arrival < float("inf"):
        now = max(now, free[0]) if queue else max(now, free[0], arrival)
        while arrival <= now:
            if rule.accepts(queue):
                queue.append(arrival)
            arrival = next(coming)
        rule.drop(queue, now)
        if not queue:
            continue
        start = rule.start_at(queue, now)
        if start > now:
            now = min(start, arrival)
            if arrival <= start:
                continue
        end = now + scenario.duration_s(num_rows := rule.num_rows(queue, now))
        heapq.heapreplace(free, end)
        num_good += sum(end - queue.popleft() <= scenario.slo_s for _ in range(num_rows))
    return num_good


def run_penstock(scenario: Scenario, arrivals: list[float], is_slo: bool) -> int:
    policy = BatchPolicy(
        scenario.max_batch,
        is_dynamic=True,
        max_pending=sys.maxsize,
        slo_latency_s=scenario.slo_s if is_slo else None,
    )
    batcher: Batcher | SloBatcher = Batcher(policy)
    if is_slo:
        batcher = SloBatcher(policy, scenario.num_executors)
        batcher.seed({rows: scenario.duration_s(rows) for rows in ladder(scenario.max_batch)})
    outcomes = simulate(batcher, arrivals, scenario.duration_s, scenario.num_executors)
    return outcomes.num_within(scenario.slo_s)


Policy = Callable[[Scenario, list[float]], int]
POLICIES: dict[str, Policy] = {
    "FIFO, eager": lambda scenario, arrivals: run_rule(Rule(scenario), arrivals),
    "FIFO, delay SLO/10": lambda scenario, arrivals: run_rule(Delayed(scenario), arrivals),
    "lazy drop": lambda scenario, arrivals: run_rule(LazyDrop(scenario), arrivals),
    "early drop at b*": lambda scenario, arrivals: run_rule(EarlyDrop(scenario), arrivals),
    "bounded queue b*": lambda scenario, arrivals: run_rule(Bounded(scenario), arrivals),
    "Penstock fixed": lambda scenario, arrivals: run_penstock(scenario, arrivals, False),
    "Penstock slo": lambda scenario, arrivals: run_penstock(scenario, arrivals, True),
}


def make_arrivals(cv: float, rate: float, count: int, seed: int) -> list[float]:
    chance = random.Random(seed)
    shape = 1 / cv**2
    now = 0.0
    times = []
    for _ in range(count):
        now += chance.gammavariate(shape, 1 / (shape * rate))
        times.append(now)
    return times


def max_rate(policy: Policy, scenario: Scenario, cv: float, count: int) -> float:
    """By bisection, as a share of the capacity."""
    low, high = 0.05, 1.25
    for _ in range(7):
        middle = (low + high) / 2
        arrivals = make_arrivals(cv, middle * scenario.capacity, count, seed=7)
        is_kept = policy(scenario, arrivals) >= 0.99 * count
        low, high = (middle, high) if is_kept else (low, middle)
    return low


def goodput(policy: Policy, scenario: Scenario, cv: float, count: int, overload: float) -> float:
    """As a share of the capacity. At least fifty SLOs long, so that both ends weigh little."""
    rate = overload * scenario.capacity
    arrivals = make_arrivals(cv, rate, max(count, round(50 * scenario.slo_s * rate)), seed=9)
    return policy(scenario, arrivals) / (arrivals[-1] + scenario.slo_s) / scenario.capacity


def measure(count: int) -> Iterator[dict[str, object]]:
    for scenario in SCENARIOS:
        for name, policy in POLICIES.items():
            for spread, cv in SPREADS.items():
                shares = [goodput(policy, scenario, cv, count, load) for load in OVERLOADS]
                yield {
                    "scenario": scenario.name,
                    "policy": name,
                    "arrivals": spread,
                    "max_rate": round(max_rate(policy, scenario, cv, count), 3),
                    "goodput": [round(share, 3) for share in shares],
                }


def print_tables(rows: list[dict[str, object]], console: Console) -> None:
    for scenario in SCENARIOS:
        table = Table(
            title=f"{scenario.name}: T(b) = {scenario.a_s * 1e3:g} + {scenario.c_s * 1e3:g} b ms, "
            f"SLO {scenario.slo_s * 1e3:g} ms, N = {scenario.num_executors}, "
            f"b* = {scenario.target}, capacity {scenario.capacity:.0f}/s"
        )
        table.add_column("policy")
        for spread in SPREADS:
            table.add_column(f"{spread}: max rate", justify="right")
            for overload in OVERLOADS:
                table.add_column(f"at {overload:g}x", justify="right")
        for name in POLICIES:
            cells = []
            for row in rows:
                if (row["scenario"], row["policy"]) == (scenario.name, name):
                    assert isinstance(row["goodput"], list)
                    cells += [f"{row['max_rate']:.2f}", *(f"{x:.2f}" for x in row["goodput"])]
            table.add_row(name, *cells)
        console.print(table)


def draw(rows: list[dict[str, object]]) -> str:
    """Goodput at twice the capacity with Poisson arrivals, a panel for each scenario."""
    parts = []
    height = 34 + 22 * len(POLICIES)
    for panel, scenario in enumerate(SCENARIOS):
        top = panel * height
        parts.append(f'<text x="8" y="{top + 22}" font-weight="bold">{scenario.name}</text>')
        for index, name in enumerate(POLICIES):
            (row,) = (
                row
                for row in rows
                if (row["scenario"], row["policy"], row["arrivals"])
                == (scenario.name, name, "Poisson")
            )
            assert isinstance(row["goodput"], list)
            share = row["goodput"][OVERLOADS.index(2.0)]
            y = top + 32 + 22 * index
            color = "#1f6feb" if name == "Penstock slo" else "#9aa4b2"
            parts.append(
                f'<text x="8" y="{y + 13}">{name}</text>'
                f'<rect x="170" y="{y}" width="{400 * share:.0f}" height="16" fill="{color}"/>'
                f'<text x="{176 + 400 * share:.0f}" y="{y + 13}">{share:.2f}</text>'
            )
    total = height * len(SCENARIOS) + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="660" height="{total}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>'
        + "".join(parts)
        + f'<text x="8" y="{total - 10}">Answers within the SLO at twice the capacity, Poisson '
        "arrivals, as a share of the capacity (simulated).</text></svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the figures go")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    began = time.monotonic()
    rows = list(measure(1500 if args.quick else 15_000))
    print_tables(rows, console)
    console.print(f"{time.monotonic() - began:.0f} s")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(rows, indent=1) + "\n")
    args.output.with_suffix(".svg").write_text(draw(rows))


if __name__ == "__main__":
    main()
