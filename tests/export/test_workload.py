"""Models on disk: where a pod finds them, and what their evidence says."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from text_server import NAME, write_model

from penstock.errors import ConfigError
from penstock.export import workload
from penstock.export.sizing import SizeOverrides, size
from penstock.export.workload import Workload
from penstock.repository import versions
from penstock.repository.model_source import resolve

EXAMPLES = Path(__file__).parents[2] / "examples" / "repository"
EVIDENCE = {
    "slo": "p99 < 20ms at 100/s",
    "outcome": "kept",
    "measured": {"memory_bytes": 50_000_000, "max_rate": {"value": 640.5, "low": 1, "high": None}},
    "hardware": {"num_cores": 4},
}


def read(path: Path | str) -> Workload:
    return workload.read(resolve(str(path)))


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A repository with one committed version of digits, without its own number of threads."""
    found = replace(resolve(str(EXAMPLES / "digits")).read().configs[0], options={})
    files = {"model.onnx": EXAMPLES / "digits" / "1" / "model.onnx"}
    versions.commit(tmp_path, "digits", files, found, EVIDENCE)
    return tmp_path


def write_evidence(models: Path, **changed: object) -> None:
    path = models / "digits" / "1" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["evidence"] |= changed
    path.write_text(json.dumps(manifest))


def test_a_repository_is_served_whole() -> None:
    found = read(EXAMPLES)
    assert (found.name, found.path, found.extras) == ("repository", "", ())
    assert [each.name for each in found.models] == ["digits", "identity", "simple", "text_length"]


def test_a_model_is_served_from_its_folder(tmp_path: Path) -> None:
    found = read(EXAMPLES / "text_length")
    assert (found.name, found.path) == ("text-length", "text_length")
    assert read(EXAMPLES / "text_length" / "1").path == "text_length/1"
    shutil.copy(EXAMPLES / "digits" / "1" / "model.onnx", tmp_path / "Digits.onnx")
    assert (read(tmp_path / "Digits.onnx").name, read(tmp_path / "Digits.onnx").path) == (
        "digits",
        "Digits.onnx",
    )


def test_figures_of_the_evidence(models: Path) -> None:
    [found] = read(models).models
    assert (found.memory_bytes, found.rate_per_s, found.slo_latency_s) == (50_000_000, 640.5, 0.02)
    assert found.file_bytes > (EXAMPLES / "digits" / "1" / "model.onnx").stat().st_size


def test_the_rate_of_the_slo_counts_if_no_higher_one_was_searched_for(models: Path) -> None:
    write_evidence(models, measured={"memory_bytes": 50_000_000, "max_rate": None})
    assert read(models).models[0].rate_per_s == 100


def test_an_slo_that_was_not_kept_does_not_count(models: Path) -> None:
    write_evidence(models, outcome="not kept")
    [found] = read(models).models
    assert (found.slo_latency_s, found.rate_per_s) == (None, None)
    assert found.memory_bytes == 50_000_000


@pytest.mark.parametrize("measured", [None, [], "no", {"memory_bytes": "5", "max_rate": 3}])
def test_evidence_of_another_form_is_no_figure(models: Path, measured: object) -> None:
    write_evidence(models, measured=measured)
    [found] = read(models).models
    assert (found.memory_bytes, found.rate_per_s) == (None, 100)


def test_cores_are_threads_or_those_of_the_measurement(models: Path) -> None:
    """Instances without a number of threads share all cores."""
    assert read(models).models[0].num_cores == 4
    write_evidence(models, hardware={})
    assert read(models).models[0].num_cores is None
    given = replace(
        resolve(str(EXAMPLES / "digits")).read().configs[0],
        options={"intra_op_thread_count": "3"},
        num_instances=2,
    )
    assert workload.read_needs(given).num_cores == 6


def add_config(folder: Path, name: str, text: str, file: str) -> None:
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "1" / file).touch()
    (folder / name / "config.pbtxt").write_text(text)


