"""Triton's repository layout and config.pbtxt, resolved, with every problem told."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from example_counts import at_most
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from tritonclient.grpc import model_config_pb2

from penstock.config import (
    BatchPolicy,
    MemoryPolicy,
    ModelConfig,
    PadAxis,
    Padding,
    QueuePolicy,
    ScalingConfig,
)
from penstock.errors import ConfigError, NotFound
from penstock.repository import pbtxt
from penstock.repository.layout import about, names, read, read_made_up, read_one, refuse_hard_links
from penstock.repository.pbtxt import describe
from penstock.serving.placement import place
from penstock.system import devices
from penstock.system.devices import Gpu
from penstock.types import DATATYPES, TensorSpec

WriteOnnx = Callable[..., Path]
MIB = 1 << 20

# A complete configuration of the null backend, which needs no file.
TENSORS = """
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
"""
NULL = 'backend: "null" max_batch_size: 8' + TENSORS


def add_model(root: Path, name: str, text: str | None = NULL, *versions: str) -> Path:
    """`<root>/<name>` with version folders (1 unless named) and a config.pbtxt."""
    folder = root / name
    for version in versions or ("1",):
        (folder / version).mkdir(parents=True)
    if text is not None:
        (folder / "config.pbtxt").write_text(text)
    return folder


def resolve(root: Path, text: str, name: str = "model") -> ModelConfig:
    """The one version of a model with this config.pbtxt."""
    found = read(add_model(root, name, text))
    assert found.problems == {}
    [config] = found.configs
    return config


def problems(root: Path, text: str, *versions: str) -> list[str]:
    """What is wrong with a model with this config.pbtxt; nothing of it may be served."""
    found = read(add_model(root, "model", text, *versions))
    assert found.configs == []
    assert list(found.problems) == ["model"]
    for problem in found.problems["model"]:
        where, separator, what = problem.partition(": ")
        assert where and separator and what, f"not 'path: what': {problem}"
    return found.problems["model"]


def versions_of(path: Path) -> list[str]:
    found = read(path)
    assert found.problems == {}
    return [config.version for config in found.configs]


def parsed(text: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


# Layout


def test_a_repository_holds_models_and_each_its_versions(tmp_path: Path) -> None:
    add_model(tmp_path, "one")
    add_model(tmp_path, "two", "version_policy { all { } }" + NULL, "1", "5")
    found = read(tmp_path)
    assert found.problems == {}
    assert [(config.name, config.version) for config in found.configs] == [
        ("one", "1"),
        ("two", "1"),
        ("two", "5"),
    ]


def test_the_folder_of_one_model_is_read_as_that_model(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "one")
    add_model(tmp_path, "two")
    assert [config.name for config in read(folder).configs] == ["one"]
    assert [config.name for config in read(str(folder) + "/").configs] == ["one"]


def test_the_current_folder_can_be_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(add_model(tmp_path, "one"))
    assert [config.name for config in read(".").configs] == ["one"]


def test_the_examples_are_a_repository_without_problems(examples: Path) -> None:
    found = read(examples)
    assert found.problems == {}
    assert [config.name for config in found.configs] == [
        "digits",
        "identity",
        "simple",
        "text_length",
    ]
    digits = found.configs[0]
    assert digits.inputs == (TensorSpec("image", "FP32", (1, 8, 8)),)
    assert [(s.name, s.datatype, s.shape, s.label_file) for s in digits.outputs] == [
        ("logits", "FP32", (10,), "labels.txt")
    ]
    assert digits.outputs[0].labels[:2] == ("zero", "one")
    assert Path(digits.artifact) == examples / "digits" / "1" / "model.onnx"


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_a_path_that_is_no_folder_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=name) as caught:
        read(tmp_path / name)
    assert len(caught.value.problems) == 1


def test_models_of_a_repository_that_has_vanished_are_a_config_error(tmp_path: Path) -> None:
    for ask in (names, lambda path: read_one(path, "model")):
        with pytest.raises(ConfigError, match="nowhere: no such folder"):
            ask(tmp_path / "nowhere")


def test_the_folder_of_a_version_is_read_as_that_version_alone(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "model", NULL, "1", "2")
    [config] = read(folder / "1").configs
    assert (config.name, config.version) == ("model", "1")
    assert names(folder / "1") == ["model"]
    assert [each.version for each in read_one(folder / "1", "model").configs] == ["1"]
    (folder / "1" / "config.pbtxt").write_text(NULL.replace("8", "4", 1))
    assert read(folder / "1").configs[0].max_batch_size == 4


def test_models_and_repositories_may_be_called_by_numbers(tmp_path: Path) -> None:
    add_model(tmp_path / "7", "model")
    assert [config.name for config in read(tmp_path / "7").configs] == ["model"]
    folder = add_model(tmp_path / "repository", "3")
    assert [config.name for config in read(folder).configs] == ["3"]


def test_a_load_of_nobody_says_who_is_there(tmp_path: Path) -> None:
    for name in "abcdefghijkl":
        add_model(tmp_path, name)
    with pytest.raises(NotFound, match=r"no such model: 'z' .*; there: a, b, .*, j and 2 more$"):
        read_one(tmp_path, "z")


def test_a_folder_without_models_is_refused_with_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    with pytest.raises(ConfigError, match="<model>/<version>"):
        read(tmp_path)


def test_files_beside_the_models_are_ignored(tmp_path: Path) -> None:
    add_model(tmp_path, "one")
    (tmp_path / "README.md").write_text("")
    assert versions_of(tmp_path) == ["1"]


def test_a_folder_that_holds_no_version_is_reported_and_not_passed_over(tmp_path: Path) -> None:
    """A model in `v1/` would otherwise be missing without a word."""
    add_model(tmp_path, "good")
    add_model(tmp_path, "bad", None, "v1")
    (tmp_path / "bad" / "v1" / "model.onnx").touch()
    found = read(tmp_path)
    assert [config.name for config in found.configs] == ["good"]
    assert "version" in found.problems["bad"][0]


# Versions


def test_only_folders_named_by_a_number_without_leading_zero_are_versions(tmp_path: Path) -> None:
    names = ("2", "01", "0", "00", "v3", "3a", "-4", "+5", "6.0", "1e3", "٧", "²", "latest", "10")
    folder = add_model(tmp_path, "model", "version_policy { all { } }" + NULL, *names)
    (folder / "11").write_text("a file, not a folder")
    assert versions_of(folder) == ["2", "10"]


def test_the_latest_version_is_served_unless_said_otherwise(tmp_path: Path) -> None:
    assert versions_of(add_model(tmp_path, "model", NULL, "9", "10", "2")) == ["10"]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("latest { }", ["10"]),
        ("latest { num_versions: 2 }", ["9", "10"]),
        ("latest { num_versions: 99 }", ["2", "9", "10"]),
        ("all { }", ["2", "9", "10"]),
        ("specific { versions: [ 9 ] }", ["9"]),
        ("specific { versions: [ 2, 10 ] }", ["2", "10"]),
        pytest.param("specific { versions: [ 10, 2 ] }", ["2", "10"]),
        pytest.param("specific { versions: [ 9, 9 ] }", ["9"]),
    ],
)
def test_version_policy_chooses_versions_in_rising_order_each_once(
    tmp_path: Path, policy: str, expected: list[str]
) -> None:
    text = f"version_policy {{ {policy} }}" + NULL
    assert versions_of(add_model(tmp_path, "model", text, "9", "10", "2")) == expected


@pytest.mark.parametrize("version", ["3", "-1", "0"])
def test_missing_specific_version_is_reported_with_those_there_are(
    tmp_path: Path, version: str
) -> None:
    text = f"version_policy {{ specific {{ versions: [ 1, {version} ] }} }}" + NULL
    [problem] = problems(tmp_path, text, "1", "7")
    assert problem.startswith("version_policy.specific: ")
    for number in (version, "1", "7"):
        assert number in problem


def test_specific_without_any_version_is_reported(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, "version_policy { specific { } }" + NULL)
    assert problem.startswith("version_policy.specific: ")


def test_model_without_version_folder_is_reported(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "model", NULL, "v1")
    assert read(folder).problems["model"][0].startswith("no version folder; expected")


def test_version_number_that_no_client_can_ask_for_is_not_served(tmp_path: Path) -> None:
    """Versions are 64-bit integers in config.pbtxt and on the wire."""
    huge = "99999999999999999999"
    folder = add_model(tmp_path, "model", "version_policy { all { } }" + NULL, "1", huge)
    found = read(folder)
    assert [config.version for config in found.configs if config.version == huge] == []
    for config in found.configs:
        describe(config)


# A version's own configuration, manifest and evidence


def own_config(folder: Path, version: str, text: str) -> None:
    (folder / version / "config.pbtxt").write_text(text)


def add_manifest(folder: Path, version: str, **content: object) -> None:
    """A manifest over the files that are there."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": "not looked at here"}
        for path in (folder / version).iterdir()
    }
    whole = {"format": 1, "created": "2026-01-01", "files": files} | content
    (folder / version / "manifest.json").write_text(json.dumps(whole))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("", {"3": 12}),
        ("latest { num_versions: 2 }", {"2": 8, "3": 12}),
        ("all { }", {"1": 4, "2": 8, "3": 12}),
        ("specific { versions: [ 1, 2 ] }", {"1": 4, "2": 8}),
    ],
)
def test_a_versions_own_config_holds_for_it_and_the_models_for_the_others(
    tmp_path: Path, policy: str, expected: dict[str, int]
) -> None:
    """Which versions there are is said by the model's alone."""
    text = f"version_policy {{ {policy} }}" if policy else ""
    folder = add_model(tmp_path, "model", text + NULL, "1", "2", "3")
    own_config(folder, "1", NULL.replace("8", "4") + "version_policy { all { } }")
    own_config(folder, "3", NULL.replace("8", "12"))
    found = read(tmp_path)
    assert found.problems == {}
    assert {c.version: c.max_batch_size for c in found.configs} == expected


