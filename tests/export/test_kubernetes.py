"""The documents of one Deployment, and that they fit each other. `make verify-deploy` compares them
with the schemas of Kubernetes and of the CRDs."""

from dataclasses import replace

import pytest
import yaml
from made_settings import made_settings

from penstock.export.kubernetes import Document, chosen, documents
from penstock.export.settings import ClusterSettings
from penstock.export.yaml_text import dump, resolved


def by_kind(settings: ClusterSettings) -> dict[str, dict]:
    found = [resolved(each.body) for each in chosen(documents(settings))]
    return {each["kind"]: each for each in found}


def with_autoscaler(name: str) -> ClusterSettings:
    settings = made_settings()
    return replace(settings, scaling=replace(settings.scaling, autoscaler=name))


@pytest.mark.parametrize(
    ("autoscaler", "kinds"),
    [("keda", {"ScaledObject"}), ("hpa", {"HorizontalPodAutoscaler"}), ("none", set())],
)
def test_one_autoscaler_at_most_owns_the_replicas(autoscaler: str, kinds: set[str]) -> None:
    found = by_kind(with_autoscaler(autoscaler))
    assert found.keys() & {"ScaledObject", "HorizontalPodAutoscaler"} == kinds
    assert ("replicas" in found["Deployment"]["spec"]) == (autoscaler == "none")


def test_the_kinds() -> None:
    assert set(by_kind(made_settings())) == {
        "Deployment",
        "Service",
        "PodDisruptionBudget",
        "ScaledObject",
        "NetworkPolicy",
        "ServiceMonitor",
    }


def test_everything_is_about_the_same_pods() -> None:
    found = by_kind(made_settings())
    deployment = found["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["selector"] == labels
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    monitor = found["ServiceMonitor"]["spec"]
    assert (
        monitor["selector"]["matchLabels"].items() <= found["Service"]["metadata"]["labels"].items()
    )
    assert monitor["namespaceSelector"]["matchNames"] == ["vision"]
    assert all(each["metadata"]["namespace"] == "vision" for each in found.values())
    assert all(each["metadata"]["name"] == "digits" for each in found.values())


def test_ports_are_the_containers() -> None:
    found = by_kind(made_settings())
    [container] = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    ports = {each["name"] for each in container["ports"]}
    service = found["Service"]["spec"]["ports"]
    assert {each["targetPort"] for each in service} == ports
    rules = found["NetworkPolicy"]["spec"]["ingress"]
    assert {port["port"] for rule in rules for port in rule["ports"]} == ports
    assert found["ServiceMonitor"]["spec"]["endpoints"][0]["port"] in {
        each["name"] for each in service
    }


def test_only_monitoring_reaches_the_metrics_port() -> None:
    for_clients, for_metrics = by_kind(made_settings())["NetworkPolicy"]["spec"]["ingress"]
    assert "from" not in for_clients
    [source] = for_metrics["from"]
    names = source["namespaceSelector"]["matchLabels"]
    assert names == {"kubernetes.io/metadata.name": "monitoring"}


def test_an_update_takes_no_pod_away_first() -> None:
    spec = by_kind(made_settings())["Deployment"]["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert spec["progressDeadlineSeconds"] > made_settings().sizing.startup_s


def test_prometheus_gets_a_key_by_reference() -> None:
    [endpoint] = by_kind(made_settings())["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "digits-keys", "key": "metrics-key"}
    [endpoint] = by_kind(made_settings(keys_secret=""))["ServiceMonitor"]["spec"]["endpoints"]
    assert "authorization" not in endpoint


def test_labels_for_the_operators_selector() -> None:
    settings = made_settings(monitor_labels=(("release", "prometheus"),))
    assert by_kind(settings)["ServiceMonitor"]["metadata"]["labels"]["release"] == "prometheus"


def test_the_deployment_says_where_its_figures_come_from() -> None:
    [deployment, *_] = documents(made_settings())
    text = dump(deployment.body, deployment.comments)
    assert "#   cpu: digits 2, the server 1" in text
    assert yaml.safe_load(text) == resolved(deployment.body)


def test_files_have_names_of_their_own() -> None:
    names = [each.file for each in documents(made_settings())]
    assert len(set(names)) == len(names)
    assert isinstance(documents(made_settings())[0], Document)
