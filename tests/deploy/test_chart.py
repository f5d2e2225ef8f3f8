"""The Helm chart, rendered by the libraries of Helm: Go's templates, sprig, sigs.k8s.io/yaml.
Debian has no Helm, so it is not run itself. Run by `make verify-deploy`."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from debian import ROOT as DEBIAN
from debian import unpack
from podman import EXAMPLES

from penstock.api.export import export_helm, export_kubernetes
from penstock.api.export_options import HelmOptions, KubernetesOptions

pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]

SOURCE = Path(__file__).parent / "render_chart.go"
GO = ("golang-1.19-go", "golang-1.19-src")
GITHUB = "golang-github-{}-dev"
LIBRARIES = (
    *map(
        GITHUB.format,
        ["masterminds-sprig", "masterminds-goutils", "masterminds-semver", "google-uuid"]
        + ["huandu-xstrings", "imdario-mergo", "mitchellh-copystructure", "mitchellh-reflectwalk"]
        + ["shopspring-decimal", "spf13-cast"],
    ),
    "golang-golang-x-crypto-dev",
    "golang-gopkg-yaml.v2-dev",
    "golang-gopkg-yaml.v3-dev",
    "golang-k8s-sigs-yaml-dev",
)
IMAGE = "registry.example.com/penstock:0.1.0"


@pytest.fixture(scope="module")
def renderer() -> Path:
    """Compiled once."""
    program = DEBIAN / "render_chart"
    if program.is_file() and program.stat().st_mtime > SOURCE.stat().st_mtime:
        return program
    go = unpack(*GO) / "usr" / "lib" / "go-1.19"
    paths = [str(unpack(each) / "usr" / "share" / "gocode") for each in LIBRARIES]
    made = {"GOROOT": str(go), "GOPATH": ":".join(paths), "GO111MODULE": "off"}
    made |= {"GOCACHE": str(DEBIAN / "go-cache"), "GOFLAGS": "-p=1", "CGO_ENABLED": "0"}
    command = [go / "bin" / "go", "build", "-o", program, SOURCE]
    done = subprocess.run(command, env=os.environ | made, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def render(renderer: Path, chart: Path, **values: object) -> tuple[int, list[dict], str]:
    """For a release `digits` in `vision`: exit code, documents, errors."""
    command = [renderer, chart, "digits", "vision", json.dumps(values)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    documents = [each for each in yaml.safe_load_all(done.stdout) if each is not None]
    return done.returncode, documents, done.stderr


def by_kind(documents: list[dict]) -> dict[str, dict]:
    assert len({each["kind"] for each in documents}) == len(documents)
    return {each["kind"]: each for each in documents}


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("chart")
    export_helm(str(EXAMPLES), HelmOptions(image=IMAGE, out=str(out)))
    return out


@pytest.mark.parametrize("autoscaler", ["keda", "hpa", "none"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"insecure": True, "models_from": "image", "gpus": 1, "min_replicas": 3},
        {"keys_secret": "own", "claim": "own", "memory": "4Gi", "monitor_label": ("a=b",)},
        {"models_from": "init", "download_image": "i", "download_command": "echo {{ x }} '\"'"},
        {
            "node_selector": ("pool=gpu", "zone=a"),
            "gpus": 2,
            "gpu_resource": "nvidia.com/mig-1g.5gb",
        },
    ],
    ids=["plain", "image", "pvc", "init", "gpu"],
)
def test_a_chart_renders_to_the_plain_documents(
    renderer: Path, given: dict, autoscaler: str, tmp_path: Path
):
    given = {"image": IMAGE, "autoscaler": autoscaler, **given}
    export_helm(str(EXAMPLES), HelmOptions(**given, out=str(tmp_path)))
    plain = KubernetesOptions(**given, name="digits", namespace="vision", out="-")
    files = export_kubernetes(str(EXAMPLES), plain).files
    code, rendered, errors = render(renderer, tmp_path)
    assert code == 0, errors
    assert by_kind(rendered) == by_kind([yaml.safe_load(text) for text in files.values()])


@pytest.mark.parametrize("autoscaler", ["keda", "hpa", "none"])
def test_the_values_choose_the_autoscaler(renderer: Path, chart: Path, autoscaler: str):
    code, rendered, errors = render(renderer, chart, autoscaler=autoscaler, minReplicas=4)
    assert code == 0, errors
    found = by_kind(rendered)
    kinds = {"keda": {"ScaledObject"}, "hpa": {"HorizontalPodAutoscaler"}, "none": set()}
    assert found.keys() & {"ScaledObject", "HorizontalPodAutoscaler"} == kinds[autoscaler]
    replicas = found["Deployment"]["spec"].get("replicas")
    assert replicas == (4 if autoscaler == "none" else None)


def test_other_values(renderer: Path, chart: Path):
    values = {
        "image": "other:2",
        "resources": {"limits": {"cpu": "9"}},
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "keysSecret": "theirs",
        "networkPolicy": False,
        "serviceMonitor": False,
        "queueDepth": 12,
    }
    code, rendered, errors = render(renderer, chart, **values)
    assert code == 0, errors
    found = by_kind(rendered)
    assert set(found) == {"Deployment", "Service", "PodDisruptionBudget", "ScaledObject"}
    spec = found["Deployment"]["spec"]["template"]["spec"]
    [container] = spec["containers"]
    assert container["image"] == "other:2" and container["resources"] == values["resources"]
    assert (spec["nodeSelector"], spec["tolerations"]) == (
        values["nodeSelector"],
        values["tolerations"],
    )
    secrets = [each["secret"]["secretName"] for each in spec["volumes"] if "secret" in each]
    assert secrets == ["theirs"]
    # A number of the user is the text that KEDA wants.
    [trigger] = found["ScaledObject"]["spec"]["triggers"]
    assert trigger["metadata"]["threshold"] == "12"


def test_an_unknown_autoscaler_is_refused(renderer: Path, chart: Path):
    code, _, errors = render(renderer, chart, autoscaler="both")
    assert code == 1 and 'autoscaler is "both"; expected keda, hpa or none' in errors
