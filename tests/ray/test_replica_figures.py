"""Figures of replicas, added up and joined."""

from prometheus_client.parser import text_string_to_metric_families

from penstock.ray.replica_figures import add_statistics, join_metrics


def entry(version: str, count: int, last: int, sizes: dict[int, int]) -> dict[str, object]:
    return {
        "name": "m",
        "version": version,
        "last_inference": last,
        "inference_stats": {"success": {"count": count, "ns": 10 * count}},
        "batch_stats": [
            {"batch_size": size, "compute_infer": {"count": number, "ns": number}}
            for size, number in sizes.items()
        ],
        "memory_usage": [],
    }


def test_statistics_of_replicas_are_added_up_by_version_and_batch_size() -> None:
    one = [entry("1", 3, 100, {1: 2, 4: 1}), entry("2", 1, 50, {})]
    other = [entry("1", 4, 70, {4: 5, 8: 1})]
    assert add_statistics([one, other]) == [
        entry("1", 7, 100, {1: 2, 4: 6, 8: 1}),
        entry("2", 1, 50, {}),
    ]


def test_one_replica_keeps_its_statistics() -> None:
    assert add_statistics([[entry("1", 3, 9, {1: 1})]]) == [entry("1", 3, 9, {1: 1})]


TEXT = """# HELP requests Answered
# TYPE requests counter
requests{{model="a",text="x y}}"}} {count}
# HELP up Whether it runs
# TYPE up gauge
up 1
# HELP latency_s Seconds
# TYPE latency_s histogram
latency_s_bucket{{le="1"}} 1
latency_s_bucket{{le="+Inf"}} 2
latency_s_sum 3.5
latency_s_count 2
"""


def test_samples_get_the_replica_and_each_metric_is_described_once() -> None:
    joined = join_metrics({"r1": TEXT.format(count=1), "r2": TEXT.format(count=2)})
    families = {each.name: each for each in text_string_to_metric_families(joined)}
    assert sorted(families) == ["latency_s", "requests", "up"]
    found = {each.labels["replica"]: each.value for each in families["requests"].samples}
    assert found == {"r1": 1.0, "r2": 2.0}
    assert families["requests"].samples[0].labels["text"] == "x y}"
    assert families["latency_s"].type == "histogram"
    assert len(families["latency_s"].samples) == 8
    assert joined.count("# TYPE up gauge") == 1


def test_no_replicas_give_no_metrics() -> None:
    assert join_metrics({}) == ""
