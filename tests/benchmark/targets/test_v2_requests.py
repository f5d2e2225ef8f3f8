"""Which model an address names, and messages for it: the server's own codec reads them back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.benchmark.targets import TargetSpec
from penstock.benchmark.targets.v2_requests import RequestTemplate, find_place
from penstock.errors import ConfigError
from penstock.types import DATATYPES, Buffer, RegionPlace, Request, TensorSpec, to_array
from penstock.wire.v2 import Codec

START = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(
    "address, model, version, path",
    [
        ("http://a/v2/models/m", "", "", "/v2/models/m"),
        ("http://a/v2/models/m/", "", "", "/v2/models/m"),
        ("http://a/v2/models/m/infer", "m", "", "/v2/models/m"),
        ("http://a/v2/models/m/versions/3", "", "3", "/v2/models/m/versions/3"),
        ("http://a/v2/models/m/versions/3/infer", "", "", "/v2/models/m/versions/3"),
        ("http://a/v2/models/m", "", "3", "/v2/models/m/versions/3"),
        ("http://a", "m", "", "/v2/models/m"),
        ("http://a/v2", "m", "2", "/v2/models/m/versions/2"),
        ("http://a/v2/", "m/n", "", "/v2/models/m%2Fn"),
        ("http://a/gateway", "m", "", "/gateway/v2/models/m"),
        ("http://a/b/v2/models/my%20model", "my model", "", "/b/v2/models/my%20model"),
    ],
)
def test_an_address_names_a_model(address, model, version, path):
    assert find_place(TargetSpec(address, model=model, version=version)).path == path


@pytest.mark.parametrize(
    "address, model, version, problem",
    [
        ("http://a/v2", "", "", "names no model: expected …/v2/models/NAME"),
        ("http://a/v2/models/m", "n", "", "names the model 'm', but --model is 'n'"),
        ("http://a/v2/models/m/versions/1", "", "2", "names the version '1', but --version is '2'"),
        ("http:/a", "", "", "expected http://host:port"),
    ],
)
def test_an_address_that_names_none_or_two_is_refused(address, model, version, problem):
    with pytest.raises(ConfigError, match=problem):
        find_place(TargetSpec(address, model=model, version=version))


def decoded(message: bytes) -> Request:
    """As the server reads it."""
    head, _, body = message.partition(b"\r\n\r\n")
    assert head.startswith(START[:-2])
    headers = dict(line.lower().split(b": ") for line in head.split(b"\r\n")[1:])
    assert int(headers[b"content-length"]) == len(body)
    length = headers.get(b"inference-header-content-length")
    return Codec().decode_infer(body, None if length is None else int(length), None, 0.0)


FIXED = [name for name in DATATYPES if name != "BYTES"]


@given(st.data(), st.sampled_from(FIXED), hnp.array_shapes(min_dims=0, min_side=0, max_dims=3))
def test_binary_tensors_arrive_bit_by_bit(data, datatype, shape):
    array = data.draw(hnp.arrays(DATATYPES[datatype].numpy, shape))
    form = RequestTemplate(START, [TensorSpec("x", datatype, shape)], is_binary=True)
    request = decoded(form.message({"x": array}))
    assert request.prefers_binary
    (tensor,) = request.inputs
    assert (tensor.name, tensor.datatype, tensor.shape) == ("x", datatype, shape)
    assert bytes(tensor.data) == array.tobytes()


@given(
    st.data(),
    st.sampled_from([name for name in FIXED if name not in ("FP16", "BF16")]),
    hnp.array_shapes(min_dims=1, max_dims=3),
)
def test_json_numbers_arrive_exactly(data, datatype, shape):
    dtype = DATATYPES[datatype].numpy
    elements = {"allow_nan": False, "allow_infinity": False} if dtype.kind == "f" else {}
    array = data.draw(hnp.arrays(dtype, shape, elements=hnp.from_dtype(dtype, **elements)))
    form = RequestTemplate(START, [TensorSpec("x", datatype, shape)], is_binary=False)
    request = decoded(form.message({"x": array}))
    assert not request.prefers_binary
    np.testing.assert_array_equal(to_array(request.inputs[0]), array)


@pytest.mark.parametrize("is_binary", [True, False])
def test_texts_of_any_length_arrive(is_binary):
    form = RequestTemplate(
        START, [TensorSpec("t", "BYTES", (2,)), TensorSpec("n", "INT8", (1,))], is_binary
    )
    number = np.array([5], np.int8)
    for texts in (["a", "b"], ["", 'é\n"'], ["long" * 1000, "x"], ["a", "b"]):
        request = decoded(form.message({"n": number, "t": np.array(texts, object)}))
        assert [tensor.name for tensor in request.inputs] == ["t", "n"]
        assert to_array(request.inputs[0]).tolist() == [text.encode() for text in texts]
        assert to_array(request.inputs[1]).tolist() == [5]


def test_views_and_other_number_types_arrive_as_the_datatype_says():
    form = RequestTemplate(START, [TensorSpec("x", "FP32", (2, 2))], is_binary=True)
    wide = np.arange(16.0).reshape(4, 4)
    for array in (wide[::2, ::2], wide.T[1:3, 1:3], np.arange(4, dtype=">i8").reshape(2, 2)):
        request = decoded(form.message({"x": array}))
        np.testing.assert_array_equal(to_array(request.inputs[0]), array)


@pytest.mark.parametrize(
    "datatype, array, problem",
    [
        ("FP32", np.array([np.nan]), "input 'x': holds NaN or infinity, which JSON cannot say"),
        ("FP64", np.array([np.inf]), "NaN or infinity"),
        ("BYTES", np.array([b"\xff"], object), "bytes that are not UTF-8"),
    ],
)
def test_what_json_cannot_say_is_refused_and_goes_as_binary(datatype, array, problem):
    specs = [TensorSpec("x", datatype, (1,))]
    with pytest.raises(ConfigError, match=problem):
        RequestTemplate(START, specs, is_binary=False).message({"x": array})
    decoded(RequestTemplate(START, specs, is_binary=True).message({"x": array}))


def test_inputs_in_shared_memory_are_named_and_not_sent():
    memory = bytearray()

    def place(data: Buffer) -> RegionPlace:
        memory.extend(data)
        return RegionPlace("r", len(memory) - len(data), len(data))

    specs = [TensorSpec("a", "FP32", (1, 3)), TensorSpec("b", "INT64", (1, 2))]
    template = RequestTemplate(START, specs, True, place)
    arrays = {"a": np.array([[1, 2, 3]]), "b": np.array([[4, 5]])}
    for round in range(2):
        request = decoded(template.message(arrays))
        places = [tensor.place for tensor in request.inputs]
        start = 28 * round
        assert places == [RegionPlace("r", start, 12), RegionPlace("r", start + 12, 16)]
        assert [tensor.shape for tensor in request.inputs] == [(1, 3), (1, 2)]
        assert not any(tensor.data for tensor in request.inputs)
    assert memory[:12] == np.array([1, 2, 3], np.float32).tobytes()
    assert memory[12:28] == np.array([4, 5]).tobytes()