def test_a_version_with_its_own_config_needs_none_of_the_model(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "model", None)
    own_config(folder, "1", NULL)
    [config] = read(tmp_path).configs
    assert config.max_batch_size == 8


def test_problems_of_a_versions_config_have_its_path(tmp_path: Path) -> None:
    text = "version_policy { all { } }" + NULL
    folder = add_model(tmp_path, "model", text, "1", "2", "3", "4")
    own_config(folder, "1", "max_batch_size: -1" + TENSORS + 'backend: "null" name: "x"')
    own_config(folder, "2", "{{{")
    own_config(folder, "3", 'backend: "onnxruntime"' + TENSORS)
    found = read(tmp_path).problems["model"]
    starts = ("1/config.pbtxt: name: ", "1/config.pbtxt: max_batch_size: ", "2/config.pbtxt: 1:1 ")
    assert len(found) == 4
    for problem, start in zip(found, (*starts, "3/model.onnx: "), strict=True):
        assert problem.startswith(start)


def test_names_that_start_with_a_dot_are_nobodys(tmp_path: Path) -> None:
    add_model(tmp_path, "model", NULL, "1", ".staging-1", ".2")
    add_model(tmp_path, ".staging-2", "{{{", "1")
    assert versions_of(tmp_path) == ["1"]


def test_a_version_without_manifest_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve(tmp_path, NULL).manifest == ""


def test_a_version_with_manifest_is_loaded_if_it_is_whole(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "model", NULL)
    (folder / "1" / "weights").write_bytes(b"12345")
    add_manifest(folder, "1")
    [config] = read(folder).configs
    assert config.manifest == str(folder / "1" / "manifest.json")
    assert (config.slo, config.batching.slo_latency_s) == ("", None)
    (folder / "1" / "weights").write_bytes(b"1234")
    [problem] = read(folder).problems["model"]
    assert problem.startswith("1/weights: 4 bytes, manifest.json says 5; version 1 is incomplete")


def test_a_file_that_the_manifest_does_not_name_is_a_problem(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "model", NULL)
    add_manifest(folder, "1")
    (folder / "1" / "added").write_bytes(b"")
    [problem] = read(folder).problems["model"]
    assert problem.startswith("1/added: is not in manifest.json")


def test_one_version_that_is_not_whole_is_told_apart_from_the_others(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "model", "version_policy { all { } }" + NULL, "1", "2")
    add_manifest(folder, "1")
    add_manifest(folder, "2", files={"gone": {"size": 1, "sha256": ""}})
    [problem] = read(folder).problems["model"]
    assert problem.startswith("2/gone: missing")
    (folder / "config.pbtxt").write_text("version_policy { specific { versions: 1 } }" + NULL)
    assert versions_of(folder) == ["1"], "what is not asked for disturbs nobody"


def test_the_slo_of_the_evidence_switches_slo_mode_on(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "model", NULL)
    add_manifest(folder, "1", evidence={"slo": "p99 < 20ms at 200/s", "accuracy": 0.9})
    [config] = read(folder).configs
    assert config.batching.slo_latency_s == 0.020
    assert config.slo == "p99 < 20ms at 200/s poisson"
    assert config.is_slo_from_evidence


@pytest.mark.parametrize(
    ("said", "latency_s"), [("p99 < 5ms", 0.005), ("", None), ("off", None), ("p50 < 1s", 1.0)]
)
def test_what_the_configuration_says_of_the_slo_wins(
    tmp_path: Path, said: str, latency_s: float | None
) -> None:
    folder = add_model(tmp_path, "model", NULL + parameter("penstock.slo", said))
    add_manifest(folder, "1", evidence={"slo": "p99 < 20ms"})
    [config] = read(folder).configs
    assert config.batching.slo_latency_s == latency_s
    assert not config.is_slo_from_evidence


@pytest.mark.parametrize("outcome", ["kept", "met"])
def test_an_slo_that_was_kept_is_enforced(tmp_path: Path, outcome: str) -> None:
    folder = add_model(tmp_path, "model", NULL)
    add_manifest(folder, "1", evidence={"slo": "p99 < 20ms", "outcome": outcome})
    [config] = read(folder).configs
    assert (config.batching.slo_latency_s, config.unkept_slo) == (0.020, "")


@pytest.mark.parametrize("outcome", ["missed", "refused", "disturbed", "interrupted"])
def test_an_slo_that_was_not_kept_is_not_enforced_unless_asked(
    tmp_path: Path, outcome: str
) -> None:
    folder = add_model(tmp_path, "model", NULL)
    add_manifest(folder, "1", evidence={"slo": "p99 < 20ms", "outcome": outcome})
    [config] = read(folder).configs
    assert config.batching.slo_latency_s is None
    assert (config.slo, config.is_slo_from_evidence) == ("", False)
    assert about(folder, config)[-1] == (
        f"slo: none; the evidence says that the SLO was not kept: p99 < 20ms ({outcome}); serving "
        "without it, set penstock.slo to enforce it"
    )
    text = NULL + parameter("penstock.slo", "p99 < 20ms")
    (folder / "config.pbtxt").write_text(text)
    [config] = read(folder).configs
    assert (config.batching.slo_latency_s, config.unkept_note) == (0.020, "")


def test_a_bad_slo_in_the_evidence_is_a_problem_with_its_path(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "model", NULL)
    add_manifest(folder, "1", evidence={"slo": "p98 < 5ms, p99 > 20ms"})
    found = read(folder).problems["model"]
    assert len(found) == 2
    assert all(problem.startswith("1/manifest.json: evidence.slo: ") for problem in found)


def test_problems_of_configuration_and_evidence_are_told_together(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "model", NULL + "sequence_batching { iterative_sequence: true }")
    add_manifest(folder, "1", evidence={"slo": 20})
    paths = [problem.partition(": ")[0] for problem in read(folder).problems["model"]]
    assert paths == ["sequence_batching", "1/manifest.json"]


def test_manifest_that_cannot_be_read_is_a_problem_of_its_model(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "model", NULL)
    (folder / "1" / "manifest.json").write_text("{")
    [problem] = read(folder).problems["model"]
    assert problem.startswith("1/manifest.json: cannot be read: ")


# Problems


def test_one_bad_model_does_not_hide_the_others(tmp_path: Path) -> None:
    add_model(tmp_path, "bad", "max_batch_size: -1" + TENSORS + 'backend: "null"')
    add_model(tmp_path, "good")
    add_model(tmp_path, "worse", "{{{")
    found = read(tmp_path)
    assert [config.name for config in found.configs] == ["good"]
    assert sorted(found.problems) == ["bad", "worse"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('backend: "null"\nmax_batch_size: "eight"\n', 2),
        ('backend: "null"\n\nmax_batch_sise: 8\n', 3),
        ('input {\n  name: "x"\n  data_type: TYPE_FP31\n}\n', 3),
        ('input {\n  name: "x"\n', 2),
        ("max_batch_size: 99999999999", 1),
    ],
)
def test_syntax_error_names_the_line(tmp_path: Path, text: str, line: int) -> None:
    [problem] = problems(tmp_path, text)
    assert problem.startswith(f"config.pbtxt: {line}:")
    assert len(problem.splitlines()) == 1


def test_config_that_is_not_text_is_reported(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "model")
    (folder / "config.pbtxt").write_bytes(b"\xff\xfe\0name")
    assert read(folder).problems["model"][0].startswith("config.pbtxt: ")


@settings(max_examples=at_most(200))
@given(st.one_of(st.text(), st.text(alphabet='{}[]:"\\<>,# \n0aname_bt1x')))
def test_whatever_config_pbtxt_holds_the_answer_is_a_list_of_problems(text: str) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = add_model(Path(root), "model", None)
        (folder / "config.pbtxt").write_text(text, encoding="utf-8")
        found = read(folder)
        assert found.configs == []
        assert found.problems["model"]


def test_name_in_the_file_must_be_the_name_of_the_folder(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, 'name: "other"' + NULL)
    assert problem.startswith("name: ")
    assert "'other'" in problem and "'model'" in problem


def test_a_number_that_is_no_datatype_is_refused(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, NULL.replace("TYPE_FP32", "20", 1))
    assert problem == "input[0].data_type: 20 is no datatype"


def test_every_problem_of_a_model_is_reported_at_once_with_its_path(tmp_path: Path) -> None:
    text = """
    backend: "null"
    max_batch_size: -3
    input { name: "x" data_type: TYPE_FP32 dims: [ 4, 0 ] }
    input { data_type: TYPE_FP32 dims: [ -2 ] }
    input { name: "z" dims: [ 1 ] reshape { shape: [ 2 ] } }
    output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
    output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
    instance_group { kind: KIND_CPU count: -1 gpus: 0 }
    sequence_batching { iterative_sequence: true }
    parameters { key: "penstock.hang_s" value { string_value: "soon" } }
    """
    paths = {problem.split(": ")[0] for problem in problems(tmp_path, text)}
    assert paths >= {
        "max_batch_size",
        "input[0].dims",
        "input[1].name",
        "input[1].dims",
        "input[2].data_type",
        "input[2].reshape",
        "output",
        "instance_group[0].gpus",
        "instance_group[0].count",
        "sequence_batching",
        "parameters.penstock.hang_s",
    }


@pytest.mark.parametrize(
    "early", ['name: "other"', "version_policy { specific { versions: [ 7 ] } }"]
)
def test_no_problem_hides_the_next(tmp_path: Path, early: str) -> None:
    text = early + NULL + "instance_group { kind: KIND_CPU gpus: 0 }"
    paths = [problem.split(": ")[0] for problem in problems(tmp_path, text)]
    assert len(paths) == 2
    assert "instance_group[0].gpus" in paths


def test_a_problem_of_all_versions_is_told_once(tmp_path: Path) -> None:
    text = "version_policy { all { } } instance_group { gpus: -1 }" + NULL
    assert len(problems(tmp_path, text, "1", "2", "3")) == 1


