"""How many replicas a load needs, for `penstock.capacity` and `penstock capacity`."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock import slo as slos
from penstock import units
from penstock.api import shown
from penstock.api.capacity_options import CapacityOptions
from penstock.config import ModelConfig
from penstock.errors import CommandLineError, ConfigError
from penstock.operate.capacity import CapacityPlan, Demand, Replica, plan, replica_of
from penstock.repository import layout
from penstock.repository import manifest as manifests
from penstock.repository.layout import ModelKind, RepositoryScan
from penstock.repository.model_source import ModelSource, resolve


@dataclass(frozen=True, slots=True)
class CapacityResult:
    """The plan; `name` is the model and its version."""

    name: str
    plan: CapacityPlan

    @property
    def figures(self) -> dict[str, object]:
        """The plan as plain values; rates per second, prices in the currency that was given."""
        found, demand = self.plan, self.plan.demand
        return {
            "model": self.name,
            "rate": demand.rate,
            "headroom": demand.headroom,
            "failure_domain": demand.failure_domain,
            "replica_rate": found.replica.rate,
            "replica_source": found.replica.source,
            "slo": found.replica.slo,
            "replicas_for_load": found.needed,
            "replicas": found.total,
            "failure_domains": found.num_domains,
            "utilisation": found.utilisation,
            "degraded_utilisation": found.degraded_utilisation,
            "cost_per_hour": found.cost_per_hour,
            "cost_per_million": found.cost_per_million,
            "rate_threshold": found.rate_threshold,
            "queue_threshold": found.queue_threshold,
        }

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The plan in words, as pairs of what and how much."""
        found, demand = self.plan, self.plan.demand
        rows = [
            ("load", f"{units.number(demand.rate)}/s"),
            ("one replica", f"{units.number(found.replica.rate)}/s ({found.replica.source})"),
            ("replicas for the load", f"{found.needed}, with {demand.headroom:.0%} headroom"),
        ]
        if demand.failure_domain:
            down = f"{found.degraded_utilisation:.0%} of their rate while one domain is down"
            domains = units.count(found.num_domains, "failure domain")
            size = f" of {demand.failure_domain}" if demand.failure_domain > 1 else ""
            rows.append(("replicas in all", f"{found.total}: {domains}{size}; {down}"))
        rows.append(("utilisation", f"{found.utilisation:.0%} of the highest rate"))
        if found.cost_per_hour is not None and found.cost_per_million is not None:
            million = f"{units.number(found.cost_per_million)} per million requests"
            rows.append(("cost", f"{units.number(found.cost_per_hour)} per hour, {million}"))
        rows.append(("add a replica above", f"{units.number(found.rate_threshold)}/s each"))
        if found.queue_threshold is not None:
            rows.append(("or above", f"{units.number(found.queue_threshold)} queued requests each"))
        return rows

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.lines)
        return "\n".join([self.name, *(f"  {name:<{width}}  {text}" for name, text in self.lines)])

    def _repr_html_(self) -> str:
        return f'<pre style="{shown.STYLE}">{html.escape(str(self))}</pre>'


def capacity(model: str, options: CapacityOptions) -> CapacityResult:
    """Plan replicas for a load; ConfigError if the model or its evidence cannot be used."""
    demand = Demand(
        _rate("rate", options.rate),
        options.headroom / 100,
        options.failure_domain,
        options.price,
    )
    config = _find(model, options)
    if options.replica_rate:
        given = _rate("replica-rate", options.replica_rate)
        replica = Replica(given, "given by --replica-rate", _slo(options.slo or config.slo))
    else:
        replica = replica_of(_evidence(config), config)
    return CapacityResult(f"{config.name}/{config.version}", plan(replica, demand))


def _rate(name: str, text: str) -> float:
    if not text:
        raise CommandLineError(f"--{name} is required, e.g. --{name} 50000/s")
    rate = 0.0
    with suppress(ValueError):
        rate = float(text.strip().removesuffix("/s").replace(",", ""))
    if not 0 < rate < math.inf:
        raise CommandLineError(f"--{name} '{text}'; expected a rate above 0, like 50000/s")
    return rate


def _slo(text: str) -> str:
    """Check an SLO and return its text; empty if it is off."""
    if text in ("", "off"):
        return ""
    return str(slos.parse(text))


def _find(model: str, options: CapacityOptions) -> ModelConfig:
    source = resolve(model)
    found = source.read()
    served = {(each.name, each.version): each for each in found.configs}
    versions = sorted(
        {*served, *(_folders(source, found) if options.version else ())},
        key=lambda each: (each[0], int(each[1])),
    )
    wanted = [
        (name, version)
        for name, version in versions
        if options.model in ("", name) and options.version in ("", version)
    ]
    names = list(dict.fromkeys(name for name, _ in wanted))
    if not wanted:
        there = ", ".join(f"{name}/{version}" for name, version in versions) or "none"
        raise ConfigError(f"{model}: no such model or version; there are {there}")
    if len(names) > 1:
        raise CommandLineError(f"--model is required: {model} has {', '.join(names)}")
    if wanted[-1] in served:
        return served[wanted[-1]]
    name, version = wanted[-1]
    is_alone = source.kind is ModelKind.MODEL_FOLDER
    one = layout.read(source.path / version) if is_alone else source.read_one(name, version)
    return one.only(model, version, "")


def _folders(source: ModelSource, found: RepositoryScan) -> Iterator[tuple[str, str]]:
    """Return name and version of all version folders, also of those that are not served."""
    if source.kind in (ModelKind.REPOSITORY, ModelKind.MODEL_FOLDER):
        for name, folder in found.folders.items():
            with suppress(OSError):
                yield from ((name, version) for version in layout.version_folders(folder))


def _evidence(config: ModelConfig) -> dict[str, object]:
    manifest = manifests.read(Path(config.manifest).parent) if config.manifest else None
    return {} if manifest is None else manifest.evidence
