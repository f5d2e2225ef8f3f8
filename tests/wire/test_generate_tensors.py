"""Triton's generate extension for models of tensors, as JSON."""

import json

import numpy as np
import pytest

from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import BackendFailed, InvalidRequest
from penstock.types import Response, TensorSpec, from_array, to_array
from penstock.wire.generate_tensors import GeneratedAnswers, read

KINDS = (
    TensorSpec("TEXT", "BYTES", (1,)),
    TensorSpec("FLAG", "BOOL", (1,)),
    TensorSpec("NUMBERS", "FP32", (-1,)),
    TensorSpec("COUNT", "UINT8", (1,), is_optional=True),
    TensorSpec("GRID", "INT32", (-1, 2)),
)


def model(*inputs: TensorSpec, max_batch_size: int = 0) -> ModelConfig:
    return ModelConfig("m", "1", "null", "", inputs or KINDS, (), max_batch_size, BatchPolicy(1))


def arrays(body: object, config: ModelConfig | None = None) -> dict[str, object]:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = read(text, config or model())
    return {name: to_array(each).tolist() for name, each in found.tensors.items()}


def test_keys_of_inputs_become_tensors_and_others_parameters():
    body = {
        "TEXT": "grün",
        "FLAG": True,
        "NUMBERS": [1, 2.5],
        "id": "one",
        "temperature": 0.5,
        "parameters": {"COUNT": 3, "seed": 7, "name": "x", "greedy": False},
    }
    found = read(json.dumps(body).encode(), model())
    assert found.id == "one"
    assert found.parameters == {"temperature": 0.5, "seed": 7, "name": "x", "greedy": False}
    assert {name: to_array(each).tolist() for name, each in found.tensors.items()} == {
        "TEXT": ["grün".encode()], "FLAG": [True], "NUMBERS": [1.0, 2.5], "COUNT": [3],
    }  # fmt: skip
    assert found.tensors["COUNT"].datatype == "UINT8"


def test_a_model_may_have_inputs_of_any_name():
    config = model(TensorSpec("id", "INT32", (1,)), TensorSpec("parameters", "INT32", (1,)))
    found = read(b'{"id": 5, "parameters": 6}', config)
    assert sorted(found.tensors) == ["id", "parameters"] and not found.id


@pytest.mark.parametrize(
    ("spec", "max_batch", "value", "expected"),
    [
        ((1,), 0, "a", [b"a"]),
        ((1,), 0, ["a"], [b"a"]),
        ((-1,), 0, ["a", "b"], [b"a", b"b"]),
        ((-1,), 0, [], []),
        ((1,), 8, "a", [[b"a"]]),
        ((-1,), 8, ["a", "b"], [[b"a", b"b"]]),
        # As many rows as lists.
        ((1,), 8, [["a"], ["b"]], [[b"a"], [b"b"]]),
        ((-1, 2), 0, ["a", "b", "c", "d"], [[b"a", b"b"], [b"c", b"d"]]),
        ((-1, 2), 0, [["a", "b"]], [[b"a", b"b"]]),
        ((-1, 2), 8, [["a", "b"]], [[[b"a", b"b"]]]),
        ((-1, 2), 8, [[["a", "b"]], [["c", "d"]]], [[[b"a", b"b"]], [[b"c", b"d"]]]),
        ((), 0, "a", b"a"),
    ],
)
def test_shapes_follow_the_input_of_the_model(spec, max_batch, value, expected):
    config = model(TensorSpec("x", "BYTES", spec), max_batch_size=max_batch)
    assert arrays({"x": value}, config) == {"x": expected}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "failed to parse the request JSON"),
        (b"\xff", "failed to parse the request JSON"),
        (b"[" * 100_000, "failed to parse the request JSON"),
        (b"[1]", "the body is not a JSON object"),
        (b'{"NUMBERS": NaN}', "NaN is no number of JSON"),
        ({"id": 1}, "id: expected a string"),
        ({"parameters": 1}, "parameters: expected an object"),
        ({"TEXT": 123}, "attempt to access JSON non-string as string"),
        ({"TEXT": {"a": "b"}}, "attempt to access JSON non-string as string"),
        ({"TEXT": None}, "attempt to access JSON non-string as string"),
        ({"TEXT": ["a", ["b"]]}, "lists have different lengths"),
        ({"FLAG": "false"}, "attempt to access JSON non-boolean as boolean"),
        ({"FLAG": 1}, "attempt to access JSON non-boolean as boolean"),
        ({"NUMBERS": ["1"]}, "attempt to access JSON non-number as number"),
        ({"NUMBERS": [True]}, "attempt to access JSON non-number as number"),
        ({"NUMBERS": [1e300]}, "a value does not fit FP32"),
        ({"COUNT": 256}, "a value does not fit UINT8"),
        ({"COUNT": 1.5}, "non-unsigned-integer as unsigned-integer"),
        ({"TEXT": ["a", "b"]}, "2 elements; expected [1]"),
        ({"GRID": [1, 2, 3]}, "3 elements; expected [-1, 2]"),
        ({"p": {"a": 1}}, "parameter 'p' has invalid type"),
        ({"p": None}, "parameter 'p' has invalid type"),
        ({"p": 1 << 64}, "parameter 'p' does not fit 64 bits"),
        (b'{"TEXT": "a", "TEXT": "b"}', "input 'TEXT' already exists in request"),
        (b'{"TEXT": "a", "parameters": {"TEXT": "b"}}', "input 'TEXT' already exists in request"),
        (b'{"TEXT": "\\ud800"}', "not valid Unicode"),
    ],
)
def test_what_is_wrong_is_said(body, words):
    with pytest.raises(InvalidRequest) as caught:
        arrays(body)
    assert words in str(caught.value)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_datatypes_without_json_are_refused_both_ways(datatype):
    with pytest.raises(InvalidRequest, match=f"'x': {datatype} has no JSON form"):
        arrays({"x": 1}, model(TensorSpec("x", datatype, (1,))))
    values = np.zeros(1, np.uint16 if datatype == "BF16" else np.float16)
    answer = Response("m", "1", [from_array("y", datatype, values)])
    with pytest.raises(BackendFailed, match=f"'y': {datatype} has no JSON form"):
        GeneratedAnswers("").whole(answer)


def test_answers_hold_outputs_parameters_and_the_id_that_was_sent():
    outputs = [
        from_array("one", "BYTES", np.array([["grün".encode()]], object)),
        from_array("many", "INT64", np.arange(4).reshape(2, 2)),
        from_array("none", "FP32", np.zeros(0, np.float32)),
        from_array("flag", "BOOL", np.array([True])),
    ]
    answer = Response("m", "3", outputs, {"sequence_id": 0})
    expected = {"model_name": "m", "model_version": "3", "sequence_id": 0}
    expected |= {"one": "grün", "many": [0, 1, 2, 3], "none": [], "flag": True}
    assert json.loads(GeneratedAnswers("").whole(answer)) == expected
    event = GeneratedAnswers("a").event(answer)
    assert event.startswith(b"data: ") and event.endswith(b"\n\n")
    assert json.loads(event[6:]) == {"id": "a", **expected}
    error = GeneratedAnswers("a").error(BackendFailed("why"))
    assert error == b'data: {"error":"why"}\n\n'


def test_texts_that_are_no_utf8_are_an_error():
    answer = Response("m", "1", [from_array("y", "BYTES", np.array([b"\xff"], object))])
    with pytest.raises(BackendFailed, match="'y': its bytes are not UTF-8"):
        GeneratedAnswers("").whole(answer)
