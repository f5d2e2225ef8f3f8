"""The Python backend: three forms of model.py, requests by themselves, errors with their line."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import dedent, indent

import numpy as np
import pytest
from doubles import Puppets, RecordingSink
from suites.backend import (
    MAX_BATCH,
    ArtifactContract,
    BackendContract,
    assert_same,
    echo_specs,
    model_config,
    run,
    values,
)

import penstock
from penstock.backends import Batch, Outputs, PerRequest, Runner, backend
from penstock.config import BatchPolicy, MemoryPolicy, ModelConfig
from penstock.errors import BackendFailed, ConfigError
from penstock.serving.model import Model
from penstock.types import Array, Request, RequestedOutput, TensorSpec, from_array
from penstock.wire.frames import RequestPart

ECHO_FUNCTION = """
def infer(inputs):
    return {"y" + name[1:]: array for name, array in inputs.items()}
"""
ECHO_CLASS = """
class Model:
    def __init__(self, config):
        self.names = {a.name: b.name for a, b in zip(config.inputs, config.outputs)}

    def load(self):
        self.is_loaded = True

    def infer(self, inputs):
        assert self.is_loaded
        return {self.names[name]: array for name, array in inputs.items()}
"""
TRITON = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

def respond(**arrays):
    tensors = [pb_utils.Tensor(name, array) for name, array in arrays.items()]
    return pb_utils.InferenceResponse(tensors)

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request, request.inputs()[0].as_numpy()) for request in requests]

"""


def triton(methods: str) -> str:
    """A TritonPythonModel with these methods, `answer(self, request, x)` among them."""
    return TRITON + indent(dedent(methods), "    ")


ECHO_TRITON = triton("""
    def answer(self, request, x):
        return respond(**{"y" + x.name()[1:]: x.as_numpy() for x in request.inputs()})
""")
ECHO_Y = triton("""
    def answer(self, request, x):
        return respond(y=x)
""")
ADD_SUB = """
import json
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.model_config = json.loads(args["model_config"])
        config0 = pb_utils.get_output_config_by_name(self.model_config, "OUTPUT0")
        config1 = pb_utils.get_output_config_by_name(self.model_config, "OUTPUT1")
        self.dtype0 = pb_utils.triton_string_to_numpy(config0["data_type"])
        self.dtype1 = pb_utils.triton_string_to_numpy(config1["data_type"])

    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            total = pb_utils.Tensor("OUTPUT0", (a + b).astype(self.dtype0))
            difference = pb_utils.Tensor("OUTPUT1", (a - b).astype(self.dtype1))
            responses.append(pb_utils.InferenceResponse(output_tensors=[total, difference]))
        return responses

    def finalize(self):
        pass
"""
FAILS_ON_SEVEN = """
def infer(inputs):
    if (inputs["x0"] == 7).any():
        raise ValueError("a seven")
    return {"y0": inputs["x0"]}
"""


def write(folder: Path, code: str) -> Path:
    path = folder / "1" / "model.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(code))
    return path


def python_config(
    folder: Path,
    code: str,
    inputs: Sequence[TensorSpec] = (TensorSpec("x", "INT64", (2,)),),
    outputs: Sequence[TensorSpec] = (TensorSpec("y", "INT64", (2,)),),
    max_batch_size: int = 8,
    **options: str,
) -> ModelConfig:
    return model_config("python", write(folder, code), inputs, outputs, max_batch_size, options)


def load(config: ModelConfig) -> Runner:
    return backend("python")(config)


def answers_of(runner: Runner, inputs: dict[str, Array], *parts: RequestPart) -> PerRequest:
    num_rows = sum(part.num_rows for part in parts)
    [answers] = runner.start(Batch(inputs, num_rows, parts)).wait()
    assert isinstance(answers, PerRequest)
    return answers


