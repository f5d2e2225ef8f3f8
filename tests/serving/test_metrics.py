"""Counters and histograms: the arithmetic of a fold, and the text that a scrape gets."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import penstock
from penstock.backends import GPU_FALLBACK, GPU_MEMORY
from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import (
    BackendFailed,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    NotReady,
    Overloaded,
    PenstockError,
    Quarantined,
    QuotaExceeded,
    TooLarge,
    Unsupported,
)
from penstock.serving.metrics import (
    BUCKETS,
    PHASES,
    REASONS,
    REFUSED_AT_ARRIVAL,
    REFUSED_LATER,
    WAITS,
    ModelMetrics,
    SloCount,
)
from penstock.serving.metrics_record import add, record
from penstock.serving.scrape import (
    BATCH_BUCKETS,
    HostUse,
    Pending,
    ProcessUse,
    ScrapeLines,
    ShardUse,
    expose,
)
from penstock.serving.served import ModelProcess
from penstock.slo import Objective
from penstock.system.devices import GpuUse
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
TRITON_HOST_GAUGES = {
    "nv_cpu_utilization",
    "nv_cpu_memory_total_bytes",
    "nv_cpu_memory_used_bytes",
}
HOST = HostUse(
    0.25,
    1000,
    400,
    [
        ProcessUse({"process": "core"}, 100, 1.5),
        ProcessUse({"process": "shard", "shard": "1"}, 50, 0.5),
        ProcessUse({"process": "shard", "shard": "2"}, 60, 0.75),
        ProcessUse(
            {"process": "worker", "model": "digits", "version": "3", "instance": "1"}, 70, 2.25
        ),
    ],
)
SHARDS = [ShardUse("1", 3, 12), ShardUse("2", 1, 0)]
SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass(frozen=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


def parse(text: bytes) -> tuple[dict[str, str], list[Sample]]:
    """Types by family, and the samples, of the Prometheus text format 0.0.4. Asserts that every
    sample follows the HELP and TYPE of its family, that none comes twice, and that histograms add
    up."""
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
            text_of_labels = match[2] or ""
            labels = LABEL.findall(text_of_labels)
            length = len("".join(f'{k}="{v}"' for k, v in labels)) + max(0, len(labels) - 1)
            assert length == len(text_of_labels)
            samples.append(Sample(match[1], {k: unescaped(v) for k, v in labels}, float(match[3])))
            family = re.sub(r"_(bucket|sum|count)$", "", match[1])
            assert {match[1], family} & types.keys(), f"{match[1]} has no TYPE before it"
    assert helps == types.keys()
    keys = [(sample.name, tuple(sample.labels.items())) for sample in samples]
    assert len(keys) == len(set(keys)), "a sample comes twice"
    check_histograms(types, samples)
    return types, samples


def check_histograms(types: dict[str, str], samples: list[Sample]) -> None:
    """Buckets rise to +Inf, which is the count; every histogram has its sum."""
    for name in (name for name, kind in types.items() if kind == "histogram"):
        series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
        for sample in samples:
            if sample.name == f"{name}_bucket":
                others = tuple((k, v) for k, v in sample.labels.items() if k != "le")
                series.setdefault(others, []).append((float(sample.labels["le"]), sample.value))
        for labels, buckets in series.items():
            assert [edge for edge, _ in buckets] == sorted({edge for edge, _ in buckets})
            counts = [count for _, count in buckets]
            assert counts == sorted(counts)
            assert buckets[-1][0] == math.inf
            assert counts[-1] == value_of(samples, f"{name}_count", **dict(labels))
            assert value_of(samples, f"{name}_sum", **dict(labels)) >= 0


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
    received: float = 0.0,
    queued: float = 0.0,
    dispatched: float = 0.0,
    completed: float = 0.0,
    instance_wait_s: float = 0.0,
) -> Request:
    request = Request(CallbackSink(lambda request, answer: None), (), received)
    timings = request.timings
    timings.queued, timings.dispatched, timings.completed = queued, dispatched, completed
    timings.instance_wait_s = instance_wait_s
    timings.compute_s = (0.25, 0.5, 0.125)
    return request


# Histograms


def test_buckets_rise() -> None:
    assert list(BUCKETS) == sorted(set(BUCKETS))


# Folding a batch


def test_a_batch_is_one_execution_of_all_its_rows_for_all_its_requests() -> None:
    metrics = ModelMetrics("model", "1")
    one = finished()
    metrics.fold([one, finished()], num_rows=7, timings=one.timings)
    metrics.fold([one], num_rows=7, timings=one.timings)
    metrics.fold([one], num_rows=1, timings=one.timings)
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
        finished(received=2.0, queued=2.0, dispatched=3.5, completed=11.0, instance_wait_s=1.25),
    ]
    waits = metrics.fold(batch, num_rows=2, timings=batch[0].timings)
    assert waits == ((2.0 + 0.25) / 2, 1.25 / 2)
    sums = {phase: histogram.total for phase, histogram in metrics.phases.items()}
    assert sums == {
        "request": 10.0 + 9.0,
        "queue": 2.0 + 1.5,
        "queue_batch": 2.0 + 0.25,
        "queue_instance": 1.25,
        "compute_input": 0.5,
        "compute_infer": 1.0,
        "compute_output": 0.25,
    }
    assert {histogram.count for histogram in metrics.phases.values()} == {2}


def test_answers_after_the_limit_of_the_slo_are_late() -> None:
    metrics = ModelMetrics("model", "1", slo_latency_s=0.5)
    batch = [finished(received=1.0, completed=1.0 + span_s) for span_s in (0.25, 0.5, 0.75)]
    metrics.fold(batch, num_rows=3, timings=batch[0].timings)
    assert (metrics.num_success, metrics.num_late) == (3, 1)
    metrics.passed(batch[2])
    metrics.answered(total_s=0.75, infer_s=0.5)
    metrics.answered(total_s=0.25, infer_s=0.25)
    assert metrics.num_late == 3
    total = ModelMetrics("model", "1")
    add(total, record(metrics))
    assert total.num_late == 3


def test_without_an_slo_no_answer_is_late() -> None:
    metrics = ModelMetrics("model", "1")
    one = finished(received=0.0, completed=1e6)
    metrics.fold([one], num_rows=1, timings=one.timings)
    assert metrics.num_late == 0


SLO = Objective("latency", 0.99, 0.5)


def test_late_failed_and_refused_requests_burn_the_error_budget() -> None:
    metrics = ModelMetrics("model", "1", slo_latency_s=0.5, objectives=[SLO])
    batch = [finished(received=0.0, completed=span_s) for span_s in (0.25, 0.5, 0.75)]
    metrics.fold(batch, num_rows=3, timings=batch[0].timings)
    assert metrics.slo_counts == [SloCount(SLO, 3, 1)]
    for number, error in enumerate(
        (Overloaded("full"), NotReady("down"), BackendFailed("died"), DeadlineExceeded("late")), 1
    ):
        metrics.refused(error)
        assert metrics.slo_counts == [SloCount(SLO, 3 + number, 1 + number)]
    metrics.failed("BACKEND", BackendFailed("died"))
    assert metrics.slo_counts == [SloCount(SLO, 8, 6)]


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("no such input"),
        TooLarge("too large"),
        Unsupported("no such thing"),
        Quarantined("it killed a worker"),
        QuotaExceeded("too many"),
        NotFound("no such version"),
    ],
)
def test_errors_of_clients_do_not_count_for_the_slo(error: PenstockError) -> None:
    metrics = ModelMetrics("model", "1", slo_latency_s=0.5, objectives=[SLO])
    metrics.refused(error, is_late=True)
    metrics.failed("OTHER", error, is_late=True)
    assert metrics.slo_counts == [SloCount(SLO, 0, 0)]


def test_a_client_that_leaves_counts_once_the_limit_has_passed() -> None:
    metrics = ModelMetrics("model", "1", slo_latency_s=0.5, objectives=[SLO])
    for waited_s in (0.1, 0.5, 0.6):
        metrics.failed("CANCELED", Cancelled("left"), metrics.is_late(waited_s))
    assert metrics.slo_counts == [SloCount(SLO, 1, 1)]


def test_objectives_are_those_of_the_configuration() -> None:
    config = ModelConfig("m", "1", "null", "", (), (), 4, BatchPolicy(4), slo="p95 < 20ms")
    metrics = ModelMetrics.from_config(config)
    assert metrics.objectives == (Objective("latency", 0.95, 0.02),)
    assert metrics.is_late(0.021) and not metrics.is_late(0.019)
    assert ModelMetrics.from_config(replace(config, slo="off")).objectives == ()
    # The batcher's limit decides what is late, if it has one.
    batching = replace(config.batching, slo_latency_s=0.01)
    assert ModelMetrics.from_config(replace(config, batching=batching)).is_late(0.011)
    stage = ModelMetrics.from_config(config, "m:preprocess")
    assert (stage.name, stage.objectives, stage.slo_latency_s) == ("m:preprocess", (), None)
    empty = metrics.blank()
    assert (empty.labels, empty.objectives) == (metrics.labels, metrics.objectives)
    assert empty.is_late(0.021)


def test_only_executed_batches_keep_instances_busy() -> None:
    metrics = ModelMetrics("model", "1")
    one = finished()
    one.timings.compute_s = (0.25, 0.5, 0.125)
    metrics.fold([one], num_rows=2, timings=one.timings)
    metrics.fold([one], num_rows=2, timings=one.timings, num_executed=4)
    # Another shard counts this execution.
    metrics.fold([one], num_rows=2, timings=one.timings, num_executed=0)
    metrics.answered(total_s=3.0, infer_s=2.0)
    assert metrics.busy_s == 1.75
    shown = Pending(metrics, 0, 1)
    assert b'penstock_busy_seconds{model="model",version="1"} 1.750000' in expose([shown])
    assert b"penstock_busy_seconds{" not in expose([replace(shown, is_staged=True)])


def test_a_scrape_shows_objectives_and_what_missed_them() -> None:
    objectives = [Objective("ttft", 0.99, 0.1), Objective("tpot", 0.95, math.inf)]
    metrics = ModelMetrics("model", "1", objectives=objectives)
    metrics.answered(total_s=3.0, infer_s=2.0)
    metrics.num_slow["ttft"] += 1
    metrics.refused(Overloaded("full"))
    types, samples = parse(expose([Pending(metrics, 0, 1), Pending(ModelMetrics("b", "1"), 0, 1)]))
    assert types["penstock_slo_requests"] == types["penstock_slo_bad_requests"] == "counter"
    found = {
        metric: {
            sample.name.removeprefix("penstock_slo_"): sample.value
            for sample in samples
            if sample.labels.get("metric") == metric and sample.labels["model"] == "model"
        }
        for metric in ("ttft", "tpot")
    }
    assert found["ttft"] == {
        "requests": 2,
        "bad_requests": 2,
        "objective": 0.99,
        "latency_seconds": 0.1,
    }
    assert found["tpot"] == {"requests": 2, "bad_requests": 1, "objective": 0.95}
    assert not any("slo" in s.name for s in samples if s.labels.get("model") == "b")


def test_families_of_other_parts_are_shown() -> None:
    made = ScrapeLines.of("penstock_made", "Made elsewhere", "gauge", [({"model": "m"}, 3)])
    empty = ScrapeLines.of("penstock_empty", "Nothing", "gauge", [])
    types, samples = parse(expose([], others=[made, empty]))
    assert types["penstock_made"] == "gauge" and "penstock_empty" not in types
    assert value_of(samples, "penstock_made", model="m") == 3


def test_who_got_no_answer_is_in_no_phase_and_his_batch_was_executed() -> None:
    metrics = ModelMetrics("model", "1")
    assert metrics.fold([], num_rows=2, timings=finished().timings) == (0.0, 0.0)
    assert (metrics.num_executions, metrics.num_inferences, metrics.num_success) == (1, 2, 0)
    assert metrics.batch_sizes == {2: 1}
    assert {histogram.count for histogram in metrics.phases.values()} == {0}


@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1)), min_size=1, max_size=20))
def test_both_waits_are_the_time_in_the_queue(waits: list[tuple[float, float]]) -> None:
    metrics = ModelMetrics("model", "1")
    batch = [
        finished(dispatched=queue_s, completed=queue_s, instance_wait_s=queue_s * share)
        for queue_s, share in waits
    ]
    metrics.fold(batch, len(batch), batch[0].timings)
    parts = [metrics.phases[wait] for wait in WAITS]
    assert [part.count for part in parts] == [len(batch)] * 2
    assert sum(part.total for part in parts) == pytest.approx(metrics.phases["queue"].total)


@pytest.mark.parametrize(
    ("error", "reason", "tritons"),
    [
        (Overloaded("full"), "queue_full", "REJECTED"),
        (Overloaded("late", reason="predicted_late"), "predicted_late", "REJECTED"),
        (InvalidRequest("wrong"), "invalid", "OTHER"),
        (TooLarge("large"), "too_large", "OTHER"),
        (NotReady("loading"), "not_ready", "OTHER"),
        (Unsupported("sequence"), "unsupported", "OTHER"),
        (Quarantined("poison"), "quarantined", "OTHER"),
    ],
)
def test_refusals_are_counted_by_reason(error: PenstockError, reason: str, tritons: str) -> None:
    metrics = ModelMetrics("model", "1")
    metrics.refused(error)
    assert {name: count for name, count in metrics.num_refused.items() if count} == {reason: 1}
    assert metrics.num_failures[tritons] == 1


def test_a_reason_is_either_of_arrival_or_of_the_queue() -> None:
    assert not set(REFUSED_AT_ARRIVAL) & set(REFUSED_LATER)


@pytest.mark.parametrize("reason", REASONS)
def test_failures_are_counted_by_reason(reason: str) -> None:
    metrics = ModelMetrics("model", "1")
    metrics.failed(reason, BackendFailed("it died"))
    metrics.failed(reason, BackendFailed("it died"))
    assert metrics.num_failures == {**dict.fromkeys(REASONS, 0), reason: 2}


def test_reasons_are_tritons() -> None:
    assert set(REASONS) == {"REJECTED", "CANCELED", "BACKEND", "OTHER"}


# What a scrape gets


@pytest.fixture
def scraped() -> tuple[dict[str, str], list[Sample]]:
    metrics = ModelMetrics("digits", "3")
    batch = [
        finished(received=0.0, queued=0.0, dispatched=0.001, completed=0.002),
        finished(received=0.0, queued=0.0, dispatched=0.25, completed=40.0, instance_wait_s=0.2),
    ]
    metrics.fold(batch, num_rows=5, timings=batch[0].timings)
    for _ in range(4):
        metrics.refused(Overloaded("late", reason="predicted_late"))
    metrics.num_restarts = 6
    metrics.num_deaths["hang"] = 2
    metrics.load_s = 1.5
    models = [Pending(metrics, num_pending=7, num_ready=8)]
    return parse(expose(models, HOST, SHARDS))


def test_tritons_metrics_have_tritons_names_and_types(
    scraped: tuple[dict[str, str], list[Sample]],
) -> None:
    types, samples = scraped
    gauges = TRITON_GAUGES | TRITON_HOST_GAUGES
    assert {name for name in types if name.startswith("nv_")} == TRITON_COUNTERS | gauges
    assert all(types[name] == "counter" for name in TRITON_COUNTERS)
    assert all(types[name] == "gauge" for name in gauges)
    names = {sample.name for sample in samples}
    assert names >= TRITON_COUNTERS | TRITON_GAUGES
    assert not [name for name in names if name.endswith(("_total", "_created"))]


def test_every_sample_says_its_model_and_version(
    scraped: tuple[dict[str, str], list[Sample]],
) -> None:
    of_the_server = ("nv_cpu_", "penstock_process_", "penstock_build_", "penstock_shard_")
    for sample in scraped[1]:
        if not sample.name.startswith(of_the_server):
            assert (sample.labels["model"], sample.labels["version"]) == ("digits", "3")
            assert sample.labels.keys() <= {"model", "version", "reason", "le", "cause"}


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
    assert value_of(samples, "penstock_rejections", reason="predicted_late") == 4
    assert value_of(samples, "penstock_rejections", reason="dropped_late") == 0
    assert value_of(samples, "penstock_worker_deaths", cause="hang") == 2
    assert value_of(samples, "penstock_worker_deaths", cause="crash") == 0
    assert value_of(samples, "penstock_shard_restarts", shard="1") == 3
    assert value_of(samples, "penstock_shard_restarts", shard="2") == 1
    connections = [s for s in samples if s.name == "penstock_shard_connections"]
    assert [(s.labels, s.value) for s in connections] == [({"shard": "1"}, 12), ({"shard": "2"}, 0)]
    assert value_of(samples, "penstock_build_info", version=penstock.__version__) == 1


def test_the_machine_and_every_process_are_shown(
    scraped: tuple[dict[str, str], list[Sample]],
) -> None:
    _, samples = scraped
    assert value_of(samples, "nv_cpu_utilization") == 0.25
    assert value_of(samples, "nv_cpu_memory_total_bytes") == 1000
    assert value_of(samples, "nv_cpu_memory_used_bytes") == 400
    assert value_of(samples, "penstock_process_resident_bytes", process="core") == 100
    worker = {"process": "worker", "model": "digits", "version": "3", "instance": "1"}
    assert value_of(samples, "penstock_process_resident_bytes", **worker) == 70
    assert value_of(samples, "penstock_process_cpu_seconds", **worker) == 2.25
    assert value_of(samples, "penstock_process_cpu_seconds", process="shard", shard="2") == 0.75


def test_batch_sizes_are_a_histogram_over_powers_of_two() -> None:
    metrics = ModelMetrics("model", "1")
    one = finished()
    for num_rows in (1, 1, 3, 4, 5, 5000):
        metrics.fold([one], num_rows, one.timings)
    _, samples = parse(expose([Pending(metrics, 0, 0)]))
    buckets = {
        sample.labels["le"]: sample.value
        for sample in samples
        if sample.name == "penstock_batch_size_bucket"
    }
    assert list(buckets) == [*map(str, BATCH_BUCKETS), "+Inf"]
    assert [buckets[edge] for edge in ("1", "2", "4", "8", "1024", "+Inf")] == [2, 2, 4, 5, 5, 6]
    assert value_of(samples, "penstock_batch_size_sum") == 1 + 1 + 3 + 4 + 5 + 5000


def test_tokens_of_batches_are_shown_where_there_is_a_budget_of_them() -> None:
    metrics, others = ModelMetrics("model", "1"), ModelMetrics("others", "1")
    assert b"penstock_batch_tokens" not in expose([Pending(others, 0, 0)])
    for num_tokens in (1, 64, 65, 32768, 1 << 30):
        metrics.batch_tokens.add(num_tokens)
    _, samples = parse(expose([Pending(metrics, 0, 0), Pending(others, 0, 0)]))
    buckets = {
        sample.labels["le"]: sample.value
        for sample in samples
        if sample.name == "penstock_batch_tokens_bucket"
    }
    assert [buckets[edge] for edge in ("64", "128", "32768", "+Inf")] == [2, 3, 4, 5]
    assert value_of(samples, "penstock_batch_tokens_sum") == 1 + 64 + 65 + 32768 + (1 << 30)


def test_the_reference_parser_reads_the_same() -> None:
    metrics = ModelMetrics('di\\gi"ts', "3")
    one = finished(dispatched=0.5, completed=1.0, instance_wait_s=0.25)
    metrics.fold([one], 3, one.timings)
    text = expose([Pending(metrics, 1, 2)], HOST, SHARDS)
    ours = {(s.name, *sorted(s.labels.items())): s.value for s in parse(text)[1]}
    # It gives Triton's counters the ending that they lack.
    theirs = {
        (sample.name.removesuffix("_total"), *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
    assert theirs == ours


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


@pytest.mark.parametrize("phase", [*PHASES, *WAITS])
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
    if phase in PHASES:
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
    assert {s.labels["model"] for s in samples if "model" in s.labels} == {name}


def test_a_name_cannot_smuggle_in_a_sample() -> None:
    name = 'a"} 1\nnv_inference_count{model="b'
    _, samples = parse(expose([Pending(ModelMetrics(name, "1"), 0, 0)]))
    assert {s.labels["model"] for s in samples if "model" in s.labels} == {name}


def test_models_share_one_family() -> None:
    models = [Pending(ModelMetrics(name, "1"), 0, 0) for name in ("a", "b")]
    types, samples = parse(expose(models))
    assert len(types) == len(set(types))
    for name in TRITON_COUNTERS - {"nv_inference_request_failure"}:
        assert [s.labels["model"] for s in samples if s.name == name] == ["a", "b"]


GPUS = [
    GpuUse("GPU-a", 0.37, 16 << 30, 1 << 30, 123.456, 700.0, 5000.25, 1980),
    GpuUse("GPU-b", None, 16 << 30, 2 << 30),
]


def test_gpus_have_tritons_names_units_and_label() -> None:
    types, samples = parse(expose([], replace(HOST, gpus=GPUS)))
    found = {(s.name, s.labels["gpu_uuid"]): s.value for s in samples if "gpu_uuid" in s.labels}
    assert found == {
        ("nv_gpu_utilization", "GPU-a"): 0.37,
        ("nv_gpu_memory_total_bytes", "GPU-a"): 16 << 30,
        ("nv_gpu_memory_total_bytes", "GPU-b"): 16 << 30,
        ("nv_gpu_memory_used_bytes", "GPU-a"): 1 << 30,
        ("nv_gpu_memory_used_bytes", "GPU-b"): 2 << 30,
        ("nv_gpu_power_usage", "GPU-a"): 123.456,
        ("nv_gpu_power_limit", "GPU-a"): 700.0,
        ("nv_energy_consumption", "GPU-a"): 5000.25,
    }
    assert types["nv_energy_consumption"] == "counter"
    assert {types[name] for name, _ in found if name.startswith("nv_gpu_")} == {"gauge"}


def test_what_no_gpu_says_has_no_series() -> None:
    types, _ = parse(expose([], replace(HOST, gpus=GPUS[1:])))
    assert "nv_gpu_power_usage" not in types
    types, _ = parse(expose([], HOST))
    assert not [name for name in types if name.startswith("nv_gpu") or "energy" in name]


def test_memory_of_instances_on_gpus_is_told() -> None:
    memory = [
        ModelProcess(index, f"cuda:{index}", 1, True, {GPU_MEMORY: str(5 + index)})
        for index in range(2)
    ]
    types, samples = parse(expose([Pending(ModelMetrics("digits", "3"), 0, 0, memory)]))
    name = "penstock_instance_gpu_memory_bytes"
    assert types[name] == "gauge"
    labels = {"model": "digits", "version": "3"}
    assert [(s.labels, s.value) for s in samples if s.name == name] == [
        (labels | {"instance": "0", "device": "cuda:0"}, 5),
        (labels | {"instance": "1", "device": "cuda:1"}, 6),
    ]


def test_instances_that_fell_back_to_the_cpu_are_told() -> None:
    built: list[dict[str, str]] = [{}, {GPU_FALLBACK: "operator Loop (node 'l') is not supported"}]
    processes = [ModelProcess(n, "cuda:0", 1, True, each) for n, each in enumerate(built)]
    types, samples = parse(expose([Pending(ModelMetrics("digits", "3"), 0, 0, processes)]))
    name = "penstock_gpu_fallback"
    assert types[name] == "gauge"
    labels = {"model": "digits", "version": "3", "instance": "1"}
    assert [(s.labels, s.value) for s in samples if s.name == name] == [(labels, 1)]
    types, _ = parse(expose([Pending(ModelMetrics("digits", "3"), 0, 0, processes[:1])]))
    assert name not in types


def test_a_server_without_models_still_answers_a_scrape() -> None:
    types, samples = parse(expose([]))
    assert types.keys() >= TRITON_COUNTERS
    assert [sample.name for sample in samples] == ["penstock_build_info"]


def test_tags_of_the_model_are_labels_of_all_its_metrics():
    metrics = ModelMetrics("model", "1", {"team": "vision", "tier": 'a"b'})
    text = expose([Pending(metrics, 0, 1)]).decode()
    of_model = [line for line in text.splitlines() if 'model="model"' in line]
    assert len(of_model) > 50
    assert all('team="vision",tier="a\\"b"' in line for line in of_model)
