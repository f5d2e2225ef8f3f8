"""What one model has done, as plain arrays that the hot path adds to once per batch.

Names and meanings are Triton's where Triton has one (nv_inference_*); every phase also has a
histogram. `expose` turns them into Prometheus text when somebody looks, never before.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.types import Request, Timings

PHASES = ("request", "queue", "compute_input", "compute_infer", "compute_output")
REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
# Seconds; about 2.5 steps a decade from 50 µs to 30 s.
BUCKETS = (
    50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3,
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip


class Histogram:
    """Counts per bucket and the sum, in seconds."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.sum_s = 0.0

    def add(self, value_s: float, count: int = 1) -> None:
        self.counts[bisect_left(BUCKETS, value_s)] += count
        self.sum_s += value_s * count

    @property
    def count(self) -> int:
        return sum(self.counts)


class BatchStatistics:
    """What batches of one size have cost."""

    __slots__ = ("count", "infer_s", "input_s", "output_s")

    def __init__(self) -> None:
        self.count = 0
        self.input_s = 0.0
        self.infer_s = 0.0
        self.output_s = 0.0

    def add(self, timings: Timings) -> None:
        self.count += 1
        self.input_s += timings.compute_input_s
        self.infer_s += timings.compute_infer_s
        self.output_s += timings.compute_output_s


class ModelMetrics:
    """Owned by the core's loop; `num_pending` is asked of the model at scrape time."""

    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self.num_success = 0
        self.num_inferences = 0
        self.num_executions = 0
        self.num_failures = dict.fromkeys(REASONS, 0)
        self.phases = {phase: Histogram() for phase in PHASES}
        self.batches: dict[int, BatchStatistics] = {}
        # Failed requests, and how long they took to fail.
        self.fail_s = 0.0
        # Unix time of the last batch.
        self.last_inference = 0.0
        self.num_restarts = 0
        self.load_s = 0.0

    def fold(self, batch: Sequence[Request], num_rows: int, answered: int) -> None:
        """One finished batch; `answered` of its requests got their answer."""
        if not batch:
            return
        self.num_executions += 1
        self.num_success += answered
        self.num_inferences += num_rows
        self.last_inference = time.time()
        phases = self.phases
        total, queue = phases["request"], phases["queue"]
        for request in batch:
            timings = request.timings
            span = timings.completed - timings.received
            total.counts[bisect_left(BUCKETS, span)] += 1
            total.sum_s += span
            span = timings.dispatched - timings.queued
            queue.counts[bisect_left(BUCKETS, span)] += 1
            queue.sum_s += span
        timings = batch[0].timings
        count = len(batch)
        statistics = self.batches.get(num_rows)
        if statistics is None:
            statistics = self.batches[num_rows] = BatchStatistics()
        statistics.add(timings)
        phases["compute_input"].add(timings.compute_input_s, count)
        phases["compute_infer"].add(timings.compute_infer_s, count)
        phases["compute_output"].add(timings.compute_output_s, count)

    def failed(self, reason: str, count: int = 1) -> None:
        self.num_failures[reason] += count

    @property
    def batch_sizes(self) -> dict[int, int]:
        """How many batches there were of each size."""
        return {size: statistics.count for size, statistics in self.batches.items()}

    def statistics(self) -> dict[str, Any]:
        """One entry of v2's statistics: counts of requests, nanoseconds of all together."""
        phases = self.phases
        count = self.num_success

        def entry(count: int, seconds: float) -> dict[str, int]:
            return {"count": count, "ns": round(seconds * 1e9)}

        return {
            "name": self.name,
            "version": self.version,
            "last_inference": round(self.last_inference * 1e3),
            "inference_count": self.num_inferences,
            "execution_count": self.num_executions,
            "inference_stats": {
                "success": entry(count, phases["request"].sum_s),
                "fail": entry(sum(self.num_failures.values()), self.fail_s),
                "queue": entry(count, phases["queue"].sum_s),
                "compute_input": entry(count, phases["compute_input"].sum_s),
                "compute_infer": entry(count, phases["compute_infer"].sum_s),
                "compute_output": entry(count, phases["compute_output"].sum_s),
                "cache_hit": entry(0, 0.0),
                "cache_miss": entry(0, 0.0),
            },
            "response_stats": {},
            "batch_stats": [
                {
                    "batch_size": size,
                    "compute_input": entry(batch.count, batch.input_s),
                    "compute_infer": entry(batch.count, batch.infer_s),
                    "compute_output": entry(batch.count, batch.output_s),
                }
                for size, batch in sorted(self.batches.items())
            ],
            "memory_usage": [],
        }


class Pending:
    """A model's metrics together with what only the live model knows."""

    __slots__ = ("metrics", "num_pending", "num_ready")

    def __init__(self, metrics: ModelMetrics, num_pending: int, num_ready: int) -> None:
        self.metrics = metrics
        self.num_pending = num_pending
        self.num_ready = num_ready


def expose(models: Iterable[Pending]) -> bytes:
    """The text that a Prometheus scrape gets. Written here because Triton's counters do not end in
    `_total`, which client libraries insist on."""
    items = list(models)
    lines: list[str] = []
    for name, text, attribute in (
        ("nv_inference_request_success", "Requests answered", "num_success"),
        ("nv_inference_count", "Inferences (rows) done", "num_inferences"),
        ("nv_inference_exec_count", "Batches executed", "num_executions"),
        ("penstock_worker_restarts", "Workers started again after a death", "num_restarts"),
    ):
        lines += _head(name, text, "counter")
        lines += [f"{name}{_labels(item)} {getattr(item.metrics, attribute)}" for item in items]
    lines += _head("nv_inference_request_failure", "Requests failed, by reason", "counter")
    for item in items:
        for reason, count in item.metrics.num_failures.items():
            lines.append(f"nv_inference_request_failure{_labels(item, reason=reason)} {count}")
    for phase in PHASES:
        lines += _phase(phase, items)
    for name, text, attribute in (
        ("nv_inference_pending_request_count", "Requests waiting for an instance", "num_pending"),
        ("penstock_ready_instances", "Instances that can run a batch", "num_ready"),
    ):
        lines += _head(name, text, "gauge")
        lines += [f"{name}{_labels(item)} {getattr(item, attribute)}" for item in items]
    lines += _head("nv_model_load_duration_secs", "Seconds the model took to load", "gauge")
    lines += [f"nv_model_load_duration_secs{_labels(i)} {i.metrics.load_s:.6f}" for i in items]
    return ("\n".join(lines) + "\n").encode()


def _phase(phase: str, items: Sequence[Pending]) -> list[str]:
    """Triton's counter of microseconds and our histogram of seconds."""
    counter, histogram = f"nv_inference_{phase}_duration_us", f"penstock_{phase}_seconds"
    lines = _head(counter, f"Microseconds in {phase}, all requests", "counter")
    for item in items:
        lines.append(f"{counter}{_labels(item)} {round(item.metrics.phases[phase].sum_s * 1e6)}")
    lines += _head(histogram, f"Seconds in {phase}", "histogram")
    for item in items:
        data = item.metrics.phases[phase]
        total = 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), data.counts, strict=True):
            total += count
            lines.append(f"{histogram}_bucket{_labels(item, le=bound)} {total}")
        lines.append(f"{histogram}_sum{_labels(item)} {data.sum_s:.9f}")
        lines.append(f"{histogram}_count{_labels(item)} {total}")
    return lines


def _head(name: str, text: str, kind: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _labels(item: Pending, **more: str) -> str:
    labels = {"model": item.metrics.name, "version": item.metrics.version, **more}
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