def problem_of(folder: Path, code: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(python_config(folder, code))
    [problem] = caught.value.problems
    assert problem.startswith("1/model.py: ")
    assert len(problem.splitlines()) == 1
    return problem


class PythonContract(BackendContract):
    backend_name = "python"
    echo = ""

    def echo_config(
        self,
        folder: Path,
        datatype: str = "FP32",
        row_shape: Sequence[int] = (3,),
        max_batch_size: int = MAX_BATCH,
        num_tensors: int = 1,
    ) -> ModelConfig:
        specs = echo_specs(datatype, row_shape, num_tensors)
        return python_config(folder, self.echo, *specs, max_batch_size)

    def failing_model(self, folder: Path) -> tuple[ModelConfig, Batch, Batch]:
        config = python_config(folder, FAILS_ON_SEVEN, *echo_specs("INT64", (1,)))
        bad, good = (Batch({"x0": np.array([[1], [last]])}, 2) for last in (7, 2))
        return config, bad, good


class TestFunction(PythonContract, ArtifactContract):
    echo = ECHO_FUNCTION

    def good_artifact(self, folder: Path) -> Path:
        """Not a character of it can be missing."""
        path = folder / "good.py"
        path.write_text('infer = (lambda inputs: {"y0": inputs["x0"]})')
        return path

    def artifact_config(self, artifact: Path) -> ModelConfig:
        return model_config("python", artifact, *echo_specs("FP32", (3,)))


class TestClass(PythonContract):
    echo = ECHO_CLASS


class TestTritonModel(PythonContract):
    echo = ECHO_TRITON

    def failing_model(self, folder: Path) -> tuple[ModelConfig, Batch, Batch]:
        code = triton("""
            def answer(self, request, x):
                assert 7 not in x, "a seven"
                return respond(y0=x)
        """)
        _, bad, good = super().failing_model(folder)
        return python_config(folder, code, *echo_specs("INT64", (1,))), bad, good


# Triton's interface


def test_add_sub_as_triton_users_write_it(tmp_path: Path) -> None:
    names = ("INPUT", "OUTPUT")
    specs = [[TensorSpec(f"{name}{i}", "FP32", (4,)) for i in (0, 1)] for name in names]
    runner = load(python_config(tmp_path, ADD_SUB, *specs))
    a, b = values("INT8", (3, 4)).astype(np.float32), values("INT8", (3, 4), 1).astype(np.float32)
    answers = answers_of(runner, {"INPUT0": a, "INPUT1": b}, RequestPart("", 1), RequestPart("", 2))
    for rows, outputs in zip((slice(0, 1), slice(1, 3)), answers.answers, strict=True):
        assert_same(outputs["OUTPUT0"], (a + b)[rows], "FP32")
        assert_same(outputs["OUTPUT1"], (a - b)[rows], "FP32")
    runner.close()


SEES = triton("""
    def initialize(self, args):
        self.args = args

    def answer(self, request, x):
        tensor = pb_utils.get_input_tensor_by_name(request, "x")
        seen = {
            "id": request.request_id(),
            "parameters": request.parameters(),
            "outputs": request.requested_output_names(),
            "model": [request.model_name(), request.model_version()],
            "correlation": request.correlation_id(),
            "cancelled": request.is_cancelled(),
            "args": self.args,
            "x": [tensor.shape(), tensor.triton_dtype(), tensor.is_cpu(), x.tolist()],
        }
        return respond(y=np.array([[json.dumps(seen)]] * len(x)))
""")


def test_a_request_shows_its_id_parameters_outputs_and_rows(tmp_path: Path) -> None:
    text = TensorSpec("y", "BYTES", (1,))
    runner = load(python_config(tmp_path, SEES, outputs=[text], flavour="sweet"))
    first = RequestPart("one", 1, parameters={"k": 1, "t": "é", "b": True})
    x = np.arange(6).reshape(3, 2)
    answers = answers_of(runner, {"x": x}, first, RequestPart("two", 2, outputs=("y",)))
    one, two = (json.loads(str(outputs["y"][0, 0])) for outputs in answers.answers)
    assert (one["id"], two["id"]) == ("one", "two")
    assert json.loads(one["parameters"]) == {"k": 1, "t": "é", "b": True}
    assert json.loads(two["parameters"]) == {}
    assert one["outputs"] == two["outputs"] == ["y"]
    assert one["model"] == ["model", 1]
    assert (one["correlation"], one["cancelled"]) == (0, False)
    assert one["x"] == [[1, 2], 9, True, [[0, 1]]]
    assert two["x"][3] == [[2, 3], [4, 5]]
    runner.close()
    arguments = one["args"]
    config_json = json.loads(arguments.pop("model_config"))
    assert config_json["max_batch_size"] == 8
    assert config_json["input"][0]["dims"] == [2]
    assert config_json["input"][0]["data_type"] == "TYPE_INT64"
    assert config_json["parameters"]["flavour"] == {"string_value": "sweet"}
    assert arguments == {
        "model_name": "model",
        "model_version": "1",
        "model_repository": str(tmp_path),
        "model_instance_name": "model_0_0",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
    }


def test_rows_of_a_request_are_views_of_the_stacked_input(tmp_path: Path) -> None:
    runner = load(python_config(tmp_path, ECHO_Y))
    x = values("INT64", (3, 2))
    answers = answers_of(runner, {"x": x}, RequestPart("", 1), RequestPart("", 2))
    assert all(np.shares_memory(outputs["y"], x) for outputs in answers.answers)


CONCURRENT = """
import asyncio
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    async def execute(self, requests):
        self.all_here = asyncio.Barrier(len(requests))
        return await asyncio.gather(*map(self.answer, requests))

    async def answer(self, request):
        await self.all_here.wait()
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", request.inputs()[0].as_numpy())])
"""


def test_async_execute_awaits_for_its_requests_at_the_same_time(tmp_path: Path) -> None:
    runner = load(python_config(tmp_path, CONCURRENT))
    for seed in range(3):
        x = values("INT64", (4, 2), seed)
        answers = answers_of(runner, {"x": x}, *[RequestPart("", 1)] * 4)
        np.testing.assert_array_equal(np.concatenate([o["y"] for o in answers.answers]), x)
    runner.close()


def test_async_infer_of_our_own_forms(tmp_path: Path) -> None:
    code = """
    import asyncio

    class Model:
        async def load(self):
            self.lock = asyncio.Lock()
        async def infer(self, inputs):
            async with self.lock:
                return {"y": inputs["x"] + 1}
        async def close(self):
            await asyncio.to_thread(print, "closed")
    """
    runner = load(python_config(tmp_path, code))
    assert run(runner, {"x": np.zeros((1, 2), np.int64)}, 1)["y"].tolist() == [[1, 1]]
    runner.close()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_an_async_model_runs_on_after_it_raised(tmp_path: Path, error: type[BaseException]) -> None:
    code = f"""
    import asyncio

    async def infer(inputs):
        await asyncio.sleep(0)
        if inputs["x"].any():
            raise {"asyncio." if error is asyncio.CancelledError else ""}{error.__name__}
        return {{"y": inputs["x"]}}
    """
    runner = load(python_config(tmp_path, code))
    for _ in range(2):
        with pytest.raises(error):
            run(runner, {"x": np.ones((1, 2), np.int64)}, 1)
        assert run(runner, {"x": np.zeros((1, 2), np.int64)}, 1)["y"].tolist() == [[0, 0]]
    runner.close()


@pytest.mark.parametrize("error", ["SystemExit(1)", "KeyboardInterrupt", "ValueError('\\ud800')"])
def test_an_error_while_a_model_is_closed_is_logged(tmp_path: Path, caplog, error: str) -> None:
    code = f"""
    class Model:
        def infer(self, inputs):
            return {{"y": inputs["x"]}}
        def close(self):
            raise {error}
    """
    load(python_config(tmp_path, code)).close()
    assert "the model failed while it was closed" in caplog.text


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("None", "expected an InferenceResponse, got NoneType"),
        ("pb_utils.InferenceResponse(error=pb_utils.TritonError('no luck'))", "no luck"),
    ],
)
def test_a_response_that_is_none_fails_its_request_only(
    tmp_path: Path, answer: str, words: str
) -> None:
    code = triton(f"""
        def answer(self, request, x):
            return {answer} if request.request_id() == "b" else respond(y=x)
    """)
    runner = load(python_config(tmp_path, code))
    parts = [RequestPart(name, 1) for name in "abc"]
    answers = answers_of(runner, {"x": values("INT64", (3, 2))}, *parts).answers
    assert [isinstance(outputs, BackendFailed) for outputs in answers] == [False, True, False]
    assert words in str(answers[1])


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("[]", "expected 2 responses to 2 requests, got 0"),
        ("[None] * 3", "expected 2 responses to 2 requests, got 3"),
        ("None", "expected 2 responses to 2 requests, got NoneType"),
    ],
)
def test_a_wrong_number_of_responses_names_both(tmp_path: Path, returned: str, words: str) -> None:
    code = (
        f"class TritonPythonModel:\n    def execute(self, requests):\n        return {returned}\n"
    )
    runner = load(python_config(tmp_path, code))
    parts = [RequestPart("", 1)] * 2
    with pytest.raises(BackendFailed, match=words):
        answers_of(runner, {"x": values("INT64", (2, 2))}, *parts)


