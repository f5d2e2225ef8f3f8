"""A model's metrics as plain values that travel between processes, and their sum. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.serving.histogram import Histogram, HistogramRecord
from penstock.serving.latency_metrics import LatencyRecord
from penstock.serving.metrics import BatchStatistics, ModelMetrics
from penstock.serving.model_gauges import NO_GAUGES, ModelGauges

# Attributes that are added up. Those of workers are the core's own.
SUMMED = (
    "num_success", "num_late", "num_inferences", "num_executions", "fail_s", "padded_bytes",
    "padding_bytes", "num_unserved", "busy_s", "num_recorded", "num_record_stopped",
    "num_cache_hits", "num_cache_misses", "cache_hit_s", "cache_miss_s", "num_caches",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MetricsRecord:
    """What one shard has counted for one model."""

    sums: dict[str, int | float]
    num_failures: dict[str, int]
    num_refused: dict[str, int]
    num_slow: dict[str, int]
    phases: dict[str, HistogramRecord]
    # By rows: number, and seconds of input, inference and output.
    batches: dict[int, tuple[int, float, float, float]]
    batch_tokens: HistogramRecord
    last_inference: float
    # What only models of its kind have, in a form of their own.
    others: bytes = b""
    num_unrecorded: dict[str, int] = field(default_factory=dict)
    latencies: LatencyRecord | None = None
    gauges: ModelGauges = NO_GAUGES
    num_sequences_ended: dict[str, int] = field(default_factory=dict)


def record_histogram(histogram: Histogram) -> HistogramRecord:
    return HistogramRecord(list(histogram.counts), histogram.total)


def record(metrics: ModelMetrics) -> MetricsRecord:
    return MetricsRecord(
        {name: getattr(metrics, name) for name in SUMMED},
        dict(metrics.num_failures),
        dict(metrics.num_refused),
        dict(metrics.num_slow),
        {name: record_histogram(each) for name, each in metrics.phases.items()},
        {
            size: (each.count, each.input_s, each.infer_s, each.output_s)
            for size, each in metrics.batches.items()
        },
        record_histogram(metrics.batch_tokens),
        metrics.last_inference,
        metrics.record_others(),
        dict(metrics.num_unrecorded),
        metrics.latency_record(),
        metrics.read_gauges(),
        dict(metrics.num_sequences_ended),
    )


def add_histogram(histogram: Histogram, counted: HistogramRecord) -> None:
    """Add a histogram with the same bounds; one without any counts nothing."""
    if len(counted.counts) == len(histogram.counts):
        histogram.counts = [a + b for a, b in zip(histogram.counts, counted.counts, strict=True)]
        histogram.total += counted.total


def add(metrics: ModelMetrics, counted: MetricsRecord) -> None:
    """Add what a shard has counted."""
    for name, value in counted.sums.items():
        setattr(metrics, name, getattr(metrics, name) + value)
    for counts, added in (
        (metrics.num_failures, counted.num_failures),
        (metrics.num_refused, counted.num_refused),
        (metrics.num_slow, counted.num_slow),
        (metrics.num_unrecorded, counted.num_unrecorded),
        (metrics.num_sequences_ended, counted.num_sequences_ended),
    ):
        for reason, count in added.items():
            counts[reason] = counts.get(reason, 0) + count
    histograms = [(metrics.phases[name], each) for name, each in counted.phases.items()]
    for histogram, each in (*histograms, (metrics.batch_tokens, counted.batch_tokens)):
        add_histogram(histogram, each)
    for size, (count, input_s, infer_s, output_s) in counted.batches.items():
        batch = metrics.batches.setdefault(size, BatchStatistics())
        batch.count += count
        batch.input_s += input_s
        batch.infer_s += infer_s
        batch.output_s += output_s
    metrics.counted_gauges = metrics.counted_gauges.plus(counted.gauges)
    if counted.latencies is not None:
        known = metrics.counted_latencies
        new = counted.latencies
        metrics.counted_latencies = new if known is None else known.plus(new)
    metrics.last_inference = max(metrics.last_inference, counted.last_inference)
