"""Settings of the resources of one Deployment. Frozen values; `api.export` makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.export.sizing import Sizing
from penstock.export.yaml_text import Yaml

ModelsFrom = Literal["pvc", "image", "init"]
Autoscaler = Literal["keda", "hpa", "none"]

# The user of the image.
USER = 10001
# Entries of the Secret with API keys: the file, and the secret of a key with the scope metrics.
KEYS_FILE, METRICS_KEY = "keys.toml", "metrics-key"
# Seconds beyond the drain until the server has ended: hanging workers are killed after 5 s.
STOP_MARGIN_S = 10


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of a pod; the defaults are those of `penstock serve`."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """How the models' files reach a pod."""

    kind: ModelsFrom
    # Folder of the models in the container.
    folder: str
    claim: str = ""
    download_image: str = ""
    download_command: str = ""
    # Secret whose entries are environment variables of the download.
    download_secret: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaPolicy:
    autoscaler: Autoscaler
    min_replicas: int
    max_replicas: int
    prometheus_url: str


@dataclass(frozen=True, slots=True)
class Stopping:
    """Seconds between the end of new connections and SIGTERM, and for requests after it."""

    deregister_s: int
    drain_s: int

    @property
    def grace_s(self) -> int:
        return self.deregister_s + self.drain_s + STOP_MARGIN_S


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Everything about one Deployment and the resources around it."""

    name: str
    namespace: str
    image: str
    # The server's MODEL argument.
    served: str
    # Secret with API keys; empty: the server is started with --insecure.
    keys_secret: str
    files: ModelFiles
    scaling: ReplicaPolicy
    stopping: Stopping
    sizing: Sizing
    monitoring_namespace: str
    ports: Ports = Ports()
    monitor_labels: tuple[tuple[str, str], ...] = ()
    node_selector: tuple[tuple[str, str], ...] = ()

    @property
    def labels(self) -> dict[str, str]:
        """Labels that select the pods."""
        return {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/instance": self.name}

    @property
    def metadata(self) -> dict[str, Yaml]:
        return {"name": self.name, "namespace": self.namespace, "labels": self.labels}
