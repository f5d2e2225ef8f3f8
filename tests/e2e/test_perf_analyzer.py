"""Triton's own load generator runs against Penstock, and reads from it the counts that are ours."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from perf_analyzer import PerfAnalyzer
from served import EXAMPLES, Served

pytestmark = pytest.mark.verify
NUM_REQUESTS = 60
# It takes its first look at the statistics while its first requests are under way; here they take
# long enough that none of them is done by then. (Against Triton it misses some as well.)
SLOW = """
backend: "null" max_batch_size: 8 dynamic_batching {}
input { name: "INPUT0" data_type: TYPE_FP32 dims: 16 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 16 }
parameters { key: "null.a_ms" value { string_value: "100" } }
"""
WAYS = {
    "HTTP": ["-i", "http"],
    "HTTP, async": ["-i", "http", "--async"],
    "HTTP, JSON": ["-i", "http", "--input-tensor-format=json", "--output-tensor-format=json"],
    "HTTP, batches of 3": ["-i", "http", "-b", "3"],
    "gRPC": ["-i", "grpc"],
    "gRPC, async": ["-i", "grpc", "--async"],
    "gRPC, stream": ["-i", "grpc", "--async", "--streaming"],
    "gRPC, batches of 3": ["-i", "grpc", "-b", "3"],
}


@pytest.fixture(scope="module")
def analyzer() -> PerfAnalyzer:
    return PerfAnalyzer()


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("repository")
    (root / "slow" / "1").mkdir(parents=True)
    (root / "slow" / "config.pbtxt").write_text(SLOW)
    served = Served(root, grpc=True)
    yield served
    assert served.terminate() == 0


@pytest.fixture(scope="module")
def examples() -> Iterator[Served]:
    served = Served(EXAMPLES, grpc=True)
    yield served
    assert served.terminate() == 0


def address(server: Served, flags: list[str]) -> list[str]:
    return ["-u", server.grpc_address if "grpc" in flags else server.address]


def counts(server: Served, model: str) -> dict[str, int]:
    (stats,) = json.loads(server.get(f"/v2/models/{model}/stats")[1])["model_stats"]
    return {
        "Inference": int(stats["inference_count"]),
        "Execution": int(stats["execution_count"]),
        "Successful request": int(stats["inference_stats"]["success"]["count"]),
    }


@pytest.mark.parametrize("flags", WAYS.values(), ids=WAYS.keys())
def test_its_counts_are_ours(
    analyzer: PerfAnalyzer, slow: Served, tmp_path: Path, flags: list[str]
) -> None:
    before = counts(slow, "slow")
    report = analyzer.measure(
        "slow",
        tmp_path,
        *flags,
        *address(slow, flags),
        "--concurrency-range=4",
        f"--request-count={NUM_REQUESTS}",
    )
    after = counts(slow, "slow")
    ours = {name: after[name] - before[name] for name in after}
    assert report.server_counts == ours
    assert report.num_requests == ours["Successful request"] == NUM_REQUESTS
    assert ours["Inference"] == NUM_REQUESTS * (3 if "-b" in flags else 1)
    assert 0 < ours["Execution"] <= NUM_REQUESTS
    assert report.throughputs[0] > 0


@pytest.mark.parametrize("flags", WAYS.values(), ids=WAYS.keys())
def test_a_range_of_concurrencies(
    analyzer: PerfAnalyzer, examples: Served, tmp_path: Path, flags: list[str]
) -> None:
    # Three windows of any stability are enough: nothing is claimed about speed.
    windows = ["-p", "400", "-r", "5", "-s", "999"]
    ranged = ["--concurrency-range=1:4", *windows]
    report = analyzer.measure("identity", tmp_path, *flags, *address(examples, flags), *ranged)
    assert len(report.throughputs) == 4
    assert all(each > 0 for each in report.throughputs)
    # Windows cut through what is under way, so only what cannot differ is compared.
    assert report.num_requests > 0
    assert set(report.server_counts) == set(counts(examples, "identity"))
