"""Counters and histograms: the arithmetic of a fold, and the text that a scrape gets."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.metrics import BUCKETS, PHASES, REASONS, Histogram, ModelMetrics, Pending, expose
from penstock.types import CallbackSink, Request

TRITON_COUNTERS = {
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
}
TRITON_GAUGES = {"nv_inference_pending_request_count", "nv_model_load_duration_secs"}
SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{(.*)\} (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass(frozen=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


def parse(text: bytes) -> tuple[dict[str, str], list[Sample]]:
    """Types by family, and the samples, of the Prometheus text format 0.0.4. Asserts that every
    sample follows the HELP and TYPE of its family."""
    types: dict[str, str] = {}
    helps: set[str] = set()
    samples: list[Sample] = []
    content = text.decode()
    assert content.endswith("\n")
    for line in content.removesuffix("\n").split("\n"):
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            assert name not in helps, f"two HELP lines for {name}"
            helps.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types, f"two TYPE lines for {name}"
            types[name] = kind
        else:
            match = SAMPLE.fullmatch(line)
            assert match, f"not a sample: {line!r}"
            labels = LABEL.findall(match[2])
            assert len("".join(f'{k}="{v}"' for k, v in labels)) + len(labels) - 1 == len(match[2])
            samples.append(Sample(match[1], {k: unescaped(v) for k, v in labels}, float(match[3])))
            family = re.sub(r"_(bucket|sum|count)$", "", match[1])
            assert {match[1], family} & types.keys(), f"{match[1]} has no TYPE before it"
    assert helps == types.keys()
    return types, samples


def unescaped(text: str) -> str:
    return re.sub(r"\\.", lambda match: ESCAPES[match[0]], text)


def value_of(samples: Sequence[Sample], name: str, **labels: str) -> float:
    [sample] = [
        sample
        for sample in samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return sample.value


def finished(
    received: float = 0.0, queued: float = 0.0, dispatched: float = 0.0, completed: float = 0.0
) -> Request:
    request = Request(CallbackSink(lambda request, answer: None), (), received)
    timings = request.timings
    timings.queued, timings.dispatched, timings.completed = queued, dispatched, completed
    timings.compute_input_s, timings.compute_infer_s, timings.compute_output_s = 0.25, 0.5, 0.125
    return request


# Histograms


def test_buckets_rise() -> None:
    assert list(BUCKETS) == sorted(set(BUCKETS))


@pytest.mark.parametrize("index", range(len(BUCKETS)))
def test_a_bucket_holds_its_upper_edge_and_not_the_next_number(index: int) -> None:
    histogram = Histogram()
    histogram.add(BUCKETS[index])
    histogram.add(math.nextafter(BUCKETS[index], math.inf))
    expected = [0] * (len(BUCKETS) + 1)
    expected[index] = expected[index + 1] = 1
    assert histogram.counts == expected


def test_nothing_is_too_small_or_too_large_for_a_bucket() -> None:
    histogram = Histogram()
    histogram.add(0.0)
    histogram.add(1e9)
    assert (histogram.counts[0], histogram.counts[-1], histogram.count) == (1, 1, 2)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 100))))
def test_count_and_sum_are_those_of_what_was_added(added: list[tuple[float, int]]) -> None:
    histogram = Histogram()
    for value, count in added:
        histogram.add(value, count)
    assert histogram.count == sum(count for _, count in added)
    assert histogram.sum_s == pytest.approx(math.fsum(value * count for value, count in added))


# Folding a batch


def test_a_batch_is_one_execution_of_all_its_rows_for_all_its_requests() -> None:
    metrics = ModelMetrics("model", "1")
    metrics.fold([finished(), finished(), finished()], num_rows=7, answered=2)
    metrics.fold([finished()], num_rows=7, answered=1)
    metrics.fold([finished()], num_rows=1, answered=1)
    assert metrics.num_executions == 3
    assert metrics.num_inferences == 15
    assert metrics.num_success == 4
    assert metrics.batch_sizes == {7: 2, 1: 1}


def test_each_request_adds_its_own_request_and_queue_time_and_the_compute_time_of_its_batch() -> (
    None
):
    metrics = ModelMetrics("model", "1")
    batch = [
        finished(received=1.0, queued=1.5, dispatched=3.5, completed=11.0),
        finished(received=2.0, queued=2.0, dispatched=3.5, completed=11.0),
    ]
    metrics.fold(batch, num_rows=2, answered=2)
    sums = {phase: histogram.sum_s for phase, histogram in metrics.phases.items()}
    assert sums == {
        "request": 10.0 + 9.0,
        "queue": 2.0 + 1.5,
        "compute_input": 0.5,
        "compute_infer": 1.0,
        "compute_output": 0.25,
    }
    assert {histogram.count for histogram in metrics.phases.values()} == {2}


def test_an_empty_batch_changes_nothing() -> None:
    metrics = ModelMetrics("model", "1")
    metrics.fold([], num_rows=0, answered=0)
    assert metrics.num_executions == 0
    assert metrics.batch_sizes == {}


@pytest.mark.parametrize("reason", REASONS)
def test_failures_are_counted_by_reason(reason: str) -> None:
    metrics = ModelMetrics("model", "1")
    metrics.failed(reason)
    metrics.failed(reason, 2)
    assert metrics.num_failures == {**dict.fromkeys(REASONS, 0), reason: 3}


def test_reasons_are_tritons() -> None:
    assert set(REASONS) == {"REJECTED", "CANCELED", "BACKEND", "OTHER"}


# What a scrape gets


@pytest.fixture
def scraped() -> tuple[dict[str, str], list[Sample]]:
    metrics = ModelMetrics("digits", "3")
    metrics.fold(
        [
            finished(received=0.0, queued=0.0, dispatched=0.001, completed=0.002),
            finished(received=0.0, queued=0.0, dispatched=0.25, completed=40.0),
        ],
        num_rows=5,
        answered=2,
    )
    metrics.failed("REJECTED", 4)
    metrics.num_restarts = 6
    metrics.load_s = 1.5
    return parse(expose([Pending(metrics, num_pending=7, num_ready=8)]))


def test_tritons_metrics_have_tritons_names_and_types(
    scraped: tuple[dict[str, str], list[Sample]],
) -> None:
    types, samples = scraped
    assert {name for name in types if name.startswith("nv_")} == TRITON_COUNTERS | TRITON_GAUGES
    assert all(types[name] == "counter" for name in TRITON_COUNTERS)
    assert all(types[name] == "gauge" for name in TRITON_GAUGES)
    names = {sample.name for sample in samples}
    assert names >= TRITON_COUNTERS | TRITON_GAUGES
    assert not [name for name in names if name.endswith(("_total", "_created"))]


def test_every_sample_says_its_model_and_version(
    scraped: tuple[dict[str, str], list[Sample]],
) -> None:
    for sample in scraped[1]:
        assert (sample.labels["model"], sample.labels["version"]) == ("digits", "3")
        assert sample.labels.keys() <= {"model", "version", "reason", "le"}


def test_values_are_those_of_the_model(scraped: tuple[dict[str, str], list[Sample]]) -> None:
    _, samples = scraped
    assert value_of(samples, "nv_inference_request_success") == 2
    assert value_of(samples, "nv_inference_count") == 5
    assert value_of(samples, "nv_inference_exec_count") == 1
    assert value_of(samples, "nv_inference_request_failure", reason="REJECTED") == 4
    for reason in ("CANCELED", "BACKEND", "OTHER"):
        assert value_of(samples, "nv_inference_request_failure", reason=reason) == 0
    assert value_of(samples, "nv_inference_pending_request_count") == 7
    assert value_of(samples, "nv_model_load_duration_secs") == 1.5
    assert value_of(samples, "penstock_worker_restarts") == 6
    assert value_of(samples, "penstock_ready_instances") == 8


def test_durations_are_microseconds_of_all_requests_together(
    scraped: tuple[dict[str, str], list[Sample]],
) -> None:
    durations = {
        phase: value_of(scraped[1], f"nv_inference_{phase}_duration_us") for phase in PHASES
    }
    assert durations == {
        "request": 40_002_000,
        "queue": 251_000,
        "compute_input": 500_000,
        "compute_infer": 1_000_000,
        "compute_output": 250_000,
    }


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_has_a_cumulative_histogram_in_seconds(
    scraped: tuple[dict[str, str], list[Sample]], phase: str
) -> None:
    types, samples = scraped
    name = f"penstock_{phase}_seconds"
    assert types[name] == "histogram"
    buckets = [sample for sample in samples if sample.name == f"{name}_bucket"]
    edges = [float(sample.labels["le"]) for sample in buckets]
    assert edges == [*BUCKETS, math.inf]
    counts = [sample.value for sample in buckets]
    assert counts == sorted(counts)
    assert counts[-1] == value_of(samples, f"{name}_count") == 2
    seconds = value_of(samples, f"nv_inference_{phase}_duration_us") / 1e6
    assert value_of(samples, f"{name}_sum") == pytest.approx(seconds)


def test_request_slower_than_every_edge_is_only_in_the_last_bucket(
    scraped: tuple[dict[str, str], list[Sample]],
) -> None:
    samples = scraped[1]
    assert value_of(samples, "penstock_request_seconds_bucket", le="30.0") == 1
    assert value_of(samples, "penstock_request_seconds_bucket", le="+Inf") == 2


@given(st.text(st.characters(blacklist_categories=["Cs"]), min_size=1))
def test_any_name_comes_back_from_the_labels(name: str) -> None:
    _, samples = parse(expose([Pending(ModelMetrics(name, "1"), 0, 0)]))
    assert {sample.labels["model"] for sample in samples} == {name}


def test_a_name_cannot_smuggle_in_a_sample() -> None:
    name = 'a"} 1\nnv_inference_count{model="b'
    _, samples = parse(expose([Pending(ModelMetrics(name, "1"), 0, 0)]))
    assert {sample.labels["model"] for sample in samples} == {name}


def test_models_share_one_family() -> None:
    models = [Pending(ModelMetrics(name, "1"), 0, 0) for name in ("a", "b")]
    types, samples = parse(expose(models))
    assert len(types) == len(set(types))
    for name in TRITON_COUNTERS - {"nv_inference_request_failure"}:
        assert [s.labels["model"] for s in samples if s.name == name] == ["a", "b"]


def test_a_server_without_models_still_answers_a_scrape() -> None:
    types, samples = parse(expose([]))
    assert types.keys() >= TRITON_COUNTERS
    assert samples == []
