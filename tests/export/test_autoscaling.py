"""KEDA by queued requests, or a plain HPA. `make verify-deploy` asks a real Prometheus."""

from dataclasses import replace

from made_settings import made_settings

from penstock.export.autoscaling import horizontal_pod_autoscaler, queue_query, scaled_object
from penstock.export.yaml_text import resolved
from penstock.serving.scrape import NUMBERS


def test_keda_asks_for_the_queue_of_this_deployment() -> None:
    spec = resolved(scaled_object(made_settings()))["spec"]
    assert spec["scaleTargetRef"] == {"name": "digits"}
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 10)
    [trigger] = spec["triggers"]
    assert trigger["metricType"] == "AverageValue"
    query = trigger["metadata"]["query"]
    assert 'namespace="vision",job="digits"' in query
    # KEDA reads every entry as a text.
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    assert trigger["metadata"]["threshold"] == "128"


def test_the_metric_is_one_of_the_server() -> None:
    [name] = [name for name, *_ in NUMBERS if name in queue_query("")]
    assert name == "nv_inference_pending_request_count"


def test_an_hpa_follows_the_cpu_or_the_queue_of_gpus() -> None:
    [on_cpu] = resolved(horizontal_pod_autoscaler(made_settings()))["spec"]["metrics"]
    assert on_cpu["resource"]["name"] == "cpu"
    [on_gpu] = resolved(horizontal_pod_autoscaler(made_settings(gpus=1)))["spec"]["metrics"]
    assert on_gpu["pods"]["metric"]["name"] == "nv_inference_pending_request_count"
    assert on_gpu["pods"]["target"]["averageValue"] == "128"


def test_both_own_the_deployment_of_that_name() -> None:
    settings = made_settings(name="other")
    for made in (scaled_object(settings), horizontal_pod_autoscaler(settings)):
        assert resolved(made)["spec"]["scaleTargetRef"]["name"] == "other"


def test_limits_of_replicas() -> None:
    scaling = replace(made_settings().scaling, min_replicas=3, max_replicas=4)
    spec = resolved(horizontal_pod_autoscaler(made_settings(scaling=scaling)))["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (3, 4)
