"""Exports as users make them: files in a folder, without what an earlier export left there."""

from pathlib import Path

import pytest
import yaml

from penstock.api.export import export_helm, export_kserve, export_kubernetes
from penstock.api.export_options import HelmOptions, KserveOptions, KubernetesOptions
from penstock.errors import CommandLineError, ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples" / "repository"
IMAGE = "registry.example.com/penstock:0.1.0"
MODEL = str(EXAMPLES / "digits")


def test_files_are_written_and_read_as_yaml(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "folder"
    exported = export_kubernetes(MODEL, KubernetesOptions(image=IMAGE, out=str(out)))
    documents = {path.name: yaml.safe_load(path.read_text()) for path in out.iterdir()}
    assert documents.keys() == exported.files.keys()
    container = documents["deployment.yaml"]["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == IMAGE
    assert container["args"][:2] == ["serve", "/models/digits"]
    assert exported.next_commands[-1] == f"kubectl apply --filename {out}"


def test_commands_of_folders_with_spaces_can_be_typed(tmp_path: Path) -> None:
    out = str(tmp_path / "my files")
    plain = export_kubernetes(MODEL, KubernetesOptions(image=IMAGE, out=out))
    assert plain.next_commands[-1] == f"kubectl apply --filename '{out}'"
    chart = export_helm(MODEL, HelmOptions(image=IMAGE, out=out))
    assert chart.next_commands[-1] == f"helm install digits '{out}'"


def test_a_chart_is_a_folder() -> None:
    with pytest.raises(CommandLineError, match="--out -: a chart has several files"):
        export_helm(MODEL, HelmOptions(image=IMAGE, out="-"))


def test_files_of_the_user_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "service.yaml").write_text("# of the user\n")
    with pytest.raises(ConfigError, match="service.yaml: not written by penstock export"):
        export_kubernetes(MODEL, KubernetesOptions(image=IMAGE, out=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["service.yaml"]
    assert (tmp_path / "service.yaml").read_text() == "# of the user\n"


def test_another_autoscaler_replaces_the_first(tmp_path: Path) -> None:
    """Both files in one folder would be applied together, and fight."""
    (tmp_path / "own.yaml").write_text("# of the user\n")
    keda = KubernetesOptions(image=IMAGE, out=str(tmp_path))
    export_kubernetes(MODEL, keda)
    assert (tmp_path / "scaledobject.yaml").exists()
    hpa = KubernetesOptions(image=IMAGE, out=str(tmp_path), autoscaler="hpa")
    assert export_kubernetes(MODEL, hpa).removed == ("scaledobject.yaml",)
    names = {path.name for path in tmp_path.iterdir()}
    assert "hpa.yaml" in names and "own.yaml" in names and "scaledobject.yaml" not in names


def test_other_forms_in_the_same_folder_stay(tmp_path: Path) -> None:
    export_kubernetes(MODEL, KubernetesOptions(image=IMAGE, out=str(tmp_path)))
    kserve = KserveOptions(image=IMAGE, out=str(tmp_path), storage_uri="s3://b")
    assert export_kserve(MODEL, kserve).removed == ()
    assert (tmp_path / "deployment.yaml").exists()


def test_the_same_export_twice_is_the_same(tmp_path: Path) -> None:
    options = KubernetesOptions(image=IMAGE, out=str(tmp_path))
    one, other = export_kubernetes(MODEL, options), export_kubernetes(MODEL, options)
    assert one == other and other.removed == ()


def test_nothing_is_written_for_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exported = export_kubernetes(MODEL, KubernetesOptions(image=IMAGE, out="-"))
    assert list(tmp_path.iterdir()) == [] and exported.files


def test_a_chart(tmp_path: Path) -> None:
    export_helm(MODEL, HelmOptions(image=IMAGE, out=str(tmp_path), keys_secret="mine"))
    assert {path.name for path in tmp_path.iterdir()} == {"Chart.yaml", "values.yaml", "templates"}
    values = yaml.safe_load((tmp_path / "values.yaml").read_text())
    assert (values["image"], values["keysSecret"], values["modelsClaim"]) == (IMAGE, "mine", "")


def test_kserve(tmp_path: Path) -> None:
    options = KserveOptions(image=IMAGE, out=str(tmp_path), storage_uri="gs://b/m", insecure=True)
    export_kserve(str(EXAMPLES), options)
    runtime = yaml.safe_load((tmp_path / "servingruntime.yaml").read_text())
    [container] = runtime["spec"]["containers"]
    assert container["args"][:2] == ["serve", "/mnt/models"] and "--insecure" in container["args"]


def test_nothing_secret_is_written(tmp_path: Path) -> None:
    """Keys and credentials are names of Secrets."""
    given = {"models_from": "init", "download_image": "aws", "download_command": "sync"}
    options = KubernetesOptions(image=IMAGE, out=str(tmp_path), download_secret="s3", **given)
    texts = "".join(export_kubernetes(MODEL, options).files.values())
    assert "kind: Secret" not in texts and "stringData" not in texts
    assert "secretRef" in texts and "secretName: digits-keys" in texts


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"image": ""}, "--image is required, e.g. --image registry.example.com/penstock:0.1.0"),
        ({"min_replicas": 5, "max_replicas": 4}, "--min-replicas 5 and --max-replicas 4 contra"),
        ({"name": "My_Model"}, "--name: 'My_Model' is not a name of Kubernetes"),
        ({"namespace": "a.b"}, "--namespace: 'a.b' is not a name of Kubernetes"),
        ({"insecure": True, "keys_secret": "k"}, "--insecure and --keys-secret contradict"),
        ({"models_from": "init"}, "--download-image is required with --models-from init"),
        ({"download_image": "aws"}, "--download-image needs --models-from init"),
        ({"download_secret": "s3"}, "--download-secret needs --models-from init"),
        ({"models_from": "image", "claim": "c"}, "--claim needs --models-from pvc"),
        ({"node_selector": ("a",)}, "--node-selector a: expected KEY=VALUE"),
        ({"monitor_label": ("=b",)}, "--monitor-label =b: expected KEY=VALUE"),
        ({"memory": "2GB"}, "--memory: '2GB' is not an amount of memory"),
        ({"node_selector": ("a=-b",)}, "--node-selector: '-b' is not part of a label"),
        ({"gpu_resource": "a gpu"}, "--gpu-resource: 'a gpu' is not a resource of Kubernetes"),
        ({"models_path": "models"}, "--models-path models: expected an absolute path"),
        ({"models_path": "/a:b"}, "--models-path /a:b: expected an absolute path without a colon"),
        ({"models_path": "/"}, "--models-path /: hides the files of the image; expected a path"),
        ({"models_path": "//"}, "--models-path //: hides the files of the image"),
        ({"models_path": "/a/.."}, "--models-path /a/..: hides the files of the image"),
        ({"models_path": "/tmp"}, "--models-path /tmp: the pod has an empty volume at /tmp"),
        ({"models_path": "/tmp/m/"}, "--models-path /tmp/m/: the pod has an empty volume at /tmp"),
        ({"image": "reg/p 1; rm"}, "--image: 'reg/p 1; rm' is not an image; expected one like"),
        ({"keys_secret": "x/../y"}, "--keys-secret: 'x/../y' is not a name of Kubernetes (at"),
        ({"claim": "X Y"}, "--claim: 'X Y' is not a name of Kubernetes (at most 253 lower-case"),
        (
            {"models_from": "init", "download_secret": "Bad Secret"},
            "--download-secret: 'Bad Secret' is not a name of Kubernetes",
        ),
        (
            {"models_from": "init", "download_image": "aws cli"},
            "--download-image: 'aws cli' is not an image",
        ),
        ({"monitoring_namespace": "A B"}, "--monitoring-namespace: 'A B' is not a name of"),
        ({"prometheus_url": "not a url"}, "--prometheus-url 'not a url': expected a URL such as"),
        ({"prometheus_url": "prometheus:9090"}, "--prometheus-url 'prometheus:9090': expected a"),
        ({"prometheus_url": "http://p:x"}, "--prometheus-url 'http://p:x': expected a URL"),
        ({"prometheus_url": "http://p/a b"}, "--prometheus-url 'http://p/a b': expected a URL"),
    ],
)
def test_wrong_options(given: dict, problem: str) -> None:
    options = KubernetesOptions(**({"image": IMAGE, "out": "-"} | given))
    with pytest.raises(CommandLineError) as error:
        export_kubernetes(MODEL, options)
    assert any(each.startswith(problem) for each in error.value.problems), error.value.problems