@pytest.mark.parametrize(
    "field",
    [
        "sequence_batching { iterative_sequence: true }",
        'model_operations { op_library_filename: "x.so" }',
    ],
)
def test_unsupported_field_is_refused_by_name(tmp_path: Path, field: str) -> None:
    name = field.split()[0]
    assert any(
        problem.startswith(f"{name}: ") and "not supported" in problem
        for problem in problems(tmp_path, NULL + field)
    )


@pytest.mark.parametrize(
    "field",
    [
        "sequence_batching { }",
        "ensemble_scheduling { }",
        "model_transaction_policy { decoupled: true }",
    ],
)
def test_answers_that_are_not_of_one_request_are_not_cached(tmp_path: Path, field: str) -> None:
    found = problems(tmp_path, NULL + field + "response_cache { enable: true }")
    name = field.split()[0]
    assert any(problem.startswith(f"response_cache: not with {name}: ") for problem in found)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_model_says_whether_its_answers_are_cached(tmp_path: Path, enabled: bool) -> None:
    text = f"response_cache {{ enable: {str(enabled).lower()} }}"
    assert resolve(tmp_path, NULL + text).is_cached == enabled


@pytest.mark.parametrize(
    "field",
    [
        pytest.param("model_transaction_policy { decoupled: false }"),
        pytest.param("model_transaction_policy { }"),
        pytest.param("response_cache { enable: false }"),
        'metric_tags { key: "team" value: "vision" }',
        "optimization { input_pinned_memory { enable: true } }",
    ],
)
def test_field_that_asks_for_nothing_more_is_accepted(tmp_path: Path, field: str) -> None:
    """Triton writes such fields out by itself, so many repositories hold them."""
    resolve(tmp_path, NULL + field)


@pytest.mark.parametrize(
    "field",
    [
        "optimization { execution_accelerators { gpu_execution_accelerator "
        '{ name: "tensorrt" } } }',
        'model_repository_agents { agents { name: "decrypt" } }',
    ],
)
def test_field_that_would_change_or_guard_the_model_is_not_silently_dropped(
    tmp_path: Path, field: str
) -> None:
    assert problems(tmp_path, NULL + field)


def test_unknown_backend_is_refused_with_those_there_are(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, 'backend: "dali"' + TENSORS)
    assert problem.startswith("backend: ")
    assert "'dali'" in problem and "onnxruntime" in problem


def test_unknown_platform_is_refused_with_those_there_are(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, 'platform: "caffe2_netdef"' + TENSORS)
    assert problem.startswith("platform: ")
    assert "'caffe2_netdef'" in problem
    assert "onnxruntime_onnx, tensorrt_plan" in problem


def test_tensorrt_plan_is_a_platform_whose_tensors_must_be_given(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "model", 'platform: "tensorrt_plan"' + TENSORS)
    assert read(folder).problems == {"model": ["1/model.plan: no such file"]}
    (folder / "1" / "model.plan").write_bytes(b"machine code")
    [config] = read(folder).configs
    assert (config.backend, config.platform) == ("tensorrt", "tensorrt_plan")
    (folder / "config.pbtxt").unlink()
    [problem] = read(folder).problems["model"]
    assert problem.startswith("input, output: must be given for backend 'tensorrt'")


def test_missing_file_is_reported(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, 'backend: "onnxruntime"' + TENSORS)
    assert problem == "1/model.onnx: no such file"


def test_tensors_must_be_given_for_a_backend_that_cannot_say(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, 'backend: "null"')
    assert "input" in problem and "'null'" in problem


# Tensors and instances


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_is_mapped(tmp_path: Path, datatype: str) -> None:
    written = "STRING" if datatype == "BYTES" else datatype
    text = f"""
    backend: "null"
    input {{ name: "x" data_type: TYPE_{written} dims: [ -1, 3 ] optional: true }}
    output {{ name: "y" data_type: TYPE_{written} dims: 2 dims: -1 label_filename: "l.txt" }}
    """
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "l.txt").write_text("cat\ndog\n")
    config = resolve(tmp_path, text)
    assert config.inputs == (TensorSpec("x", datatype, (-1, 3), is_optional=True),)
    assert config.outputs == (
        TensorSpec("y", datatype, (2, -1), label_file="l.txt", labels=("cat", "dog")),
    )


LABELLED = NULL.replace('name: "y"', 'name: "y" label_filename: "l.txt"')


def test_missing_label_file_is_a_problem_that_names_its_path_once(tmp_path: Path) -> None:
    text = "version_policy { all { } }" + LABELLED
    [problem] = problems(tmp_path, text, "1", "2")
    assert problem.startswith("output[0].label_filename: no such file: ")
    assert str(tmp_path / "model" / "l.txt") in problem


def test_labels_of_the_version_come_before_those_of_the_model(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "model", "version_policy { all { } }" + LABELLED, "1", "2")
    (folder / "l.txt").write_text("model")
    (folder / "2" / "l.txt").write_text("version")
    assert [config.outputs[0].labels for config in read(folder).configs] == [
        ("model",),
        ("version",),
    ]


@pytest.mark.parametrize("field", ["default_model_filename", "label_filename"])
@pytest.mark.parametrize("name", ["a\\000b", "a" * 300, "loop"])
def test_file_name_that_cannot_be_one_is_a_problem(tmp_path: Path, field: str, name: str) -> None:
    folder = add_model(tmp_path, "model", None)
    for where in (folder, folder / "1"):
        (where / "loop").symlink_to("loop")
    text = f'{field}: "{name}"'
    if field == "label_filename":
        text = NULL.replace('name: "y"', f'name: "y" {text}')
    else:
        text += NULL
    (folder / "config.pbtxt").write_text(text)
    [problem] = read(tmp_path).problems["model"]
    assert field in problem


@pytest.mark.parametrize("name", ["../l.txt", "../../l.txt", "/etc/hostname"])
def test_label_file_cannot_leave_the_models_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "l.txt").write_text("secret")
    [problem] = problems(tmp_path, LABELLED.replace("l.txt", name))
    assert problem == f"output[0].label_filename: '{name}' leaves the model's folder"


def test_a_file_names_the_backend_where_the_configuration_does_not(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "model", NULL.replace('backend: "null"', ""))
    with pytest.raises(ConfigError, match=r"neither 1/model.onnx nor 1/model.py nor .* exists"):
        raise ConfigError(read(folder).problems["model"])
    (folder / "1" / "model.py").touch()
    [config] = read(folder).configs
    assert (config.backend, config.platform) == ("python", "python")
    assert Path(config.artifact) == folder / "1" / "model.py"


def test_a_python_model_must_say_its_tensors(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "model", 'backend: "python"')
    (folder / "1" / "model.py").touch()
    [problem] = read(folder).problems["model"]
    assert problem.startswith("1/model.py: defines no model; expected ")


def test_a_python_model_may_have_no_inputs(tmp_path: Path) -> None:
    output = 'output { name: "y" data_type: TYPE_FP32 dims: 2 }'
    folder = add_model(
        tmp_path, "model", f'backend: "python" max_batch_size: 4 dynamic_batching {{}} {output}'
    )
    (folder / "1" / "model.py").touch()
    [config] = read(folder).configs
    assert config.inputs == () and len(config.outputs) == 1
    assert not config.batching.is_dynamic, "nothing would say how many rows a batch has"


def test_platform_names_the_backend_too(tmp_path: Path, write_identity: WriteOnnx) -> None:
    folder = add_model(tmp_path, "model", 'platform: "onnxruntime_onnx"')
    write_identity(folder / "1" / "model.onnx")
    [config] = read(folder).configs
    assert config.backend == "onnxruntime"
    assert config.platform == "onnxruntime_onnx"


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("", 1),
        ("instance_group { }", 1),
        ("instance_group { count: 3 kind: KIND_CPU }", 3),
        ("instance_group { } instance_group { count: 2 }", 3),
        ("instance_group { count: 3 } instance_group { count: 2 kind: KIND_MODEL }", 5),
        ("instance_group { count: 64 }", 64),
    ],
)
def test_instances_of_all_groups_are_counted(tmp_path: Path, groups: str, expected: int) -> None:
    assert resolve(tmp_path, NULL + groups).num_instances == expected


@pytest.mark.parametrize("count", [65, 1_000_000, 2**31 - 1])
def test_huge_number_of_instances_is_refused(tmp_path: Path, count: int) -> None:
    [problem] = problems(tmp_path, NULL + f"instance_group {{ count: {count} }}")
    assert problem.startswith("instance_group")
    assert str(count) in problem


def add_python(root: Path, groups: str) -> Path:
    folder = add_model(root, "model", f'backend: "python" max_batch_size: 8 {TENSORS} {groups}')
    (folder / "1" / "model.py").touch()
    return folder


@pytest.mark.parametrize("group", ["kind: KIND_GPU", "kind: KIND_GPU gpus: [ 0 ]"])
def test_gpu_instances_are_refused_for_backends_without_gpus(tmp_path: Path, group: str) -> None:
    [problem] = read(add_python(tmp_path, f"instance_group {{ {group} }}")).problems["model"]
    assert problem.startswith("instance_group[0].kind: ")
    assert "KIND_GPU" in problem


