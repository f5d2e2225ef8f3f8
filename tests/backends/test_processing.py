"""Functions around a model: rows in, the model's inputs out, its outputs in, answers out, in the
order of rows."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from doubles import Puppets, RecordingSink
from onnx import TensorProto, helper

import penstock
from penstock.backends import Batch, PerRequest, Runner, backend
from penstock.backends.finished import Finished
from penstock.backends.processing import apply, apply_after
from penstock.config import ModelConfig, Padding, Postprocess, Preprocess
from penstock.errors import BackendFailed, ConfigError, PenstockError
from penstock.repository import layout, pbtxt, versions
from penstock.serving.model import Model
from penstock.serving.proof import apply_proof, prove
from penstock.types import Request, TensorSpec, from_array
from penstock.wire.frames import Proof, RequestPart

# Words become their lengths; "bad" is a text that cannot be understood.
CODE = """
import time

import numpy as np


def encode(inputs):
    words = inputs["text"][0].decode().split()
    if "bad" in words:
        raise ValueError("a bad word")
    return {
        "ids": np.array([len(word) for word in words], np.int64),
        "mask": np.ones(len(words), np.int64),
    }


def slow(inputs):
    end = time.perf_counter() + 0.02
    while time.perf_counter() < end:
        pass
    return encode(inputs)


def wrong_type(inputs):
    return {"ids": np.zeros(2, np.float32), "mask": np.ones(2, np.int64)}


def nothing(inputs):
    return None


# Behind the model. A word of nine letters is one that nobody may hear of.
def describe(outputs):
    each = outputs["each"]
    if 10 in each:
        raise ValueError("an unspeakable word")
    return {"text": np.array([f"{len(each)} words, {outputs['total'][0]}"]), "each": each[:1]}


def slow_describe(outputs):
    end = time.perf_counter() + 0.02
    while time.perf_counter() < end:
        pass
    return describe(outputs)


def long_each(outputs):
    return {"text": np.array([b"x"]), "each": outputs["each"]}


def no_text(outputs):
    return {"text": outputs["each"][:1], "each": outputs["each"][:1]}
