"""Builds tried out for real, in processes of their own: answers, batch times, and all the ways in
which a model can end its process."""

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from onnx import helper, numpy_helper
from served_builds import IMAGE, a_config, company_build, mean_build, null_build, read

from penstock.errors import BackendFailed, ConfigError
from penstock.optimizer import trial_child, trials
from penstock.optimizer.candidates import Build
from penstock.optimizer.time_plan import CutOff, TookTooLong
from penstock.optimizer.trial_child import Compute, Computed, LoadTrial, TrialLoaded
from penstock.wire.v2_client import Values

PADDED = """
parameters { key: "penstock.pad" value { string_value: "x[0]=0" } }
parameters { key: "penstock.pad_buckets" value { string_value: "4,8" } }
"""


COUNTING = """
from pathlib import Path

import numpy as np


def count(outputs):
    with Path(__file__).with_name("seen").open("a") as file:
        print(len(outputs["y"]), file=file)
    return {"y": np.array([len(outputs["y"])])}
"""
COUNTED = """
backend: "onnxruntime" max_batch_size: 8 dynamic_batching { }
input { name: "x" data_type: TYPE_FP32 dims: [ -1, 2 ] }
output { name: "y" data_type: TYPE_INT64 dims: 1 }
parameters { key: "penstock.postprocess" value { string_value: "code.py:count" } }
parameters { key: "penstock.model_outputs" value { string_value: "y:FP32[-1,2]" } }
"""


def sequences(*lengths: int) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(5)
    return [{"x": random.standard_normal((n, 2)).astype(np.float32)} for n in lengths]


def python_build(tmp_path: Path, code: str, tensors: str) -> Build:
    """A model that is its code, for batches of at most 4."""
    folder = tmp_path / "model"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(code)
    (folder / "config.pbtxt").write_text(f'backend: "python" max_batch_size: 4\n{tensors}')
    return read(folder)


def numbers(*values: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.array([value], np.int32)} for value in values]


class TestUndisturbed:
    """Of times that others on the machine got in the way of."""

    def test_what_grows_with_the_work_stays(self):
        seconds = {8: {1: 0.002, 8: 0.007}, 32: {1: 0.005, 8: 0.025}}
        assert trials.undisturbed(seconds) == seconds

    def test_less_work_takes_no_longer(self):
        seconds = {8: {1: 0.008, 8: 0.018}, 48: {1: 0.016, 8: 0.046}, 128: {1: 0.014}}
        assert trials.undisturbed(seconds) == {**seconds, 48: {1: 0.014, 8: 0.046}}

    def test_of_two_kinds_of_work_neither_says_anything_of_the_other(self):
        # More rows, and shorter ones.
        seconds = {8: {8: 0.003}, 64: {1: 0.009}}
        assert trials.undisturbed(seconds) == seconds


class TestWouldTake:
    """What a batch that was not run would take."""

    def test_on_a_cpu_each_row_costs_its_share(self):
        assert trials.would_take_s({1: 0.002, 8: 0.008}, 32, is_on_gpu=False) == 0.032

    def test_on_a_gpu_one_row_says_nothing_of_eight(self):
        assert trials.would_take_s({1: 0.006}, 8, is_on_gpu=True) == 0.006

    def test_on_a_gpu_the_last_line_goes_on(self):
        found = {1: 0.006, 8: 0.006, 32: 0.012}
        assert trials.would_take_s(found, 128, is_on_gpu=True) == pytest.approx(0.036)

    def test_more_rows_take_no_less(self):
        assert trials.would_take_s({1: 0.006, 8: 0.005}, 32, is_on_gpu=True) == 0.005


class SmallGpu:
    """A child on a GPU with memory for so many rows; a batch takes a millisecond and a bit."""

    def __init__(self, fits: int, max_rows: int | None = None) -> None:
        self.fits = fits
        self.rules = trials.TrialLimits(max_rows)
        self.may_batch, self.is_padded, self.is_well = True, False, True
        self.load_s = 0.0
        self.tried: list[int] = []

    def send(self, question: object) -> None:
        if isinstance(question, trial_child.Hold):
            self.tried.append(question.num_rows)

    def expect(self, kind: type) -> object:
        rows = self.tried[-1]
        if kind is trial_child.TrialDone:
            if rows > self.fits:
                raise BackendFailed("OutOfMemoryError: CUDA out of memory. Tried to allocate")
            return trial_child.TrialDone()
        seconds = 0.001 + 1e-6 * rows
        return trial_child.TrialMeasured([seconds] * 3, rows << 20, busy=0.5)


