"""A Deployment and what belongs to it, as documents of Kubernetes. Pure; `pod` has the pod."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from penstock.export.autoscaling import horizontal_pod_autoscaler, scaled_object
from penstock.export.pod import pod_template
from penstock.export.settings import METRICS_KEY, ClusterSettings
from penstock.export.yaml_text import ChartValue, When, Yaml

# Deployments of which a pod is not ready in time have failed; the first pull of an image counts.
PULL_S = 300
SCRAPE_S = 15


@dataclass(frozen=True, slots=True)
class Document:
    """One resource. A chart has it only if `condition` on its values holds; `holds` says whether
    it does with their defaults."""

    file: str
    body: Yaml
    comments: tuple[str, ...] = ()
    condition: str = ""
    holds: bool = True


def documents(settings: ClusterSettings) -> list[Document]:
    """Return all resources, including those that other values of a chart would choose."""
    autoscaler = settings.scaling.autoscaler

    def scaler(name: str) -> tuple[str, bool]:
        return f'eq .Values.autoscaler "{name}"', autoscaler == name

    return [
        Document("deployment.yaml", deployment(settings), _why(settings)),
        Document("service.yaml", service(settings)),
        Document("pdb.yaml", disruption_budget(settings)),
        Document("scaledobject.yaml", scaled_object(settings), (), *scaler("keda")),
        Document("hpa.yaml", horizontal_pod_autoscaler(settings), (), *scaler("hpa")),
        Document("networkpolicy.yaml", network_policy(settings), (), ".Values.networkPolicy", True),
        Document(
            "servicemonitor.yaml", service_monitor(settings), (), ".Values.serviceMonitor", True
        ),
    ]


def chosen(every: Sequence[Document]) -> list[Document]:
    """Return the documents that the settings ask for."""
    return [document for document in every if document.holds]


def _why(settings: ClusterSettings) -> tuple[str, ...]:
    return ("Where the figures come from:", *(f"  {note}" for note in settings.sizing.notes))


def deployment(settings: ClusterSettings) -> Yaml:
    is_fixed = settings.scaling.autoscaler == "none"
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": settings.metadata,
        "spec": {
            # An autoscaler owns the number of pods; applying this again must not reset it.
            "replicas": When(
                'eq .Values.autoscaler "none"',
                is_fixed,
                ChartValue("minReplicas", settings.scaling.min_replicas),
            ),
            "revisionHistoryLimit": 5,
            "progressDeadlineSeconds": settings.sizing.startup_s + PULL_S,
            "selector": {"matchLabels": settings.labels},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
            },
            "template": pod_template(settings),
        },
    }


def service(settings: ClusterSettings) -> Yaml:
    """Return the Service. HTTP/2 connections of gRPC stay at one pod: clients that want to use all
    of them balance themselves, or go through a proxy that does."""
    kinds = {"http": "http", "grpc": "kubernetes.io/h2c", "metrics": "http"}
    ports = asdict(settings.ports)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": settings.metadata,
        "spec": {
            "type": "ClusterIP",
            "selector": settings.labels,
            "ports": [
                {"name": name, "port": port, "targetPort": name, "appProtocol": kinds[name]}
                for name, port in ports.items()
            ],
        },
    }


def disruption_budget(settings: ClusterSettings) -> Yaml:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": settings.metadata,
        "spec": {
            "maxUnavailable": 1,
            # Pods that are not ready do not block the drain of a node.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": settings.labels},
        },
    }


def network_policy(settings: ClusterSettings) -> Yaml:
    """Return who may connect: all pods to HTTP and gRPC, monitoring to the metrics port. Probes
    come from the node, which policies do not restrict."""
    monitoring = {"kubernetes.io/metadata.name": settings.monitoring_namespace}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": settings.metadata,
        "spec": {
            "podSelector": {"matchLabels": settings.labels},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"ports": [{"port": "http"}, {"port": "grpc"}]},
                {
                    "from": [{"namespaceSelector": {"matchLabels": monitoring}}],
                    "ports": [{"port": "metrics"}],
                },
            ],
        },
    }


def service_monitor(settings: ClusterSettings) -> Yaml:
    """Return how Prometheus finds and scrapes the pods; a server with keys needs one of them."""
    endpoint: dict[str, Yaml] = {
        "port": "metrics",
        "path": "/metrics",
        "interval": f"{SCRAPE_S}s",
        "scrapeTimeout": "10s",
    }
    if settings.keys_secret:
        name = ChartValue("keysSecret", settings.keys_secret)
        endpoint["authorization"] = {
            "type": "Bearer",
            "credentials": {"name": name, "key": METRICS_KEY},
        }
    labels = {**settings.labels, **dict(settings.monitor_labels)}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": {**settings.metadata, "labels": labels},
        "spec": {
            "selector": {"matchLabels": settings.labels},
            "namespaceSelector": {"matchNames": [settings.namespace]},
            "endpoints": [endpoint],
        },
    }