"""
CONFIG = """
backend: "onnxruntime"
max_batch_size: 8
input { name: "text" data_type: TYPE_STRING dims: 1 }
output { name: "total" data_type: TYPE_INT64 dims: 1 }
output { name: "each" data_type: TYPE_INT64 dims: -1 }
dynamic_batching { }
"""
INPUTS = "ids:INT64[-1], mask:INT64[-1]"
OUTPUTS = "total:INT64[1], each:INT64[-1]"
# Between both functions, and with the one behind it alone.
SENT = 'input { name: "text" data_type: TYPE_STRING dims: 1 }'
TOKENS = """
input { name: "ids" data_type: TYPE_INT64 dims: -1 }
input { name: "mask" data_type: TYPE_INT64 dims: -1 }
"""
AFTER = """
backend: "onnxruntime"
max_batch_size: 8
output { name: "text" data_type: TYPE_STRING dims: 1 }
output { name: "each" data_type: TYPE_INT64 dims: 1 }
dynamic_batching { }
"""


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "penstock.{key}" value {{ string_value: "{value}" }} }}\n'


def write_model(path: Path, mask_power: int = 1) -> None:
    """each = ids * mask, total = their sum; without the mask padding changes the total."""

    def value(name: str, *shape: object) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.INT64, shape)

    other = "mask" if mask_power else "ones"
    nodes = [
        helper.make_node("Mul", ["mask", "zero"], ["zeros"]),
        helper.make_node("Add", ["zeros", "one"], ["ones"]),
        helper.make_node("Add", ["ids", "one"], ["more"]),
        helper.make_node("Mul", ["more", other], ["each"]),
        helper.make_node("ReduceSum", ["each", "axes"], ["total"], keepdims=1),
    ]
    constants = [
        helper.make_tensor("zero", TensorProto.INT64, [1], [0]),
        helper.make_tensor("one", TensorProto.INT64, [1], [1]),
        helper.make_tensor("axes", TensorProto.INT64, [1], [1]),
    ]
    graph = helper.make_graph(
        nodes,
        "model",
        [value("ids", "n", "s"), value("mask", "n", "s")],
        [value("total", "n", 1), value("each", "n", "s")],
        constants,
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)


def folder(root: Path, function: str = "encode", mask_power: int = 1, more: str = "") -> Path:
    version = root / "model" / "1"
    version.mkdir(parents=True)
    (version / "code.py").write_text(CODE)
    write_model(version / "model.onnx", mask_power)
    text = CONFIG + parameter("preprocess", f"code.py:{function}")
    text += parameter("model_inputs", INPUTS) + more
    (root / "model" / "config.pbtxt").write_text(text)
    return root / "model"


def folder_after(
    root: Path, after: str = "describe", before: str = "encode", more: str = ""
) -> Path:
    """With a function behind the model, and one before it unless that is empty."""
    path = folder(root)
    text = AFTER + (SENT if before else TOKENS) + more
    if before:
        text += parameter("preprocess", f"code.py:{before}") + parameter("model_inputs", INPUTS)
    text += parameter("postprocess", f"code.py:{after}") + parameter("model_outputs", OUTPUTS)
    (path / "config.pbtxt").write_text(text)
    return path


PAD = parameter("pad", "ids[0]=0, mask[0]=0") + parameter("pad_buckets", "4,8")


def config_of(path: Path) -> ModelConfig:
    found = layout.read(path)
    assert found.problems == {}
    return found.configs[0]


def loaded(path: Path) -> Runner:
    config = config_of(path)
    runner = backend(config.backend)(config)
    prove(config, runner)
    return runner


def texts(*values: str) -> np.ndarray:
    return np.array([[value.encode()] for value in values], object)


def run(runner: Runner, *values: str) -> PerRequest:
    parts = [RequestPart("", 1) for _ in values]
    (answer,) = runner.start(Batch({"text": texts(*values)}, len(values), parts)).wait()
    assert isinstance(answer, PerRequest)
    return answer


class Spy:
    """A runner that remembers the shapes it ran."""

    needs_requests = False
    keeps_rows_apart = False
    runs_ahead = False
    inputs = ()

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.outputs = inner.outputs
        self.shapes: list[tuple[int, ...]] = []

    def built(self):
        return self.inner.built()

    def start(self, batch: Batch):
        self.shapes.append(batch.inputs["ids"].shape)
        return self.inner.start(batch)

    def close(self) -> None:
        self.inner.close()


def test_rows_of_different_lengths_are_computed_by_bucket_and_cut_back(tmp_path: Path) -> None:
    runner = loaded(folder(tmp_path, more=PAD))
    runner.inner = spy = Spy(runner.inner)
    sent = ["a", "aa aa aa aa aa", "aaa aa a", "a a a a a a a a a"]
    answer = run(runner, *sent)
    # 1 and 3 words share a bucket, 9 words are longer than the last one.
    assert sorted(spy.shapes) == [(1, 8), (1, 9), (2, 4)]
    for text, outputs in zip(sent, answer.answers, strict=True):
        expected = [len(word) + 1 for word in text.split()]
        assert outputs["each"].tolist() == [expected]
        assert outputs["total"].tolist() == [[sum(expected)]]
    runner.close()


class Reusing(Spy):
    """As a GPU's: all answers lie in the same memory, one after the other."""

    runs_ahead = True

    def __init__(self, inner: Runner) -> None:
        super().__init__(inner)
        self._memory = np.zeros(64, np.int64)

    def start(self, batch: Batch):
        (answer,) = self.inner.start(batch).wait()
        views = {}
        begin = 0
        for name, values in answer.items():
            views[name] = self._memory[begin : begin + values.size].reshape(values.shape)
            views[name][:] = values
            begin += values.size
        return Finished(views)


def test_answers_outlive_the_next_run_of_the_model(tmp_path: Path) -> None:
    runner = loaded(folder(tmp_path))
    runner.inner = Reusing(runner.inner)
    sent = ["aaaa", "a a", "aa aa aa", "aaa", "a a a a"]
    for text, outputs in zip(sent, run(runner, *sent).answers, strict=True):
        assert outputs["each"].tolist() == [[len(word) + 1 for word in text.split()]]
    runner.close()


def test_a_model_that_padding_changes_is_run_by_length(tmp_path: Path) -> None:
    path = folder(tmp_path, mask_power=0, more=PAD)
    config = config_of(path)
    runner = backend(config.backend)(config)
    proof = prove(config, runner)
    assert proof.unpadded.startswith("padding changes answers")
    answer = run(runner, "a", "aaa aa a")
    assert [each["total"].tolist() for each in answer.answers] == [[[2]], [[9]]]
    runner.close()


def test_one_bad_text_fails_its_own_request_only(tmp_path: Path) -> None:
    runner = loaded(folder(tmp_path, more=PAD))
    answer = run(runner, "good one", "a bad one")
    assert answer.answers[0]["total"].tolist() == [[4 + 1 + 3 + 1]]
    assert str(answer.answers[1]) == "a bad word"
    runner.close()