@pytest.mark.parametrize(
    ("form", "method"), [("TritonPythonModel", "finalize"), ("Model", "close")]
)
def test_the_models_own_end_is_called_once_at_close(tmp_path: Path, form: str, method: str) -> None:
    code = f"""
    from pathlib import Path

    class {form}:
        execute = infer = lambda self, argument: None
        def {method}(self):
            with Path(__file__).with_name("ended").open("a") as file:
                file.write("x")
            raise OSError("and it fails")
    """
    runner = load(python_config(tmp_path, code))
    ended = tmp_path / "1" / "ended"
    assert not ended.exists()
    runner.close()
    assert ended.read_text() == "x"


# Loading


@pytest.mark.parametrize(
    ("form", "method", "step"),
    [
        ("TritonPythonModel", "initialize(self, args)", "initialize: "),
        ("TritonPythonModel", "__init__(self)", "TritonPythonModel(): "),
        ("Model", "load(self)", "load: "),
        ("Model", "__init__(self, config)", "Model(): "),
    ],
)
def test_error_while_the_model_sets_itself_up_names_step_and_line(
    tmp_path: Path, form: str, method: str, step: str
) -> None:
    code = f"""class {form}:
    execute = infer = print
    def {method}:
        raise KeyError('weights')
    """
    assert f"{step}line 4: KeyError: 'weights'" in problem_of(tmp_path, code)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("", "defines no model; expected class TritonPythonModel, class Model"),
        ("class Model:\n    pass\n", "defines no model"),
        ("infer = 3\n", "defines no model"),
        ("class Model:\n    infer = print\ndef infer(x): ...\n", "class Model and function infer"),
        ("class TritonPythonModel:\n    pass\n", "no method execute"),
    ],
)
def test_a_file_must_hold_one_model(tmp_path: Path, code: str, words: str) -> None:
    assert words in problem_of(tmp_path, code)


