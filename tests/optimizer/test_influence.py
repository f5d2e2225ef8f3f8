"""Real rows alone, padded and in mixed batches. Each of these models passes the check at load,
which uses random rows; what their examples do to each other is seen only with the examples."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import helper, numpy_helper
from served_builds import outlier_nodes, read, write_outlier_model

from penstock.config import BatchPolicy, ModelConfig
from penstock.optimizer import influence, trials
from penstock.optimizer.candidates import Build, Candidate, Step
from penstock.optimizer.influence import RowCheck, batches
from penstock.optimizer.simulate import Row
from penstock.optimizer.trials import TrialProcess
from penstock.types import TensorSpec

PADDED = """
parameters { key: "penstock.pad" value { string_value: "x[0]=0" } }
parameters { key: "penstock.pad_buckets" value { string_value: "4,8" } }
"""
TOLERANT = 'parameters { key: "penstock.tolerance" value { string_value: "0.5" } }'
PYTHON = """
backend: "python" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 3 }
output { name: "y" data_type: TYPE_FP32 dims: 3 }
"""
CODE = """
import numpy as np

class Model:
    def __init__(self, config):
        self.random = np.random.default_rng(0)
        self.count = 0

    def infer(self, inputs):
        x = inputs["x"]
        self.count += 1
        return {"y": %s}
