"""Families of a scrape that `--metrics-config` switches on or off, and those of response caches.

Names and units are Triton's. Knows neither how values are counted nor how a scrape is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from penstock.config import MetricsConfig
from penstock.serving.latency_metrics import CACHE_HIT, CACHE_MISS, LatencyRecord
from penstock.serving.latency_summary import SummaryRecord
from penstock.serving.metrics import PHASES, ModelMetrics
from penstock.serving.model_gauges import NO_GAUGES
from penstock.serving.scrape import Pending, Sample, ScrapeLines, label_text

FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
# Families without the counters of latencies (`counter_latencies=false`).
COUNTERS = frozenset(f"nv_inference_{phase}_duration_us" for phase in PHASES)
# Counters of models with a response cache: name, help and attribute of `ModelMetrics`.
CACHE_COUNTERS = (
    ("nv_cache_num_hits_per_model", "Requests answered from the cache", "num_cache_hits"),
    ("nv_cache_num_misses_per_model", "Requests that the cache did not have", "num_cache_misses"),
    ("nv_cache_hit_duration_per_model", "Microseconds of hits", "cache_hit_s"),
    ("nv_cache_miss_duration_per_model", "Microseconds of misses", "cache_miss_s"),
)
CACHE_PHASES = (CACHE_HIT, CACHE_MISS)


def hidden(config: MetricsConfig) -> frozenset[str]:
    """Return the names of families that the operator does not want."""
    return frozenset() if config.has_counters else COUNTERS


def families(models: Iterable[Pending], config: MetricsConfig) -> Iterator[ScrapeLines]:
    metrics = [each.metrics for each in models]
    yield from _pinned_memory(metrics)
    if config.has_counters:
        yield from _cache_counters([each for each in metrics if each.num_caches])
    counted = [(each, each.latency_record()) for each in metrics]
    records = [(each, record) for each, record in counted if record is not None]
    yield _first_responses(records)
    for phase in (*PHASES, *CACHE_PHASES):
        prefix = "nv_" if phase in CACHE_PHASES else "nv_inference_"
        summaries = [
            (each, record.summaries[phase]) for each, record in records if phase in record.summaries
        ]
        yield _summary(f"{prefix}{phase}_summary_us", phase, summaries, config.quantiles)


def _pinned_memory(metrics: Sequence[ModelMetrics]) -> Iterator[ScrapeLines]:
    total = NO_GAUGES
    for each in metrics:
        total = total.plus(each.gauges)
    for name, text, value in (
        ("total", "Shared memory that GPUs copy from and to", total.pinned_bytes),
        ("used", "Part of it that requests hold", total.pinned_used_bytes),
    ):
        name = f"nv_pinned_memory_pool_{name}_bytes"
        yield ScrapeLines(name, text, "gauge", [f"{name} {value}"])


def _cache_counters(metrics: Sequence[ModelMetrics]) -> Iterator[ScrapeLines]:
    for name, text, attribute in CACHE_COUNTERS:
        samples: list[Sample] = []
        for each in metrics:
            value = getattr(each, attribute)
            shown = round(value * 1e6) if isinstance(value, float) else value
            samples.append((each.labels, shown))
        yield ScrapeLines.of(name, text, "counter", samples)


def _first_responses(records: Sequence[tuple[ModelMetrics, LatencyRecord]]) -> ScrapeLines:
    lines: list[str] = []
    for metrics, record in records:
        if (histogram := record.first_response) is None:
            continue
        total = 0
        bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
        for bound, count in zip(bounds, histogram.counts, strict=True):
            total += count
            labels = label_text({**metrics.labels, "le": bound})
            lines.append(f"{FIRST_RESPONSE}_bucket{labels} {total}")
        own = label_text(metrics.labels)
        lines.append(f"{FIRST_RESPONSE}_sum{own} {round(histogram.total)}")
        lines.append(f"{FIRST_RESPONSE}_count{own} {total}")
    text = "Milliseconds from a request to its first answer"
    return ScrapeLines(FIRST_RESPONSE, text, "histogram", lines)


def _summary(
    name: str,
    phase: str,
    summaries: Sequence[tuple[ModelMetrics, SummaryRecord]],
    quantiles: Sequence[str],
) -> ScrapeLines:
    lines: list[str] = []
    for metrics, summary in summaries:
        for quantile in quantiles:
            labels = label_text({**metrics.labels, "quantile": quantile})
            value = summary.quantile(float(quantile)) * 1e6
            lines.append(f"{name}{labels} {'NaN' if value != value else round(value)}")
        own = label_text(metrics.labels)
        lines.append(f"{name}_sum{own} {round(summary.total * 1e6)}")
        lines.append(f"{name}_count{own} {summary.count}")
    text = f"Microseconds in {phase} over the last minute"
    return ScrapeLines(name, text, "summary", lines)
