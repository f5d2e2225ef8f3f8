"""Rendered pods under `podman kube play`, and a test in the place of the controllers.

podman runs the pod as it was exported, with its user, rights, volumes and limits, and restarts
containers that die. It has no probes, Services, rolling updates or preStop hooks: `Kubelet` does
what they say, at the times that the Deployment gives. Pods share the network of this machine, so
each gets ports of its own.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from haproxy import Proxy
from podman import Container, Podman, free_ports

from penstock.api.export import export_kubernetes
from penstock.api.export_options import KubernetesOptions


def render_deployment(models: Path, image: str, **options: object) -> dict:
    """Return the Deployment that `penstock export kubernetes` writes."""
    given = {"image": image, "insecure": True, "autoscaler": "none", "out": "-"} | options
    files = export_kubernetes(str(models), KubernetesOptions(**given)).files
    return yaml.safe_load(files["deployment.yaml"])


@dataclass
class Pod(Container):
    """One pod of a Deployment."""

    deployment: dict
    slot: str
    podman: Podman
    models: Path
    ports: list[int]
    # Differs between pods of different templates.
    revision: str = "v1"
    manifest: dict = field(init=False)

    def __post_init__(self) -> None:
        super().__init__(self.podman, f"{self.pod_name}-penstock", self.ports)
        self.manifest = self._manifest()

    @property
    def pod_name(self) -> str:
        return f"pod-{self.slot}-{self.ports[0]}"

    @property
    def spec(self) -> dict:
        """As it was exported."""
        return self.deployment["spec"]["template"]["spec"]

    @property
    def container(self) -> dict:
        [found] = self.spec["containers"]
        return found

    def _manifest(self) -> dict:
        """Return the pod with what this machine needs: its network, the local image, ports that
        are free, and the models' folder in the place of the claim."""
        template = copy.deepcopy(self.deployment["spec"]["template"])
        spec = template["spec"]
        spec["hostNetwork"] = True
        [made] = spec["containers"]
        made["imagePullPolicy"] = "Never"
        for name, port in zip(("http", "grpc", "metrics"), self.ports, strict=True):
            made["args"][made["args"].index(f"--{name}-port") + 1] = str(port)
        made["args"] += ["--id", self.revision]
        # podman would run the liveness probe with curl, by systemd's timers.
        for key in ("ports", "startupProbe", "readinessProbe", "livenessProbe"):
            del made[key]
        # As many cores as this machine has.
        for amounts in made["resources"].values():
            amounts["cpu"] = str(min(int(amounts["cpu"]), os.cpu_count() or 1))
        for volume in spec["volumes"]:
            if volume.pop("persistentVolumeClaim", None):
                volume["hostPath"] = {"path": str(self.models)}
        metadata = {**template["metadata"], "name": self.pod_name}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def create(self, folder: Path) -> None:
        path = folder / f"{self.pod_name}.yaml"
        path.write_text(json.dumps(self.manifest))
        self.podman.run("kube", "play", str(path))

    def probe(self, name: str) -> bool:
        """Ask as the kubelet does for this probe: its path, port and time-out."""
        asked = self.container[f"{name}Probe"]["httpGet"]
        [number] = [
            i for i, port in enumerate(self.container["ports"]) if port["name"] == asked["port"]
        ]
        return self.get(asked["path"], self.ports[number])[0] == 200

    def wait_until(self, name: str, limit_s: float = 90) -> None:
        """Wait for a probe to succeed."""
        ends = time.monotonic() + limit_s
        while not self.probe(name):
            assert time.monotonic() < ends, f"{name}: {self.logs()}"
            time.sleep(0.05)

    def kill(self) -> None:
        """kill -9 of everything in the container, as if the node's memory were exhausted."""
        pid = int(self.podman.run("inspect", "--format={{.State.Pid}}", self.name))
        os.kill(pid, signal.SIGKILL)

    def stop(self, grace_s: int = 0) -> int:
        """SIGTERM, with the pod's own grace period; return the exit code."""
        grace_s = grace_s or self.spec["terminationGracePeriodSeconds"]
        self.podman.run("pod", "stop", f"--time={grace_s}", self.pod_name, timeout_s=grace_s + 60)
        return int(self.podman.run("inspect", "--format={{.State.ExitCode}}", self.name))

    def remove(self) -> None:
        self.podman.run_unchecked("pod", "rm", "--force", "--time=0", self.pod_name)


class Kubelet:
    """Starts, replaces and removes pods as Kubernetes does, with haproxy as the Service."""

    def __init__(self, podman: Podman, deployment: dict, models: Path, folder: Path) -> None:
        self._podman = podman
        self._deployment = deployment
        self._models = models
        self._folder = folder
        self.pods: list[Pod] = []
        self.exit_codes: list[int] = []

    def create(self, slot: str, ports: list[int] | None = None, revision: str = "v1") -> Pod:
        """Start a pod and wait until it has started and is ready."""
        ports = ports or free_ports(3)
        pod = Pod(self._deployment, slot, self._podman, self._models, ports, revision)
        self.pods.append(pod)
        pod.create(self._folder)
        pod.wait_until("startup")
        assert pod.probe("readiness") and pod.probe("liveness")
        return pod

    def delete(self, pod: Pod, proxy: Proxy) -> None:
        """End a pod: it leaves the Service, the preStop hook runs, then SIGTERM and the grace
        period."""
        proxy.ask(f"set server servers/{pod.slot} state maint")
        pod.exec(*pod.container["lifecycle"]["preStop"]["exec"]["command"])
        self.exit_codes.append(pod.stop())
        pod.remove()
        self.pods.remove(pod)

    def join(self, pod: Pod, proxy: Proxy) -> None:
        """Add a ready pod to the Service."""
        proxy.ask(f"set server servers/{pod.slot} state ready")
        proxy.wait_until_up(pod.slot)

    def close(self) -> None:
        for pod in self.pods:
            pod.remove()
