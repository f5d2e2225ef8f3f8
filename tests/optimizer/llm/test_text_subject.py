"""A language model as it came, as a folder that can be served."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import text_server

from penstock.config import LLM
from penstock.errors import ConfigError
from penstock.llm.settings import settings_of
from penstock.optimizer.candidates import Candidate, Step
from penstock.optimizer.llm.text_subject import (
    build_of,
    open_text_subject,
    with_steps,
)
from penstock.repository import layout

DTYPE = Candidate((Step("dtype", {"dtype": "bfloat16"}),))


@pytest.fixture
def folder(tmp_path):
    return text_server.write_model(tmp_path)


def test_a_folder_becomes_a_version_without_being_copied(folder, tmp_path):
    (folder / "README.md").write_text("words")
    (folder / "pytorch_model.bin").write_bytes(b"pickles")
    subject = open_text_subject(str(folder), "cpu", tmp_path / "out" / "other")
    config = subject.build.config
    assert config.backend == LLM and config.name == "other"
    # What the folder's own configuration says stays.
    assert settings_of(config).num_threads == 1
    weights = tmp_path / "out" / "other" / "1" / "model.safetensors"
    assert weights.samefile(folder / "model.safetensors")
    there = {each.name for each in weights.parent.iterdir()}
    assert there == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert subject.kind == "Hugging Face" and "float32" in subject.text
    assert subject.num_parameters > 1000


def test_weights_in_several_files_are_those_that_the_index_names(folder, tmp_path):
    (folder / "model.safetensors").rename(folder / "model-1-of-1.safetensors")
    index = {"weight_map": {"a": "model-1-of-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "consolidated.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError):
        # The index names nothing that the model needs.
        open_text_subject(str(folder), "cpu", tmp_path / "out" / "smol")
    there = {each.name for each in (tmp_path / "out" / "smol" / "1").iterdir()}
    assert "model-1-of-1.safetensors" in there and "consolidated.safetensors" not in there


def test_shards_that_are_missing_are_named(folder, tmp_path):
    index = {"weight_map": {"a": "model-1-of-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"model-1-of-2\.safetensors is not there"):
        open_text_subject(str(folder), "cpu", tmp_path / "out" / "smol")


def test_the_digest_is_of_every_byte(folder, tmp_path):
    first = open_text_subject(str(folder), "cpu", tmp_path / "a" / "smol").digest
    assert open_text_subject(str(folder), "cpu", tmp_path / "b" / "smol").digest == first
    (folder / "tokenizer_config.json").write_text("{}")
    assert open_text_subject(str(folder), "cpu", tmp_path / "c" / "smol").digest != first


def test_a_version_of_a_repository_is_taken_with_its_settings(folder, tmp_path):
    first = open_text_subject(str(folder), "cpu", tmp_path / "a" / "smol")
    made = build_of(first.build, DTYPE, tmp_path / "models" / "smol")
    for path in (made.folder, made.folder / "1"):
        again = open_text_subject(str(path), "auto", tmp_path / path.name / "again")
        assert again.kind == "served version 1"
        assert settings_of(again.build.config).dtype == "bfloat16"


def test_a_family_that_is_not_served_is_told_with_those_that_are(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["FooForCausalLM"]}))
    with pytest.raises(ConfigError, match="FooForCausalLM.*LlamaForCausalLM"):
        open_text_subject(str(folder), "cpu", tmp_path / "out" / "smol")


def test_a_gpu_that_is_not_there(folder, tmp_path):
    with pytest.raises(ConfigError, match="device: cuda:7"):
        open_text_subject(str(folder), "cuda:7", tmp_path / "out" / "smol")


def test_a_build_has_what_its_steps_set(folder, tmp_path):
    original = open_text_subject(str(folder), "cpu", tmp_path / "out" / "smol").build
    steps = (*DTYPE.steps, Step("sequences", {"max_num_seqs": "8"}))
    build = build_of(original, Candidate(steps), tmp_path / "b" / "smol")
    settings = settings_of(layout.read(build.folder).configs[0])
    assert (settings.dtype, settings.max_sequences, settings.num_threads) == ("bfloat16", 8, 1)
    assert (build.version_folder / "model.safetensors").samefile(folder / "model.safetensors")
    assert build_of(original, Candidate(steps), tmp_path / "b" / "smol").config == build.config


def test_what_a_killed_run_left_of_a_build_is_written_anew(folder, tmp_path):
    original = open_text_subject(str(folder), "cpu", tmp_path / "out" / "smol").build
    half = tmp_path / "b" / ".smol" / "smol" / "1"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    build = build_of(original, DTYPE, tmp_path / "b" / "smol")
    assert (build.version_folder / "model.safetensors").samefile(folder / "model.safetensors")
    assert [each.name for each in (tmp_path / "b").iterdir()] == ["smol"]


@pytest.mark.parametrize(("asked", "expected"), [({}, 256), ({"penstock.max_model_len": 40}, 40)])
def test_a_text_is_as_long_as_the_model_and_its_parameters_allow(tmp_path, asked, expected):
    folder = text_server.write_model(tmp_path, asked)
    subject = open_text_subject(str(folder), "cpu", tmp_path / "out" / "smol")
    assert subject.max_length == expected


def test_of_two_steps_the_later_counts(folder, tmp_path):
    config = open_text_subject(str(folder), "cpu", tmp_path / "out" / "smol").build.config
    twice = DTYPE.then(Step("dtype", {"dtype": "float16"}))
    assert with_steps(config, twice).options["penstock.dtype"] == "float16"
    assert with_steps(replace(config, options={}), Candidate()).options == {}
