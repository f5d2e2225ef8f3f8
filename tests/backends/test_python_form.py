"""How the function of a Python model is called, told to `penstock export triton`."""

from pathlib import Path

import pytest

from penstock.backends.python_form import FunctionForm, TensorForm, read
from penstock.errors import ConfigError


def form_of(folder: Path, code: str) -> FunctionForm:
    (folder / "model.py").write_text(code)
    return read(folder / "model.py")


def test_a_triton_model_needs_no_wrapper(tmp_path: Path):
    code = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
    assert form_of(tmp_path, code).entry == ""


def test_a_function_of_values_is_called_for_each_row(tmp_path: Path):
    code = "def length(text: str, scale: float = 1.0) -> float:\n    return len(text) * scale\n"
    assert form_of(tmp_path, code) == FunctionForm(
        "length",
        takes_mapping=False,
        is_batched=False,
        is_bare=True,
        inputs=(
            TensorForm("text", "BYTES", 0, "value", True),
            TensorForm("scale", "FP64", 0, "value", False),
        ),
        outputs=(TensorForm("output", "FP64", 0, "value", False),),
    )


def test_a_class_of_arrays_by_name_has_no_tensors(tmp_path: Path):
    code = "class Model:\n    def infer(self, inputs):\n        return inputs\n"
    assert form_of(tmp_path, code) == FunctionForm("Model", "infer")


def test_a_class_that_needs_a_configuration_is_refused(tmp_path: Path):
    code = "class Model:\n    def __init__(self, config): ...\n    def infer(self, x): return x\n"
    with pytest.raises(ConfigError, match="class Model takes Penstock's configuration"):
        form_of(tmp_path, code)
