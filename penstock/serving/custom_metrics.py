"""Metrics of models' own code, added up over their workers. Pure.

As in Triton, metrics of one name and labels are one metric, whichever worker or model declares it:
counts add up, and a gauge has the value that was set last. They go with the model.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.wire.frames import MetricChange

log = logging.getLogger("penstock.metrics")
# Workers have sent what they changed before (`worker_metrics.SEND_EVERY_S`).
SETTLED_AFTER_S = 0.06
# Orders the sets of gauges of all models; and the last one of each gauge, by family and labels.
_sets = itertools.count(1)
_last_sets: dict[tuple[str, tuple[tuple[str, str], ...]], int] = {}


@dataclass(slots=True)
class CustomMetric:
    """`value` of a histogram is the sum of what it counts, that of a gauge what was set."""

    family: str
    text: str
    kind: str
    labels: Mapping[str, str]
    bounds: tuple[float, ...]
    counts: list[int]
    value: float = 0.0
    # What each worker has added to a gauge since this set of it, by any model.
    added: dict[int, float] = field(default_factory=dict)
    since: int = 0

    @property
    def total(self) -> float:
        return self.value + sum(self.added.values(), 0.0)

    def add(self, worker: int, change: MetricChange) -> None:
        self.counts = [a + b for a, b in zip(self.counts, change.counts, strict=True)]
        if self.kind == "gauge":
            self._add_to_gauge(worker, change)
        else:
            self.value += change.value

    def _add_to_gauge(self, worker: int, change: MetricChange) -> None:
        key = change.family, change.labels
        last = _last_sets.get(key, 0)
        if self.since != last:
            # Another model has set it: what this one did before does not count any more.
            self.value, self.added, self.since = 0.0, {}, last
        if change.is_new:
            # The worker that was here before has died: what it was doing has ended.
            self.added.pop(worker, None)
        if change.is_set:
            self.since = _last_sets[key] = next(_sets)
            self.value, self.added = change.value, {}
        else:
            self.added[worker] = self.added.get(worker, 0.0) + change.value

    def plus(self, other: CustomMetric) -> CustomMetric:
        """Return both as one metric; those of one kind and bounds."""
        if self.since != other.since:
            return max(self, other, key=lambda each: each.since)
        counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        described = self.family, self.text, self.kind, self.labels, self.bounds
        total = self.total + other.total
        return CustomMetric(*described, counts, total, since=self.since)


class CustomMetrics:
    """Those of one model, and of its stages. Belongs to the core's event loop."""

    def __init__(self) -> None:
        self._metrics: dict[tuple[str, tuple[tuple[str, str], ...]], CustomMetric] = {}
        self._parts: list[CustomMetrics] = []

    def include(self, part: CustomMetrics) -> None:
        """Show the metrics of a stage as well."""
        self._parts.append(part)

    def add(self, worker: int, changes: Sequence[MetricChange]) -> None:
        """Take what the worker of an instance has changed."""
        for each in changes:
            key = each.family, each.labels
            metric = self._metrics.get(key)
            if metric is None:
                described = each.family, each.text, each.kind, dict(each.labels), each.bounds
                metric = self._metrics[key] = CustomMetric(*described, [0] * len(each.counts))
            if (metric.kind, metric.bounds) == (each.kind, each.bounds):
                metric.add(worker, each)
            elif each.is_new:
                _warn(metric)

    def __iter__(self) -> Iterator[CustomMetric]:
        yield from self._metrics.values()
        for each in self._parts:
            yield from each


def merge(models: Iterable[CustomMetrics]) -> list[list[CustomMetric]]:
    """Return the metrics of all models by family. The first model that declares a family decides
    its kind, and the buckets of each metric."""
    families: dict[str, dict[tuple[tuple[str, str], ...], CustomMetric]] = {}
    for metric in itertools.chain.from_iterable(models):
        family = families.setdefault(metric.family, {})
        kind = next((each.kind for each in family.values()), metric.kind)
        key = tuple(metric.labels.items())
        known = family.get(key)
        if metric.kind != kind or (known is not None and known.bounds != metric.bounds):
            continue
        family[key] = metric if known is None else known.plus(metric)
    return [list(family.values()) for family in families.values()]


def _warn(metric: CustomMetric) -> None:
    text = "instances declare the metric %s %s in different ways; the first one counts"
    log.warning(text, metric.family, dict(metric.labels))
