"""`reshape`, ragged inputs, `batch_input` and `batch_output` in config.pbtxt. The rules and most of
the refused configurations are those of Triton's L0_model_config."""

from pathlib import Path

import pytest

from penstock.config import BatchInput, BatchOutput, ModelConfig
from penstock.errors import ConfigError
from penstock.repository import pbtxt

RAGGED = """
backend: "null" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
"""
COUNTS = """
batch_input { kind: %s target_name: "n" data_type: %s source_input: %s }
"""


def resolve(text: str, root: Path) -> ModelConfig:
    folder = root / "model" / "1"
    folder.mkdir(parents=True, exist_ok=True)
    return pbtxt.resolve(pbtxt.parse(text), "model", folder)


def reshaped(dims: str, shape: str, max_batch: int = 4, kind: str = "input") -> str:
    tensors = {"input": "dims: 1", "output": "dims: 1"}
    tensors[kind] = f"dims: [{dims}] reshape {{ shape: [{shape}] }}"
    both = " ".join(f'{k} {{ name: "{k}" data_type: TYPE_FP32 {t} }}' for k, t in tensors.items())
    return f'backend: "null" max_batch_size: {max_batch} {both}'


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        ("1, 3, 2", "6"),
        ("1", ""),
        ("1, 1", ""),
        ("-1", "1, -1"),
        ("2, 4, -1, 6", "8, -1, 1, 6"),
        ("-1, 2, -1", "-1, 1, 2, -1"),
    ],
)
@pytest.mark.parametrize("kind", ["input", "output"])
def test_shapes_with_the_same_elements_are_taken(dims: str, shape: str, kind: str, tmp_path: Path):
    config = resolve(reshaped(dims, shape, kind=kind), tmp_path)
    [spec] = config.inputs if kind == "input" else config.outputs
    assert spec.shape == tuple(map(int, dims.split(",")))
    assert spec.reshape == tuple(map(int, shape.split(","))) if shape else spec.reshape == ()
    assert config.warnings == ()


@pytest.mark.parametrize(
    ("dims", "shape", "max_batch", "problem"),
    [
        ("1, 3, 2", "5", 4, "has 5 elements, dims [1, 3, 2] have 6"),
        ("2", "", 4, "has 1 elements, dims [2] have 2"),
        ("1", "", 0, "an empty shape needs a batch dimension (max_batch_size)"),
        ("-1", "1", 4, "expected as many variable dimensions as dims [-1]"),
        ("-1, -1", "-1", 0, "expected as many variable dimensions as dims [-1, -1]"),
        ("2, -1", "-1, 2", 4, "has 1 elements between variable dimensions"),
        ("1", "0", 4, "each must be positive or -1"),
        ("1", "-2", 4, "each must be positive or -1"),
    ],
)
@pytest.mark.parametrize("kind", ["input", "output"])
def test_other_shapes_are_refused(
    dims: str, shape: str, max_batch: int, problem: str, kind: str, tmp_path: Path
):
    with pytest.raises(ConfigError) as caught:
        resolve(reshaped(dims, shape, max_batch, kind), tmp_path)
    [found] = caught.value.problems
    assert found.startswith(f"{kind}[0].reshape: ")
    assert problem in found


def test_batch_inputs_and_outputs_are_read(tmp_path: Path):
    text = RAGGED + COUNTS % ("BATCH_ITEM_SHAPE", "TYPE_INT32", '"x"')
    text += 'batch_output { target_name: "y" source_input: "x" }'
    config = resolve(text, tmp_path)
    assert config.inputs[0].is_ragged
    assert config.batch_inputs == (BatchInput("BATCH_ITEM_SHAPE", ("n",), "INT32", "x"),)
    assert config.batch_outputs == (BatchOutput(("y",), "x"),)
    assert config.warnings == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            COUNTS % ("BATCH_ELEMENT_COUNT", "TYPE_FP32", "[]"),
            "batch_input[0].source_input: BATCH_ELEMENT_COUNT takes 1 source, got 0",
        ),
        (
            COUNTS % ("BATCH_ITEM_SHAPE", "TYPE_FP32", '["x", "x"]'),
            "batch_input[0].source_input: BATCH_ITEM_SHAPE takes 1 source, got 2",
        ),
        (
            COUNTS % ("BATCH_ELEMENT_COUNT", "TYPE_FP32", '"z"'),
            "batch_input[0].source_input: no input 'z'; expected one of x",
        ),
        (
            COUNTS % ("BATCH_ELEMENT_COUNT", "TYPE_INT64", '"x"'),
            "batch_input[0].data_type: INT64; expected TYPE_INT32 or TYPE_FP32",
        ),
        (
            (COUNTS % ("BATCH_ELEMENT_COUNT", "TYPE_FP32", '"x"')).replace('"n"', '"x"'),
            "batch_input[0].target_name: 'x' is given twice",
        ),
        (
            'batch_output { target_name: ["y", "y"] source_input: "x" }',
            "batch_output[0].target_name: 'y' is given twice",
        ),
        (
            'batch_output { target_name: "z" source_input: "x" }',
            "batch_output[0].target_name: no output 'z'; outputs are ['y']",
        ),
        (
            'batch_output { target_name: "y" }',
            "batch_output[0].source_input: BATCH_SCATTER_WITH_INPUT_SHAPE takes 1 source, got 0",
        ),
    ],
)
def test_what_names_no_tensor_is_refused(text: str, problem: str, tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        resolve(RAGGED + text, tmp_path)
    assert caught.value.problems == (problem,)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (RAGGED.replace("max_batch_size: 4", ""), "input[0].allow_ragged_batch: needs max_batch"),
        (RAGGED.replace("FP32", "STRING", 1), "input[0].allow_ragged_batch: not for TYPE_STRING"),
        (
            RAGGED.replace("dims: -1 allow", "dims: -1 optional: true allow"),
            "input[0].allow_ragged_batch: not for optional inputs",
        ),
        (
            RAGGED + 'parameters { key: "penstock.pad" value { string_value: "x[0]=0" } }',
            "input[0].allow_ragged_batch: not with pre- or postprocessing or penstock.pad",
        ),
    ],
)
def test_what_cannot_be_ragged_is_refused(text: str, problem: str, tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        resolve(text, tmp_path)
    assert any(found.startswith(problem) for found in caught.value.problems)


def test_what_is_written_reads_back(tmp_path: Path):
    text = RAGGED + COUNTS % ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", "TYPE_FP32", '"x"')
    text += 'batch_output { target_name: "y" source_input: "x" }'
    text += 'input { name: "z" data_type: TYPE_FP32 dims: 1 reshape { } }'
    text += 'output { name: "w" data_type: TYPE_FP32 dims: [2, 3] reshape { shape: 6 } }'
    config = resolve(text, tmp_path)
    assert resolve(pbtxt.describe(config), tmp_path) == config
    assert pbtxt.to_json(config)["input"][1]["reshape"] == {"shape": []}
