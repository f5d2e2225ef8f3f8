"""What Triton's dashboards and metrics documents query, against scrapes of a real server.

The series are those of deploy/*/dashboard.json and of docs/user_guide/metrics.md in Triton's
repository; GPUs are those of a made scrape.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import Served, null_model
from waiting import wait_until

from penstock.serving.scrape import HostUse, expose
from penstock.system.devices import GpuUse

MODEL = frozenset({"model", "version"})
NOTHING = frozenset[str]()
GPU = frozenset({"gpu_uuid"})
# Series by dashboard, with the labels that it filters or groups by. `instance` and `pod` come from
# Prometheus itself.
DASHBOARDS = {
    "aws, fleetcommand, gcp and oci": {
        "nv_inference_request_success": MODEL,
        "nv_inference_request_failure": MODEL,
        "nv_inference_queue_duration_us": MODEL,
    },
    "k8s-onprem": {
        "nv_inference_count": MODEL,
        "nv_inference_request_success": MODEL,
        "nv_inference_request_failure": MODEL,
        "nv_inference_compute_infer_duration_us": MODEL,
        "nv_inference_queue_duration_us": MODEL,
        "nv_cpu_memory_used_bytes": NOTHING,
        "nv_cpu_utilization": NOTHING,
    },
}
# Triton itself has had none of these since its version 2; two panels of the older dashboards are
# empty with it, too.
GONE = {"nv_inference_load_ratio_bucket", "nv_inference_compute_duration_us"}
# The tables of the documentation, without those that a flag switches on.
DOCUMENTED = {
    "nv_inference_request_success": MODEL,
    "nv_inference_request_failure": MODEL | {"reason"},
    "nv_inference_count": MODEL,
    "nv_inference_exec_count": MODEL,
    "nv_inference_pending_request_count": MODEL,
    "nv_inference_request_duration_us": MODEL,
    "nv_inference_queue_duration_us": MODEL,
    "nv_inference_compute_input_duration_us": MODEL,
    "nv_inference_compute_infer_duration_us": MODEL,
    "nv_inference_compute_output_duration_us": MODEL,
    "nv_model_load_duration_secs": MODEL,
    "nv_cpu_utilization": NOTHING,
    "nv_cpu_memory_total_bytes": NOTHING,
    "nv_cpu_memory_used_bytes": NOTHING,
    "nv_pinned_memory_pool_total_bytes": NOTHING,
    "nv_pinned_memory_pool_used_bytes": NOTHING,
}
ON_GPUS = (
    "nv_gpu_utilization", "nv_gpu_memory_total_bytes", "nv_gpu_memory_used_bytes",
    "nv_gpu_power_usage", "nv_gpu_power_limit", "nv_energy_consumption",
)  # fmt: skip
HISTOGRAM = "nv_inference_first_response_histogram_ms"
SUMMARIES = [
    f"nv_inference_{phase}_summary_us"
    for phase in ("request", "queue", "compute_input", "compute_infer", "compute_output")
]
BUCKETS = f"""model_metrics {{ metric_control {{ metric_identifier {{ family: "{HISTOGRAM}" }}
  histogram_options {{ buckets: [ 1, 20000 ] }} }} }}"""
FLAGS = (
    "--metrics-config", "histogram_latencies=true", "--metrics-config", "summary_latencies=true",
    "--metrics-config", "summary_quantiles=0.5:0.05,0.75:0.01",
)  # fmt: skip

Samples = dict[str, dict[frozenset[tuple[str, str]], float]]


def read(text: str) -> Samples:
    """Values by name as it is written, and by labels."""
    found: Samples = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        [family] = text_string_to_metric_families(line + "\n")
        [sample] = family.samples
        name = line.partition("{")[0].partition(" ")[0]
        found.setdefault(name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def labels(samples: Samples, name: str) -> set[str]:
    """Names of the labels that every sample of a series has."""
    return set.intersection(*({key for key, _ in each} for each in samples[name]))


@pytest.fixture(scope="module", params=["1", "2"], ids=["core", "shards"])
def served(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("metrics")
    null_model(root, "plain", config=BUCKETS)
    null_model(root, "other")
    with Served(root, "--shards", request.param, *FLAGS) as server:
        number = int(request.param)
        wait_until(lambda: number == 1 or server.has_shards(number))
        yield server


@pytest.fixture(scope="module")
def samples(served: Served) -> Samples:
    for value in range(12):
        assert served.infer("plain", "x", "INT32", [value])[0] == 200
    return read(served.get("/metrics")[1].decode())


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_every_series_of_a_dashboard_is_there_with_its_labels(samples: Samples, dashboard: str):
    for name, needed in DASHBOARDS[dashboard].items():
        assert name in samples
        assert labels(samples, name) >= needed


def test_every_documented_series_is_there_with_its_labels(samples: Samples):
    assert {name for name in DOCUMENTED if name not in samples} == set()
    assert all(labels(samples, name) == needed for name, needed in DOCUMENTED.items())
    assert not GONE & set(samples)


def test_series_of_gpus_have_their_uuid():
    gpu = GpuUse("GPU-1", 0.5, 80, 8, 300.0, 700.0, 12.5)
    samples = read(expose([], HostUse(0.1, 2, 1, gpus=[gpu])).decode())
    assert all(labels(samples, name) == GPU for name in ON_GPUS)


def test_the_histogram_has_the_buckets_of_the_model_and_counts_each_answer(samples: Samples):
    def sample(name: str, **more: str) -> float:
        labels = {"model": "plain", "version": "1", **more}
        return samples[f"{HISTOGRAM}_{name}"][frozenset(labels.items())]

    assert sample("count") == sample("bucket", le="20000") == sample("bucket", le="+Inf") == 12
    assert 0 <= sample("bucket", le="1") <= 12
    assert sample("sum") == int(sample("sum"))
    bounds = {
        dict(each)["le"] for each in samples[f"{HISTOGRAM}_bucket"] if ("model", "other") in each
    }
    assert bounds == {"100", "500", "2000", "5000", "+Inf"}


@pytest.mark.parametrize("name", SUMMARIES)
def test_summaries_have_the_chosen_quantiles_and_add_up_to_the_counters(
    samples: Samples, name: str
):
    own = {"model": "plain", "version": "1"}
    values = [samples[name][frozenset({**own, "quantile": q}.items())] for q in ("0.5", "0.75")]
    assert 0 <= values[0] <= values[1]
    assert samples[f"{name}_count"][frozenset(own.items())] == 12
    counter = name.replace("_summary_us", "_duration_us")
    total = samples[f"{name}_sum"][frozenset(own.items())]
    assert total == pytest.approx(samples[counter][frozenset(own.items())], abs=2)


def test_counters_of_latencies_can_be_left_out(tmp_path: Path):
    null_model(tmp_path, "plain")
    flags = ("--metrics-config", "counter_latencies=false", "--metrics-interval-ms", "60000")
    with Served(tmp_path, *flags) as server:
        first = read(server.get("/metrics")[1].decode())
        second = read(server.get("/metrics")[1].decode())
    assert not [name for name in first if name.endswith("_duration_us")]
    assert "nv_inference_request_success" in first
    assert HISTOGRAM + "_count" not in first
    # The machine's use is read at most once a minute.
    for name in ("nv_cpu_utilization", "nv_cpu_memory_used_bytes"):
        assert first[name] == second[name]