def test_all_problems_are_told_at_once() -> None:
    options = KubernetesOptions(memory="much", models_from="init", out="-")
    with pytest.raises(CommandLineError) as error:
        export_kubernetes(MODEL, options)
    assert len(error.value.problems) == 4


def test_kserve_needs_a_place_of_the_models() -> None:
    with pytest.raises(CommandLineError, match="--storage-uri is required"):
        export_kserve(MODEL, KserveOptions(image=IMAGE, out="-"))


@pytest.mark.parametrize("uri", ["nonsense", "s3:/b", "://b", "s3://", "s3://a b"])
def test_the_place_of_the_models_is_a_uri(uri: str) -> None:
    with pytest.raises(CommandLineError, match=f"--storage-uri '{uri}': expected a URI such as"):
        export_kserve(MODEL, KserveOptions(image=IMAGE, out="-", storage_uri=uri))


def test_unusual_values_that_are_right() -> None:
    options = KubernetesOptions(
        image="localhost:5000/a/b_c__d-e:V1.0@sha256:" + 64 * "a",
        out="-",
        keys_secret="team.keys-1",
        claim="0",
        models_path="/srv/../tmpfiles/models/",
        prometheus_url="https://user.example.com/prometheus/",
    )
    assert export_kubernetes(MODEL, options).files


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = KubernetesOptions(image=IMAGE, out=str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        export_kubernetes(MODEL, options)