class TestOutOfMemory:
    def table(self, child: SmallGpu, max_batch: int = 8):
        config = replace(a_config(max_batch=max_batch), device="cuda:0", inputs=(IMAGE,))
        crew = trials.TrialCrew(config, [child], 10.0)  # type: ignore[list-item]
        row = {IMAGE.name: np.zeros(IMAGE.shape, np.float32)}
        return crew.table([row], (1, 1))

    def test_sizes_grow_beyond_what_is_configured_until_memory_is_full(self):
        child = SmallGpu(fits=700)
        table = self.table(child)
        assert child.tried == [1, 8, 32, 128, 256, 512, 1024]
        assert (table.max_rows, table.ran_out_at) == (512, 1024)
        # Not that of the batch that did not fit.
        assert table.memory_bytes == 512 << 20

    def test_they_are_halved_after_that(self):
        child = SmallGpu(fits=100)
        table = self.table(child)
        assert child.tried == [1, 8, 32, 128, 64]
        assert (table.max_rows, table.ran_out_at) == (64, 128)

    def test_also_below_what_is_configured(self):
        table = self.table(SmallGpu(fits=20), max_batch=64)
        assert (table.max_rows, table.ran_out_at) == (16, 32)

    def test_one_row_that_does_not_fit_is_an_error(self):
        with pytest.raises(BackendFailed, match="out of memory"):
            self.table(SmallGpu(fits=0))

    def test_a_model_that_takes_fewer_rows_gets_no_more(self):
        child = SmallGpu(fits=10_000, max_rows=48)
        self.table(child, max_batch=16)
        assert max(child.tried) == 48

    def test_large_rows_are_not_sent_by_the_thousand(self, monkeypatch):
        monkeypatch.setattr(trials, "MAX_HELD_BYTES", 16 * 600)  # A row has 16 bytes.
        child = SmallGpu(fits=10_000)
        self.table(child)
        assert child.tried == [1, 8, 32, 128, 256, 512, 600]

    def test_how_busy_the_gpu_is_comes_with_it(self):
        assert self.table(SmallGpu(fits=100)).busy == 0.5


def test_a_child_has_no_longer_than_the_time_that_is_left(tmp_path: Path):
    build = null_build(tmp_path, load_ms=60_000)
    with pytest.raises(CutOff, match=r"no answer within 0\.\d+ s"):
        trials.inspect(build, ends_at=time.monotonic() + 0.5)


def test_rows_without_time_have_no_answer(tmp_path: Path):
    build = null_build(tmp_path)
    rules = trials.TrialLimits(stop_after_s=-1.0)
    assert trials.answers(build, numbers(1, 2, 3), rules=rules) == [{}, {}, {}]
    assert all(trials.answers(build, numbers(1, 2, 3)))


def test_a_compilation_has_as_long_as_it_is_given(tmp_path: Path):
    build = null_build(tmp_path, load_ms=60_000)
    with pytest.raises(TookTooLong, match=r"no answer within 0.2 s") as caught:
        trials.keep_compiled(build, 0.2)
    # The caller knows whether a budget set this limit.
    assert not isinstance(caught.value, CutOff)


class TestValues:
    def test_strings_travel(self):
        array = np.array([b"a", "\N{SNOWMAN}".encode(), b""], np.object_).reshape(3, 1)
        found = Values.of("x", "BYTES", array).array()
        assert found.tolist() == array.tolist()

    def test_numbers_travel_as_the_model_takes_them(self):
        found = Values.of("x", "INT64", np.array([[1, 2]], np.int32)).array()
        assert (found.dtype, found.tolist()) == (np.int64, [[1, 2]])


