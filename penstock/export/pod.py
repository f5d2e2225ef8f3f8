"""The pod: one container that serves the models, its probes, its volumes and its rights. Pure.

The container runs as in docs/deploy.md: another user than root, a read-only root file system, no
capabilities. KServe's runtime has the same container.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from penstock.export.settings import KEYS_FILE, USER, ClusterSettings
from penstock.export.yaml_text import ChartValue, When, Yaml

KEYS_FOLDER = "/run/secrets/penstock"
# Kubernetes expands $(NAME) in commands and arguments, and reads $$ as $.
EXPANDED = re.compile(r"\$(?=[$(])")
LIVE, READY = "/v2/health/live", "/v2/health/ready"
# Compiled kernels and temporary files; nothing else is written.
TMP: dict[str, Yaml] = {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}
TMP_MOUNT: dict[str, Yaml] = {"name": "tmp", "mountPath": "/tmp"}
STARTUP_PERIOD_S = 5
# A download has limits too, so that the pod stays Guaranteed.
DOWNLOAD: dict[str, Yaml] = {"cpu": "1", "memory": "1Gi"}
# Nodes with GPUs are usually tainted with the name of their resource.
GPU_TOLERATIONS: list[Yaml] = [
    {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
]
RESTRICTED: dict[str, Yaml] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
POD_SECURITY: dict[str, Yaml] = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    # Volumes belong to this group, which may read them.
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}


def pod_template(settings: ClusterSettings) -> Yaml:
    """Return the template of a Deployment's pods."""
    spec: dict[str, Yaml] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": settings.stopping.grace_s,
        "securityContext": POD_SECURITY,
        "nodeSelector": _if_any("nodeSelector", dict(settings.node_selector)),
        "tolerations": _if_any("tolerations", GPU_TOLERATIONS if settings.sizing.gpus else []),
        "topologySpreadConstraints": [
            _spread(settings, "kubernetes.io/hostname"),
            _spread(settings, "topology.kubernetes.io/zone"),
        ],
    }
    if settings.files.kind == "init":
        spec["initContainers"] = [_download(settings)]
    spec["containers"] = [container(settings, "penstock")]
    spec["volumes"] = volumes(settings)
    return {"metadata": {"labels": settings.labels}, "spec": spec}


def _if_any(path: str, value: Mapping[str, Yaml] | Sequence[Yaml]) -> When:
    return When(f".Values.{path}", bool(value), ChartValue(path, value))


def container(settings: ClusterSettings, name: str) -> dict[str, Yaml]:
    """Return the container that serves."""
    ports, sleep_s = asdict(settings.ports), str(settings.stopping.deregister_s)
    return {
        "name": name,
        "image": ChartValue("image", settings.image),
        "args": [_literal(each) for each in arguments(settings)],
        "ports": [{"name": each, "containerPort": port} for each, port in ports.items()],
        **probes(settings),
        # The pod leaves its Services when it is deleted; connections come until all nodes know.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", sleep_s]}}},
        "resources": ChartValue("resources", settings.sizing.resources),
        "securityContext": RESTRICTED,
        "volumeMounts": _mounts(settings),
    }


def arguments(settings: ClusterSettings) -> list[str]:
    """Return the arguments of the image, `penstock`'s."""
    access = (
        ["--api-keys", f"{KEYS_FOLDER}/{KEYS_FILE}"] if settings.keys_secret else ["--insecure"]
    )
    serve = ["serve", settings.served, "--host", "0.0.0.0", *access]
    ports: list[str] = []
    for name, port in asdict(settings.ports).items():
        ports += [f"--{name}-port", str(port)]
    return [*serve, *ports, "--drain-s", str(settings.stopping.drain_s), "--log-format", "json"]


def _literal(text: str) -> str:
    """Return a text of a command that Kubernetes expands to the one given."""
    return EXPANDED.sub("$$", text)


def probes(settings: ClusterSettings) -> dict[str, Yaml]:
    """Return the probes. Readiness asks where clients connect, and fails while the server drains.
    Liveness asks the metrics port, which fails if the event loop is stuck and answers although all
    connections of clients are taken."""
    num_tries = math.ceil(settings.sizing.startup_s / STARTUP_PERIOD_S)
    return {
        "startupProbe": {
            "httpGet": {"path": READY, "port": "http"},
            "periodSeconds": STARTUP_PERIOD_S,
            "timeoutSeconds": 5,
            "failureThreshold": num_tries,
        },
        "readinessProbe": {
            "httpGet": {"path": READY, "port": "http"},
            "periodSeconds": 5,
            "timeoutSeconds": 5,
            "failureThreshold": 2,
        },
        "livenessProbe": {
            "httpGet": {"path": LIVE, "port": "metrics"},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
    }


def volumes(settings: ClusterSettings) -> list[Yaml]:
    found: list[Yaml] = [TMP]
    files = settings.files
    if files.kind == "pvc":
        claim: dict[str, Yaml] = {
            "claimName": ChartValue("modelsClaim", files.claim),
            "readOnly": True,
        }
        found.append({"name": "models", "persistentVolumeClaim": claim})
    elif files.kind == "init":
        found.append({"name": "models", "emptyDir": {}})
    if settings.keys_secret:
        items: list[Yaml] = [{"key": KEYS_FILE, "path": KEYS_FILE}]
        name = ChartValue("keysSecret", settings.keys_secret)
        secret: dict[str, Yaml] = {"secretName": name, "items": items}
        found.append({"name": "keys", "secret": secret})
    return found


def _mounts(settings: ClusterSettings) -> list[Yaml]:
    found: list[Yaml] = [TMP_MOUNT]
    if settings.files.kind != "image":
        folder = settings.files.folder
        found.append({"name": "models", "mountPath": folder, "readOnly": True})
    if settings.keys_secret:
        found.append({"name": "keys", "mountPath": KEYS_FOLDER, "readOnly": True})
    return found


def _download(settings: ClusterSettings) -> dict[str, Yaml]:
    """Return the container that brings the models, with the image and command that were given."""
    files = settings.files
    made: dict[str, Yaml] = {
        "name": "download",
        "image": files.download_image,
        "command": ["sh", "-c", _literal(files.download_command)],
        # Programs that keep files in a home folder find one.
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": {"requests": DOWNLOAD, "limits": DOWNLOAD},
        "securityContext": RESTRICTED,
        "volumeMounts": [TMP_MOUNT, {"name": "models", "mountPath": files.folder}],
    }
    if files.download_secret:
        made["envFrom"] = [{"secretRef": {"name": files.download_secret}}]
    return made


def _spread(settings: ClusterSettings, key: str) -> Yaml:
    return {
        "maxSkew": 1,
        "topologyKey": key,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": settings.labels},
    }
