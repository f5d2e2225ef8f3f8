"""What a Hugging Face folder says about itself."""

import json

import pytest

from penstock.errors import ConfigError
from penstock.repository import pretrained


def write(folder, config, **files):
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertForSequenceClassification", "text classifier"),
        ("DistilBertForTokenClassification", "token classifier"),
        ("ViTForImageClassification", "image classifier"),
        ("MPNetModel", "encoder"),
        ("RobertaForMaskedLM", "encoder"),
    ],
)
def test_the_task_follows_from_the_architecture(tmp_path, architecture, task):
    found = pretrained.read(write(tmp_path, {"architectures": [architecture]}))
    assert (found.task, found.architecture) == (task, architecture)


@pytest.mark.parametrize("names", [["LlamaForCausalLM"], ["GPT2LMHeadModel"], []])
def test_language_models_are_left_to_their_engine(tmp_path, names):
    assert pretrained.read(write(tmp_path, {"architectures": names})) is None


def test_other_architectures_are_refused_by_name(tmp_path):
    write(tmp_path, {"architectures": ["BertForQuestionAnswering"]})
    with pytest.raises(
        ConfigError, match="BertForQuestionAnswering is not served; expected a text"
    ):
        pretrained.read(tmp_path)


def test_a_folder_without_weights_is_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert pretrained.read(tmp_path) is None


def test_an_exported_network_is_found_in_either_place(tmp_path):
    found = pretrained.read(write(tmp_path, {"architectures": ["BertModel"]}))
    assert found.onnx_file == ""
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model.onnx").write_bytes(b"")
    assert found.onnx_file == "onnx/model.onnx"
    (tmp_path / "model.onnx").write_bytes(b"")
    assert found.onnx_file == "model.onnx"


def test_labels_are_in_the_order_of_their_numbers():
    many = {str(n): f"l{n}" for n in reversed(range(12))}
    assert pretrained.labels({"id2label": many}) == tuple(f"l{n}" for n in range(12))
    assert pretrained.labels({}) == ("LABEL_0", "LABEL_1")
    with pytest.raises(ConfigError, match="id2label: expected the numbers from 0 on"):
        pretrained.labels({"id2label": {"1": "a", "2": "b"}})


@pytest.mark.parametrize(
    ("problem", "num_labels", "expected"),
    [
        (None, 3, "softmax"),
        (None, 1, "sigmoid"),
        ("single_label_classification", 2, "softmax"),
        ("multi_label_classification", 3, "sigmoid"),
        ("regression", 1, "none"),
    ],
)
def test_the_activation_is_that_of_the_pipelines_of_transformers(problem, num_labels, expected):
    labels = {str(n): str(n) for n in range(num_labels)}
    assert pretrained.activation({"problem_type": problem, "id2label": labels}) == expected


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({}, {}, 512),
        ({"max_position_embeddings": 128}, {}, 128),
        ({"max_position_embeddings": 514, "model_type": "roberta", "pad_token_id": 1}, {}, 512),
        ({"max_position_embeddings": 512}, {"sentence_bert_config": {"max_seq_length": 256}}, 256),
        ({}, {"tokenizer_config": {"model_max_length": 1e30}}, 512),
        ({"max_position_embeddings": 64}, {"tokenizer_config": {"model_max_length": 32}}, 32),
    ],
)
def test_the_longest_text_is_the_smallest_limit(tmp_path, config, files, expected):
    write(tmp_path, config, **files)
    assert pretrained.max_length(tmp_path, config) == expected


def sentence_folder(folder, kinds, pooling):
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": kind} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "Pooling").mkdir()
    (folder / "Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_lasttoken": True}, "lasttoken"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len_tokens"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_pooling_is_that_of_sentence_transformers(tmp_path, pooling, expected):
    folder = sentence_folder(tmp_path, ["Transformer", "Pooling", "Normalize"], pooling)
    found = pretrained.embedding(folder)
    assert (found.pooling, found.is_normalized, found.is_guessed) == (expected, True, False)


def test_without_modules_the_mean_is_a_guess(tmp_path):
    found = pretrained.embedding(tmp_path)
    assert (found.pooling, found.is_normalized, found.is_guessed) == ("mean", False, True)


def test_modules_that_are_not_supported_are_refused(tmp_path):
    sentence_folder(tmp_path, ["Transformer", "Pooling", "Dense"], {"pooling_mode": "mean"})
    with pytest.raises(ConfigError, match="'Dense' is not supported"):
        pretrained.embedding(tmp_path)


def test_two_poolings_at_once_are_refused(tmp_path):
    both = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}
    with pytest.raises(ConfigError, match="2 pooling modes"):
        pretrained.embedding(sentence_folder(tmp_path, ["Pooling"], both))