IO = """
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""


def test_gpus_and_what_the_image_needs(tmp_path: Path) -> None:
    group = "instance_group { kind: KIND_GPU count: 2 gpus: [ 0, 2 ] }"
    add_config(tmp_path, "net", f'backend: "pytorch" max_batch_size: 8 {IO} {group}', "model.pt2")
    each = "instance_group { kind: KIND_GPU }"
    add_config(tmp_path, "null", f'backend: "null" max_batch_size: 8 {IO} {each}', "model")
    found = read(tmp_path)
    assert found.extras == ("torch",)
    assert [each.num_gpus for each in found.models] == [3, 1]
    assert [each.num_workers for each in found.models] == [2, 1]
    assert found.models[0].num_rows == 8 * 4


def test_models_with_problems_are_not_exported(tmp_path: Path) -> None:
    add_config(tmp_path, "bad", "max_batch_size: many", "model.onnx")
    with pytest.raises(ConfigError, match="bad"):
        read(tmp_path)


def test_only_files_are_exported() -> None:
    with pytest.raises(ConfigError, match="a running server; expected a file or folder"):
        read("http://127.0.0.1:8000")
    with pytest.raises(ConfigError, match="a factory of PyTorch modules; expected a file or"):
        read("package.module:factory")


def test_gpu_memory_is_that_of_each_instance_and_of_all() -> None:
    [config] = resolve(str(EXAMPLES / "text_length")).read().configs
    on_gpus = replace(config, gpu_memory_bytes=5 << 30).on(["cuda:0", "cuda:1", "cuda:1"])
    found = workload.read_needs(on_gpus)
    assert (found.num_gpus, found.gpu_memory_bytes, found.instance_gpu_bytes) == (
        2,
        15 << 30,
        5 << 30,
    )
    on_cpu = workload.read_needs(replace(config, gpu_memory_bytes=5 << 30))
    assert (on_cpu.num_gpus, on_cpu.gpu_memory_bytes, on_cpu.instance_gpu_bytes) == (0, None, None)


def test_weights_beside_the_loaded_file_count(tmp_path: Path) -> None:
    add_config(tmp_path, "net", f'backend: "onnxruntime" {IO}', "model.onnx")
    (tmp_path / "net" / "1" / "weights.bin").write_bytes(bytes(1000))
    assert read(tmp_path / "net").models[0].file_bytes == 1000
    shutil.copy(EXAMPLES / "digits" / "1" / "model.onnx", tmp_path / "one.onnx")
    (tmp_path / "one.onnx.data").write_bytes(bytes(2000))
    (tmp_path / "other.bin").write_bytes(bytes(4000))
    num_bytes = (tmp_path / "one.onnx").stat().st_size + 2000
    assert read(tmp_path / "one.onnx").models[0].file_bytes == num_bytes


@pytest.mark.parametrize(
    ("given", "num_bytes"), [({}, 1 << 30), ({"penstock.kv_cache_bytes": "5000"}, 5000)]
)
def test_a_language_model_needs_its_weights_and_cache(
    tmp_path: Path, given: dict[str, str], num_bytes: int
) -> None:
    write_model(tmp_path)
    [config] = resolve(str(tmp_path)).read().configs
    options = {**config.options, "penstock.kv_cache_bytes": "", **given}
    found = workload.read_needs(replace(config, options=options))
    assert found.cache_bytes == num_bytes
    assert found.file_bytes > (tmp_path / NAME / "model.safetensors").stat().st_size
    sized = size([found], SizeOverrides())
    assert sized.memory_bytes > found.cache_bytes + found.file_bytes
    on_gpu = replace(config, options=options).on(["cuda:0"])
    assert workload.read_needs(on_gpu).cache_bytes == 0


def add_ensemble(folder: Path, name: str, *members: str) -> None:
    """Add an ensemble that runs these models one after the other."""
    steps = [
        f'step {{ model_name: "{member}" model_version: -1 '
        f'input_map {{ key: "x" value: "t{number}" }} '
        f'output_map {{ key: "y" value: "t{number + 1}" }} }}'
        for number, member in enumerate(members)
    ]
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(
        f"""platform: "ensemble" ensemble_scheduling {{ {" ".join(steps)} }}
        input {{ name: "t0" data_type: TYPE_FP32 dims: 1 }}
        output {{ name: "t{len(members)}" data_type: TYPE_FP32 dims: 1 }}"""
    )


def test_ensembles_need_their_members_and_nothing_else(tmp_path: Path) -> None:
    add_config(tmp_path, "net", f'backend: "null" max_batch_size: 0 {IO}', "model")
    add_ensemble(tmp_path, "whole", "net", "net")
    found = read(tmp_path)
    assert [each.name for each in found.models] == ["net"]
    assert size(found.models, SizeOverrides()).queue_depth == 1
    expected = f"ensemble 'whole' runs net, not exported with it; export the repository, {tmp_path}"
    for path in (tmp_path / "whole", tmp_path / "whole" / "1"):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            read(path)


def test_ensembles_that_cannot_be_loaded_are_refused(tmp_path: Path) -> None:
    add_ensemble(tmp_path, "one", "two")
    with pytest.raises(ConfigError, match="'one' runs two, not exported with it$"):
        read(tmp_path)
    add_ensemble(tmp_path, "two", "one")
    with pytest.raises(ConfigError, match="a cycle of ensembles: "):
        read(tmp_path)


def test_a_model_that_must_be_recorded_is_refused(tmp_path: Path) -> None:
    """A pod's server has no folder for recordings, and would refuse to load the model."""
    record = 'parameters { key: "penstock.record" value { string_value: "off" } }'
    add_config(tmp_path, "net", f'backend: "null" max_batch_size: 8 {IO} {record}', "model")
    assert [each.name for each in read(tmp_path).models] == ["net"]
    config = tmp_path / "net" / "config.pbtxt"
    config.write_text(config.read_text().replace('"off"', '"1MB"'))
    with pytest.raises(
        ConfigError, match=r"net: parameters\.penstock\.record: pods have no folder"
    ):
        read(tmp_path)
