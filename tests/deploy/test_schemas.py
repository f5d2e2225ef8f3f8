"""Every kind that is exported, compared with the API that defines it: Kubernetes 1.37, the CRDs of
KEDA and of Prometheus' operator, and KServe's SDK. Run by `make verify-deploy`."""

import subprocess
from itertools import product
from pathlib import Path

import pytest
import yaml
from environments import environment
from podman import EXAMPLES

from penstock.api.export import export_kserve, export_kubernetes
from penstock.api.export_options import KserveOptions, KubernetesOptions

pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]

CHECK = Path(__file__).parent / "check_schemas.py"
PACKAGES = (
    "kubernetes-validate==1.37.*",
    "cloudcoil.models.keda==2.16.*",
    "cloudcoil.models.prometheus-operator==0.80.*",
    "kubernetes==35.*",
    "six",
)
IMAGE = "registry.example.com/penstock:0.1.0"
DOWNLOAD = {"download_image": "aws", "download_command": "aws s3 sync s3://b /models"}
FORMS = (
    {"models_from": "pvc"},
    {"models_from": "image", "insecure": True},
    {"models_from": "init", "download_secret": "s3", **DOWNLOAD},
)
SIZES = (
    {},
    {"gpus": 1, "gpu_resource": "nvidia.com/mig-1g.10gb", "node_selector": ("a/b=c",)},
    {"cpu": 4, "memory": "3Gi", "queue_depth": 7, "monitor_label": ("release=x",)},
)


def check(*files: Path) -> subprocess.CompletedProcess[str]:
    python = environment("schemas", *PACKAGES, alone=["kserve==0.21.0"]) / "python"
    return subprocess.run([python, CHECK, *files], capture_output=True, text=True, timeout=300)


def test_every_document_fits_its_schema(tmp_path: Path):
    """All ways to bring models, all autoscalers, GPUs or none."""
    folders = []
    forms = product(FORMS, SIZES, ("keda", "hpa", "none"))
    for number, (form, size, autoscaler) in enumerate(forms):
        folders.append(tmp_path / f"kubernetes-{number}")
        given = {"image": IMAGE, "autoscaler": autoscaler, "out": str(folders[-1])}
        export_kubernetes(str(EXAMPLES), KubernetesOptions(**given, **form, **size))
    for number, (gpus, autoscaler) in enumerate(product((0, 1), ("keda", "hpa", "none"))):
        folders.append(tmp_path / f"kserve-{number}")
        given = {"image": IMAGE, "autoscaler": autoscaler, "out": str(folders[-1])}
        options = KserveOptions(**given, gpus=gpus, storage_uri="s3://bucket/models")
        export_kserve(str(EXAMPLES), options)
    files = [path for folder in folders for path in sorted(folder.iterdir())]
    done = check(*files)
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = sorted({yaml.safe_load(path.read_text())["kind"] for path in files})
    print(f"\n{done.stdout.strip()} of {len(kinds)} kinds fit: {', '.join(kinds)}")
    assert len(kinds) == 9


MISTAKES = {
    "deployment.yaml": ("containers:", "container:"),
    "service.yaml": ("port: 8000", "port: http"),
    "pdb.yaml": ("maxUnavailable: 1", "maxUnavailble: 1"),
    "scaledobject.yaml": ("minReplicaCount: 2", "minReplicas: 2"),
    "networkpolicy.yaml": ("podSelector:", "selector:"),
    "servicemonitor.yaml": ("endpoints:", "endpoint:"),
    "servingruntime.yaml": ("containers:", "container:"),
    "inferenceservice.yaml": ("storageUri:", "storageURI:"),
}


def test_mistakes_are_found(tmp_path: Path):
    """One in each file: a wrong name of a field, or a wrong type."""
    given = {"image": IMAGE, "out": str(tmp_path)}
    export_kubernetes(str(EXAMPLES), KubernetesOptions(**given))
    export_kserve(
        str(EXAMPLES), KserveOptions(image=IMAGE, out=str(tmp_path), storage_uri="s3://b")
    )
    for name, (before, after) in MISTAKES.items():
        text = (tmp_path / name).read_text()
        assert before in text
        (tmp_path / name).write_text(text.replace(before, after))
    done = check(*(tmp_path / name for name in MISTAKES))
    assert done.returncode == 1, done.stderr
    assert {line.split(":")[0] for line in done.stdout.splitlines()[1:]} == MISTAKES.keys()
