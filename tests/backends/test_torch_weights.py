"""Networks are made from a folder's files alone."""

import json

import pytest
import tiny_pretrained as tiny

from penstock.errors import ConfigError

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
from penstock.backends.torch_weights import load_network  # noqa: E402


def test_the_network_is_that_of_the_architecture_in_fp32(tmp_path):
    module = load_network(tiny.write_classifier(tmp_path / "m"))
    assert type(module).__name__ == "BertForSequenceClassification"
    assert {weight.dtype for weight in module.parameters()} == {torch.float32}
    assert not module.training


def test_an_encoder_may_lack_its_pooler(tmp_path):
    folder = tiny.write_bert(tmp_path / "m", "BertForMaskedLM")
    assert type(load_network(folder)).__name__ == "BertModel"


def test_code_of_the_folder_is_never_run(tmp_path):
    folder = tiny.write_classifier(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForSequenceClassification": "evil.Model"}
    config["model_type"] = "not-of-transformers"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ConfigError, match="transformers cannot load it"):
        load_network(folder)
    assert not (tmp_path / "ran").exists()


def test_a_language_model_is_no_such_network(tmp_path):
    folder = tiny.write_classifier(tmp_path / "m")
    path = folder / "config.json"
    path.write_text(path.read_text().replace("BertForSequenceClassification", "BertLMHeadModel"))
    with pytest.raises(ConfigError, match="a language model"):
        load_network(folder)
