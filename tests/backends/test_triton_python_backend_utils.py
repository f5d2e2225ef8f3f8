"""pb_utils as models use it: tensors, lookups, datatypes, and clear refusals."""

import json
import logging
from collections.abc import Callable

import numpy as np
import pytest

from penstock.backends import triton_python_backend_utils as pb_utils
from penstock.types import DATATYPES


class Made:
    """What torch and others look like to a receiver of DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **wishes: object) -> object:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def test_tensor_keeps_name_and_array() -> None:
    array = np.ones((2, 3), np.float32)
    tensor = pb_utils.Tensor("x", array)
    assert tensor.name() == "x"
    assert tensor.as_numpy() is array
    assert tuple(tensor.shape()) == (2, 3)
    assert tensor.is_cpu()


def test_tensor_wants_a_numpy_array() -> None:
    with pytest.raises(pb_utils.TritonModelException, match="tensor 'x'.*got list"):
        pb_utils.Tensor("x", [1, 2])


def test_dlpack_shares_what_may_be_written_and_copies_what_may_not() -> None:
    array = np.arange(4, dtype=np.int32)
    shared = pb_utils.Tensor.from_dlpack("y", pb_utils.Tensor("x", array).to_dlpack())
    np.testing.assert_array_equal(shared.as_numpy(), array)
    assert np.shares_memory(shared.as_numpy(), array)
    array.flags.writeable = False
    copied = pb_utils.Tensor.from_dlpack("y", pb_utils.Tensor("x", array).to_dlpack())
    np.testing.assert_array_equal(copied.as_numpy(), array)
    assert not np.shares_memory(copied.as_numpy(), array)


def test_dlpack_goes_to_and_comes_from_objects_that_speak_it() -> None:
    array = np.arange(4, dtype=np.float64)
    np.testing.assert_array_equal(np.from_dlpack(pb_utils.Tensor("x", array)), array)
    tensor = pb_utils.Tensor.from_dlpack("x", Made(array))
    np.testing.assert_array_equal(tensor.as_numpy(), array)


def test_from_dlpack_refuses_anything_else() -> None:
    with pytest.raises(pb_utils.TritonModelException, match="tensor 'x': expected a DLPack tensor"):
        pb_utils.Tensor.from_dlpack("x", "text")


@pytest.mark.parametrize("name", [name for name in DATATYPES if name != "BF16"])
def test_every_datatype_has_a_number_a_text_and_a_numpy_type(name: str) -> None:
    text = "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}"
    kind = pb_utils.triton_string_to_numpy(text)
    assert np.dtype(kind) == DATATYPES[name].numpy
    assert pb_utils.np_to_triton_dtype(kind) == name
    number = pb_utils.np_to_triton_type(kind)
    assert pb_utils.triton_to_np_type(number) == kind
    assert pb_utils.Tensor("x", np.zeros(1, kind)).triton_dtype() == number


def test_numbers_of_datatypes_are_tritons() -> None:
    numbers = {
        name: pb_utils.np_to_triton_type(kind)
        for name, kind in (
            ("BOOL", bool),
            ("UINT8", np.uint8),
            ("INT8", np.int8),
            ("FP16", np.float16),
            ("BYTES", object),
        )
    }
    assert numbers == {"BOOL": 1, "UINT8": 2, "INT8": 6, "FP16": 10, "BYTES": 13}
    bits = np.zeros(1, np.uint16)
    assert pb_utils.Tensor("x", bits, "BF16").triton_dtype() == 14
    assert pb_utils.Tensor("x", bits).triton_dtype() == 3


@pytest.mark.parametrize(
    ("convert", "value"),
    [
        (pb_utils.triton_string_to_numpy, "TYPE_BF16"),
        (pb_utils.triton_string_to_numpy, "TYPE_FP99"),
        (pb_utils.triton_to_np_type, 14),
        (pb_utils.triton_to_np_type, 99),
        (pb_utils.np_to_triton_dtype, np.complex64),
    ],
)
def test_what_has_no_counterpart_is_refused(
    convert: Callable[[object], object], value: object
) -> None:
    with pytest.raises(pb_utils.TritonModelException, match="has no"):
        convert(value)


def test_tensors_and_configurations_are_found_by_name() -> None:
    a, b = (pb_utils.Tensor(name, np.zeros(1)) for name in "ab")
    request = pb_utils.InferenceRequest(inputs=[a, b], requested_output_names=["b"])
    assert pb_utils.get_input_tensor_by_name(request, "b") is b
    assert pb_utils.get_input_tensor_by_name(request, "c") is None
    response = pb_utils.InferenceResponse([a, b])
    assert pb_utils.get_output_tensor_by_name(response, "a") is a
    assert pb_utils.get_output_tensor_by_name(response, "c") is None
    config = {"input": [{"name": "a"}], "output": [{"name": "b"}]}
    assert pb_utils.get_input_config_by_name(config, "a") == {"name": "a"}
    assert pb_utils.get_input_config_by_name(config, "b") is None
    assert pb_utils.get_output_config_by_name(config, "b") == {"name": "b"}
    assert not pb_utils.using_decoupled_model_transaction_policy(config)


def test_request_gives_back_what_it_was_made_of() -> None:
    memory = pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0)
    request = pb_utils.InferenceRequest(
        request_id="r",
        correlation_id=5,
        model_name="m",
        model_version=3,
        flags=pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
        timeout=7,
        preferred_memory=memory,
        parameters={"k": [1]},
    )
    assert (request.request_id(), request.correlation_id()) == ("r", 5)
    assert (request.model_name(), request.model_version()) == ("m", 3)
    assert (request.flags(), request.timeout(), request.trace()) == (1, 7, None)
    assert json.loads(request.parameters()) == {"k": [1]}
    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
    assert pb_utils.InferenceRequest(model_name=b"m").model_name() == "m"


def test_response_holds_tensors_or_an_error() -> None:
    fine = pb_utils.InferenceResponse(output_tensors=[])
    assert (fine.has_error(), fine.error(), fine.output_tensors()) == (False, None, [])
    error = pb_utils.TritonError("bad row", pb_utils.TritonError.INVALID_ARG)
    failed = pb_utils.InferenceResponse(error=error)
    assert failed.has_error()
    assert failed.error().message() == "bad row"
    assert failed.error().code() == pb_utils.TritonError.INVALID_ARG


@pytest.mark.parametrize(
    "arguments", [{"output_tensors": [np.zeros(1)]}, {"error": "text"}], ids=["array", "text"]
)
def test_response_of_other_things_is_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=r"expected .* got (ndarray|str)"):
        pb_utils.InferenceResponse(**arguments)


@pytest.mark.parametrize(
    "parameters, what",
    [
        ([], r", got <class 'list'>"),
        ({1: "a"}, r"keys to have type str, found type <class 'int'>"),
        ({"a": 0.5}, r"values to have type bool/int/str, found type <class 'float'>"),
        ({"a": None}, r"values to have type bool/int/str, found type <class 'NoneType'>"),
        ({"a": 1 << 63}, "a = 9223372036854775808 has more than 64 bits"),
    ],
)
def test_parameters_of_a_response_are_of_types_that_protocols_have(
    parameters: object, what: str
) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=what):
        pb_utils.InferenceResponse([], parameters=parameters)


REQUEST = pb_utils.InferenceRequest(model_name="other")


@pytest.mark.parametrize(
    "use",
    [
        lambda: REQUEST.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE),
    ],
)
def test_what_needs_the_server_is_not_supported_yet(use: Callable[[], object]) -> None:
    with pytest.raises(pb_utils.TritonModelException, match="is not supported yet"):
        use()


def test_logger_goes_to_python_logging(caplog: pytest.LogCaptureFixture) -> None:
    logger = pb_utils.Logger
    with caplog.at_level(logging.DEBUG, logger="penstock.model_code"):
        logger.log("100 %s")
        logger.log("w", logger.WARNING)
        logger.log_info("i")
        logger.log_warn("w")
        logger.log_error("e")
        logger.log_verbose("v")
    assert [record.getMessage() for record in caplog.records] == ["100 %s", *"wiwev"]
    assert [record.levelname[0] for record in caplog.records] == list("IWIWED")
