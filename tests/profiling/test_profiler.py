"""A folder and rows to a profile, through a real child process."""

import json

import numpy as np
import pytest

from penstock.errors import BackendFailed, ConfigError
from penstock.profiling.profiler import make_batch, profile_build, read_config

pytestmark = pytest.mark.slow

ROW = {"x": np.zeros((5, 64), np.float32)}
CRASHES = """
import os, signal

def infer(inputs):
    os.kill(os.getpid(), signal.SIGSEGV)
"""
CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
"""


def test_a_profile_is_whole(encoder, peaks_cache, tmp_path) -> None:
    found = profile_build(
        encoder, [ROW] * 2, num_runs=4, trace=tmp_path / "trace.json", cache=peaks_cache
    )
    assert (found.model, found.backend, found.num_runs) == ("encoder", "onnxruntime", 4)
    assert found.batch == "2 rows of x 5x64"
    assert {each.type for each in found.operators} == {"MatMul", "Add", "Erf", "Softmax"}
    assert {each.block for each in found.operators} == {"encoder/layer.3", ""}
    assert found.total_s > 0
    assert found.bound != "unknown"
    assert found.recommendation
    assert found.peaks.flops["fp32"] > 0
    assert sum(each.seconds for each in found.buckets) > 0
    assert "onnxruntime" in found.versions
    spans = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(span.get("cat") == "MatMul" for span in spans)


FUNCTIONS = """
import numpy as np


def embed(inputs):
    return {"x": np.ones((len(inputs["text"][0].split()), 64), np.float32)}


def count(outputs):
    return {"count": np.array([len(outputs["y"])]), "each": outputs["y"][:, 0]}
"""
PROCESSED = """
backend: "onnxruntime" max_batch_size: 8
input { name: "text" data_type: TYPE_STRING dims: 1 }
output { name: "count" data_type: TYPE_INT64 dims: 1 }
output { name: "each" data_type: TYPE_FP32 dims: -1 }
"""
PARAMETERS = {
    "preprocess": "code.py:embed",
    "model_inputs": "x:FP32[-1,64]",
    "postprocess": "code.py:count",
    "model_outputs": "y:FP32[-1,64]",
}


def test_operators_are_those_of_the_model_and_the_way_shows_the_functions(
    encoder, peaks_cache
) -> None:
    (encoder / "1" / "code.py").write_text(FUNCTIONS)
    parameters = [
        f'parameters {{ key: "penstock.{key}" value {{ string_value: "{value}" }} }}'
        for key, value in PARAMETERS.items()
    ]
    (encoder / "config.pbtxt").write_text("\n".join([PROCESSED, *parameters]))
    rows = [{"text": np.array([text], object)} for text in (b"a b c", b"a", b"b b b")]
    found = profile_build(encoder, rows, num_runs=3, cache=peaks_cache)
    # Of three texts the two that have as many words.
    assert found.batch == "2 rows of x 3x64"
    assert {each.type for each in found.operators} == {"MatMul", "Add", "Erf", "Softmax"}
    names = ["decode", "queue", "preprocess", "compute", "postprocess", "encode"]
    assert [each.name for each in found.buckets] == names


def python_model(tmp_path, source: str):
    folder = tmp_path / "models" / "code"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(source)
    (folder / "config.pbtxt").write_text(CONFIG)
    return folder


def test_code_has_a_way_but_no_operators(tmp_path, peaks_cache) -> None:
    folder = python_model(tmp_path, "def infer(inputs):\n    return {'y': inputs['x'] + 1}\n")
    found = profile_build(folder, [{"x": np.zeros(2, np.float32)}], num_runs=3, cache=peaks_cache)
    assert (found.operators, found.bound) == ([], "unknown")
    assert any("does not tell of its operators" in line for line in found.findings)
    assert len(found.buckets) == 6


def test_a_model_that_crashes_is_an_error(tmp_path) -> None:
    folder = python_model(tmp_path, CRASHES)
    with pytest.raises(BackendFailed, match="the profiler was killed by SIGSEGV"):
        profile_build(folder, [{"x": np.zeros(2, np.float32)}])


def test_a_model_that_cannot_be_loaded_says_why(tmp_path) -> None:
    folder = python_model(tmp_path, "def infer(")
    with pytest.raises(ConfigError, match="model.py"):
        profile_build(folder, [{"x": np.zeros(2, np.float32)}])


def test_rows_of_the_commonest_shape_run_together(encoder) -> None:
    config = read_config(encoder)
    longer = {"x": np.zeros((9, 64), np.float32)}
    tensors, num_rows, text = make_batch(config, [ROW, longer, ROW, ROW])
    assert (num_rows, text) == (3, "3 rows of x 5x64")
    assert tensors[0].array().shape == (3, 5, 64)


def test_no_more_rows_than_the_model_takes(encoder) -> None:
    config = read_config(encoder)
    assert make_batch(config, [ROW] * 1000)[1] == config.max_batch_size


def test_rows_that_do_not_fit_are_refused(encoder) -> None:
    config = read_config(encoder)
    with pytest.raises(ConfigError, match="at least one example"):
        make_batch(config, [])
    with pytest.raises(ConfigError, match="input 'x': missing; a row has"):
        make_batch(config, [{"z": np.zeros(2)}])


def test_texts_travel_to_the_child(tmp_path) -> None:
    folder = python_model(tmp_path, "def infer(inputs):\n    return {'y': inputs['x']}\n")
    (folder / "config.pbtxt").write_text(CONFIG.replace("TYPE_FP32", "TYPE_STRING"))
    row = {"x": np.array([b"a", "ü".encode()], np.object_)}
    tensors, _, _ = make_batch(read_config(folder), [row])
    assert tensors[0].array().tolist() == [[b"a", "ü".encode()]]