class Choosy(Spy):
    """A model that has no row in its table for some tokens, as embeddings have."""

    def start(self, batch: Batch):
        if (batch.inputs["ids"] > 5).any():
            raise BackendFailed("index 6 is out of bounds")
        return super().start(batch)


def test_one_text_that_the_model_does_not_take_fails_its_own_request_only(tmp_path: Path) -> None:
    runner = loaded(folder(tmp_path, more=PAD))
    runner.inner = Choosy(runner.inner)
    # The first two share a bucket, and a batch.
    answer = run(runner, "good one", "a foreigner", "a longer one of all")
    assert answer.answers[0]["total"].tolist() == [[4 + 1 + 3 + 1]]
    assert str(answer.answers[1]) == "index 6 is out of bounds"
    assert isinstance(answer.answers[2], BackendFailed)
    assert run(runner, "all five of them here").answers[0]["total"].tolist() == [[17 + 5]]
    runner.close()


def test_an_earlier_proof_will_do(tmp_path: Path) -> None:
    """As for a worker that takes the place of one that died."""
    config = config_of(folder(tmp_path, more=PAD))
    runner = backend(config.backend)(config)
    apply_proof(runner, Proof(crops=(("each", 0),)))
    assert run(runner, "a", "a aa").answers[0]["each"].tolist() == [[2]]
    runner.inner = spy = Spy(runner.inner)
    run(runner, "a", "a aa")
    assert spy.shapes == [(2, 4)]
    runner.close()


def test_time_of_the_function_is_told_apart(tmp_path: Path) -> None:
    runner = loaded(folder(tmp_path))
    execution = runner.start(Batch({"text": texts("a")}, 1))
    assert 0 < execution.prepare_s < 60
    assert runner.built()["preprocess"] == "code.py:encode"
    runner.close()


def test_a_batch_without_requests_has_one_answer(tmp_path: Path) -> None:
    runner = loaded(folder(tmp_path, more=PAD))
    (answer,) = runner.start(Batch({"text": texts("a aa", "aaa a")}, 2)).wait()
    assert answer["each"].tolist() == [[2, 3], [4, 2]]
    with pytest.raises(BackendFailed, match="different shapes; send them apart"):
        runner.start(Batch({"text": texts("a aa", "a")}, 2))
    runner.close()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("wrong_type", "code.py:wrong_type: 'ids' is float32, expected int64"),
        ("nothing", "code.py:nothing: expected arrays by name, got NoneType"),
    ],
)
def test_what_the_model_does_not_take_is_told(tmp_path: Path, function: str, text: str) -> None:
    runner = loaded(folder(tmp_path, function))
    assert str(run(runner, "a").answers[0]) == text
    runner.close()


def test_a_function_that_is_not_there_is_refused_at_load(tmp_path: Path) -> None:
    config = config_of(folder(tmp_path, "absent"))
    with pytest.raises(ConfigError, match=r"1/code.py: no function absent"):
        backend(config.backend)(config)


def test_apply_gives_what_the_model_sees(tmp_path: Path) -> None:
    config = config_of(folder(tmp_path))
    (row,) = apply(config, [{"text": texts("aaa a")[0]}])
    assert row["ids"].tolist() == [3, 1]
    assert apply(config.model, [row])[0]["ids"] is row["ids"]


def test_what_users_get_is_made_of_what_the_model_gives(tmp_path: Path) -> None:
    """Row by row and without the padding that rows were computed with."""
    runner = loaded(folder_after(tmp_path, more=PAD))
    runner.inner = spy = Spy(runner.inner)
    answer = run(runner, "a", "aaa aa a")
    assert spy.shapes == [(2, 4)]
    assert [each["text"].tolist() for each in answer.answers] == [
        [["1 words, 2"]],
        [["3 words, 9"]],
    ]
    assert [each["each"].tolist() for each in answer.answers] == [[[2]], [[4]]]
    assert runner.built()["preprocess"] == "code.py:encode"
    assert runner.built()["postprocess"] == "code.py:describe"
    runner.close()


def tokens(*lengths: int, bucket: int) -> dict[str, np.ndarray]:
    """Rows of so many tokens 1, filled up."""
    mask = np.array([[n < length for n in range(bucket)] for length in lengths], np.int64)
    return {"ids": mask, "mask": mask}