class TestAnswers:
    def test_each_row_gets_its_own_in_order(self, tmp_path: Path, write_onnx):
        rows = sequences(*np.random.default_rng(0).integers(1, 9, 300).tolist())
        heard: list[int] = []
        found = trials.answers(mean_build(tmp_path, write_onnx), rows, heard.append)
        for row, answer in zip(rows, found, strict=True):
            assert answer["y"] == pytest.approx(row["x"].sum(axis=0), abs=1e-5)
        assert heard[-1] == 300
        # In batches: eight lengths, at most 32 rows each.
        assert len(heard) < 40

    def test_rows_that_influence_each_other_are_computed_alone(self, tmp_path: Path, write_onnx):
        rows = [{"x": np.full(3, n, np.float32)} for n in range(4)]
        heard: list[int] = []
        found = trials.answers(company_build(tmp_path, write_onnx), rows, heard.append)
        assert [answer["y"].tolist() for answer in found] == [[0, 0, 0]] * 4
        assert heard == [1, 2, 3, 4]

    def test_what_is_padded_is_cut_back(self, tmp_path: Path, write_onnx):
        nodes = [helper.make_node("Add", ["x", "x"], ["y"])]
        shape = ("FP32", ["batch", "n", 2])
        path = tmp_path / "model" / "1" / "model.onnx"
        write_onnx(path, nodes, {"x": shape}, {"y": shape})
        (tmp_path / "model" / "config.pbtxt").write_text(PADDED)
        rows = sequences(1, 2, 3, 4, 9)
        heard: list[int] = []
        found = trials.answers(read(tmp_path / "model"), rows, heard.append)
        for row, answer in zip(rows, found, strict=True):
            assert answer["y"].tolist() == (2 * row["x"]).tolist()
        # Four share the first bucket; the last is longer than any.
        assert heard == [4, 5]

    def test_a_function_behind_the_model_sees_no_padding(self, tmp_path: Path, write_onnx):
        """Neither where answers are wanted nor where times are."""
        nodes = [helper.make_node("Add", ["x", "x"], ["y"])]
        shape = ("FP32", ["batch", "n", 2])
        version = tmp_path / "model" / "1"
        write_onnx(version / "model.onnx", nodes, {"x": shape}, {"y": shape})
        (version / "code.py").write_text(COUNTING)
        (tmp_path / "model" / "config.pbtxt").write_text(COUNTED + PADDED)
        build = read(tmp_path / "model")
        found = trials.answers(build, sequences(1, 2, 3, 4, 9))
        assert [answer["y"].tolist() for answer in found] == [[1], [2], [3], [4], [9]]
        plain = replace(build, config=build.config.without_postprocess)
        assert [len(each["y"]) for each in trials.answers(plain, sequences(2, 9))] == [2, 9]
        (version / "seen").unlink()
        trials.times(build, sequences(3, 3, 7), 1, 1)
        assert set((version / "seen").read_text().split()) == {"3", "7"}

    def test_what_neighbours_of_other_lengths_do_to_a_row_is_seen(self, tmp_path: Path, write_onnx):
        """As in INT8 with ranges by batch, which a tolerance lets share one."""
        nodes = [
            helper.make_node("ReduceSum", ["x", "axes"], ["sum"], keepdims=0),
            helper.make_node("ReduceMax", ["x"], ["max"], keepdims=0),
            helper.make_node("Mul", ["max", "part"], ["moved"]),
            helper.make_node("Add", ["sum", "moved"], ["y"]),
        ]
        constants = [
            numpy_helper.from_array(np.array([1], np.int64), "axes"),
            numpy_helper.from_array(np.array(0.01, np.float32), "part"),
        ]
        inputs, outputs = {"x": ("FP32", ["batch", "n", 2])}, {"y": ("FP32", ["batch", 2])}
        path = tmp_path / "model" / "1" / "model.onnx"
        write_onnx(path, nodes, inputs, outputs, constants)
        tolerance = 'parameters { key: "penstock.tolerance" value { string_value: "0.25" } }'
        (tmp_path / "model" / "config.pbtxt").write_text(PADDED + tolerance)
        rows = [{"x": np.full((n, 2), value, np.float32)} for n, value in ((1, 1.0), (2, 100.0))]
        found = trials.answers(read(tmp_path / "model"), rows)
        assert found[0]["y"] == pytest.approx([2.0, 2.0])
        assert found[1]["y"] == pytest.approx([201.0, 201.0])

    def test_what_is_no_input_is_not_sent(self, tmp_path: Path):
        rows = [{**row, "label": np.array(3)} for row in numbers(7, 8)]
        found = trials.answers(null_build(tmp_path), rows)
        assert [answer["y"].tolist() for answer in found] == [[7], [8]]

    def test_a_model_without_batch_dimension_takes_rows_as_they_are(self, tmp_path: Path):
        build = null_build(tmp_path)
        text = (build.folder / "config.pbtxt").read_text()
        plain = text.replace("max_batch_size: 8 dynamic_batching { }", "max_batch_size: 0")
        (build.folder / "config.pbtxt").write_text(plain)
        found = trials.answers(read(build.folder), numbers(7, 8))
        assert [answer["y"].tolist() for answer in found] == [[7], [8]]

    def test_a_one_for_the_batch_is_taken_off_and_given_back(self, tmp_path: Path, write_onnx):
        """Where a model of one row has got a batch dimension."""
        build = mean_build(tmp_path, write_onnx)
        rows = [{"x": np.full((1, 2, 2), number, np.float32)} for number in range(3)]
        found = trials.answers(build, rows)
        assert [each["y"].tolist() for each in found] == [[[2 * n, 2 * n]] for n in range(3)]
        table = trials.times(build, rows, 1, 1)
        assert set(table.seconds) == {2}

    def test_no_rows_have_no_answers(self, tmp_path: Path):
        assert trials.answers(null_build(tmp_path), []) == []

    def test_a_row_without_an_input_is_told(self, tmp_path: Path):
        with pytest.raises(ConfigError, match=r"input 'x': missing; a row has \['z'\]"):
            trials.answers(null_build(tmp_path), [{"z": np.zeros(1)}])


