"""The null backend: echoes, takes the time it is told, and misbehaves on request."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from suites.backend import (
    MAX_BATCH,
    BackendContract,
    assert_same,
    echo_specs,
    model_config,
    run,
    values,
)

from penstock.backends import Batch, backend
from penstock.config import ModelConfig
from penstock.errors import BackendFailed, ConfigError
from penstock.types import DATATYPES, TensorSpec


def null_config(
    datatype: str = "FP32",
    row_shape: Sequence[int] = (3,),
    max_batch_size: int = MAX_BATCH,
    num_tensors: int = 1,
    **options: str,
) -> ModelConfig:
    """A null model; `a_ms="2"` becomes the parameter `null.a_ms`."""
    specs = echo_specs(datatype, row_shape, num_tensors)
    parameters = {f"null.{key}": value for key, value in options.items()}
    return model_config("null", "", *specs, max_batch_size, parameters)


def rows_starting_with(*firsts: float, datatype: str = "FP32") -> Batch:
    rows = np.zeros((len(firsts), 3), DATATYPES[datatype].numpy)
    rows[:, 0] = firsts
    return Batch({"x0": rows}, len(firsts))


class TestNullBackend(BackendContract):
    backend_name = "null"

    def echo_config(
        self,
        folder: Path,
        datatype: str = "FP32",
        row_shape: Sequence[int] = (3,),
        max_batch_size: int = MAX_BATCH,
        num_tensors: int = 1,
    ) -> ModelConfig:
        return null_config(datatype, row_shape, max_batch_size, num_tensors)

    def failing_model(self, folder: Path) -> tuple[ModelConfig, Batch, Batch]:
        config = null_config(fail_on="7", a_ms="0")
        return config, rows_starting_with(1, 7), rows_starting_with(1, 2)

    def test_inputs_are_found_by_name_whatever_their_order(self, tmp_path: Path) -> None:
        super().test_inputs_are_found_by_name_whatever_their_order(tmp_path)


@pytest.mark.parametrize("num_rows", [1, 4])
def test_a_batch_of_b_rows_takes_at_least_a_plus_c_times_b(num_rows: int) -> None:
    runner = backend("null")(null_config(a_ms="10", c_ms="5"))
    began = time.perf_counter()
    run(runner, {"x0": values("FP32", (num_rows, 3))}, num_rows)
    assert time.perf_counter() - began >= 0.010 + 0.005 * num_rows


def test_load_takes_at_least_its_stated_time() -> None:
    began = time.perf_counter()
    backend("null")(null_config(load_ms="30"))
    assert time.perf_counter() - began >= 0.030


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("max_batch_size", [0, MAX_BATCH])
def test_output_that_matches_no_input_is_zeros(datatype: str, max_batch_size: int) -> None:
    config = model_config(
        "null",
        "",
        [TensorSpec("x0", "FP32" if datatype != "FP32" else "INT8", (3,))],
        [TensorSpec("y0", datatype, (2, 4)), TensorSpec("y1", datatype, (2,))],
        max_batch_size,
    )
    batch_shape = (3,) if max_batch_size else ()
    inputs = {"x0": np.ones((*batch_shape, 3), DATATYPES[config.inputs[0].datatype].numpy)}
    outputs = run(backend("null")(config), inputs, 3 if max_batch_size else 1)
    for name, shape in {"y0": (2, 4), "y1": (2,)}.items():
        expected = np.zeros((*batch_shape, *shape), DATATYPES[datatype].numpy)
        if datatype == "BYTES":
            expected[...] = b""
        assert_same(outputs[name], expected, datatype)


def test_fail_on_raises_only_for_a_row_that_starts_with_the_value() -> None:
    runner = backend("null")(null_config(fail_on="7", a_ms="0"))
    with pytest.raises(BackendFailed, match=r"fail_on.*7"):
        runner.start(rows_starting_with(1, 7, 2))
    runner.start(rows_starting_with(1, 2, 3))
    later = np.zeros((2, 3), np.float32)
    later[:, 1:] = 7
    runner.start(Batch({"x0": later}, 2))


def test_fail_on_works_as_the_only_option() -> None:
    runner = backend("null")(null_config(fail_on="7"))
    with pytest.raises(BackendFailed):
        runner.start(rows_starting_with(7))


@pytest.mark.parametrize("datatype", ["INT8", "UINT64", "FP16", "FP64"])
def test_fail_on_works_for_every_kind_of_number(datatype: str) -> None:
    runner = backend("null")(null_config(datatype, fail_on="7", a_ms="0"))
    with pytest.raises(BackendFailed):
        runner.start(rows_starting_with(7, datatype=datatype))


def test_model_without_batch_dimension_is_one_row() -> None:
    runner = backend("null")(null_config(max_batch_size=0, fail_on="7", a_ms="0"))
    runner.start(Batch({"x0": np.array([0, 7, 7], np.float32)}, 1))
    with pytest.raises(BackendFailed):
        runner.start(Batch({"x0": np.array([7, 0, 0], np.float32)}, 1))


def test_stall_on_adds_at_least_its_time() -> None:
    runner = backend("null")(null_config(stall_on="7", stall_ms="30"))
    began = time.perf_counter()
    runner.start(rows_starting_with(1, 7))
    assert time.perf_counter() - began >= 0.030


def test_built_repeats_the_options_it_understood() -> None:
    built = backend("null")(null_config(a_ms="2.5", fail_on="7")).built()
    assert {name: float(text) for name, text in built.items()} == {"a_ms": 2.5, "fail_on": 7.0}


def test_options_of_others_are_left_alone() -> None:
    specs = echo_specs("FP32", (3,))
    config = model_config("null", "", *specs, options={"intra_op_thread_count": "x"})
    assert backend("null")(config).built() == {}


def test_every_wrong_option_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        backend("null")(null_config(a_mss="1", c_ms="fast", crash="1", stall_ms="", a_ms="1"))
    problems = caught.value.problems
    assert len(problems) == 4
    for name in ("a_mss", "c_ms", "crash", "stall_ms"):
        assert sum(problem.startswith(f"parameters.null.{name}:") for problem in problems) == 1
    assert any("'fast'" in problem for problem in problems)


@pytest.mark.parametrize("option", ["a_ms", "c_ms", "load_ms", "stall_ms"])
@pytest.mark.parametrize("text", ["-1", "nan", "inf"])
def test_a_time_that_cannot_pass_is_refused(option: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"parameters.null.{option}: '{text}'"):
        backend("null")(null_config(**{option: text}))


SCRIPT = """
import sys
import numpy as np
from penstock.backends import Batch, backend
from penstock.config import BatchPolicy, ModelConfig
from penstock.types import TensorSpec

x, y = (TensorSpec(name, "FP32", (1,)) for name in "xy")
config = ModelConfig(
    "model", "1", "null", "", (x,), (y,), 4, BatchPolicy(4), options={sys.argv[1]: "7"}
)
runner = backend("null")(config)
runner.start(Batch({"x": np.zeros((1, 1), np.float32)}, 1))
print("a harmless row is answered", flush=True)
runner.start(Batch({"x": np.full((1, 1), 7, np.float32)}, 1))
print("the harmful row is answered", flush=True)
"""


@contextmanager
def run_harmful_row(option: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is about to run a row that starts with the option's value."""
    command = [sys.executable, "-c", SCRIPT, option]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "a harmless row is answered\n"
            yield process
        finally:
            process.kill()


def test_crash_on_kills_the_process_that_runs_it() -> None:
    with run_harmful_row("null.crash_on") as process:
        assert process.wait(timeout=60) == -signal.SIGABRT


def test_hang_on_never_returns() -> None:
    with run_harmful_row("null.hang_on") as process, pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
