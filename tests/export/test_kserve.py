"""KServe's resources: the same container, where the storage initializer puts the models."""

from dataclasses import replace

import pytest
from made_settings import made_settings

from penstock.export import kserve
from penstock.export.settings import ClusterSettings, ModelFiles
from penstock.export.yaml_text import resolved


def settings_of(autoscaler: str = "keda", gpus: int = 0) -> ClusterSettings:
    made = made_settings(gpus, files=ModelFiles("image", kserve.MODELS), ports=kserve.PORTS)
    scaling = replace(made.scaling, autoscaler=autoscaler)
    return replace(made, served=kserve.MODELS, scaling=scaling)


def rendered(settings: ClusterSettings) -> tuple[dict, dict]:
    runtime, service = kserve.documents(settings, "s3://bucket/models")
    return resolved(runtime.body), resolved(service.body)


def test_the_runtime_serves_what_kserve_downloads() -> None:
    runtime, _ = rendered(settings_of())
    [container] = runtime["spec"]["containers"]
    assert container["name"] == "kserve-container"
    assert container["args"][:2] == ["serve", "/mnt/models"]
    assert [each["containerPort"] for each in container["ports"]] == [8080, 9000, 8002]
    assert runtime["spec"]["protocolVersions"] == ["v2", "grpc-v2"]
    volumes = {each["name"] for each in runtime["spec"]["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes == {"tmp", "keys"}


def test_the_service_uses_the_runtime() -> None:
    runtime, service = rendered(settings_of())
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    formats = [each["name"] for each in runtime["spec"]["supportedModelFormats"]]
    assert model["modelFormat"]["name"] in formats
    assert model["storageUri"] == "s3://bucket/models"
    assert service["spec"]["predictor"]["terminationGracePeriodSeconds"] == 50


@pytest.mark.parametrize(
    ("autoscaler", "field"), [("keda", "autoScaling"), ("hpa", "scaleTarget"), ("none", "")]
)
def test_autoscaling(autoscaler: str, field: str) -> None:
    _, service = rendered(settings_of(autoscaler))
    predictor = service["spec"]["predictor"]
    class_name = service["metadata"]["annotations"]["serving.kserve.io/autoscalerClass"]
    assert class_name == autoscaler
    assert predictor.keys() & {"autoScaling", "scaleTarget"} == ({field} if field else set())


def test_keda_asks_for_the_queue_of_the_predictors_pods() -> None:
    _, service = rendered(settings_of())
    [metric] = service["spec"]["predictor"]["autoScaling"]["metrics"]
    query = metric["external"]["metric"]["query"]
    assert 'namespace="vision",pod=~"digits-predictor-.*"' in query


def test_prometheus_is_told_of_the_metrics_port() -> None:
    runtime, service = rendered(settings_of())
    assert runtime["spec"]["annotations"]["prometheus.kserve.io/port"] == "8002"
    annotations = service["metadata"]["annotations"]
    assert annotations["serving.kserve.io/enable-prometheus-scraping"] == "true"


def test_gpus_are_tolerated() -> None:
    _, service = rendered(settings_of(gpus=1))
    predictor = service["spec"]["predictor"]
    assert predictor["tolerations"] and predictor["model"]["resources"]["limits"]["nvidia.com/gpu"]