class TestWhatGoesWrong:
    def test_a_model_that_raises(self, tmp_path: Path):
        with pytest.raises(BackendFailed, match="fail_on"):
            trials.answers(null_build(tmp_path, fail_on=7), numbers(1, 7))

    def test_a_model_that_ends_its_process(self, tmp_path: Path):
        with pytest.raises(BackendFailed, match="the process of the model was killed by SIG"):
            trials.answers(null_build(tmp_path, crash_on=7), numbers(1, 7))

    def test_a_model_that_hangs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(trials, "RUN_TIMEOUT_S", 0.3)
        with pytest.raises(BackendFailed, match=r"no answer within 0\.3 s"):
            trials.answers(null_build(tmp_path, hang_on=7), numbers(7))

    def test_a_file_that_is_no_model(self, tmp_path: Path, write_onnx):
        build = mean_build(tmp_path, write_onnx)
        build.artifact.write_bytes(b"nothing of the kind")
        with pytest.raises(BackendFailed, match="ONNX Runtime cannot load the model"):
            trials.answers(build, sequences(2))

    def test_options_that_make_no_sense_are_all_told(self, tmp_path: Path, write_onnx):
        option = 'parameters {{ key: "{}" value {{ string_value: "x" }} }}\n'
        text = option.format("graph_level") + option.format("execution_mode")
        build = mean_build(tmp_path, write_onnx, config=text)
        with pytest.raises(ConfigError) as caught:
            trials.answers(build, sequences(2))
        assert len(caught.value.problems) == 2

    def test_what_the_code_of_a_model_wrote_is_in_the_error(self, tmp_path: Path):
        build = python_build(
            tmp_path,
            "import os\n"
            "class TritonPythonModel:\n"
            "    def initialize(self, args):\n"
            "        print('about to leave', flush=True)\n"
            "        os._exit(3)\n"
            "    def execute(self, requests):\n"
            "        return []\n",
            'input { name: "x" data_type: TYPE_INT32 dims: 1 }\n'
            'output { name: "y" data_type: TYPE_INT32 dims: 1 }\n',
        )
        with pytest.raises(
            BackendFailed, match="exited with status 3; it wrote: (?s:.*)about to leave"
        ):
            trials.answers(build, numbers(1))


class TestChild:
    def test_is_gone_after_the_block_also_when_it_was_busy(self, tmp_path: Path):
        build = null_build(tmp_path, a_ms=60_000)
        before = set(psutil.Process().children())
        with pytest.raises(KeyboardInterrupt), trials.TrialProcess(build.config) as child:
            child.send(LoadTrial(build.config))
            child.expect(TrialLoaded)
            child.send(Compute([Values.of("x", "INT32", np.zeros((1, 1), np.int32))], 1))
            raise KeyboardInterrupt
        assert set(psutil.Process().children()) <= before

    def test_is_in_a_session_of_its_own(self, tmp_path: Path):
        """A Ctrl-C in the terminal is for whoever decides, not for it."""
        build = null_build(tmp_path)
        before = set(psutil.Process().children())
        with trials.TrialProcess(build.config) as child:
            child.load()
            (process,) = set(psutil.Process().children()) - before
            assert os.getsid(process.pid) == process.pid

    def test_answers_one_question_after_the_other(self, tmp_path: Path):
        build = null_build(tmp_path)
        with trials.TrialProcess(build.config) as child:
            child.load()
            for value in (1, 2, 3):
                child.send(Compute([Values.of("x", "INT32", np.array([[value]]))], 1))
                assert child.expect(Computed).rows[0][0].array().tolist() == [value]


