"""Deployments of a repository: what Ray gets to see. tests/ray_cluster.py runs them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from ray_load import choose, write_pace
from text_server import NAME, write_model

import penstock.ray
from penstock.api.ray_options import RayOptions
from penstock.errors import CommandLineError, ConfigError
from penstock.ray import application
from penstock.ray.application import Design, digest_versions, merge_settings, replica_spec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "repository"


def design(root: Path, versions: Any = None, **options: Any) -> Design:
    return Design.read(str(root), RayOptions(**options), versions or {})


def test_each_model_is_a_deployment_behind_an_ingress() -> None:
    settings = design(EXAMPLES, max_replicas=4, drain_s=7.0).settings()
    names = ["penstock_ingress", "digits", "identity", "simple", "text_length"]
    assert list(settings) == names
    digits = settings["digits"]
    assert digits["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 0}
    assert digits["autoscaling_config"]["max_replicas"] == 4
    assert digits["autoscaling_config"]["target_ongoing_requests"] == 64.0
    assert "num_replicas" not in digits and "request_router_config" not in digits
    assert digits["graceful_shutdown_timeout_s"] == 17.0
    assert settings["penstock_ingress"]["num_replicas"] == 1


def test_language_models_have_a_router_of_their_own(tmp_path: Path) -> None:
    write_model(tmp_path)
    settings = design(tmp_path).settings()[NAME]
    router = settings["request_router_config"]["request_router_class"]
    module, _, name = router.rpartition(".")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    assert f"class {name}(" in Path(spec.origin).read_text()


def test_our_servers_get_a_node_each() -> None:
    settings = design(EXAMPLES, ingress="penstock", ingress_replicas=3).settings()
    (server,) = settings.values()
    assert server["name"] == "penstock_server"
    assert (server["num_replicas"], server["max_replicas_per_node"]) == (3, 1)
    assert server["ray_actor_options"] == {"num_cpus": 4, "num_gpus": 0}


def test_options_of_the_caller_override_ours() -> None:
    ours = {"m": {"name": "m", "num_replicas": 1, "max_ongoing_requests": 5}}
    merged = merge_settings(ours, {"m": {"autoscaling_config": {"max_replicas": 3}}})
    assert merged["m"]["autoscaling_config"] == {"max_replicas": 3}
    assert "num_replicas" not in merged["m"]
    assert merged["m"]["max_ongoing_requests"] == 5
    with pytest.raises(ConfigError, match="deployments: no x; there: m"):
        merge_settings(ours, {"x": {}})


def test_a_promoted_or_changed_version_is_another_deployment(tmp_path: Path) -> None:
    write_pace(tmp_path, "pace", 0.0, versions=2)

    def spec() -> Any:
        found = design(tmp_path)
        return replica_spec(str(tmp_path), found.models["pace"], found.options)

    first = spec()
    assert first.versions == ("1",) and spec() == first
    choose(tmp_path, "pace", 2)
    second = spec()
    assert second.versions == ("2",) and second.digest != first.digest
    (tmp_path / "pace" / "2" / "model.py").write_text("# other code")
    assert spec().digest != second.digest


def test_versions_can_be_pinned(tmp_path: Path) -> None:
    write_pace(tmp_path, "pace", 0.0, versions=3)
    found = design(tmp_path, {"pace": ["3"]})
    assert [config.version for config in found.models["pace"]] == ["3"]
    with pytest.raises(ConfigError, match="versions: no model other"):
        design(tmp_path, {"other": ["1"]})
    with pytest.raises(ConfigError, match="versions: a server serves those that are promoted"):
        design(tmp_path, {"pace": ["3"]}, ingress="penstock")


def test_digests_of_the_same_files_are_the_same(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "identity", tmp_path / "identity")
    models = design(tmp_path).models["identity"]
    assert digest_versions(models) == digest_versions(models)


def test_other_weights_are_another_deployment(tmp_path: Path) -> None:
    """They lie beside config.json, which does not change."""
    write_model(tmp_path)
    models = design(tmp_path).models[NAME]
    before = digest_versions(models)
    weights = tmp_path / NAME / "model.safetensors"
    assert weights.is_file()
    os.utime(weights, ns=(1, 1))
    assert digest_versions(models) != before


def test_quotas_are_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    key = '[[key]]\nsecret = "a secret of some length"\nscopes = ["infer"]\n'
    keys.write_text(key)
    design(EXAMPLES, api_keys=str(keys))
    keys.write_text(f"{key}requests_per_s = 5\n")
    with pytest.raises(ConfigError, match="quotas"):
        design(EXAMPLES, api_keys=str(keys))


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[ray\]'"):
        penstock.ray.app(EXAMPLES)


def test_options_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "require_serve", lambda: None)
    with pytest.raises(CommandLineError, match="evidence: 'maybe' is not one of warn"):
        penstock.ray.app(EXAMPLES, evidence="maybe")
    with pytest.raises(TypeError, match="unknown option shards"):
        penstock.ray.build({"repository": str(EXAMPLES), "shards": 2})


def test_importing_needs_no_ray_and_proxies_find_their_functions() -> None:
    assert penstock.ray.grpc_options(9)["port"] == 9
    for path in penstock.ray.grpc_options()["grpc_servicer_functions"]:
        module, _, name = path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))


def test_ensembles_are_served_by_our_servers_only(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "identity", tmp_path / "identity")
    spec = "data_type: TYPE_FP32 dims: 16"
    maps = 'input_map { key: "INPUT" value: "IN" } output_map { key: "OUTPUT" value: "OUT" }'
    (tmp_path / "whole" / "1").mkdir(parents=True)
    (tmp_path / "whole" / "config.pbtxt").write_text(
        f"""platform: "ensemble" max_batch_size: 8
        input {{ name: "IN" {spec} }} output {{ name: "OUT" {spec} }}
        ensemble_scheduling {{ step {{ model_name: "identity" model_version: -1 {maps} }} }}"""
    )
    with pytest.raises(ConfigError, match="whole: an ensemble cannot be a deployment.*--ingress"):
        design(tmp_path)
    (server,) = design(tmp_path, ingress="penstock").settings().values()
    (alone,) = design(EXAMPLES / "identity", ingress="penstock").settings().values()
    assert server["ray_actor_options"] == alone["ray_actor_options"]