def test_an_environment_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"parameters.EXECUTION_ENV_PATH: not supported"):
        load(python_config(tmp_path, ECHO_Y, EXECUTION_ENV_PATH="env.tar.gz"))


def test_a_triton_model_may_have_functions_and_classes_of_any_name(tmp_path: Path) -> None:
    code = ECHO_Y + "\ndef infer(): ...\n\nclass Model:\n    infer = print\n"
    assert load(python_config(tmp_path, code)).needs_requests


def test_files_beside_the_model_can_be_imported_until_it_is_closed(tmp_path: Path) -> None:
    code = """
    import beside_the_model
    from . import beside_the_model as relative
    from .beside_the_model import FACTOR

    assert __file__.endswith("1/model.py")

    def infer(inputs):
        return {"y": inputs["x"] * FACTOR * beside_the_model.FACTOR}
    """
    write(tmp_path, "").with_name("beside_the_model.py").write_text("FACTOR = 3\n")
    before = list(sys.path)
    runner = load(python_config(tmp_path, code))
    assert run(runner, {"x": np.ones((1, 2), np.int64)}, 1)["y"].tolist() == [[9, 9]]
    runner.close()
    assert sys.path == before


def test_a_model_without_constructor_parameters_is_made_without(tmp_path: Path) -> None:
    code = """
    class Model:
        def __init__(self, *, step=1):
            self.step = step

        def infer(self, inputs):
            return {"y": inputs["x"] + self.step}
    """
    runner = load(python_config(tmp_path, code))
    assert run(runner, {"x": np.ones((1, 2), np.int64)}, 1)["y"].tolist() == [[2, 2]]


@pytest.mark.parametrize(
    ("returned", "words"),
    [("None", "infer: expected arrays by name, got NoneType"), ("{'y': [1]}", "'y': .*got list")],
)
def test_infer_must_return_arrays_by_name(tmp_path: Path, returned: str, words: str) -> None:
    runner = load(python_config(tmp_path, f"def infer(inputs):\n    return {returned}\n"))
    with pytest.raises(BackendFailed, match=words):
        run(runner, {"x": np.ones((1, 2), np.int64)}, 1)


# Served: the same with workers on strings


def serve(config: ModelConfig, scenario: Callable[[Model, Puppets], Awaitable[None]]) -> None:
    async def main() -> None:
        puppets = Puppets()
        model = Model(replace(config, batching=BatchPolicy(8, is_dynamic=True)), start_life=puppets)
        starting = asyncio.ensure_future(model.start())
        await puppets.step_all()
        await starting
        await scenario(model, puppets)
        assert model.memory.pool.num_in_use == model.memory.extents.num_held == 0
        closing = asyncio.ensure_future(model.close())
        while not closing.done():
            await puppets.step_all()
        await closing

    asyncio.run(main())