def test_padding_of_the_server_is_cut_before_the_function_sees_it(tmp_path: Path) -> None:
    runner = loaded(folder_after(tmp_path, before="", more=PAD))
    runner.inner = spy = Spy(runner.inner)
    parts = [RequestPart("", 1, length=3), RequestPart("", 2, length=1), RequestPart("", 1)]
    batch = Batch(tokens(3, 1, 1, 4, bucket=4), 4, parts)
    execution = runner.start(batch)
    (answer,) = execution.wait()
    assert isinstance(answer, PerRequest)
    texts_of = [each["text"].ravel().tolist() for each in answer.answers]
    assert texts_of == [["3 words, 6"], ["1 words, 2"] * 2, ["4 words, 8"]]
    # In one batch, as it came.
    assert spy.shapes == [(4, 4)]
    assert execution.prepare_s == 0
    runner.close()


def test_a_function_behind_the_model_fails_its_own_request_only(tmp_path: Path) -> None:
    runner = loaded(folder_after(tmp_path, more=PAD))
    answer = run(runner, "good", "ninechars", "bad")
    assert answer.answers[0]["each"].tolist() == [[5]]
    assert str(answer.answers[1]) == "an unspeakable word"
    assert str(answer.answers[2]) == "a bad word"
    runner.close()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("long_each", "code.py:long_each: 'each' has shape [2], expected [1]"),
        ("no_text", "code.py:no_text: 'text' is int64, expected object"),
        ("encode", "'text'"),
        ("nothing", "code.py:nothing: expected arrays by name, got NoneType"),
    ],
)
def test_answers_that_were_not_promised_are_told(tmp_path: Path, function: str, text: str) -> None:
    runner = loaded(folder_after(tmp_path, function))
    assert text in str(run(runner, "a aa").answers[0])
    runner.close()


def test_a_model_without_a_batch_dimension_has_functions_too(tmp_path: Path) -> None:
    """They get what the model takes and gives, with the 1 that stands for its batch."""
    path = folder(tmp_path)
    code = (
        CODE
        + """

def whole(outputs):
    return {"sum": outputs["total"].sum(axis=1)}
"""
    )
    (path / "1" / "code.py").write_text(code)
    config = """
backend: "onnxruntime"
input { name: "ids" data_type: TYPE_INT64 dims: [ 1, -1 ] }
input { name: "mask" data_type: TYPE_INT64 dims: [ 1, -1 ] }
output { name: "sum" data_type: TYPE_INT64 dims: 1 }
"""
    config += parameter("postprocess", "code.py:whole")
    config += parameter("model_outputs", "total:INT64[1,1], each:INT64[1,-1]")
    (path / "config.pbtxt").write_text(config)
    with penstock.load(str(path)) as model:
        assert model.infer(tokens(3, bucket=3))["sum"].tolist() == [6]


def test_apply_after_gives_what_users_get(tmp_path: Path) -> None:
    config = config_of(folder_after(tmp_path))
    outputs = {"total": np.array([7]), "each": np.array([3, 4])}
    (row,) = apply_after(config, [outputs])
    assert row["text"].tolist() == ["2 words, 7"]
    assert apply_after(config.model, [outputs])[0]["each"] is outputs["each"]


def test_both_are_served_like_any_model(tmp_path: Path) -> None:
    with penstock.load(str(folder_after(tmp_path / "both", more=PAD))) as model:
        answer = model.infer({"text": texts("aaa aa", "a")})
        assert answer["text"].tolist() == [[b"2 words, 7"], [b"1 words, 2"]]
        with pytest.raises(PenstockError, match="an unspeakable word"):
            model.infer({"text": texts("ninechars")})
    # Filled up by the server: there are buckets of 4 and 8.
    with penstock.load(str(folder_after(tmp_path / "one", before="", more=PAD))) as model:
        assert model.infer(tokens(3, bucket=3))["text"].tolist() == [[b"3 words, 6"]]
        assert model.infer(tokens(5, 5, bucket=5))["text"].tolist() == [[b"5 words, 10"]] * 2


def test_it_is_served_like_any_model(tmp_path: Path) -> None:
    """The same worker and batcher as the server's."""
    with penstock.load(str(folder(tmp_path, more=PAD))) as model:
        answer = model.infer({"text": texts("aaa aa")})
        assert answer["each"].tolist() == [[4, 3]]
        with pytest.raises(PenstockError, match="a bad word"):
            model.infer({"text": texts("bad")})


def answered(config: ModelConfig, *values: str) -> Request:
    """By the server's own model and worker loop."""
    request = Request(RecordingSink(), [from_array("text", "BYTES", texts(*values))], 0.0)

    async def main() -> None:
        puppets = Puppets()
        model = Model(config, start_life=puppets)
        starting = asyncio.ensure_future(model.start())
        await puppets.step_all()
        await starting
        model.submit(request)
        await puppets.step_all()
        closing = asyncio.ensure_future(model.close())
        while not closing.done():
            await puppets.step_all()
        await closing

    asyncio.run(main())
    return request


