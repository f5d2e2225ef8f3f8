"""Arrays of Python callers as tensors."""

from threading import Thread

import numpy as np
import pytest

from penstock.errors import InvalidRequest
from penstock.types import TensorSpec, to_array
from penstock.wire import arrays
from penstock.wire.arrays import InputReader

INPUTS = (TensorSpec("a", "FP32", (2,)), TensorSpec("b", "INT8", (-1,)))


def one_input(datatype: str = "FP32") -> InputReader:
    return InputReader([TensorSpec("x", datatype, (2,))], "model", has_batch=True)


@pytest.mark.parametrize("count", [1, 3])
def test_arrays_of_one_dtype_and_shape_have_one_form(count: int) -> None:
    reader = one_input()
    forms = set()
    for number in range(3):
        array = np.full((count, 2), number, np.float32)
        [tensor], form = reader.read(array)
        array[:] = -1
        assert (tensor.name, tensor.datatype, tensor.shape) == ("x", "FP32", (count, 2))
        assert (to_array(tensor) == number).all()
        forms.add(form)
    assert len(forms) == 1 and None not in forms
    assert reader.read(np.zeros((count + 1, 2), np.float32))[1] not in forms
    # By name it is the same array, but another form, since names can come in any order.
    assert reader.read({"x": np.zeros((count, 2), np.float32)})[1] not in forms


def test_inputs_by_name_keep_their_order() -> None:
    reader = InputReader(INPUTS, "model", has_batch=False)
    a, b = np.array([1, 2], np.float32), np.array([3], np.int8)
    for _ in range(2):
        tensors, form = reader.read({"a": a, "b": b})
        assert [(each.name, to_array(each).tolist()) for each in tensors] == [
            ("a", [1, 2]),
            ("b", [3]),
        ]
        swapped, other = reader.read({"b": b, "a": a})
        assert [each.name for each in swapped] == ["b", "a"] and other is not form


@pytest.mark.parametrize(
    "given",
    [
        np.ones((1, 2), np.float64),
        np.ones((1, 2), ">f4"),
        [[1.0, 1.0]],
        {"x": [[1, 1]]},
        np.ones((1, 2), np.float32).view(np.matrix),
    ],
)
def test_what_needs_a_cast_has_no_form(given: object) -> None:
    reader = one_input()
    for _ in range(2):
        [tensor], form = reader.read(given)
        assert form is None and to_array(tensor).tolist() == [[1, 1]]
        assert isinstance(tensor.data, bytes)


def test_texts_have_no_form() -> None:
    tensors, form = one_input("BYTES").read(np.array([[b"a", b"b"]], np.object_))
    assert form is None and to_array(tensors[0]).tolist() == [[b"a", b"b"]]


def test_an_input_that_the_model_does_not_have_is_refused_each_time() -> None:
    reader = one_input()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="unexpected inference input 'y'.*it takes x"):
            reader.read({"y": np.ones((1, 2), np.float32)})


def test_forms_are_forgotten_if_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "MAX_FORMS", 4)
    reader = one_input()
    first = np.zeros((1, 2), np.float32)
    form = reader.read(first)[1]
    assert reader.read(first)[1] is form
    for count in range(2, 20):
        [tensor], each = reader.read(np.full((count, 2), count, np.float32))
        assert each is not None and (to_array(tensor) == count).all()
    assert reader.read(first)[1] is not form


def test_threads_that_come_first_together_share_a_form() -> None:
    reader, forms = one_input(), []
    array = np.zeros((1, 2), np.float32)
    threads = [Thread(target=lambda: forms.append(reader.read(array)[1])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(forms)) == 1


def test_tensors_have_the_form_of_arrays_by_their_names() -> None:
    reader = InputReader(INPUTS, "model", has_batch=False)
    arrays = {"b": np.zeros((3,), np.int8), "a": np.zeros((2,), np.float32)}
    tensors, form = reader.read(arrays)
    assert reader.form_of(tensors) is form
    others, _ = reader.read(arrays | {"b": np.zeros((4,), np.int8)})
    assert reader.form_of(others) is not form