def test_gpus_ask_for_a_gpu_without_saying_so(tmp_path: Path) -> None:
    [problem] = read(add_python(tmp_path, "instance_group { gpus: [ 0 ] }")).problems["model"]
    assert problem.startswith("instance_group[0].gpus: ") and "KIND_GPU" in problem


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Gpu(i, f"GPU-{i}", "Made Up", 1 << 34, 1 << 33) for i in range(2))
    monkeypatch.setattr(devices, "read_gpus", lambda: gpus)


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "read_gpus", lambda: ())


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("", "cpu"),
        ("instance_group { kind: KIND_CPU }", "cpu"),
        ("instance_group { kind: KIND_MODEL } instance_group { }", "cpu cpu"),
        ("instance_group { kind: KIND_GPU }", "cuda"),
        ("instance_group { kind: KIND_GPU count: 2 }", "cuda cuda"),
        ("instance_group { kind: KIND_GPU gpus: 2 count: 2 }", "cuda:2 cuda:2"),
        ("instance_group { gpus: 0 }", "cuda:0"),
        ("instance_group { gpus: [ 0, 1 ] }", "cuda:0 cuda:1"),
        ("instance_group { count: 2 gpus: [ 3, 1 ] }", "cuda:3 cuda:1 cuda:3 cuda:1"),
        ("instance_group { gpus: [ 0, 1 ] } instance_group { gpus: 0 }", "cuda:0 cuda:1 cuda:0"),
        ("instance_group { count: 2 gpus: 0 } instance_group { gpus: 1 }", "cuda:0 cuda:1 cuda:0"),
        ("instance_group { kind: KIND_CPU } instance_group { gpus: 0 }", "cpu cuda:0"),
        ("instance_group { kind: KIND_GPU } instance_group { gpus: [0] }", "cuda cuda:0"),
        (
            "instance_group { count: 2 gpus: 0 } instance_group { gpus: 1 } "
            "instance_group { count: 2 gpus: 2 }",
            "cuda:0 cuda:1 cuda:2 cuda:0 cuda:2",
        ),
    ],
)
def test_each_instance_has_the_device_of_its_group(
    tmp_path: Path, groups: str, expected: str
) -> None:
    config, again = round_trip(add_model(tmp_path, "model", NULL + groups))
    assert config.devices == tuple(expected.split())
    assert (config.num_instances, config.device) == (len(config.devices), config.devices[0])
    assert again == config


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("groups", ["", "instance_group { }", "instance_group { kind: KIND_AUTO }"])
def test_without_a_kind_gpus_are_used_where_they_are_and_can_be(
    tmp_path: Path, groups: str
) -> None:
    text = f'backend: "pytorch" max_batch_size: 8 {TENSORS} {groups}'
    folder = add_model(tmp_path / "can", "model", text)
    (folder / "1" / "module.py").touch()
    config, again = round_trip(folder)
    assert config.devices == ("cuda",)
    assert again == config
    [config] = read(add_python(tmp_path / "cannot", groups)).configs
    assert config.devices == ("cpu",)


@pytest.mark.usefixtures("two_gpus")
def test_what_was_described_as_of_the_cpu_stays_there(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "model", NULL + "instance_group { kind: KIND_CPU }")
    config, again = round_trip(folder)
    assert again.devices == config.devices == ("cpu",)


@pytest.mark.parametrize(
    ("groups", "path"),
    [
        ("instance_group { kind: KIND_GPU gpus: -1 }", "instance_group[0].gpus"),
        ("instance_group { gpus: 0 } instance_group { gpus: [ 1, 1 ] }", "instance_group[1].gpus"),
        ("instance_group { kind: KIND_CPU gpus: 0 }", "instance_group[0].gpus"),
        ("instance_group { count: 33 gpus: [ 0, 1 ] }", "instance_group"),
    ],
)
def test_groups_that_make_no_sense_are_refused(tmp_path: Path, groups: str, path: str) -> None:
    assert [problem.split(": ")[0] for problem in problems(tmp_path, NULL + groups)] == [path]


def test_what_an_instance_takes_of_a_gpu_may_be_given(tmp_path: Path) -> None:
    parameter = 'parameters { key: "penstock.gpu_memory_bytes" value { string_value: "%s" } }'
    folder = add_model(tmp_path / "good", "model", NULL + parameter % (3 << 30))
    config, again = round_trip(folder)
    assert config.gpu_memory_bytes == 3 << 30
    assert again == config
    [problem] = problems(tmp_path / "bad", NULL + parameter % "3GiB")
    assert problem.startswith("parameters.penstock.gpu_memory_bytes: '3GiB' is not a whole number")


# Batching


def test_without_dynamic_batching_each_request_runs_alone(tmp_path: Path) -> None:
    config = resolve(tmp_path, NULL)
    assert config.max_batch_size == 8
    assert config.batching == BatchPolicy(8, is_dynamic=False)


def test_empty_dynamic_batching_has_tritons_defaults(tmp_path: Path) -> None:
    policy = resolve(tmp_path, NULL + "dynamic_batching { }").batching
    assert policy == BatchPolicy(8, is_dynamic=True)
    assert policy.max_queue_delay_s == 0.0
    assert policy.policies == (QueuePolicy("REJECT", 0.0, False, 0),)


def test_every_field_of_dynamic_batching_is_mapped_and_microseconds_become_seconds(
    tmp_path: Path,
) -> None:
    text = """
    dynamic_batching {
      preferred_batch_size: [ 8, 4 ]
      max_queue_delay_microseconds: 1500
      priority_levels: 3
      default_priority_level: 2
      default_queue_policy {
        timeout_action: DELAY
        default_timeout_microseconds: 2500000
        allow_timeout_override: true
        max_queue_size: 16
      }
      priority_queue_policy {
        key: 3
        value { timeout_action: REJECT default_timeout_microseconds: 1 max_queue_size: 1 }
      }
    }
    """
    base = QueuePolicy("DELAY", 2.5, True, 16)
    assert resolve(tmp_path, NULL + text).batching == BatchPolicy(
        max_batch_size=8,
        is_dynamic=True,
        preferred_batch_sizes=(4, 8),
        max_queue_delay_s=0.0015,
        preserve_ordering=False,
        num_priorities=3,
        default_priority=2,
        policies=(base, base, base, QueuePolicy("REJECT", 1e-6, False, 1)),
    )


def test_preserve_ordering_is_mapped(tmp_path: Path) -> None:
    text = NULL + "dynamic_batching { preserve_ordering: true }"
    assert resolve(tmp_path, text).batching.preserve_ordering


@pytest.mark.parametrize(
    ("field", "path"),
    [
        ("preferred_batch_size: [ 4, 9 ]", "preferred_batch_size"),
        ("preferred_batch_size: [ 0 ]", "preferred_batch_size"),
        ("preferred_batch_size: [ -1 ]", "preferred_batch_size"),
        ("priority_levels: 3", "default_priority_level"),
        ("priority_levels: 3 default_priority_level: 4", "default_priority_level"),
        ("priority_levels: 4000000000 default_priority_level: 1", "priority_levels"),
        pytest.param(
            "priority_levels: 2 default_priority_level: 1 "
            "priority_queue_policy { key: 3 value { max_queue_size: 1 } }",
            "priority_queue_policy",
        ),
        pytest.param(
            "priority_levels: 2 default_priority_level: 1 "
            "priority_queue_policy { key: 0 value { max_queue_size: 1 } }",
            "priority_queue_policy",
        ),
        pytest.param(
            "preserve_ordering: true priority_levels: 2 default_priority_level: 1",
            "preserve_ordering",
        ),
        pytest.param(
            "preserve_ordering: true default_queue_policy "
            "{ timeout_action: DELAY default_timeout_microseconds: 5 }",
            "preserve_ordering",
        ),
    ],
)
def test_batching_that_triton_refuses_is_refused_here(
    tmp_path: Path, field: str, path: str
) -> None:
    found = problems(tmp_path, NULL + f"dynamic_batching {{ {field} }}")
    assert [problem.split(": ")[0] for problem in found] == [f"dynamic_batching.{path}"]


@pytest.mark.parametrize(
    "field",
    [
        "priority_levels: 1 default_priority_level: 1",
        "default_queue_policy { timeout_action: DELAY }",
    ],
)
def test_ordering_can_be_kept_with_one_level_or_a_delay_that_never_comes(
    tmp_path: Path, field: str
) -> None:
    text = NULL + f"dynamic_batching {{ preserve_ordering: true {field} }}"
    assert resolve(tmp_path, text).batching.preserve_ordering


def test_dynamic_batching_needs_a_batch_dimension(tmp_path: Path) -> None:
    text = 'backend: "null" dynamic_batching { }' + TENSORS
    [problem] = problems(tmp_path, text)
    assert problem.startswith("dynamic_batching: ") and "max_batch_size" in problem


def test_negative_batch_is_refused(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, 'backend: "null" max_batch_size: -1' + TENSORS)
    assert problem.startswith("max_batch_size: ") and "-1" in problem


# Parameters


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def test_parameters_are_kept_for_the_backend(tmp_path: Path) -> None:
    text = NULL + parameter("null.a_ms", "2") + parameter("anything", "")
    assert resolve(tmp_path, text).options == {"null.a_ms": "2", "anything": ""}


def test_penstocks_own_parameters_are_mapped(tmp_path: Path) -> None:
    text = (
        NULL
        + parameter("penstock.hang_s", "2.5")
        + parameter("penstock.slab_bytes", "65536")
        + parameter("penstock.max_slabs", "3")
        + parameter("penstock.spill_bytes", "1048576")
        + parameter("penstock.load_timeout_s", "12.5")
        + parameter("penstock.memory_bytes", "1000000000")
        + parameter("penstock.env", "MODEL_TOKEN, MY_*,")
    )
    config = resolve(tmp_path, text)
    assert config.hang_s == 2.5
    assert (config.load_timeout_s, config.memory_bytes) == (12.5, 1_000_000_000)
    assert config.env == ("MODEL_TOKEN", "MY_*")
    assert config.memory == MemoryPolicy(slab_bytes=65536, max_slabs=3, spill_bytes=MIB)


def test_without_them_loading_has_ten_minutes_and_any_memory(tmp_path: Path) -> None:
    config = resolve(tmp_path, NULL)
    assert (config.load_timeout_s, config.memory_bytes, config.env) == (600, None, ())


@pytest.mark.parametrize("value", ["A B", "*", "1A", "A=b", "A*B", "A;B"])
def test_names_of_variables_are_checked(tmp_path: Path, value: str) -> None:
    [problem] = problems(tmp_path, NULL + parameter("penstock.env", f"FINE, {value}"))
    assert problem.startswith(f"parameters.penstock.env: '{value}' names no variable")


