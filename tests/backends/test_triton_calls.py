"""Business logic scripting as models of Triton write it."""

import asyncio
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from penstock.backends import model_calls
from penstock.backends import triton_python_backend_utils as pb_utils
from penstock.backends.model_calls import CalledAnswer, Deliver, ModelCall
from penstock.errors import NotReady
from penstock.types import from_array, to_array

X = pb_utils.Tensor("x", np.arange(4, dtype=np.float32).reshape(1, 4))


class Line:
    """Answers with the inputs, under the name y, as often as it is told."""

    def __init__(self) -> None:
        self.calls: list[ModelCall] = []
        self.num_answers = 1
        self.num_cancelled = 0
        self.error: CalledAnswer | None = None
        self.refuses = False

    def start(self, call: ModelCall, deliver: Deliver) -> Callable[[], None]:
        self.calls.append(call)
        if self.refuses:
            raise NotReady("the model is being closed")
        if self.error is not None:
            deliver(self.error)
        outputs = [from_array("y", each.datatype, to_array(each)) for each in call.inputs]
        for number in range(self.num_answers):
            deliver(CalledAnswer(outputs, is_final=number == self.num_answers - 1))
        return self.cancel

    def cancel(self) -> None:
        self.num_cancelled += 1


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    model_calls.use(made)
    yield made


def ask(**more: object) -> pb_utils.InferenceRequest:
    return pb_utils.InferenceRequest(
        **{"model_name": "other", "requested_output_names": ["y"], "inputs": [X], **more}
    )


def test_exec_returns_the_response(line: Line):
    response = ask(request_id="7", model_version=3).exec()
    assert not response.has_error()
    y = pb_utils.get_output_tensor_by_name(response, "y").as_numpy()
    np.testing.assert_array_equal(y, X.as_numpy())
    y += 1  # The answer is the model's own.
    (call,) = line.calls
    assert (call.model_name, call.model_version, call.id, call.outputs) == (
        "other", "3", "7", ("y",),
    )  # fmt: skip


def test_arguments_travel_under_the_names_of_clients(line: Line):
    start = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
    end = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
    ask(
        parameters={"own": 2.5}, timeout=1000, correlation_id=9, flags=start | end, trace=None
    ).exec()
    (call,) = line.calls
    assert call.parameters == {
        "own": 2.5,
        "timeout": 1000,
        "sequence_id": 9,
        "sequence_start": True,
        "sequence_end": True,
    }
    assert (call.model_version, call.id) == ("", "")
    preferred = pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU)
    ask(preferred_memory=preferred).exec()
    assert line.calls[1].parameters == {}


@pytest.mark.parametrize(
    ("tensor", "datatype"),
    [
        (pb_utils.Tensor("x", np.array([[b"a", "ä".encode()]], object)), "BYTES"),
        (pb_utils.Tensor("x", np.array([["a", "ä"]])), "BYTES"),
        (pb_utils.Tensor("x", np.zeros((2, 3), np.uint16), "BF16"), "BF16"),
        (pb_utils.Tensor("x", np.zeros((4, 6), np.float16)[::2, ::3]), "FP16"),
        (pb_utils.Tensor("x", np.array(True)), "BOOL"),
        (pb_utils.Tensor("x", np.zeros((0, 3), np.int8)), "INT8"),
    ],
)
def test_tensors_of_every_kind_travel(line: Line, tensor: pb_utils.Tensor, datatype: str):
    response = ask(inputs=[tensor]).exec()
    (sent,), (found,) = line.calls[0].inputs, response.output_tensors()
    assert (sent.datatype, sent.shape) == (datatype, tensor.shape())
    assert (found.triton_dtype(), found.shape()) == (tensor.triton_dtype(), tensor.shape())
    assert found.as_numpy().flags.writeable


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("NotFound", pb_utils.TritonError.NOT_FOUND),
        ("InvalidRequest", pb_utils.TritonError.INVALID_ARG),
        ("Unsupported", pb_utils.TritonError.UNSUPPORTED),
        ("BackendFailed", pb_utils.TritonError.INTERNAL),
        ("SomethingNew", pb_utils.TritonError.INTERNAL),
    ],
)
def test_errors_are_responses(line: Line, kind: str, code: int):
    line.error = CalledAnswer(error_kind=kind, error="why")
    for response in (ask().exec(), asyncio.run(ask().async_exec())):
        assert response.has_error() and response.output_tensors() == []
        assert (response.error().message(), response.error().code()) == ("why", code)


