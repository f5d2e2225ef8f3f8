"""Which paths are language models."""

import json

import pytest

from penstock.errors import ConfigError
from penstock.repository.layout import architectures
from penstock.repository.model_source import is_language_model


def folder_of(path, *names):
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"architectures": list(names)}))
    (path / "model.safetensors").write_bytes(b"")
    return path


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel", "MistralForCausalLM"]
)
def test_a_folder_that_continues_texts_is_one_whether_we_serve_its_family_or_not(tmp_path, name):
    assert is_language_model(str(folder_of(tmp_path, name)))


@pytest.mark.parametrize("name", ["BertModel", "BertForSequenceClassification", "ViTModel"])
def test_an_encoder_is_none(tmp_path, name):
    assert not is_language_model(str(folder_of(tmp_path, name)))


def test_a_gguf_file_is_one_and_other_files_are_not(tmp_path):
    for name in ("a.gguf", "a.onnx"):
        (tmp_path / name).write_bytes(b"")
    assert is_language_model(str(tmp_path / "a.gguf"))
    assert not is_language_model(str(tmp_path / "a.onnx"))
    assert not is_language_model(str(tmp_path / "b.gguf"))
    assert not is_language_model("package.module:factory")


def test_a_model_of_a_repository_is_what_its_newest_version_is(tmp_path):
    folder_of(tmp_path / "texts" / "1", "BertModel")
    folder_of(tmp_path / "texts" / "2", "LlamaForCausalLM")
    assert is_language_model(str(tmp_path / "texts"))
    assert is_language_model(str(tmp_path / "texts" / "2"))
    assert not is_language_model(str(tmp_path / "texts" / "1"))
    (tmp_path / "packed" / "1").mkdir(parents=True)
    (tmp_path / "packed" / "1" / "model.gguf").write_bytes(b"")
    assert is_language_model(str(tmp_path / "packed"))


def test_a_configuration_that_is_no_json_is_told(tmp_path):
    (tmp_path / "config.json").write_text("{nonsense")
    with pytest.raises(ConfigError, match=r"config\.json: not JSON"):
        architectures(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"architectures": 3}'])
def test_one_without_architectures_names_none(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    assert architectures(tmp_path) == []