@pytest.mark.parametrize(
    ("value", "max_wait_s"), [("250", 0.25), ("0", 0.0), ("0.5", 0.0005), (None, None)]
)
def test_the_longest_wait_is_given_in_milliseconds(
    tmp_path: Path, value: str | None, max_wait_s: float | None
) -> None:
    text = NULL if value is None else NULL + parameter("penstock.max_wait_ms", value)
    config = resolve(tmp_path, text)
    assert config.batching.max_wait_s == max_wait_s
    assert "penstock.max_wait_ms" not in config.options


@pytest.mark.parametrize("value", ["", "soon", "-1", "nan", "inf", "1e300"])
def test_junk_in_the_longest_wait_is_refused(tmp_path: Path, value: str) -> None:
    [problem] = problems(tmp_path, NULL + parameter("penstock.max_wait_ms", value))
    assert problem.startswith(f"parameters.penstock.max_wait_ms: '{value}' is not a number from 0")


@pytest.mark.parametrize(
    "key",
    ["hang_s", "slab_bytes", "max_slabs", "spill_bytes", "load_timeout_s", "memory_bytes"],
)
@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf", "1e300", "0x10"])
def test_junk_in_penstocks_parameters_is_refused_by_name(
    tmp_path: Path, key: str, value: str
) -> None:
    [problem] = problems(tmp_path, NULL + parameter(f"penstock.{key}", value))
    assert problem.startswith(f"parameters.penstock.{key}: ")
    assert f"'{value}'" in problem


@pytest.mark.parametrize("key", ["slab_bytes", "max_slabs", "spill_bytes", "memory_bytes"])
def test_sizes_are_whole_numbers(tmp_path: Path, key: str) -> None:
    [problem] = problems(tmp_path, NULL + parameter(f"penstock.{key}", "0.5"))
    assert problem.startswith(f"parameters.penstock.{key}: ")


@pytest.mark.parametrize("key", ["max_slabs", "spill_bytes"])
def test_sizes_beyond_any_machine_are_refused(tmp_path: Path, key: str) -> None:
    [problem] = problems(tmp_path, NULL + parameter(f"penstock.{key}", "100000000000000"))
    assert problem.startswith(f"parameters.penstock.{key}: ")


def test_slo_gives_the_batcher_its_latency_and_survives_the_description(tmp_path: Path) -> None:
    text = NULL + parameter("penstock.slo", "p50 < 5ms, p99 < 20ms at 200/s")
    config, again = round_trip(add_model(tmp_path, "model", text))
    assert config.batching.slo_latency_s == 0.020
    assert again == config


@pytest.mark.parametrize("text", ["", " ", "off", " off "])
def test_slo_may_be_switched_off_in_words(tmp_path: Path, text: str) -> None:
    config, again = round_trip(add_model(tmp_path, "model", NULL + parameter("penstock.slo", text)))
    assert (config.slo, config.batching.slo_latency_s) == ("off", None)
    assert again == config


def test_slo_without_a_latency_leaves_tritons_rules(tmp_path: Path) -> None:
    text = NULL + parameter("penstock.slo", "throughput >= 100/s")
    assert resolve(tmp_path, text).batching.slo_latency_s is None


def test_every_problem_of_an_slo_is_reported_by_name(tmp_path: Path) -> None:
    found = problems(tmp_path, NULL + parameter("penstock.slo", "p98 < 5ms, p99 > 20ms"))
    assert [problem.partition(": ")[0] for problem in found] == ["parameters.penstock.slo"] * 2
    assert "'p98' is not a term" in found[0]


ENCODER = """backend: "null" max_batch_size: 8 dynamic_batching {}
input { name: "ids" data_type: TYPE_INT64 dims: [ -1 ] }
input { name: "x" data_type: TYPE_BF16 dims: [ 3, -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
"""


def test_paddable_axes_and_buckets(tmp_path: Path) -> None:
    text = ENCODER + parameter("penstock.pad", "ids[0], x[1] = 0.5")
    text += parameter("penstock.pad_buckets", "16, 32,64") + parameter("penstock.tolerance", "0.01")
    config, again = round_trip(add_model(tmp_path, "model", text))
    axes = (PadAxis("ids", 0, 0.0), PadAxis("x", 1, 0.5))
    assert config.padding == Padding(axes, (16, 32, 64))
    assert config.tolerance == 0.01
    assert again == config


def test_buckets_have_a_default(tmp_path: Path) -> None:
    padding = resolve(tmp_path, ENCODER + parameter("penstock.pad", "ids[0]=1")).padding
    assert padding is not None and padding.buckets == Padding(()).buckets


@pytest.mark.parametrize(
    ("pad", "text"),
    [
        ("", "'' is not of the form input[axis]=value"),
        ("ids", "'ids' is not of the form input[axis]=value"),
        ("ids[0]=", "is not of the form input[axis]=value"),
        ("ids[-1]", "is not of the form input[axis]=value"),
        ("idz[0]", "no input 'idz'; there are ids, x"),
        ("x[0]", "'x[0]': not one of the axes of size -1 in dims [3, -1]"),
        ("x[2]", "'x[2]': not one of the axes of size -1 in dims [3, -1]"),
        ("ids[0]=0.5", "'ids[0]': the value is not one of INT64"),
        ("ids[0]=zero", "'ids[0]': the value is not one of INT64"),
        ("x[1]=zero", "'x[1]': the value is not one of BF16"),
    ],
)
def test_what_is_wrong_with_padding_is_named(tmp_path: Path, pad: str, text: str) -> None:
    [problem] = problems(tmp_path, ENCODER + parameter("penstock.pad", pad))
    assert problem.startswith("parameters.penstock.pad: ")
    assert text in problem


@pytest.mark.parametrize("sizes", ["", "16,", "32,16", "16,16", "0,16", "a", "1.5", "-4"])
def test_buckets_are_whole_numbers_that_grow(tmp_path: Path, sizes: str) -> None:
    text = ENCODER + parameter("penstock.pad", "ids[0]") + parameter("penstock.pad_buckets", sizes)
    [problem] = problems(tmp_path, text)
    assert problem.startswith(f"parameters.penstock.pad_buckets: '{sizes}': expected whole numbers")


def test_buckets_need_an_axis(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, ENCODER + parameter("penstock.pad_buckets", "16"))
    assert problem == "parameters.penstock.pad_buckets: needs parameters.penstock.pad"


PADDED = ENCODER + parameter("penstock.pad", "ids[0]") + parameter("penstock.pad_buckets", "16,384")


@pytest.mark.parametrize("most", [384, 32768])
def test_a_budget_of_tokens(tmp_path: Path, most: int) -> None:
    text = PADDED + parameter("penstock.max_tokens", str(most))
    config, again = round_trip(add_model(tmp_path, "model", text))
    assert config.batching.max_tokens == most
    assert again == config
    assert resolve(tmp_path / "without", PADDED).batching.max_tokens is None


FUNCTION = parameter("penstock.preprocess", "code.py:f") + parameter(
    "penstock.model_inputs", "ids:INT64[-1]"
)


@pytest.mark.parametrize(
    ("text", "most", "expected"),
    [
        (PADDED, "0", "'0' is not a whole number above 0 up to"),
        (PADDED, "1e4", "'1e4' is not a whole number above 0 up to"),
        (PADDED, "383", "'383' is less than one row of the largest bucket, 384"),
        (ENCODER, "4096", "needs parameters.penstock.pad,"),
        (PADDED.replace("dynamic_batching {}", ""), "4096", "needs dynamic_batching"),
        (PADDED + FUNCTION, "4096", "known only behind parameters.penstock.preprocess"),
    ],
)
def test_a_budget_of_tokens_needs_a_length(
    tmp_path: Path, text: str, most: str, expected: str
) -> None:
    folder = add_model(tmp_path, "model", text + parameter("penstock.max_tokens", most))
    (folder / "1" / "code.py").write_text("")
    [problem] = read(folder).problems["model"]
    assert problem.startswith("parameters.penstock.max_tokens: ")
    assert expected in problem


def test_misspelt_parameter_of_penstock_is_refused(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, NULL + parameter("penstock.spil_bytes", "1048576"))
    assert problem.startswith("parameters.penstock.spil_bytes: ")
    assert "penstock.spill_bytes" in problem


# The file of a version


@pytest.mark.parametrize("name", ["../../x", "../2/model.onnx", "a/../../../x", "/etc/passwd"])
def test_file_name_cannot_leave_the_version_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "x").write_text("")
    text = f'backend: "onnxruntime" default_model_filename: "{name}"' + TENSORS
    [problem] = problems(tmp_path, text)
    assert problem.startswith("default_model_filename: ")
    assert f"'{name}'" in problem


def test_file_name_can_be_another_one_inside_the_version_folder(
    tmp_path: Path, write_identity: WriteOnnx
) -> None:
    text = 'backend: "onnxruntime" default_model_filename: "parts/net.onnx"'
    folder = add_model(tmp_path, "model", text)
    file = write_identity(folder / "1" / "parts" / "net.onnx")
    [config] = read(folder).configs
    assert Path(config.artifact) == file


@pytest.mark.parametrize("name", [".", "folder"])
def test_file_of_an_onnx_model_must_be_a_file(tmp_path: Path, name: str) -> None:
    folder = add_model(tmp_path, "model")
    (folder / "1" / "folder").mkdir()
    text = f'backend: "onnxruntime" default_model_filename: "{name}"' + TENSORS
    (folder / "config.pbtxt").write_text(text)
    assert read(folder).problems["model"]


