"""Watches the loaded versions once a second: burn rates, saturation, cost and energy.

Runs on the core's event loop and is the only one that reads counters periodically; with several
shards it brings the core's copy of their counters up to date. `families` is its part of a scrape,
and `on_tick` lets others look at the same readings. Decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.config import CPU
from penstock.operate.burn_rate import BurnRate
from penstock.operate.machine_shares import divide_energy, price_shares
from penstock.operate.sliding_sums import CounterStep, SlidingSums
from penstock.serving.catalog import Catalog, pending_of
from penstock.serving.metrics import Labels, ModelMetrics
from penstock.serving.scrape import Pending, ScrapeLines
from penstock.serving.served import Served
from penstock.slo import cost_per_million
from penstock.system.cpu_energy import CpuEnergy
from penstock.system.devices import Watch

log = logging.getLogger("penstock.monitor")
TICK_S = 1.0
# Energy is divided by the time that versions computed in such a span; batches should be shorter.
ENERGY_S = 10.0
# Windows of the saturation, and of cost and energy per request.
BUSY_WINDOW_S, COST_WINDOW_S = 60.0, 300.0
Version = tuple[str, str]
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(slots=True)
class BusyTime:
    """How busy the instances of a version, or of one of its stages, were in the last minute."""

    labels: Labels
    step: CounterStep = field(default_factory=CounterStep)
    # Seconds of computing, and seconds in which instances could have computed.
    sums: SlidingSums = field(default_factory=lambda: SlidingSums(BUSY_WINDOW_S, 2))

    def ratio(self, now: float) -> float | None:
        """Return the share of time, at most 1: batches may overlap on a GPU. None before the first
        reading."""
        busy_s, ready_s = self.sums.sums(now)
        return min(1.0, max(0.0, busy_s / ready_s)) if ready_s > 0 else None


@dataclass(slots=True)
class Spending:
    """Cost and energy of a version."""

    labels: Labels
    devices: tuple[str, ...] = ()
    # Price of the machine per hour; None: unknown.
    price: float | None = None
    share: float | None = None
    # Computing since energy was divided last.
    busy_s: float = 0.0
    # None: no counter of energy covers its devices.
    joules: float | None = None
    step: CounterStep = field(default_factory=CounterStep)
    # Answers and joules.
    sums: SlidingSums = field(default_factory=lambda: SlidingSums(COST_WINDOW_S, 2))

    @property
    def price_per_hour(self) -> float | None:
        return None if self.price is None or self.share is None else self.price * self.share

    def cost_per_million(self, now: float, covered_s: float) -> float | None:
        """Return the cost of a million answers at the rate of the last minutes; None without
        answers or price."""
        num_answered, price = self.sums.sums(now)[0], self.price_per_hour
        if price is None or num_answered < 1 or covered_s <= 0:
            return None
        return cost_per_million(num_answered / min(covered_s, COST_WINDOW_S), price)

    def joules_per_request(self, now: float) -> float | None:
        num_answered, joules = self.sums.sums(now)
        return joules / num_answered if self.joules is not None and num_answered >= 1 else None


class Monitor:
    """`price` is that of the machine per hour; None: that of each version's evidence."""

    def __init__(
        self,
        catalog: Catalog,
        gpus: Watch | None = None,
        price: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        cpu: CpuEnergy | None = None,
    ) -> None:
        self._catalog = catalog
        self._gpus = gpus or Watch()
        self._price = price
        self._clock = clock
        self._cpu = cpu or CpuEnergy()
        self._began = self._ticked_at = self._divided_at = clock()
        self._joules: dict[str, float] = {}
        self._burns: dict[tuple[str, str], BurnRate] = {}
        self._slo_steps: dict[tuple[str, str, str], CounterStep] = {}
        self._busy_times: dict[Version, BusyTime] = {}
        self._spendings: dict[Version, Spending] = {}
        # Called after each tick, with its time.
        self.on_tick: list[Callable[[float], None]] = []

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self._catalog.refresh()
                self.tick(self._clock())
                if self._clock() - self._divided_at >= ENERGY_S:
                    self.divide(await asyncio.to_thread(self.read_joules), self._clock())
            except Exception:  # Keep watching.
                log.exception("a reading of the metrics failed")

    def tick(self, now: float) -> None:
        """Read the counters of all versions."""
        elapsed_s, self._ticked_at = now - self._ticked_at, now
        known: set[object] = set()
        for model in self._catalog:
            whole, *stages = pending_of(model)
            known.update(self._count_slo(whole.metrics, now))
            for each in stages or [whole]:
                known.add(self._count_busy(each, elapsed_s, now))
            known.add(self._spend(model, [whole, *stages], now))
        _forget(self._burns, known)
        _forget(self._slo_steps, known)
        _forget(self._busy_times, known)
        _forget(self._spendings, known)
        shares = price_shares({key: each.devices for key, each in self._spendings.items()})
        for key, spending in self._spendings.items():
            spending.share = shares.get(key)
        for tell in self.on_tick:
            tell(now)

    def _count_slo(self, metrics: ModelMetrics, now: float) -> Iterator[object]:
        for count in metrics.slo_counts:
            objective = count.objective
            key = metrics.name, objective.metric
            burn = self._burns.get(key)
            if burn is None:
                burn = self._burns[key] = BurnRate(objective)
            burn.objective = objective
            step_key = metrics.name, metrics.version, objective.metric
            step = self._slo_steps.setdefault(step_key, CounterStep())
            burn.add(now, *step.take(count.num_requests, count.num_bad))
            yield key
            yield step_key

    def _count_busy(self, pending: Pending, elapsed_s: float, now: float) -> Version:
        metrics = pending.metrics
        key = metrics.name, metrics.version
        found = self._busy_times.get(key)
        if found is None:
            found = self._busy_times[key] = BusyTime(metrics.labels)
        found.sums.add(now, *found.step.take(metrics.busy_s), elapsed_s * pending.num_ready)
        return key

    def _spend(self, model: Served, pending: list[Pending], now: float) -> Version:
        metrics = model.metrics
        key = metrics.name, metrics.version
        found = self._spendings.get(key)
        if found is None:
            found = self._spendings[key] = Spending(metrics.labels)
        found.devices = tuple(each.device for each in model.processes)
        found.price = model.config.price_per_hour if self._price is None else self._price
        busy_s = sum(each.metrics.busy_s for each in pending)
        num_answered, new_busy_s = found.step.take(metrics.num_success, busy_s)
        found.busy_s += new_busy_s
        found.sums.add(now, num_answered, 0.0)
        return key

    def read_joules(self) -> dict[str, float]:
        """Return the energy counter of each device that has one. Not for the event loop."""
        found = {
            f"cuda:{index}": use.energy_joules
            for index, use in enumerate(self._gpus.uses())
            if use.energy_joules is not None
        }
        if (joules := self._cpu.read()) is not None:
            found[CPU] = joules
        return found

    def divide(self, counters: Mapping[str, float], now: float) -> None:
        """Give the energy since the last call to the versions that computed."""
        self._divided_at = now
        grown = {
            device: max(0.0, joules - self._joules.get(device, 0.0))
            for device, joules in counters.items()
        }
        self._joules.update(counters)
        spendings = self._spendings
        busy_s = {key: each.busy_s for key, each in spendings.items()}
        devices = {key: each.devices for key, each in spendings.items()}
        for key, joules in divide_energy(grown, busy_s, devices).items():
            spendings[key].joules = (spendings[key].joules or 0.0) + joules
            spendings[key].sums.add(now, 0.0, joules)
        for spending in spendings.values():
            spending.busy_s = 0.0

    def burn_rates(self) -> dict[tuple[str, str], dict[str, float]]:
        """Return the burn rate of each window, by model and metric of its SLO."""
        return {key: burn.rates(self._ticked_at) for key, burn in self._burns.items()}

    def busy_ratios(self) -> dict[Version, float | None]:
        now = self._ticked_at
        return {key: each.ratio(now) for key, each in self._busy_times.items()}

    @property
    def covered_s(self) -> float:
        """Seconds that it has watched."""
        return self._ticked_at - self._began

    def spendings(self) -> Mapping[Version, Spending]:
        return self._spendings

    def families(self) -> Iterator[ScrapeLines]:
        """Yield its metrics for a scrape."""
        now, covered_s = self._ticked_at, self.covered_s
        burns = [
            ({"model": name, "metric": metric, "window": window}, round(rate, 6))
            for (name, metric), rates in self.burn_rates().items()
            for window, rate in rates.items()
        ]
        text = "How fast the error budget burns; 1: exactly as fast as the SLO allows"
        yield ScrapeLines.of("penstock_slo_burn_rate", text, "gauge", burns)
        busy = [(each.labels, _rounded(each.ratio(now))) for each in self._busy_times.values()]
        text = "Share of time that instances computed in the last minute (0 to 1)"
        yield ScrapeLines.of("penstock_busy_ratio", text, "gauge", busy)
        spent = list(self._spendings.values())
        prices = [(each.labels, _rounded(each.price_per_hour)) for each in spent]
        text = "Price per hour of the part of the machine that a version holds"
        yield ScrapeLines.of("penstock_price_per_hour", text, "gauge", prices)
        costs = [(each.labels, _rounded(each.cost_per_million(now, covered_s))) for each in spent]
        text = "Cost of a million answers at the rate of the last 5 minutes"
        yield ScrapeLines.of("penstock_cost_per_million", text, "gauge", costs)
        joules = [(each.labels, _rounded(each.joules)) for each in spent]
        text = "Joules that devices used while a version computed on them"
        yield ScrapeLines.of("penstock_energy_joules", text, "counter", joules)
        per_request = [(each.labels, _rounded(each.joules_per_request(now))) for each in spent]
        text = "Joules per answer in the last 5 minutes"
        yield ScrapeLines.of("penstock_joules_per_request", text, "gauge", per_request)


def _forget(table: dict[Key, Value], known: Container[object]) -> None:
    """Remove what is not known any more."""
    for key in [key for key in table if key not in known]:
        del table[key]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
