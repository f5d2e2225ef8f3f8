"""The pod: who it runs as, what it mounts, how it is asked and how it ends."""

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_settings import made_settings

from penstock.api.serve_options import ServeOptions
from penstock.cli import main
from penstock.export.pod import arguments, container, pod_template
from penstock.export.settings import ClusterSettings, ModelFiles, Ports, Stopping
from penstock.export.yaml_text import resolved

INIT = ModelFiles("init", "/models", "", "amazon/aws-cli", "aws s3 sync s3://b /models", "s3")


def spec_of(settings: ClusterSettings) -> dict:
    return resolved(pod_template(settings))["spec"]


def test_it_runs_without_rights() -> None:
    spec = spec_of(made_settings())
    assert spec["automountServiceAccountToken"] is False
    context = spec["securityContext"]
    assert context["runAsNonRoot"] is True and context["runAsUser"] == 10001
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for each in (*spec_of(made_settings(files=INIT))["initContainers"], *spec["containers"]):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_its_arguments_are_accepted_by_the_server() -> None:
    """`penstock serve` itself parses them."""
    given = arguments(made_settings(ports=Ports(1, 2, 3), stopping=Stopping(5, 77)))
    context = main.commands["serve"].make_context("serve", list(given[1:]))
    values = {name: context.params[name] for name in ("sources", "host", "api_keys", "log_format")}
    assert values == {
        "sources": ("/models/digits",),
        "host": "0.0.0.0",
        "api_keys": "/run/secrets/penstock/keys.toml",
        "log_format": "json",
    }
    ports = [context.params[f"{name}_port"] for name in ("http", "grpc", "metrics")]
    assert (ports, context.params["drain_s"]) == ([1, 2, 3], 77)


def test_without_keys_it_is_insecure_by_name() -> None:
    settings = made_settings(keys_secret="")
    assert "--insecure" in arguments(settings) and "--api-keys" not in arguments(settings)
    assert [each["name"] for each in spec_of(settings)["volumes"]] == ["tmp", "models"]


def test_default_ports_are_those_of_the_server() -> None:
    defaults = ServeOptions()
    assert Ports() == Ports(defaults.http_port, defaults.grpc_port, defaults.metrics_port)


def test_probes() -> None:
    """The start may take as long as loading; liveness asks the metrics port."""
    made = resolved(container(made_settings(), "penstock"))
    ports = {each["name"]: each["containerPort"] for each in made["ports"]}
    start, ready, live = (made[f"{name}Probe"] for name in ("startup", "readiness", "liveness"))
    assert start["periodSeconds"] * start["failureThreshold"] >= 630
    assert start["httpGet"] == ready["httpGet"] == {"path": "/v2/health/ready", "port": "http"}
    assert live["httpGet"] == {"path": "/v2/health/live", "port": "metrics"}
    assert ports == {"http": 8000, "grpc": 8001, "metrics": 8002}


def test_the_grace_period_covers_deregistration_and_drain() -> None:
    spec = spec_of(made_settings(stopping=Stopping(deregister_s=20, drain_s=60)))
    [made] = spec["containers"]
    assert made["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "20"]
    assert made["args"][made["args"].index("--drain-s") + 1] == "60"
    # Workers that hang are killed 5 s after the drain.
    assert spec["terminationGracePeriodSeconds"] >= 20 + 60 + 5


@pytest.mark.parametrize(
    ("files", "volume"),
    [
        (
            ModelFiles("pvc", "/models", "claim"),
            {"persistentVolumeClaim": {"claimName": "claim", "readOnly": True}},
        ),
        (INIT, {"emptyDir": {}}),
        (ModelFiles("image", "/models"), None),
    ],
    ids=["pvc", "init", "image"],
)
def test_model_files(files: ModelFiles, volume: dict | None) -> None:
    spec = spec_of(made_settings(files=files))
    [made] = spec["containers"]
    volumes = {each.pop("name"): each for each in spec["volumes"]}
    mounted = {each["name"]: each for each in made["volumeMounts"]}
    assert volumes.get("models") == volume
    assert ("models" in mounted) == (volume is not None)
    assert all(each["readOnly"] for name, each in mounted.items() if name != "tmp")
    assert mounted.keys() == volumes.keys()


def test_a_download_has_its_command_and_credentials_by_reference() -> None:
    [made] = spec_of(made_settings(files=INIT))["initContainers"]
    assert made["command"] == ["sh", "-c", "aws s3 sync s3://b /models"]
    assert made["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert {"name": "models", "mountPath": "/models"} in made["volumeMounts"]


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Expand a command as kubelet does."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


@given(st.text(alphabet="$()A b", max_size=12))
def test_kubernetes_expands_commands_to_what_was_given(text: str) -> None:
    settings = made_settings(files=replace(INIT, download_command=text), served=f"/models/{text}")
    spec = spec_of(settings)
    [download], [made] = spec["initContainers"], spec["containers"]
    variables = {"A": "expanded", "": "expanded"}
    assert expand(download["command"][-1], variables) == text
    assert expand(made["args"][1], variables) == f"/models/{text}"


def test_variables_of_the_shell_are_written_as_they_are() -> None:
    files = replace(INIT, download_command="cp $SOURCE ${TARGET}")
    [download] = spec_of(made_settings(files=files))["initContainers"]
    assert download["command"][-1] == "cp $SOURCE ${TARGET}"


def test_gpus() -> None:
    spec = spec_of(made_settings(gpus=1))
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert "tolerations" not in spec_of(made_settings())


def test_nodes_can_be_chosen() -> None:
    labels = (("node.kubernetes.io/instance-type", "c7i.4xlarge"),)
    assert spec_of(made_settings(node_selector=labels))["nodeSelector"] == dict(labels)
    assert "nodeSelector" not in spec_of(made_settings())
