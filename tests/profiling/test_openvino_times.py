"""Operator times of OpenVINO, from a real model."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.profiling import openvino_times
from penstock.profiling.profiler import read_config
from penstock.profiling.work import work_of

pytest.importorskip("openvino")


def test_layers_are_told_with_shapes_although_the_model_has_none(encoder) -> None:
    config = replace(read_config(encoder), backend="openvino")
    found = openvino_times.timed(config, {"x": np.zeros((2, 5, 64), np.float32)}, 3)
    product = next(each for each in found.operators if each.kind == "MatMul")
    work = work_of(product.kind, product.inputs, product.outputs)
    assert work.flops == 2 * 10 * 64 * 64
    assert product.weight_bytes >= 64 * 64 * 4
    assert product.datatype == "fp32"
    assert "Softmax" in {each.kind for each in found.operators}
    assert found.profiled_s > 0
    ends = [event.start_s for event in found.events]
    assert ends == sorted(ends)