def test_its_time_counts_as_input_and_not_as_the_model(tmp_path: Path) -> None:
    request = answered(config_of(folder(tmp_path, "slow")), "a", "aa")
    assert request.sink.outputs[0]["total"].tolist() == [[2], [3]]
    # Two rows, one after the other.
    assert request.timings.compute_input_s >= 0.04
    assert request.timings.compute_infer_s > 0


def test_time_behind_the_model_counts_as_output(tmp_path: Path) -> None:
    request = answered(config_of(folder_after(tmp_path, "slow_describe")), "a", "aa")
    assert request.sink.outputs[0]["each"].tolist() == [[2], [3]]
    assert request.timings.compute_output_s >= 0.04
    assert request.timings.compute_infer_s > 0


def test_a_version_with_both_is_committed_with_both(tmp_path: Path) -> None:
    config = config_of(folder_after(tmp_path / "work", more=PAD))
    (tmp_path / "models").mkdir()
    source = Path(config.artifact).parent
    versions.commit(tmp_path / "models", "texts", source, replace(config, name="texts"))
    with penstock.load(str(tmp_path / "models" / "texts")) as model:
        assert model.config.postprocess == config.postprocess
        assert model.infer({"text": texts("aaa")})["text"].tolist() == [[b"1 words, 4"]]


def test_it_is_part_of_a_committed_version(tmp_path: Path) -> None:
    config = config_of(folder(tmp_path / "work", more=PAD))
    (tmp_path / "models").mkdir()
    source = Path(config.artifact).parent
    versions.commit(tmp_path / "models", "texts", source, replace(config, name="texts"))
    with penstock.load(str(tmp_path / "models" / "texts")) as model:
        assert model.config.preprocess == config.preprocess
        assert model.infer({"text": texts("aaa")})["total"].tolist() == [[4]]


def test_configuration_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = folder(tmp_path, more=PAD)
    config = config_of(path)
    specs = (TensorSpec("ids", "INT64", (-1,)), TensorSpec("mask", "INT64", (-1,)))
    assert config.padding is None
    assert config.preprocess is not None
    assert config.preprocess == Preprocess("code.py:encode", specs, config.model.padding)
    assert isinstance(config.model.padding, Padding)
    assert (config.model.inputs, config.model.preprocess) == (specs, None)
    (path / "config.pbtxt").write_text(pbtxt.write(config))
    assert config_of(path) == replace(config)


def test_what_the_model_gives_reads_back_as_it_was_written(tmp_path: Path) -> None:
    for before in ("encode", ""):
        path = folder_after(tmp_path / f"with {before}", before=before, more=PAD)
        config = config_of(path)
        specs = (TensorSpec("total", "INT64", (1,)), TensorSpec("each", "INT64", (-1,)))
        assert config.postprocess == Postprocess("code.py:describe", specs)
        assert (config.padding is None) == bool(before)
        # Both see the same model.
        assert [spec.name for spec in config.model.inputs] == ["ids", "mask"]
        assert (config.model.outputs, config.model.padding is None) == (specs, False)
        assert not config.model.is_processed and config.is_processed
        assert config.without_postprocess.preprocess == config.preprocess
        (path / "config.pbtxt").write_text(pbtxt.write(config))
        assert config_of(path) == config


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (parameter("preprocess", "code.py"), "parameters.penstock.preprocess: 'code.py': expected"),
        (parameter("preprocess", "other.py:f"), "1/other.py: no such file"),
        (parameter("model_inputs", "ids"), "parameters.penstock.model_inputs: 'ids': expected"),
        (parameter("model_inputs", "ids:INT65[2]"), "'ids:INT65[2]': expected what the model"),
        (parameter("model_inputs", "ids:INT64[0]"), "'ids:INT64[0]': expected what the model"),
        (parameter("pad", "text[0]"), "no input 'text'; there are ids, mask"),
        (parameter("postprocess", "code.py"), "parameters.penstock.postprocess: 'code.py'"),
        (parameter("postprocess", "no.py:f"), "1/no.py: no such file"),
        (parameter("postprocess", "code.py:describe"), "penstock.model_outputs: '': expected what"),
        (parameter("model_outputs", "total:INT64[1]"), "penstock.postprocess: '': expected FILE"),
        (parameter("model_outputs", "t:INT64[1], t:FP32[]"), "'t' is given 2 times"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(tmp_path: Path, more: str, problem: str) -> None:
    path = folder(tmp_path, more=more)
    (problems,) = layout.read(path).problems.values()
    assert any(problem in each for each in problems), problems
