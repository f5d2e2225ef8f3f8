"""Operator times of ONNX Runtime: from a real session, and from a profile written by hand."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from penstock.errors import BackendFailed
from penstock.profiling import onnx_times
from penstock.profiling.profiler import read_config
from penstock.profiling.work import Shaped, work_of


def kernel(name: str, at_us: int, took_us: int, **details: Any) -> Mapping[str, Any]:
    known = {"op_name": "Add", "node_index": "0", "provider": "CPUExecutionProvider"}
    event = {"cat": "Node", "ph": "X", "ts": at_us, "dur": took_us}
    return event | {"name": f"{name}_kernel_time", "args": known | details}


def model_run(at_us: int, took_us: int) -> Mapping[str, Any]:
    return {"cat": "Session", "name": "model_run", "ts": at_us, "dur": took_us, "args": {}}


def test_a_real_session_tells_every_operator_with_its_weights(encoder) -> None:
    config = read_config(encoder)
    found = onnx_times.timed(config, {"x": np.zeros((2, 5, 64), np.float32)}, 3)
    by_kind = {each.kind: each for each in found.operators}
    assert by_kind.keys() == {"MatMul", "Add", "Erf", "Softmax"}
    product = by_kind["MatMul"]
    assert product.name == "/encoder/layer.3/dense/MatMul"
    assert product.inputs == (Shaped("fp32", (2, 5, 64)), Shaped("fp32", (64, 64)))
    assert product.weight_bytes == 64 * 64 * 4
    assert work_of(product.kind, product.inputs, product.outputs).flops == 2 * 10 * 64 * 64
    assert found.profiled_s > 0
    assert {event.kind for event in found.events} >= {"run", "MatMul", "Softmax"}
    assert not found.notes


def test_runs_before_the_last_ones_do_not_count() -> None:
    raw = [kernel("a", 10, 1000), model_run(0, 2000)]
    for start in (5000, 6000, 7000):
        raw += [kernel("a", start + 10, 40 + start // 1000), model_run(start, 100)]
    (found,) = onnx_times.read(raw, 3, {}).operators
    assert found.seconds == pytest.approx(46e-6)
    assert found.num_calls == 1


def test_an_operator_in_a_loop_is_called_several_times() -> None:
    raw = [model_run(0, 500), kernel("body", 10, 20), kernel("body", 40, 20)]
    raw.append(kernel("loop", 5, 100, op_name="Loop", node_index="7"))
    (found,) = onnx_times.read(raw, 1, {}).operators
    assert (found.name, found.num_calls) == ("body", 2)
    assert found.seconds == pytest.approx(40e-6)


def test_shapes_of_the_other_session_are_believed() -> None:
    packed = [model_run(0, 50), kernel("a", 1, 9, input_type_shape=[{"float": [1, 4]}])]
    whole = [{"float": [1, 4]}, {"float16": [4, 2]}]
    full = [model_run(0, 50), kernel("a", 1, 90, input_type_shape=whole, parameter_size="16")]
    (found,) = onnx_times.read(packed, 1, onnx_times.nodes(full, 1)).operators
    assert found.inputs == (Shaped("fp32", (1, 4)), Shaped("fp16", (4, 2)))
    assert (found.weight_bytes, found.seconds) == (16, pytest.approx(9e-6))


def test_a_profile_without_runs_is_refused() -> None:
    with pytest.raises(BackendFailed, match="no run"):
        onnx_times.read([kernel("a", 1, 9)], 1, {})
