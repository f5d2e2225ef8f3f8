"""Decoupled models: what says so, and what it excludes."""

from pathlib import Path
from textwrap import dedent

import pytest

from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.repository import pbtxt

TENSORS = """
    backend: "python"
    input { name: "x" data_type: TYPE_INT32 dims: 1 }
    output { name: "y" data_type: TYPE_INT32 dims: 1 }
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
SAYS_SO = """
    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(config):
            config.set_model_transaction_policy({"decoupled": True})
            TENSORS
            return config

        def execute(self, requests):
            pass
"""
TENSORS_TOO = """config.add_input({"name": "a", "data_type": "TYPE_INT32", "dims": [1]})
            config.add_output({"name": "b", "data_type": "TYPE_INT32", "dims": [1]})"""


def resolve(folder: Path, text: str, code: str = "") -> ModelConfig:
    version = folder / "1"
    version.mkdir()
    (version / "model.py").write_text(dedent(code))
    return pbtxt.resolve(pbtxt.parse(text), folder.name, version)


def test_a_model_is_decoupled_if_its_configuration_says_so(tmp_path):
    config = resolve(tmp_path, TENSORS + DECOUPLED)
    assert config.is_decoupled and config.has_one_owner and not config.warnings
    assert pbtxt.to_json(config)["model_transaction_policy"] == {"decoupled": True}


@pytest.mark.parametrize("policy", ["", "model_transaction_policy { }"])
def test_others_are_not(tmp_path, policy):
    config = resolve(tmp_path, TENSORS + policy)
    assert not config.is_decoupled and not config.has_one_owner


def test_the_code_may_say_so_with_its_tensors_or_without(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir(), (tmp_path / "c").mkdir()
    alone = resolve(tmp_path / "a", "", SAYS_SO.replace("TENSORS", TENSORS_TOO))
    assert alone.is_decoupled and alone.outputs[0].name == "b"
    assert pbtxt.to_json(alone)["model_transaction_policy"] == {"decoupled": True}
    beside = resolve(tmp_path / "b", TENSORS, SAYS_SO.replace("TENSORS", ""))
    assert beside.is_decoupled and beside.outputs[0].name == "y"
    # config.pbtxt decides.
    text = TENSORS + "model_transaction_policy { decoupled: false }"
    assert not resolve(tmp_path / "c", text, SAYS_SO.replace("TENSORS", "")).is_decoupled


def test_a_model_without_tensors_anywhere_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="output: must be given here or in model.py"):
        resolve(tmp_path, 'backend: "python"', SAYS_SO.replace("TENSORS", ""))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (TENSORS.replace('"python"', '"null"'), "only 'python' can be"),
        (
            'backend: "python" input { name: "x" data_type: TYPE_INT32 dims: 4 '
            "reshape { shape: [ 2, 2 ] } } output { name: 'y' data_type: TYPE_INT32 dims: 1 }",
            "not supported with reshape",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(tmp_path, text, problem):
    with pytest.raises(ConfigError) as caught:
        resolve(tmp_path, text + DECOUPLED)
    assert any(problem in each for each in caught.value.problems)


def test_the_order_of_answers_has_no_effect(tmp_path):
    text = TENSORS + "max_batch_size: 4 dynamic_batching { preserve_ordering: true }"
    (warning,) = resolve(tmp_path, text + DECOUPLED).warnings
    assert warning.startswith("dynamic_batching.preserve_ordering: has no effect")