def test_a_call_that_cannot_be_sent_is_a_response_too(line: Line):
    line.refuses = True

    async def all_of(request: pb_utils.InferenceRequest) -> list[pb_utils.InferenceResponse]:
        found = [await request.async_exec()]
        return found + [each async for each in await request.async_exec(decoupled=True)]

    found = [ask().exec(), *ask().exec(decoupled=True), *asyncio.run(all_of(ask()))]
    assert [each.error().message() for each in found] == ["the model is being closed"] * 4


@pytest.mark.parametrize("count", [1, 3])
def test_decoupled_iterates_over_all_responses(line: Line, count: int):
    line.num_answers = count

    async def collect() -> list[pb_utils.InferenceResponse]:
        return [each async for each in await ask().async_exec(decoupled=True)]

    async def collect_as_in_triton() -> list[pb_utils.InferenceResponse]:
        return list(await ask().async_exec(decoupled=True))

    awaited = asyncio.run(collect()), asyncio.run(collect_as_in_triton())
    for found in (list(ask().exec(decoupled=True)), *awaited):
        assert len(found) == count
        assert all(each.output_tensors()[0].name() == "y" for each in found)
    assert line.num_cancelled == 0


def test_several_responses_must_be_asked_for(line: Line):
    line.num_answers = 2
    for response in (ask().exec(), asyncio.run(ask().async_exec())):
        assert "decoupled=True" in response.error().message()
    assert line.num_cancelled == 2


def test_an_iteration_that_ends_early_cancels_the_rest(line: Line):
    line.num_answers = 3
    responses = ask().exec(decoupled=True)
    next(responses)
    responses.close()
    assert line.num_cancelled == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model_name": ""}, "model_name"),
        ({"model_name": 3}, "model_name"),
        ({"inputs": [np.zeros(3)]}, "pb_utils.Tensor objects, got ndarray"),
        ({"requested_output_names": [1]}, "requested_output_names"),
        ({"parameters": {"a": [1]}}, "parameter 'a'"),
        ({"inputs": [pb_utils.Tensor("x", np.zeros(1, ">f4"))]}, "no Triton datatype"),
    ],
)
def test_a_request_that_is_wrong_in_itself_raises(line: Line, more: dict[str, object], words: str):
    with pytest.raises(pb_utils.TritonModelException, match=words):
        ask(**more).exec()
    assert line.calls == []


def test_without_a_server_calls_raise():
    model_calls.use(None)
    with pytest.raises(pb_utils.TritonModelException) as raised:
        ask().exec()
    text = str(raised.value)
    assert "cannot call model 'other'" in text and "penstock.load" in text


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"config": {"max_batch_size": 4}}, "config: expected a JSON text, got dict"),
        ({"config": 5}, "config: expected a JSON text, got int"),
        ({"files": ["model.py"]}, "files: expected paths with their bytes, got list"),
        ({"files": {5: b"x"}}, "got 5 with bytes"),
        ({"files": {"file:1/model.py": "text"}}, "got 'file:1/model.py' with str"),
    ],
)
def test_a_load_with_values_of_other_types_is_refused(line: Line, given: dict, what: str):
    with pytest.raises(pb_utils.TritonModelException, match=what):
        pb_utils.load_model("other", **given)
    assert not line.calls