def test_artifact_that_links_out_of_the_version_folder_is_refused(
    tmp_path: Path, write_identity: WriteOnnx
) -> None:
    outside = write_identity(tmp_path / "outside.onnx")
    folder = add_model(tmp_path / "repository", "model", None)
    (folder / "1" / "model.onnx").symlink_to(outside)
    assert "1/model.onnx: a link that leads out" in "; ".join(read(folder).problems["model"])
    (folder / "model.onnx").write_bytes(outside.read_bytes())
    (folder / "1" / "model.onnx").unlink()
    (folder / "1" / "model.onnx").symlink_to(folder / "model.onnx")
    assert "leaves the version folder" in "; ".join(read(folder).problems["model"])


def test_artifact_that_links_within_the_version_folder_is_accepted(
    tmp_path: Path, write_identity: WriteOnnx
) -> None:
    folder = add_model(tmp_path, "model", None)
    write_identity(folder / "1" / "blob")
    (folder / "1" / "model.onnx").symlink_to("blob")
    assert versions_of(folder) == ["1"]


@pytest.mark.parametrize("link", ["model", "model/1"])
def test_folder_that_links_out_of_the_repository_is_refused(
    tmp_path: Path, write_identity: WriteOnnx, link: str
) -> None:
    write_identity(tmp_path / "elsewhere" / "1" / "model.onnx")
    root = tmp_path / "repository"
    path = root / link
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "elsewhere" / "1" if link == "model/1" else tmp_path / "elsewhere")
    found = read(root)
    assert found.configs == []
    assert list(found.problems) == ["model"]


@pytest.mark.parametrize(
    "target",
    [
        "releases",
        pytest.param(
            "releases/model",
        ),
    ],
)
def test_the_path_that_the_operator_names_may_be_a_link(tmp_path: Path, target: str) -> None:
    """`models -> releases/2026-03` is how people switch; what is inside may still not lead out."""
    add_model(tmp_path / "elsewhere" / "releases", "model")
    (tmp_path / "here").mkdir()
    link = tmp_path / "here" / "model"
    link.symlink_to(tmp_path / "elsewhere" / target)
    assert versions_of(link) == ["1"]


def test_a_linked_model_has_the_name_of_the_link(tmp_path: Path) -> None:
    add_model(tmp_path, "one")
    (tmp_path / "two").symlink_to("one")
    assert [config.name for config in read(tmp_path).configs] == ["one", "two"]


# Without config.pbtxt: worked out from the file


def test_model_without_config_takes_its_tensors_from_the_file(
    tmp_path: Path, write_identity: WriteOnnx
) -> None:
    folder = add_model(tmp_path, "model", None)
    write_identity(folder / "1" / "model.onnx", "FP16", ("batch", 3, "size"), num_tensors=2)
    [config] = read(folder).configs
    assert config.backend == "onnxruntime"
    assert config.inputs == tuple(TensorSpec(f"x{i}", "FP16", (3, -1)) for i in range(2))
    assert config.outputs == tuple(TensorSpec(f"y{i}", "FP16", (3, -1)) for i in range(2))
    assert config.max_batch_size == pbtxt.DEFAULT_MAX_BATCH
    assert config.batching == BatchPolicy(config.max_batch_size, is_dynamic=True)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_is_worked_out(
    tmp_path: Path, write_identity: WriteOnnx, datatype: str
) -> None:
    folder = add_model(tmp_path, "model", None)
    write_identity(folder / "1" / "model.onnx", datatype)
    [config] = read(folder).configs
    assert config.inputs == (TensorSpec("x0", datatype, (4,)),)


@pytest.mark.parametrize(
    ("shape", "max_batch_size", "row_shape"),
    [
        (("batch", 4), pbtxt.DEFAULT_MAX_BATCH, (4,)),
        (("batch",), pbtxt.DEFAULT_MAX_BATCH, ()),
        ((1, 4), 0, (1, 4)),
        ((8, "size"), 0, (8, -1)),
        ((), 0, ()),
    ],
)
def test_a_symbolic_first_dimension_is_the_batch_and_a_fixed_one_is_not(
    tmp_path: Path,
    write_identity: WriteOnnx,
    shape: tuple[int | str, ...],
    max_batch_size: int,
    row_shape: tuple[int, ...],
) -> None:
    folder = add_model(tmp_path, "model", None)
    write_identity(folder / "1" / "model.onnx", "FP32", shape)
    [config] = read(folder).configs
    assert config.max_batch_size == max_batch_size
    assert config.inputs[0].shape == config.outputs[0].shape == row_shape
    assert config.batching.is_dynamic == (max_batch_size > 0)


def test_without_a_batch_in_every_tensor_there_is_no_batch_dimension(
    tmp_path: Path, write_onnx: WriteOnnx
) -> None:
    folder = add_model(tmp_path, "model", None)
    write_onnx(
        folder / "1" / "model.onnx",
        [helper.make_node("NonZero", ["x"], ["where"])],
        {"x": ("FP32", ["rows", 3])},
        {"where": ("INT64", [2, "found"])},
    )
    [config] = read(folder).configs
    assert config.max_batch_size == 0
    assert config.inputs[0].shape == (-1, 3)
    assert config.outputs[0].shape == (2, -1)


def test_weights_are_not_inputs(tmp_path: Path, write_onnx: WriteOnnx) -> None:
    folder = add_model(tmp_path, "model", None)
    write_onnx(
        folder / "1" / "model.onnx",
        [helper.make_node("Add", ["x", "weight"], ["y"])],
        {"x": ("FP32", ["batch", 1]), "weight": ("FP32", [1])},
        {"y": ("FP32", ["batch", 1])},
        [helper.make_tensor("weight", TensorProto.FLOAT, [1], [1.0])],
    )
    [config] = read(folder).configs
    assert [spec.name for spec in config.inputs] == ["x"]


def test_config_may_say_only_the_batch_size(tmp_path: Path, write_identity: WriteOnnx) -> None:
    folder = add_model(tmp_path, "model", "max_batch_size: 3")
    write_identity(folder / "1" / "model.onnx")
    [config] = read(folder).configs
    assert config.max_batch_size == 3
    assert config.inputs == (TensorSpec("x0", "FP32", (4,)),)


def test_tensors_given_with_their_batch_dimension_stay_so(
    tmp_path: Path, write_identity: WriteOnnx
) -> None:
    """max_batch_size 0 beside a written input means that its dims are the whole shape."""
    text = 'max_batch_size: 0 input { name: "x0" data_type: TYPE_FP32 dims: [ -1, 4 ] }'
    folder = add_model(tmp_path, "model", text)
    write_identity(folder / "1" / "model.onnx")
    [config] = read(folder).configs
    assert config.max_batch_size == 0
    assert config.inputs[0].shape == config.outputs[0].shape == (-1, 4)


@pytest.mark.parametrize("kind", ["sequence", "float8"])
def test_tensor_that_the_protocol_has_no_datatype_for_is_a_problem_that_names_it(
    tmp_path: Path, kind: str
) -> None:
    """Classifiers from scikit-learn, for one, give a sequence of maps."""
    if kind == "sequence":
        strange = helper.make_tensor_sequence_value_info("strange", TensorProto.FLOAT, None)
    else:
        strange = helper.make_tensor_value_info("strange", TensorProto.FLOAT8E4M3FN, ["batch"])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    node = helper.make_node("SequenceConstruct", ["x"], ["strange"])
    model = helper.make_model(helper.make_graph([node], "graph", [x], [strange]))
    folder = add_model(tmp_path, "model", None)
    (folder / "1" / "model.onnx").write_bytes(model.SerializeToString())
    found = read(folder)
    assert found.configs == []
    assert "strange" in "; ".join(found.problems["model"])


def test_no_truncation_of_a_model_file_resolves_to_a_model(
    tmp_path: Path, write_identity: WriteOnnx
) -> None:
    folder = add_model(tmp_path, "model", None)
    file = write_identity(folder / "1" / "model.onnx")
    whole = file.read_bytes()
    resolved = []
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        found = read(folder)
        config = found.configs[0] if found.configs else None
        # The graph may be whole while what follows it is cut off: the backend finds that out.
        if config is not None and not (config.inputs and config.outputs):
            resolved.append(size)
    assert resolved == []


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b""),
        b"\0" * 100,
        b"\xff" * 100,
        b"hello, world\n" * 10,
    ],
)
def test_file_that_is_no_model_is_a_problem_that_names_it(tmp_path: Path, content: bytes) -> None:
    folder = add_model(tmp_path, "model", None)
    (folder / "1" / "model.onnx").write_bytes(content)
    found = read(folder)
    assert found.configs == []
    [problem] = found.problems["model"]
    assert problem.startswith("1/model.onnx: ")
    assert len(problem.splitlines()) == 1


def test_a_pipe_in_place_of_the_model_does_not_hang_the_reader(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "model", None)
    os.mkfifo(folder / "1" / "model.onnx")
    script = "import sys; from penstock.repository import layout; layout.read(sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True, timeout=60)


@pytest.mark.parametrize("location", ["../../secret.bin", "/etc/hostname", "missing.bin"])
def test_weights_kept_outside_the_file_are_not_read(
    tmp_path: Path, write_onnx: WriteOnnx, location: str
) -> None:
    weight = TensorProto(name="weight", data_type=TensorProto.FLOAT, dims=[1])
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    folder = add_model(tmp_path, "model", None)
    write_onnx(
        folder / "1" / "model.onnx",
        [helper.make_node("Add", ["x", "weight"], ["y"])],
        {"x": ("FP32", ["batch", 1])},
        {"y": ("FP32", ["batch", 1])},
        [weight],
    )
    assert versions_of(folder) == ["1"]


def external(location: str) -> TensorProto:
    weight = TensorProto(name="weight", data_type=TensorProto.FLOAT, dims=[1])
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    return weight


