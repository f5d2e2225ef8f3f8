"""Options of `penstock export`: what is written for Kubernetes, Helm and KServe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.api.options import flags_of, number, text

output_flag, image_flag = flags_of("Output"), flags_of("Image and models")
scale_flag, size_flag = flags_of("Replicas"), flags_of("Size of a pod")
access_flag, stop_flag = flags_of("Access"), flags_of("Shutdown")
NAMESPACE: Mapping[str, object] = {
    "summary": "Namespace of the resources",
    "when": "Change it to where they will run; queries of metrics name it.",
    **text("NAME", value="default"),
}


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Options that all forms have."""

    image: str = image_flag(
        "Image of the server",
        "Required: the image that the Containerfile builds, as your registry names it.",
        **text("IMAGE", "-"),
    )
    name: str = output_flag(
        "Name of the resources",
        "Change it when the same models are deployed twice.",
        **text("NAME", "that of the model or folder"),
    )
    autoscaler: str = scale_flag(
        "What changes the number of pods",
        "keda scales on queued requests and needs KEDA and Prometheus; hpa scales on CPU, or on "
        "queued requests if the pods have GPUs. Both together would fight over the Deployment.",
        value="keda",
        choices=("keda", "hpa", "none"),
    )
    min_replicas: int = scale_flag(
        "Fewest pods",
        "With 1, a lost node means no answers until another pod is ready.",
        **number(2, "N", 1, 10_000),
    )
    max_replicas: int = scale_flag(
        "Most pods", "Raise it to what the cluster has room for.", **number(10, "N", 1, 10_000)
    )
    queue_depth: int | None = scale_flag(
        "Queued requests per pod that add another",
        "Lower it to scale earlier, at a higher cost.",
        **number(None, "N", 1, 8192, "half the SLO's latency at the measured rate"),
    )
    prometheus_url: str = scale_flag(
        "Address of Prometheus, for KEDA",
        "Change it to where your cluster has it.",
        **text("URL", value="http://prometheus-operated.monitoring.svc:9090"),
    )
    cpu: int | None = size_flag(
        "Cores of a pod",
        "Set it when the evidence comes from other hardware.",
        **number(None, "N", 1, 1024, "from threads and evidence"),
    )
    memory: str = size_flag(
        "Memory of a pod, such as 2Gi",
        "Set it when pods are killed for lack of memory, or the models were not measured.",
        **text("QUANTITY", "from the evidence"),
    )
    gpus: int | None = size_flag(
        "GPUs, or slices of GPUs, of a pod",
        "Set it when the models should run on GPUs and their configuration does not say so.",
        **number(None, "N", 0, 16, "from the models' instance_group"),
    )
    gpu_resource: str = size_flag(
        "Resource that stands for a GPU",
        "Change it for slices in MIG mode: nvidia.com/mig-1g.10gb.",
        **text("RESOURCE", value="nvidia.com/gpu"),
    )
    node_selector: tuple[str, ...] = size_flag(
        "Label of the nodes to run on, as KEY=VALUE",
        "Use it to choose nodes like those of the evidence. Repeatable.",
        value=(),
        metavar="KEY=VALUE",
    )
    keys_secret: str = access_flag(
        "Secret with API keys: keys.toml and metrics-key",
        "Change it when the Secret has another name.",
        **text("NAME", "the resources' name and -keys"),
    )
    insecure: bool = access_flag(
        "Serve without API keys",
        "Use it only where the network or a gateway controls access.",
        value=False,
    )
    drain_s: int = stop_flag(
        "Seconds for requests in flight after SIGTERM",
        "Raise it for slow models and long texts.",
        **number(30, "SECONDS", 1, 3600),
    )
    deregister_s: int = stop_flag(
        "Seconds between leaving the Service and SIGTERM",
        "Raise it when load balancers learn late that a pod is gone.",
        **number(10, "SECONDS", 0, 600),
    )


@dataclass(frozen=True, slots=True)
class DeploymentOptions(ClusterOptions):
    """A Deployment, as plain documents or as a Helm chart."""

    models_from: str = image_flag(
        "How the models reach the pods",
        "pvc mounts a claim, init downloads them with --download-image, image has them in --image.",
        value="pvc",
        choices=("pvc", "init", "image"),
    )
    models_path: str = image_flag(
        "Folder of the models in the container",
        "Change it when the image has them elsewhere.",
        **text("PATH", value="/models"),
    )
    claim: str = image_flag(
        "PersistentVolumeClaim with the models",
        "Change it when the claim has another name. Pods on several nodes must be able to read it.",
        **text("NAME", "the resources' name and -models"),
    )
    download_image: str = image_flag(
        "Image that downloads the models",
        "Required with --models-from init, such as amazon/aws-cli.",
        metavar="IMAGE",
    )
    download_command: str = image_flag(
        "Shell command of that image that downloads them",
        "Required with --models-from init: it fills the folder of --models-path.",
        metavar="COMMAND",
    )
    download_secret: str = image_flag(
        "Secret with environment variables of the download",
        "Use it for the credentials of an object store.",
        metavar="NAME",
    )
    monitoring_namespace: str = access_flag(
        "Namespace that may reach the metrics port",
        "Change it to where Prometheus runs.",
        **text("NAME", value="monitoring"),
    )
    monitor_label: tuple[str, ...] = access_flag(
        "Label of the ServiceMonitor, as KEY=VALUE",
        "Needed when your Prometheus selects ServiceMonitors by label. Repeatable.",
        value=(),
        metavar="KEY=VALUE",
    )


@dataclass(frozen=True, slots=True)
class KubernetesOptions(DeploymentOptions):
    """Plain documents."""

    out: str = output_flag(
        "Folder to write",
        "Files of an earlier export that are not written again are removed. - writes to stdout.",
        **text("DIR", value="kubernetes"),
    )
    namespace: str = output_flag(**NAMESPACE)


@dataclass(frozen=True, slots=True)
class HelmOptions(DeploymentOptions):
    """A chart; its release gives name and namespace."""

    out: str = output_flag(
        "Folder of the chart",
        "Files of an earlier export that are not written again are removed.",
        **text("DIR", value="chart"),
    )


@dataclass(frozen=True, slots=True)
class KserveOptions(ClusterOptions):
    """A ServingRuntime and an InferenceService."""

    out: str = output_flag(
        "Folder to write",
        "Files of an earlier export that are not written again are removed. - writes to stdout.",
        **text("DIR", value="kserve"),
    )
    namespace: str = output_flag(**NAMESPACE)
    storage_uri: str = image_flag(
        "Where KServe finds the models: s3://, gs://, pvc://",
        "Required: the folder that holds the models' folders.",
        **text("URI", "-"),
    )