class TestTimes:
    @pytest.fixture(autouse=True)
    def short_points(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(trials, "POINT_S", 0.02)

    def test_rungs_are_one_eight_and_the_largest(self, tmp_path: Path):
        table = trials.times(null_build(tmp_path, max_batch=64, a_ms=1), numbers(1, 2, 3), 1, 2)
        assert list(table.seconds) == [0]
        assert list(table.seconds[0]) == [1, 8, 64]
        # It sleeps so long, so that is what it takes at least.
        assert min(table.seconds[0].values()) >= 0.001
        assert (table.num_instances, table.num_threads) == (1, 2)
        assert table.load_s >= 0

    def test_larger_batches_than_configured_are_tried(self, tmp_path: Path):
        table = trials.times(null_build(tmp_path, max_batch=4), numbers(1), 1, 1)
        assert list(table.seconds[0]) == [1, 4, 8, 32]

    @pytest.mark.parametrize(
        "end", ["os._exit(3)", pytest.param("time.sleep(60)", marks=pytest.mark.slow)]
    )
    def test_a_batch_that_is_too_much_ends_only_itself(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
    ):
        monkeypatch.setattr(trials, "RUN_TIMEOUT_S", 6.0)
        build = python_build(
            tmp_path,
            "import os, time\n"
            "import triton_python_backend_utils as pb_utils\n"
            "class TritonPythonModel:\n"
            "    def execute(self, requests):\n"
            "        tensors = [pb_utils.get_input_tensor_by_name(r, 'x') for r in requests]\n"
            "        arrays = [each.as_numpy() for each in tensors]\n"
            "        if sum(map(len, arrays)) > 4:\n"
            f"            {end}\n"
            "        sums = [pb_utils.Tensor('y', each.sum(1, keepdims=True)) for each in arrays]\n"
            "        return [pb_utils.InferenceResponse([each]) for each in sums]\n",
            'input { name: "x" data_type: TYPE_FP32 dims: -1 }\n'
            'output { name: "y" data_type: TYPE_FP32 dims: 1 }\n',
        )
        rows = [{"x": np.ones(length, np.float32)} for length in (2, 3)]
        table = trials.times(build, rows, 1, 1)
        assert {length: list(each) for length, each in table.seconds.items()} == {
            2: [1, 4],
            3: [1, 4],
        }

    def test_batches_that_would_take_very_long_are_not_run(self, tmp_path: Path):
        table = trials.times(null_build(tmp_path, max_batch=64, c_ms=20), numbers(1), 1, 1)
        assert list(table.seconds[0]) == [1, 8]

    def test_where_rows_must_be_alone_there_is_one_rung(self, tmp_path: Path, write_onnx):
        rows = [{"x": np.ones(3, np.float32)}]
        table = trials.times(company_build(tmp_path, write_onnx), rows, 1, 1)
        assert list(table.seconds[0]) == [1]

    def test_all_instances_compute_at_once(self, tmp_path: Path, monkeypatch):
        """All are told to begin before anybody is asked for what it measured."""
        events: list[str] = []
        send, expect = trials.TrialProcess.send, trials.TrialProcess.expect

        def sent(self, question):
            events.append(type(question).__name__)
            send(self, question)

        def expected(self, kind):
            events.append(kind.__name__)
            return expect(self, kind)

        monkeypatch.setattr(trials.TrialProcess, "send", sent)
        monkeypatch.setattr(trials.TrialProcess, "expect", expected)
        build = null_build(tmp_path, max_batch=1, a_ms=1)
        assert trials.times(build, numbers(1), 3, 1).num_instances == 3
        point = ["Hold"] * 3 + ["TrialDone"] * 3 + ["Measure"] * 3 + ["TrialMeasured"] * 3
        assert events == ["LoadTrial"] * 3 + ["TrialLoaded"] * 3 + point

    def test_lengths_without_padding_are_a_few_that_the_rows_have(self, tmp_path: Path, write_onnx):
        lengths = [*range(1, 21), 20, 20]
        table = trials.times(mean_build(tmp_path, write_onnx), sequences(*lengths), 1, 1)
        assert min(table.seconds) == 1 and max(table.seconds) == 20
        assert 4 <= len(table.seconds) <= 6
        assert table.memory_bytes > 0

    def test_a_small_budget_has_time_for_three_lengths(self, tmp_path: Path, write_onnx):
        rules = trials.TrialLimits(max_lengths=trials.FEW_LENGTHS)
        build = mean_build(tmp_path, write_onnx)
        table = trials.times(build, sequences(*range(1, 21)), 1, 1, rules=rules)
        assert sorted(table.seconds) == [1, 10, 20]

    def test_lengths_with_padding_are_buckets(self, tmp_path: Path, write_onnx):
        build = mean_build(tmp_path, write_onnx, config=PADDED)
        table = trials.times(build, sequences(1, 3, 7, 11), 1, 1)
        assert sorted(table.seconds) == [4, 8, 11]

    def test_padding_that_changes_answers_is_not_used(self, tmp_path: Path, write_onnx):
        build = mean_build(tmp_path, write_onnx, masked=False, config=PADDED)
        table = trials.times(build, sequences(1, 3), 1, 1)
        assert sorted(table.seconds) == [1, 3]

    def test_needs_a_row(self, tmp_path: Path):
        with pytest.raises(ConfigError, match="at least one row"):
            trials.times(null_build(tmp_path), [], 1, 1)

    def test_a_model_that_fails_says_why(self, tmp_path: Path):
        with pytest.raises(BackendFailed, match="fail_on"):
            trials.times(null_build(tmp_path, fail_on=7), numbers(7), 2, 1)


class TestInspect:
    def test_says_what_was_built(self, tmp_path: Path, write_onnx):
        facts = trials.inspect(mean_build(tmp_path, write_onnx))
        assert facts.backend == "onnxruntime"
        assert facts.operators == {"ReduceSum": 1}
        assert facts.optimised_operators == {"ReduceSum": 1}
        assert facts.built["providers"] == "CPUExecutionProvider"
        assert (facts.batching_problem, facts.padding_problem) == ("", "")

    def test_says_why_rows_must_not_share_a_batch(self, tmp_path: Path, write_onnx):
        facts = trials.inspect(company_build(tmp_path, write_onnx))
        assert "answers depend on what else is in the batch" in facts.batching_problem

    def test_says_why_rows_are_not_padded(self, tmp_path: Path, write_onnx):
        build = mean_build(tmp_path, write_onnx, masked=False, config=PADDED)
        assert "padding changes answers" in trials.inspect(build).padding_problem

    def test_a_build_that_cannot_be_loaded_says_why(self, tmp_path: Path, write_onnx):
        build = mean_build(tmp_path, write_onnx)
        build.artifact.write_bytes(b"")
        with pytest.raises(BackendFailed):
            trials.inspect(build)


LINEAR = """
import torch

def factory():
    torch.manual_seed(0)
    return torch.nn.Linear(1, 1)
"""
COMPILED = """
backend: "pytorch" max_batch_size: 2 dynamic_batching { } default_model_filename: "module.py"
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
instance_group { kind: KIND_CPU }
parameters { key: "penstock.compile" value { string_value: "default" } }
"""


class TestKeep:
    def test_nothing_where_nothing_is_compiled(self, tmp_path):
        build = null_build(tmp_path)
        assert trials.keep_compiled(build) == 0
        assert list(build.version_folder.iterdir()) == []

    @pytest.mark.slow
    @pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
    def test_what_was_compiled_and_not_in_the_build_it_was_linked_from(self, tmp_path):
        torch = pytest.importorskip("torch")
        save_file = pytest.importorskip("safetensors.torch").save_file
        version = tmp_path / "model" / "1"
        version.mkdir(parents=True)
        (version / "module.py").write_text(LINEAR)
        save_file(torch.nn.Linear(1, 1).state_dict(), version / "model.safetensors")
        (tmp_path / "model" / "config.pbtxt").write_text(COMPILED)
        (tmp_path / "parents").write_bytes(b"of another build")
        (version / "compiled.bin").hardlink_to(tmp_path / "parents")
        assert trials.keep_compiled(read(tmp_path / "model")) > 1000
        assert (version / "compiled.bin").stat().st_size > 1000
        assert (tmp_path / "parents").read_bytes() == b"of another build"