def write_adding(
    write_onnx: WriteOnnx, folder: Path, location: str, is_inner: bool = False
) -> None:
    """A model whose weight, of the graph or of a branch in it, lies in a file beside it."""
    add = helper.make_node("Add", ["x", "weight"], ["y"])
    nodes, weights = [add], [external(location)]
    if is_inner:
        inner = helper.make_graph(
            nodes, "inner", [], [helper.make_tensor_value_info("y", 1, None)], weights
        )
        yes = helper.make_node("Constant", [], ["yes"], value=helper.make_tensor("c", 9, [], [1]))
        nodes = [yes, helper.make_node("If", ["yes"], ["y"], then_branch=inner, else_branch=inner)]
        weights = []
    tensors = {"x": ("FP32", ["batch", 1])}, {"y": ("FP32", ["batch", 1])}
    write_onnx(folder / "1" / "model.onnx", nodes, *tensors, weights)


@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize("name", ["weights.bin", "below/weights.bin"])
def test_weights_in_a_hard_link_are_refused(
    tmp_path: Path, write_onnx: WriteOnnx, name: str, is_inner: bool
) -> None:
    (tmp_path / "secret.bin").write_bytes(bytes(4))
    folder = add_model(tmp_path, "model", None)
    write_adding(write_onnx, folder, name, is_inner)
    place = folder / "1" / name
    place.parent.mkdir(exist_ok=True)
    place.hardlink_to(tmp_path / "secret.bin")
    found = refuse_hard_links(read(folder))
    assert found.configs == []
    [problem] = found.problems["model"]
    assert problem.startswith(f"1/{name}: has further hard links")
    place.unlink()
    place.write_bytes(bytes(4))
    found = refuse_hard_links(read(folder))
    assert [config.name for config in found.configs] == ["model"]


def test_hard_links_that_hold_no_weights_are_allowed(tmp_path: Path, write_onnx: WriteOnnx) -> None:
    folder = add_model(tmp_path, "model", None)
    write_adding(write_onnx, folder, "weights.bin")
    (folder / "1" / "weights.bin").write_bytes(bytes(4))
    (tmp_path / "labels.txt").write_text("a")
    (folder / "1" / "labels.txt").hardlink_to(tmp_path / "labels.txt")
    (tmp_path / "model.onnx").hardlink_to(folder / "1" / "model.onnx")
    found = refuse_hard_links(read(folder))
    assert (len(found.configs), found.problems) == (1, {})


WITH_FILES = """
backend: "null"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [2] }
output { name: "y" data_type: TYPE_FP32 dims: [2] label_filename: "labels.txt" }
model_warmup {
  name: "w" batch_size: 1
  inputs { key: "x" value { data_type: TYPE_FP32 dims: [2] input_data_file: "data" } }
}
"""
# Every file of a model that the server reads, beside its weights.
READ_FILES = [
    "config.pbtxt",
    "labels.txt",
    "warmup/data",
    "1/config.pbtxt",
    "1/labels.txt",
    "1/other.py",
    "1/package/inner.py",
]


def add_labelled(folder: Path) -> None:
    for name in READ_FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(WITH_FILES if "config" in name else "12345678")


@pytest.mark.parametrize("name", READ_FILES)
def test_a_file_that_links_out_of_the_repository_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "repository" / "model"
    add_labelled(folder)
    assert versions_of(folder) == ["1"]
    moved = (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(moved)
    for path in (folder, tmp_path / "repository"):
        found = read(path)
        assert found.configs == []
        assert found.problems["model"] == [f"{name}: a link that leads out of the repository"]
    moved.rename(folder / "inside")
    (folder / name).unlink()
    (folder / name).symlink_to(folder / "inside")
    if name != "warmup/data":
        assert versions_of(folder) == ["1"]


@pytest.mark.parametrize("name", READ_FILES)
def test_a_file_with_further_hard_links_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "repository" / "model"
    add_labelled(folder)
    assert refuse_hard_links(read(folder)).problems == {}
    (tmp_path / "outside").hardlink_to(folder / name)
    assert versions_of(folder) == ["1"]
    found = refuse_hard_links(read(folder))
    assert found.configs == []
    (problem,) = found.problems["model"]
    assert problem.startswith(f"{name}: has further hard links") and "--allow-hard" in problem


def test_a_linked_folder_of_a_version_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "repository" / "model"
    add_labelled(folder)
    (tmp_path / "outside").mkdir()
    (folder / "1" / "linked").symlink_to(tmp_path / "outside")
    assert read(folder).problems["model"] == ["1/linked: a link that leads out of the repository"]


# describe


def test_description_is_a_config_pbtxt_of_what_was_resolved(examples: Path) -> None:
    [digits] = read(examples / "digits").configs
    message = parsed(describe(digits))
    assert message.name == "digits"
    assert message.backend == "onnxruntime"
    assert message.max_batch_size == 64
    assert list(message.version_policy.specific.versions) == [1]
    assert message.input[0].data_type == model_config_pb2.TYPE_FP32
    assert list(message.input[0].dims) == [1, 8, 8]
    assert message.output[0].label_filename == "labels.txt"
    assert message.instance_group[0].count == 1
    assert message.HasField("dynamic_batching")


def round_trip(folder: Path) -> tuple[ModelConfig, ModelConfig]:
    """The model as read, and as read from its description."""
    found = read(folder)
    assert found.problems == {}
    [config] = found.configs
    (folder / "config.pbtxt").write_text(describe(config))
    found = read(folder)
    assert found.problems == {}
    [again] = found.configs
    return config, again


@pytest.mark.parametrize("shape", [("batch", 4), (1, 4), ("batch",), ()])
@pytest.mark.parametrize("datatype", ["FP32", "BYTES", "BF16"])
def test_what_was_worked_out_from_the_file_survives_its_description(
    tmp_path: Path, write_identity: WriteOnnx, shape: tuple[int | str, ...], datatype: str
) -> None:
    folder = add_model(tmp_path, "model", None)
    write_identity(folder / "1" / "model.onnx", datatype, shape)
    config, again = round_trip(folder)
    assert again == config


@pytest.mark.parametrize(
    "name",
    [
        "net.onnx",
        "parts/model.onnx",
        pytest.param(
            "1/model.onnx",
        ),
    ],
)
def test_file_name_survives_the_description(
    tmp_path: Path, write_identity: WriteOnnx, name: str
) -> None:
    text = f'backend: "onnxruntime" default_model_filename: "{name}"'
    folder = add_model(tmp_path, "model", text)
    write_identity(folder / "1" / name)
    config, again = round_trip(folder)
    assert again == config


def test_level_with_plain_policy_beside_a_stricter_default_survives_the_description(
    tmp_path: Path,
) -> None:
    batching = """
    dynamic_batching {
      priority_levels: 2
      default_priority_level: 1
      default_queue_policy { max_queue_size: 4 }
      priority_queue_policy { key: 1 value { } }
    }
    """
    config, again = round_trip(add_model(tmp_path, "model", NULL + batching))
    assert again == config


@pytest.mark.parametrize("microseconds", [1, 249, 251, 1009, 4037, 999_999, 10**12 + 1])
def test_every_microsecond_survives_the_description(tmp_path: Path, microseconds: int) -> None:
    batching = f"""
    dynamic_batching {{
      max_queue_delay_microseconds: {microseconds}
      default_queue_policy {{ default_timeout_microseconds: {microseconds} }}
    }}
    """
    folder = add_model(tmp_path, "model", NULL + batching)
    [config] = read(folder).configs
    described = parsed(describe(config)).dynamic_batching
    assert described.max_queue_delay_microseconds == microseconds
    assert described.default_queue_policy.default_timeout_microseconds == microseconds


queue_policies = st.builds(
    model_config_pb2.ModelQueuePolicy,
    timeout_action=st.sampled_from([0, 1]),
    default_timeout_microseconds=st.integers(0, 10**12),
    allow_timeout_override=st.booleans(),
    max_queue_size=st.integers(1, 2**32 - 1),
)
texts = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=8)


@st.composite
def dynamic_batching(draw: st.DrawFn) -> model_config_pb2.ModelDynamicBatching:
    levels = draw(st.integers(0, 4))
    message = model_config_pb2.ModelDynamicBatching(
        preferred_batch_size=draw(st.lists(st.integers(1, 8))),
        max_queue_delay_microseconds=draw(st.integers(0, 10**12)),
        preserve_ordering=False if levels else draw(st.booleans()),
        priority_levels=levels,
        default_priority_level=draw(st.integers(1, levels)) if levels else 0,
    )
    if not message.preserve_ordering:
        if draw(st.booleans()):
            message.default_queue_policy.CopyFrom(draw(queue_policies))
        for level in draw(st.sets(st.integers(1, levels))) if levels else ():
            message.priority_queue_policy[level].CopyFrom(draw(queue_policies))
    return message


@st.composite
def messages(draw: st.DrawFn) -> model_config_pb2.ModelConfig:
    message = model_config_pb2.ModelConfig(
        backend="null", max_batch_size=draw(st.sampled_from([0, 8]))
    )
    dims = st.lists(st.one_of(st.just(-1), st.integers(1, 9)), max_size=3)
    types = st.sampled_from(sorted(set(model_config_pb2.DataType.values()) - {0}))
    for name in draw(st.sets(texts, min_size=1, max_size=3)):
        message.input.add(name=name, data_type=draw(types), dims=draw(dims))
        message.input[-1].optional = draw(st.booleans())
        message.output.add(name=name, data_type=draw(types), dims=draw(dims))
        message.output[-1].label_filename = draw(st.sampled_from(["", "labels.txt"]))
    if message.max_batch_size and draw(st.booleans()):
        message.dynamic_batching.CopyFrom(draw(dynamic_batching()))
    for count in draw(st.lists(st.integers(0, 5), max_size=3)):
        message.instance_group.add(count=count)
    for key, value in draw(st.dictionaries(texts, texts, max_size=3)).items():
        message.parameters[key].string_value = value
    if draw(st.booleans()):
        hang_s = draw(st.floats(1e-3, 1e6))
        message.parameters["penstock.hang_s"].string_value = repr(hang_s)
    return message