def ask(*rows: Sequence[int], name: str = "", outputs: Sequence[str] = ()) -> Request:
    tensor = from_array("x", "INT64", np.array(rows, np.int64))
    asked = [RequestedOutput(output) for output in outputs]
    return Request(RecordingSink(), [tensor], 0.0, id=name, outputs=asked)


def answer_of(request: Request) -> Outputs | str:
    """The outputs, or the text of the error."""
    sink = request.sink
    assert sink.num_final == len(sink.answers) == 1
    return sink.outputs[0] if sink.outputs else str(sink.error)


RAGGED = triton("""
    def answer(self, request, x):
        if (x < 0).any():
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{x.min()} is negative"))
        num_rows = len(x) + (x == 99).any()
        outputs = {
            "y": np.resize(x * 2, (num_rows, 2)),
            "count": np.full((num_rows, x.max()), x.max()),
        }
        return respond(**{name: outputs[name] for name in request.requested_output_names()})
""")
Y, COUNT = TensorSpec("y", "INT64", (2,)), TensorSpec("count", "INT64", (-1,))


def test_each_request_of_a_batch_has_its_own_shapes_and_errors(tmp_path: Path) -> None:
    async def scenario(model: Model, puppets: Puppets) -> None:
        requests = [ask([1, 2]), ask([-3, 5]), ask([4, 3], [0, 1]), ask([5, 99]), ask([1, 1])]
        for request in requests:
            model.submit(request)
        await puppets.step_all()
        one, negative, two_rows, wrong_rows, last = map(answer_of, requests)
        assert one["y"].tolist() == [[2, 4]]
        assert one["count"].tolist() == [[2, 2]]
        assert negative == "-3 is negative"
        assert two_rows["y"].tolist() == [[8, 6], [0, 2]]
        assert two_rows["count"].tolist() == [[4] * 4] * 2
        assert wrong_rows == "output 'y': shape [2, 2], expected [1, 2]"
        assert last["count"].tolist() == [[1]]
        assert model.metrics.num_executions == 1
        assert (model.metrics.num_success, model.metrics.num_failures["BACKEND"]) == (3, 2)

    serve(python_config(tmp_path, RAGGED, outputs=[Y, COUNT]), scenario)


@pytest.mark.parametrize("shape", [(2,), (-1,)], ids=["fixed", "variable"])
def test_answers_find_their_rows_around_holes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    async def scenario(model: Model, puppets: Puppets) -> None:
        requests = [ask([i, i], [10 * i, 0]) for i in range(1, 7)]
        for request in requests:
            model.submit(request)
        model.cancel(requests[1])
        model.cancel(requests[3])
        await puppets.step_all()
        for i, request in enumerate(requests, 1):
            if i not in (2, 4):
                assert answer_of(request)["y"].tolist() == [[2 * i, 2 * i], [20 * i, 0]]

    inputs, outputs = ([TensorSpec(name, "INT64", shape)] for name in "xy")
    serve(python_config(tmp_path, RAGGED, inputs, outputs), scenario)


def test_a_model_may_give_only_the_outputs_asked_for(tmp_path: Path) -> None:
    async def scenario(model: Model, puppets: Puppets) -> None:
        requests = [ask([1, 2], outputs=[name]) for name in ("y", "count")] + [ask([1, 1])]
        for request in requests:
            model.submit(request)
        await puppets.step_all()
        y, count, both = map(answer_of, requests)
        assert (list(y), list(count), list(both)) == (["y"], ["count"], ["y", "count"])
        assert count["count"].tolist() == [[2, 2]]

    serve(python_config(tmp_path, RAGGED, outputs=[Y, COUNT]), scenario)


def test_when_execute_raises_only_the_guilty_request_fails(tmp_path: Path) -> None:
    code = triton("""
        def answer(self, request, x):
            1 / int(x[0, 0])
            return respond(y=x)
    """)

    async def scenario(model: Model, puppets: Puppets) -> None:
        requests = [ask([i, i]) for i in (2, 0, 1)]
        for request in requests:
            model.submit(request)
        await puppets.step_all()
        good, bad, other = map(answer_of, requests)
        assert (good["y"].tolist(), other["y"].tolist()) == ([[2, 2]], [[1, 1]])
        assert bad == "ZeroDivisionError: division by zero"
        assert model.metrics.num_executions == 2

    serve(python_config(tmp_path, code), scenario)


