"""Autoscalers of the pods: KEDA by the depth of the queue, or a plain HPA. Pure.

Only one of them may own a Deployment: KEDA makes an HPA itself.
"""

from __future__ import annotations

from penstock.export.settings import ClusterSettings
from penstock.export.yaml_text import ChartValue, Yaml

QUEUE = "nv_inference_pending_request_count"
# A scrape sees the queue of one moment; the mean of some scrapes does not jump.
WINDOW = "1m"
POLL_S = 15
CPU_PERCENT = 70
# Up at once, by doubling. Down slowly, as starting a pod takes as long as its models load.
BEHAVIOR: Yaml = {
    "scaleUp": {
        "stabilizationWindowSeconds": 0,
        "policies": [
            {"type": "Percent", "value": 100, "periodSeconds": 60},
            {"type": "Pods", "value": 2, "periodSeconds": 60},
        ],
        "selectPolicy": "Max",
    },
    "scaleDown": {
        "stabilizationWindowSeconds": 300,
        "policies": [{"type": "Percent", "value": 50, "periodSeconds": 60}],
    },
}


def queue_query(selector: str) -> str:
    """Return the PromQL of the requests that wait in all pods; `selector` are label matchers."""
    return f"sum(avg_over_time({QUEUE}{{{selector}}}[{WINDOW}]))"


def scaled_object(settings: ClusterSettings) -> Yaml:
    """Return KEDA's ScaledObject: a replica for each `queue_depth` waiting requests."""
    scaling = settings.scaling
    # The labels that a ServiceMonitor adds.
    selector = f'namespace="{settings.namespace}",job="{settings.name}"'
    trigger: dict[str, Yaml] = {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": ChartValue("prometheusUrl", scaling.prometheus_url),
            "query": queue_query(selector),
            "threshold": ChartValue("queueDepth", str(settings.sizing.queue_depth)),
        },
    }
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": settings.metadata,
        "spec": {
            "scaleTargetRef": {"name": settings.name},
            "pollingInterval": POLL_S,
            "minReplicaCount": ChartValue("minReplicas", scaling.min_replicas),
            "maxReplicaCount": ChartValue("maxReplicas", scaling.max_replicas),
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": BEHAVIOR}},
            "triggers": [trigger],
        },
    }


def horizontal_pod_autoscaler(settings: ClusterSettings) -> Yaml:
    """Return an HPA: on CPU utilisation, or on the queue if GPUs compute, which needs an adapter
    that offers the metric of pods."""
    scaling = settings.scaling
    on_cpu: Yaml = {"type": "Utilization", "averageUtilization": CPU_PERCENT}
    metric: Yaml = {"type": "Resource", "resource": {"name": "cpu", "target": on_cpu}}
    if settings.sizing.gpus:
        value = str(settings.sizing.queue_depth)
        target: Yaml = {"type": "AverageValue", "averageValue": ChartValue("queueDepth", value)}
        metric = {"type": "Pods", "pods": {"metric": {"name": QUEUE}, "target": target}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": settings.metadata,
        "spec": {
            "scaleTargetRef": {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "name": settings.name,
            },
            "minReplicas": ChartValue("minReplicas", scaling.min_replicas),
            "maxReplicas": ChartValue("maxReplicas", scaling.max_replicas),
            "metrics": [metric],
            "behavior": BEHAVIOR,
        },
    }
