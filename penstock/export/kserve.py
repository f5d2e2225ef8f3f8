"""KServe: a ServingRuntime with the pod's container, and an InferenceService that uses it. Pure.

KServe's storage initializer downloads the models before the container starts; the plain mode of
deployment, without Knative, keeps the probes and the time to drain.
"""

from __future__ import annotations

from penstock.export import pod
from penstock.export.autoscaling import BEHAVIOR, CPU_PERCENT, queue_query
from penstock.export.kubernetes import Document
from penstock.export.settings import ClusterSettings, Ports
from penstock.export.yaml_text import Yaml

API = "serving.kserve.io"
# The storage initializer's folder of models, and the ports that KServe expects.
MODELS = "/mnt/models"
PORTS = Ports(http=8080, grpc=9000)
CONTAINER = "kserve-container"
FORMAT, FORMAT_VERSION = "penstock", "1"


def documents(settings: ClusterSettings, storage_uri: str) -> list[Document]:
    return [
        Document("servingruntime.yaml", serving_runtime(settings)),
        Document("inferenceservice.yaml", inference_service(settings, storage_uri)),
    ]


def serving_runtime(settings: ClusterSettings) -> Yaml:
    """Return the runtime: it serves a model repository in the formats that Penstock knows."""
    return {
        "apiVersion": f"{API}/v1alpha1",
        "kind": "ServingRuntime",
        "metadata": settings.metadata,
        "spec": {
            "annotations": {
                "prometheus.kserve.io/port": str(settings.ports.metrics),
                "prometheus.kserve.io/path": "/metrics",
            },
            "supportedModelFormats": [
                {"name": FORMAT, "version": FORMAT_VERSION, "autoSelect": True, "priority": 1}
            ],
            "protocolVersions": ["v2", "grpc-v2"],
            "multiModel": False,
            "containers": [pod.container(settings, CONTAINER)],
            "volumes": pod.volumes(settings),
        },
    }


def inference_service(settings: ClusterSettings, storage_uri: str) -> Yaml:
    scaling = settings.scaling
    predictor: dict[str, Yaml] = {
        "minReplicas": scaling.min_replicas,
        "maxReplicas": scaling.max_replicas,
        **_autoscaling(settings),
        "terminationGracePeriodSeconds": settings.stopping.grace_s,
        "automountServiceAccountToken": False,
        "securityContext": pod.POD_SECURITY,
        "model": {
            "modelFormat": {"name": FORMAT, "version": FORMAT_VERSION},
            "runtime": settings.name,
            "protocolVersion": "v2",
            "storageUri": storage_uri,
            "resources": settings.sizing.resources,
        },
    }
    if settings.node_selector:
        predictor["nodeSelector"] = dict(settings.node_selector)
    if settings.sizing.gpus:
        predictor["tolerations"] = pod.GPU_TOLERATIONS
    annotations = {
        f"{API}/deploymentMode": "RawDeployment",
        f"{API}/autoscalerClass": scaling.autoscaler,
        # Without it KServe does not tell Prometheus of the port that the runtime names.
        f"{API}/enable-prometheus-scraping": "true",
    }
    return {
        "apiVersion": f"{API}/v1beta1",
        "kind": "InferenceService",
        "metadata": {**settings.metadata, "annotations": annotations},
        "spec": {"predictor": predictor},
    }


def _autoscaling(settings: ClusterSettings) -> dict[str, Yaml]:
    """Return the fields of the predictor; KServe makes the ScaledObject or the HPA itself."""
    match settings.scaling.autoscaler:
        case "keda":
            pods = f"{settings.name}-predictor-.*"
            metric: Yaml = {
                "backend": "prometheus",
                "serverAddress": settings.scaling.prometheus_url,
                "query": queue_query(f'namespace="{settings.namespace}",pod=~"{pods}"'),
            }
            # KServe passes `value` on as KEDA's threshold, which is per replica.
            target: Yaml = {"type": "Value", "value": str(settings.sizing.queue_depth)}
            external: Yaml = {"metric": metric, "target": target}
            metrics: Yaml = [{"type": "External", "external": external}]
            return {"autoScaling": {"metrics": metrics, "behavior": BEHAVIOR}}
        case "hpa":
            return {"scaleMetric": "cpu", "scaleTarget": CPU_PERCENT}
        case _:
            return {}