def test_too_few_responses_fail_every_request_with_the_counts(tmp_path: Path) -> None:
    code = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"

    async def scenario(model: Model, puppets: Puppets) -> None:
        requests = [ask([i, i]) for i in range(3)]
        for request in requests:
            model.submit(request)
        await puppets.step_all()
        for request in requests:
            assert answer_of(request) == "execute: expected 1 responses to 1 requests, got 0"

    serve(python_config(tmp_path, code), scenario)


def test_answers_too_large_together_are_computed_one_by_one(tmp_path: Path) -> None:
    async def scenario(model: Model, puppets: Puppets) -> None:
        requests = [ask([300, i]) for i in range(4)]
        for request in requests:
            model.submit(request)
        await puppets.step_all()
        for request in requests:
            assert answer_of(request)["count"].shape == (1, 300)

    config = python_config(tmp_path, RAGGED, outputs=[Y, COUNT])
    serve(replace(config, memory=MemoryPolicy(spill_bytes=1 << 12)), scenario)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("np.zeros((1, 2))", "output 'y': numpy float64, expected int64 for INT64"),
        ("np.zeros((1, 3), np.int64)", "output 'y': shape [1, 3], expected [1, 2]"),
        ("np.zeros(2, np.int64)", "output 'y': shape [2], expected [1, 2]"),
    ],
)
@pytest.mark.parametrize("form", ["triton", "function"])
def test_an_output_that_is_not_as_configured_is_described(
    tmp_path: Path, form: str, output: str, words: str
) -> None:
    if form == "triton":
        code = triton(f"def answer(self, request, x):\n    return respond(y={output})\n")
    else:
        code = f"""
        import numpy as np

        def infer(inputs):
            is_warm_up = not inputs["x"].any()
            return {{"y": inputs["x"] if is_warm_up else {output}}}
        """

    async def scenario(model: Model, puppets: Puppets) -> None:
        request = ask([1, 1])
        model.submit(request)
        await puppets.step_all()
        assert answer_of(request) == words

    serve(python_config(tmp_path, code), scenario)


def test_a_triton_model_sees_no_request_that_nobody_sent(tmp_path: Path) -> None:
    """Zeros would be one: the model counts, and the first that it sees is ours."""
    code = triton("""
        count = 0
        def answer(self, request, x):
            self.count += 1
            return respond(y=x + self.count)
    """)

    async def scenario(model: Model, puppets: Puppets) -> None:
        request = ask([0, 0])
        model.submit(request)
        await puppets.step_all()
        assert answer_of(request)["y"].tolist() == [[1, 1]]

    serve(python_config(tmp_path, code), scenario)


def test_the_text_of_a_huge_error_is_cut(tmp_path: Path) -> None:
    code = triton("""
        def answer(self, request, x):
            raise ValueError("x" * 10_000_000)
    """)

    async def scenario(model: Model, puppets: Puppets) -> None:
        request = ask([0, 0])
        model.submit(request)
        await puppets.step_all()
        text = answer_of(request)
        assert text.startswith("ValueError: xxx")
        assert len(text) < 10_000

    serve(python_config(tmp_path, code), scenario)


# In this process


def test_the_text_length_example_runs_in_this_process(examples: Path) -> None:
    with penstock.load(str(examples / "text_length")) as model:
        texts = np.array([["four"], ["größe"], [""]])
        assert model.infer(texts)["LENGTH"].tolist() == [[4], [5], [0]]
        bad = model.submit(np.array([[b"\xff"]], object))
        good = model.submit(np.array([["fine"]]))
        assert good.result()["LENGTH"].tolist() == [[4]]
        with pytest.raises(BackendFailed, match="TEXT: 'utf-8' codec"):
            bad.result()


def test_async_execute_in_this_process(tmp_path: Path) -> None:
    config = """
    backend: "python" max_batch_size: 4 dynamic_batching {}
    input { name: "x" data_type: TYPE_INT64 dims: 2 }
    output { name: "y" data_type: TYPE_INT64 dims: 2 }
    """
    write(tmp_path / "model", CONCURRENT)
    (tmp_path / "model" / "config.pbtxt").write_text(config)
    with penstock.load(str(tmp_path / "model")) as model:
        futures = [model.submit(np.full((1, 2), i)) for i in range(10)]
        assert [future.result()["y"][0, 0] for future in futures] == list(range(10))