"""


def node(operator: str, *inputs: str, out: str = "y", **attributes: object):
    return helper.make_node(operator, list(inputs), [out], **attributes)


def onnx_build(root: Path, write_onnx, nodes, constants, config: str = "", shape=(3,)) -> Build:
    kind = ("FP32", ["batch", *shape])
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    path = root / "model" / "1" / "model.onnx"
    write_onnx(path, nodes, {"x": kind}, {"y": kind}, initializers)
    (root / "model" / "config.pbtxt").write_text(config)
    return read(root / "model")


def outlier_build(root: Path, write_onnx, config: str = "") -> Build:
    write_outlier_model(root / "model" / "1" / "model.onnx", write_onnx)
    (root / "model" / "config.pbtxt").write_text(config)
    return read(root / "model")


def python_build(root: Path, expression: str) -> Build:
    folder = root / "model"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(CODE % expression)
    (folder / "config.pbtxt").write_text(PYTHON)
    return read(folder)


def data(num: int = 120, *, outlier: float = 900.0) -> list[Row]:
    """Number 77 is the outlier."""
    rows = np.random.default_rng(4).normal(size=(num, 3)).astype(np.float32)
    rows[77] = outlier
    return [{"x": row} for row in rows]


def check(build: Build, rows: list[Row], *, is_rounded: bool = False) -> RowCheck:
    with TrialProcess(build.config) as child:
        assert not child.load().proof.unbatched
        return influence.check_rows(child, build, rows, is_rounded=is_rounded)


class TestBatches:
    def test_every_row_is_in_batches_of_every_size_in_other_company(self):
        group = list(range(20))
        found = list(batches(group, 32))
        assert {len(batch) for batch in found} == {2, 8, 20}
        assert len(found[0]) == 20
        for size in (2, 8, 20):
            seen = [index for batch in found if len(batch) == size for index in batch]
            assert {seen.count(index) for index in group} <= {2, 3, 4}
            places = [batch.index(7) for batch in found if len(batch) == size and 7 in batch]
            assert size == 2 or len(set(places)) > 1

    def test_no_batch_is_larger_than_allowed_and_none_has_one_row(self):
        assert {len(batch) for batch in batches(list(range(20)), 4)} == {2, 4}
        assert list(batches([5], 32)) == []

    def test_no_row_is_twice_in_a_batch(self):
        assert all(len(batch) == len(set(batch)) for batch in batches(list(range(11)), 32))


class TestNeighbours:
    def test_an_outlier_that_changes_its_neighbours_is_named(self, tmp_path: Path, write_onnx):
        found = check(outlier_build(tmp_path, write_onnx), data())
        assert found.batching_problem.startswith(
            "answers depend on other rows in the batch: output 'y' of example "
        )
        assert found.batching_problem.endswith(" of its range next to example 77")
        assert (found.padding_problem, found.repeat_problem) == ("", "")

    def test_the_same_model_without_outliers_in_its_data(self, tmp_path: Path, write_onnx):
        assert check(outlier_build(tmp_path, write_onnx), data(outlier=1.0)) == RowCheck()

    def test_a_model_that_treats_each_row_alone(self, tmp_path: Path, write_onnx):
        weights = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
        nodes = [node("MatMul", "x", "w", out="z"), node("Softmax", "z", axis=-1)]
        assert check(onnx_build(tmp_path, write_onnx, nodes, {"w": weights}), data()) == RowCheck()

    def test_a_large_column_does_not_hide_a_small_one(self, tmp_path: Path, write_onnx):
        """The first column is in thousands and stays; the last, below 1, is what moves. As a share
        of the largest value that would be nothing."""
        nodes = [
            *outlier_nodes()[:-1],
            node("Sub", "scale", "one", out="beyond"),
            node("Min", "beyond", "one", out="moved"),
            node("Mul", "moved", "last", out="added"),
            node("Mul", "x", "factors", out="scaled"),
            node("Add", "scaled", "added"),
        ]
        constants = {
            "ten": np.float32([10.0]),
            "one": np.float32([1.0]),
            "last": np.float32([[0.0, 0.0, 0.4]]),
            "factors": np.float32([[1e5, 1e5, 0.01]]),
        }
        rows = [{"x": np.array(row["x"])} for row in data()]
        rows[77]["x"][2] = 0.0
        found = check(onnx_build(tmp_path, write_onnx, nodes, constants), rows)
        assert "next to example 77" in found.batching_problem

    def test_a_neighbour_that_matters_only_at_the_next_place(self, tmp_path: Path):
        code = "x + np.where(np.roll(x, 1, axis=0) > 10, 1, 0).astype(np.float32) * (len(x) > 1)"
        found = check(python_build(tmp_path, code), data())
        assert "next to example 77" in found.batching_problem

    def test_what_takes_more_than_one_neighbour_is_told_by_the_batch(self, tmp_path: Path):
        code = "x + np.float32(len(x) > 4)"
        found = check(python_build(tmp_path, code), data())
        assert found.batching_problem.endswith(" in a batch of 8")

    def test_integers_must_be_the_same(self, tmp_path: Path, write_onnx):
        nodes = [*outlier_nodes()[:-1], node("Div", "x", "scale", out="z")]
        nodes.append(node("Cast", "z", to=6))
        path = tmp_path / "model" / "1" / "model.onnx"
        kinds = {"x": ("FP32", ["batch", 3])}, {"y": ("INT32", ["batch", 3])}
        ten = [numpy_helper.from_array(np.float32([10.0]), "ten")]
        write_onnx(path, nodes, *kinds, ten)
        build = read(tmp_path / "model")
        assert "next to example 77" in check(build, data()).batching_problem
        # A build that rounds tips integers that floats are the reason of; its parent counts.
        assert check(build, data(), is_rounded=True).batching_problem == ""

    def test_a_tolerance_of_the_configuration_is_respected(self, tmp_path: Path, write_onnx):
        nodes = [
            *outlier_nodes()[:-1],
            node("Min", "scale", "more", out="little"),
            node("Mul", "x", "little"),
        ]
        constants = {"ten": np.float32([10.0]), "more": np.float32([1.05])}
        rows = data(outlier=11.0)
        strict = onnx_build(tmp_path / "strict", write_onnx, nodes, constants)
        assert check(strict, rows).batching_problem
        granted = onnx_build(tmp_path / "granted", write_onnx, nodes, constants, TOLERANT)
        assert check(granted, rows) == RowCheck()

    def test_a_model_of_one_row_has_no_neighbours(self, tmp_path: Path, write_onnx):
        kind = ("FP32", [1, 3])
        nodes = outlier_nodes()
        ten = [numpy_helper.from_array(np.float32([10.0]), "ten")]
        write_onnx(tmp_path / "model" / "1" / "model.onnx", nodes, {"x": kind}, {"y": kind}, ten)
        rows = [{"x": row["x"][None]} for row in data()]
        assert check(read(tmp_path / "model"), rows) == RowCheck()

    def test_a_slow_model_is_checked_with_fewer_rows(self, tmp_path: Path, monkeypatch):
        monkeypatch.setattr(influence, "CHECK_S", 0.0)
        monkeypatch.setattr(influence, "MAX_CHECK_S", 0.0)
        seen: list[int] = []
        compute = trials.compute

        def counted(child, build, served, indices):
            seen.append(len(indices))
            return compute(child, build, served, indices)

        monkeypatch.setattr(trials, "compute", counted)
        code = "x * (np.float32(0.5) if np.abs(x).max() > 10 and len(x) > 1 else np.float32(1))"
        found = check(python_build(tmp_path, code), data())
        assert "answers depend on other rows" in found.batching_problem
        assert max(seen) == influence.MIN_EXAMPLES
        assert len(seen) < 30


class TestPadding:
    def build(self, root: Path, write_onnx, config: str = PADDED) -> Build:
        """Zeros behind a sequence change nothing until a value is beyond 10."""
        nodes = [
            node("ReduceSum", "x", "axes", out="sum", keepdims=0),
            node("Sub", "x", "ten", out="less"),
            node("Relu", "less", out="beyond"),
            node("ReduceMean", "beyond", out="mean", keepdims=0, axes=[1]),
            node("Add", "sum", "mean"),
        ]
        constants = {"axes": np.array([1], np.int64), "ten": np.float32([10.0])}
        initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
        kinds = {"x": ("FP32", ["batch", "n", 2])}, {"y": ("FP32", ["batch", 2])}
        write_onnx(root / "model" / "1" / "model.onnx", nodes, *kinds, initializers)
        (root / "model" / "config.pbtxt").write_text(config)
        return read(root / "model")

    def rows(self) -> list[Row]:
        random = np.random.default_rng(5)
        lengths = random.integers(1, 9, 80)
        rows = [{"x": random.normal(size=(n, 2)).astype(np.float32)} for n in lengths]
        rows[33] = {"x": np.full((3, 2), 900, np.float32)}
        return rows

    def test_padding_that_changes_a_real_row(self, tmp_path: Path, write_onnx):
        found = check(self.build(tmp_path, write_onnx), self.rows())
        assert found.padding_problem.startswith("padding changes answers: output 'y' of example 33")
        assert found.padding_problem.endswith("with 3 elements filled up to 4")
        assert found.batching_problem == ""

    def test_a_candidate_that_would_be_padded_all_the_same_is_not_batched(
        self, tmp_path: Path, write_onnx
    ):
        build = self.build(tmp_path, write_onnx)
        made = replace(build, candidate=Candidate((Step("openvino"),)))
        found = check(made, self.rows())
        assert found.batching_problem == found.padding_problem != ""

    def test_harmless_padding(self, tmp_path: Path, write_onnx):
        rows = [{"x": np.minimum(row["x"], 9)} for row in self.rows()]
        assert check(self.build(tmp_path, write_onnx), rows) == RowCheck()

    def test_without_padding_rows_of_one_length_share_batches(self, tmp_path: Path, write_onnx):
        assert check(self.build(tmp_path, write_onnx, ""), self.rows()) == RowCheck()


class TestRepeats:
    @pytest.mark.parametrize(
        "code",
        [
            "x + self.random.normal(size=x.shape).astype(np.float32)",
            "x + np.float32(self.count)",
            "x * (np.float32(1) if self.count < 40 else np.float32(2))",
        ],
        ids=["random", "counting", "worn out"],
    )
    def test_answers_that_differ_from_run_to_run(self, tmp_path: Path, code: str):
        found = check(python_build(tmp_path, code), data())
        assert found.repeat_problem.startswith("output 'y' of example ")
        assert found.repeat_problem.endswith(" of its range when it was asked again")
        assert found.batching_problem == ""

    def test_noise_below_rounding_is_none(self, tmp_path: Path):
        code = "x + (1e-7 * self.random.normal(size=x.shape)).astype(np.float32)"
        assert check(python_build(tmp_path, code), data()) == RowCheck()

    def test_what_is_not_finite_is_the_same_every_time(self, tmp_path: Path):
        code = "np.where(x > 10, np.nan, x).astype(np.float32)"
        assert check(python_build(tmp_path, code), data()) == RowCheck()


def test_facts_have_what_rows_show(tmp_path: Path, write_onnx):
    build = outlier_build(tmp_path, write_onnx)
    assert trials.inspect(build).batching_problem == ""
    facts = influence.inspect(build, data(), is_lossy=False)
    assert "next to example 77" in facts.batching_problem
    assert facts.operators["ReduceMax"] == 1


def test_a_function_behind_the_model_hides_nothing(tmp_path: Path, write_onnx):
    config = """
    backend: "onnxruntime" max_batch_size: 8 dynamic_batching { }
    input { name: "x" data_type: TYPE_FP32 dims: 3 }
    output { name: "y" data_type: TYPE_INT64 dims: 1 }
    parameters { key: "penstock.postprocess" value { string_value: "code.py:best" } }
    parameters { key: "penstock.model_outputs" value { string_value: "y:FP32[3]" } }
    """
    build = outlier_build(tmp_path, write_onnx)
    code = "def best(outputs):\n    return {'y': outputs['y'].argmax(keepdims=True)}\n"
    (build.version_folder / "code.py").write_text(code)
    (build.folder / "config.pbtxt").write_text(config)
    facts = influence.inspect(read(build.folder), data(), is_lossy=False)
    assert "next to example 77" in facts.batching_problem


def test_no_rows_say_nothing(tmp_path: Path, write_onnx):
    assert check(outlier_build(tmp_path, write_onnx), []) == RowCheck()


def test_the_childs_rules_are_as_before(tmp_path: Path, write_onnx):
    build = TestPadding().build(tmp_path, write_onnx)
    with TrialProcess(build.config) as child:
        child.load()
        influence.check_rows(child, build, TestPadding().rows(), is_rounded=False)
        assert child.rules == trials.NO_LIMITS


@pytest.mark.parametrize(("device", "is_moved"), [("cpu", True), ("cuda:0", False)])
def test_kernels_of_a_gpu_round_otherwise_for_other_batches(device: str, is_moved: bool) -> None:
    """TF32 moved values of a ResNet-50 by 0.8 % between batches of different sizes."""
    outputs = (TensorSpec("y", "FP32", (4,)),)
    config = ModelConfig("m", "1", "null", "", (), outputs, 8, BatchPolicy(8), device=device)
    random = np.random.default_rng(0)
    alone = [{"y": (100 + random.uniform(0, 1, (1, 4))).astype(np.float32)} for _ in range(8)]
    compared = influence.RowComparison(config, alone, is_rounded=False)
    found = compared.difference(alone[0], {"y": alone[0]["y"] * np.float32(1.008)})
    assert (found is not None) is is_moved
    assert compared.difference(alone[0], {"y": alone[0]["y"] * np.float32(1.2)}) is not None


def test_a_row_that_does_not_look_special_is_found_by_the_survey(tmp_path: Path) -> None:
    """One row in fifty moves its neighbours; what marks it lies among usual values."""
    build = python_build(tmp_path, "x + np.float32(5) * (np.abs(x[:, 1] - 0.5) < 0.01).any()")
    rows = np.random.default_rng(4).uniform(-1, 1, (1000, 3)).astype(np.float32)
    rows[:, 1] = np.where(np.abs(rows[:, 1] - 0.5) < 0.02, 0.0, rows[:, 1])
    rows[27::50, 1] = 0.5
    chosen = influence.choose_rows([{"x": row} for row in rows], influence.MAX_EXAMPLES)
    assert not any(index % 50 == 27 for index in chosen), "the survey would not be needed"
    found = check(build, [{"x": row} for row in rows])
    assert found.batching_problem.startswith("answers depend on other rows in the batch")
    step = replace(build, candidate=Candidate((Step("some"),)))
    assert not check(step, [{"x": row} for row in rows]).batching_problem


def test_a_survey_takes_all_other_rows_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = influence.survey_order(50, [3, 4])
    assert sorted(found) == [each for each in range(50) if each not in (3, 4)]
    assert found == influence.survey_order(50, [3, 4]) != sorted(found)
    monkeypatch.setattr(influence, "MAX_SURVEYED", 7)
    assert influence.survey_order(50, [3, 4]) == found[:7]