@settings(max_examples=at_most(150))
@given(messages())
def test_every_configuration_survives_its_description(
    message: model_config_pb2.ModelConfig,
) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = add_model(Path(root), "model", text_format.MessageToString(message))
        (folder / "labels.txt").write_text("cat\ndog")
        config, again = round_trip(folder)
        assert again == config


READ_AS_NOBODY = """
import os, sys
from pathlib import Path
from penstock.repository.layout import read

read(Path(sys.argv[1]))  # Imports everything.
os.setuid(65534)
found = read(Path(sys.argv[1]))
[problem] = found.problems["digits"]
print(list(found.problems), len(found.configs), problem)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
@pytest.mark.parametrize("closed", ["digits", "digits/1"])
def test_a_folder_that_may_not_be_read_is_a_problem_of_its_model_alone(closed: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        add_model(root, "digits", 'backend: "onnxruntime" max_batch_size: 8' + TENSORS)
        add_model(root, "other")
        (root / "digits" / "1" / "model.onnx").write_text("")
        (root / closed).chmod(0o700)
        command = [sys.executable, "-c", READ_AS_NOBODY, name]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.stdout.startswith("['digits'] 1 "), ended.stderr
        assert "cannot be read" in ended.stdout and "Permission denied" in ended.stdout


class TestLanguageModels:
    """A folder as Hugging Face has it, or a GGUF file."""

    def folder(self, root: Path) -> Path:
        root.mkdir(parents=True)
        (root / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        (root / "model.safetensors").write_bytes(b"")
        return root

    def test_a_folder_is_a_model_by_itself(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path / "smol")
        found = read(folder)
        (config,) = found.configs
        assert (config.name, config.version, config.backend) == ("smol", "1", "llm")
        assert config.artifact == str(folder / "config.json") and config.max_batch_size == 0
        assert [spec.name for spec in config.inputs] == ["text_input"]
        assert names(folder) == ["smol"] and read_one(folder, "smol").configs == [config]

    def test_so_is_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "smol-q4.gguf"
        path.write_bytes(b"GGUF")
        # What is beside it is not about it.
        (tmp_path / "config.pbtxt").write_text("nonsense")
        (config,) = read(path).configs
        assert (config.name, config.artifact) == ("smol-q4", str(path))

    def test_a_file_of_something_else_is_a_problem(self, tmp_path: Path) -> None:
        (tmp_path / "smol.gguf").write_bytes(b"\0" * 100)
        found = read(tmp_path / "smol.gguf")
        assert not found.configs and "not a GGUF file" in found.problems["smol"][0]

    def test_files_stand_in_a_folder_of_models(self, tmp_path: Path) -> None:
        for name in ("a.gguf", "b.gguf", ".hidden.gguf"):
            (tmp_path / name).write_bytes(b"GGUF")
        found = read(tmp_path)
        assert [config.name for config in found.configs] == ["a", "b"] == names(tmp_path)
        (config,) = read_one(tmp_path, "b").configs
        assert config.artifact == str(tmp_path / "b.gguf")
        with pytest.raises(NotFound, match="there: a, b"):
            read_one(tmp_path, "c")

    def test_two_of_one_name_are_a_problem(self, tmp_path: Path) -> None:
        self.folder(tmp_path / "smol")
        (tmp_path / "smol.gguf").write_bytes(b"GGUF")
        (tmp_path / "other.gguf").write_bytes(b"GGUF")
        found = read(tmp_path)
        assert [config.name for config in found.configs] == ["other"]
        assert "both smol and smol.gguf" in found.problems["smol"][0]

    def test_links_may_lead_anywhere_as_in_a_cache_of_downloads(self, tmp_path: Path) -> None:
        blobs = self.folder(tmp_path / "blobs")
        snapshot = tmp_path / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (snapshot / name).symlink_to(blobs / name)
        (config,) = read(snapshot).configs
        assert config.name == "abc"

    @pytest.mark.parametrize("links", ["files", "folder"])
    def test_a_version_may_link_to_a_cache_where_its_configuration_says_so(
        self, tmp_path: Path, links: str
    ) -> None:
        cache = tmp_path / "cache"
        blobs = self.folder(cache / "blobs")
        snapshot = cache / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (snapshot / name).symlink_to(blobs / name)
        model = tmp_path / "models" / "smol"
        model.mkdir(parents=True)
        if links == "folder":
            (model / "1").symlink_to(snapshot)
        else:
            (model / "1").mkdir()
            for name in ("config.json", "model.safetensors"):
                (model / "1" / name).symlink_to(snapshot / name)
        (model / "config.pbtxt").write_text('backend: "llm"')
        problem, *_ = read(tmp_path / "models").problems["smol"]
        assert "a link that leads out" in problem and "penstock.follow_links 'true'" in problem
        (model / "config.pbtxt").write_text(
            'backend: "llm" parameters { key: "penstock.follow_links" '
            'value { string_value: "true" } }'
        )
        (config,) = read(tmp_path / "models").configs
        # Where its other files lie too.
        assert Path(config.artifact) == (model / "1").resolve() / "config.json"

    def test_a_version_may_link_within_its_model(self, tmp_path: Path) -> None:
        model = tmp_path / "smol"
        shared = self.folder(model / "shared")
        (model / "1").mkdir()
        for name in ("config.json", "model.safetensors"):
            (model / "1" / name).symlink_to(shared / name)
        (model / "config.pbtxt").write_text('backend: "llm"')
        (config,) = read(tmp_path).configs
        assert Path(config.artifact) == model / "1" / "config.json"
        (model / "config.pbtxt").write_text(
            'backend: "llm" default_model_filename: "../shared/config.json"'
        )
        assert "leaves the version folder" in read(tmp_path).problems["smol"][0]

    def test_they_stand_beside_others_in_a_repository(self, tmp_path: Path, examples: Path) -> None:
        self.folder(tmp_path / "smol")
        version = self.folder(tmp_path / "versioned" / "3")
        (tmp_path / "versioned" / "config.pbtxt").write_text('backend: "llm"')
        (tmp_path / "digits").symlink_to(examples / "digits")
        found = read(tmp_path)
        by_name = {config.name: config for config in found.configs}
        assert by_name["smol"].version == "1" and by_name["versioned"].version == "3"
        assert by_name["versioned"].artifact == str(version / "config.json")

    def test_its_own_config_says_how_it_runs(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path / "smol")
        (folder / "config.pbtxt").write_text(
            'parameters { key: "penstock.max_num_seqs" value { string_value: "4" } }'
        )
        (config,) = read(folder).configs
        assert config.options == {"penstock.max_num_seqs": "4"}
        (folder / "config.pbtxt").write_text(
            'parameters { key: "penstock.max_seqs" value { string_value: "4" } }'
        )
        assert "penstock.max_seqs" in read(folder).problems["smol"][0]

    def test_weights_may_be_made_up_for_its_sizes(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path / "smol")
        for path, name in ((folder, "smol"), (folder / "config.json", "smol")):
            (config,) = read_made_up(path).configs
            assert (config.name, config.artifact) == (name, str(folder / "config.json"))
            assert config.options["penstock.random_weights"] == "true"
        other = (folder / "config.json").rename(folder / "llama-8b.json")
        assert list(read_made_up(other).folders) == ["llama-8b"]
        for wrong in (folder, folder / "model.safetensors", tmp_path / "nowhere"):
            with pytest.raises(ConfigError, match=r"config\.json, whose sizes"):
                read_made_up(wrong)


SCALED = "instance_group { count: 2 kind: KIND_CPU }\n"


def test_limits_of_the_number_of_instances_are_read(tmp_path: Path) -> None:
    limits = parameter("penstock.min_instances", "0") + parameter("penstock.max_instances", "8")
    times = parameter("penstock.scale_down_s", "5") + parameter("penstock.cold_start_s", "2.5")
    config = resolve(tmp_path, NULL + SCALED + limits + times)
    assert (config.num_instances, config.min_instances, config.max_instances) == (2, 0, 8)
    assert config.scaling == ScalingConfig(0, 8, 5.0, 300.0, 2.5)
    assert config.is_scaled and len(config.workers) == 2 and len(config.places) == 8
    fixed = resolve(tmp_path / "fixed", NULL + SCALED)
    assert not fixed.is_scaled and fixed.places == fixed.workers


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [
        ("3", "2", "min_instances: 3 is more than parameters.penstock.max_instances, 2"),
        ("3", "8", "min_instances: instance_group has 2 instances; expected from 3 to 8 at the"),
        ("0", "1", "max_instances: instance_group has 2 instances; expected from 0 to 1 at the"),
        ("1", "65", "max_instances: '65' is not a whole number above 0 up to 64"),
        ("-1", "2", "min_instances: '-1' is not a whole number from 0 up to 64"),
    ],
)
def test_limits_that_cannot_hold_are_refused(
    tmp_path: Path, least: str, most: str, expected: str
) -> None:
    keys = parameter("penstock.min_instances", least) + parameter("penstock.max_instances", most)
    [problem] = problems(tmp_path, NULL + SCALED + keys)
    assert problem.startswith(f"parameters.penstock.{expected}")


def test_slots_of_a_gpus_worker_are_not_added_while_serving(tmp_path: Path) -> None:
    on_gpu = "instance_group { count: 2 kind: KIND_GPU gpus: [ 0 ] }\n"
    [problem] = problems(tmp_path, NULL + on_gpu + parameter("penstock.max_instances", "4"))
    assert problem.startswith("parameters.penstock.max_instances: 4, and instance_group has 2; ")
    each = "instance_group { count: 1 kind: KIND_GPU }\n"
    config = resolve(tmp_path / "each", NULL + each + parameter("penstock.max_instances", "2"))
    gpus = [Gpu(0, "GPU-0", "Made Up", 1 << 30, 1 << 30)]
    with pytest.raises(ConfigError, match="max_instances: 2, and instance_group has 1"):
        place(config, gpus)
    assert place(config, [*gpus, Gpu(1, "GPU-1", "Made Up", 1 << 30, 1 << 30)]).is_scaled is False
