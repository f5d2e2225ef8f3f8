"""The module that a Triton `model.py` imports as `triton_python_backend_utils`, usually pb_utils.

Names and signatures are Triton's, so that such files run unchanged; tensors are on the CPU and
input arrays are read-only. `triton_calls` calls other models, `metric_book` has custom metrics.
Features that are not supported raise TritonModelException.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import AsyncIterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from penstock.backends import Responder
from penstock.backends.current import Current
from penstock.backends.metric_book import Metric as Metric
from penstock.backends.metric_book import MetricFamily as MetricFamily
from penstock.backends.triton_responses import ResponseSender, TritonModelException
from penstock.types import DATATYPES, Array, Parameter

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

log = logging.getLogger("penstock.model_code")
# A parsed config.pbtxt, or a tensor in it, as models read and write them.
ParsedConfig = Mapping[str, Any]

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
DLPACK_CPU = (1, 0)
MIN_INT64, MAX_INT64 = -(1 << 63), (1 << 63) - 1
# Triton's numbers of datatypes, in the order of its C API.
TYPE_NAMES = "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 BYTES BF16"
TYPE_NUMBERS = {name: number for number, name in enumerate(TYPE_NAMES.split(), 1)}


class TritonError:
    """Error of one request; the code chooses the status that the client gets."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = str(message)
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class MemoryType(IntEnum):
    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_GPU = 2


TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU


@dataclass
class PreferredMemory:
    """A preference without effect; tensors stay on the CPU."""

    preferred_memory_type: MemoryType
    preferred_device_id: int = 0


class PbTensor:
    """A named numpy array. `datatype` is set if numpy has no type for it (BF16 as bits)."""

    def __init__(self, name: str, array: Array, datatype: str = "") -> None:
        if not isinstance(array, np.ndarray):
            raise TritonModelException(
                f"tensor '{name}': expected a numpy array, got {type(array).__name__}"
            )
        self._name = name
        self._array = array
        self._datatype = datatype

    def __repr__(self) -> str:
        return f"<Tensor {self._name} {self._array.dtype} {list(self._array.shape)}>"

    @staticmethod
    def from_dlpack(name: str, tensor: object) -> PbTensor:
        """Create from a DLPack capsule, or an object with `__dlpack__`, such as a torch tensor."""
        source: Any = tensor if hasattr(tensor, "__dlpack__") else _Capsule(tensor)
        try:
            return PbTensor(name, np.from_dlpack(source))
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TritonModelException(
                f"tensor '{name}': expected a DLPack tensor on the CPU: {error}"
            ) from error

    def to_dlpack(self) -> CapsuleType:
        return self.__dlpack__()

    def __dlpack__(self, **wishes: object) -> CapsuleType:
        # Copy: receivers may write, and most DLPack versions cannot forbid it.
        array = self._array if self._array.flags.writeable else self._array.copy()
        return array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return DLPACK_CPU

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        return self._array

    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def triton_dtype(self) -> int:
        """Return Triton's number of the datatype, for `triton_to_np_type`."""
        return TYPE_NUMBERS[self.v2_datatype()]

    def v2_datatype(self) -> str:
        """Return the name on the wire; not in Triton's interface."""
        return self._datatype or np_to_triton_dtype(self._array.dtype)

    def is_cpu(self) -> bool:
        return True


# The names that models of Triton use; those of kinds are older than in `MetricFamily`.
COUNTER, GAUGE = MetricFamily.COUNTER, MetricFamily.GAUGE
Tensor = PbTensor
InferenceResponseSender = ResponseSender
# The folder of the version whose code runs; not in Triton's interface.
MODEL_DIR: Current[str] = Current("model_dir")


class InferenceRequest:
    """One request. The server creates those that `execute` gets; a model creates others only to
    call another model, which is not supported yet."""

    def __init__(  # noqa: PLR0913 (Triton's signature)
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[PbTensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str | bytes = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: object = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        self._id = request_id
        self._correlation_id = correlation_id
        self._inputs = list(inputs)
        self._output_names = list(requested_output_names)
        self._model_name = model_name.decode() if isinstance(model_name, bytes) else model_name
        self._model_version = model_version
        self._flags = flags
        self._timeout = timeout
        self._trace = trace
        self._parameters = parameters or {}
        # None for requests that a model creates.
        self._responder: Responder | None = None
        self._sender: ResponseSender | None = None

    def __repr__(self) -> str:
        return f"<InferenceRequest {self._id!r} {self._inputs}>"

    def inputs(self) -> list[PbTensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def requested_output_names(self) -> list[str]:
        return self._output_names

    def model_name(self) -> str:
        return self._model_name

    def model_version(self) -> int:
        return self._model_version

    def flags(self) -> int:
        return self._flags

    def timeout(self) -> int:
        """Return microseconds; always 0, as the server handles deadlines itself."""
        return self._timeout

    def trace(self) -> object:
        return self._trace

    def parameters(self) -> str:
        """Return the parameters as JSON."""
        return json.dumps(dict(self._parameters))

    def answer_by(self, responder: Responder) -> None:
        """Take the responder of this request; called by the server."""
        self._responder = responder

    @property
    def has_sender(self) -> bool:
        """Whether the model has asked for the response sender."""
        return self._sender is not None

    def is_cancelled(self) -> bool:
        return self._responder is not None and self._responder.is_cancelled

    def set_release_flags(self, flags: int) -> None:
        if flags != TRITONSERVER_REQUEST_RELEASE_ALL:
            _refuse("rescheduling a request")

    def get_response_sender(self) -> ResponseSender:
        if self._responder is None:
            raise TritonModelException("get_response_sender: the model made this request itself")
        if self._sender is None:
            self._sender = ResponseSender(self._responder)
        return self._sender

    def exec(
        self, decoupled: bool = False, execution_timeout: int = 0
    ) -> InferenceResponse | Iterator[InferenceResponse]:
        """Call the model, and wait for its response; with `decoupled`, return an iterator of its
        responses. `execution_timeout` has no effect: `timeout` limits the wait for an instance."""
        calls = importlib.import_module("penstock.backends.triton_calls")
        made: InferenceResponse | Iterator[InferenceResponse]
        made = calls.call_for_all(self) if decoupled else calls.call_once(self)
        return made

    async def async_exec(
        self, decoupled: bool = False, execution_timeout: int = 0
    ) -> InferenceResponse | AsyncIterable[InferenceResponse]:
        """Like `exec`, awaited; responses are iterated over with `async for`, or with `for`, which
        blocks the event loop."""
        calls = importlib.import_module("penstock.backends.triton_calls")
        made: InferenceResponse | AsyncIterable[InferenceResponse]
        made = await (calls.await_all(self) if decoupled else calls.await_one(self))
        return made


class InferenceResponse:
    def __init__(
        self,
        output_tensors: Sequence[PbTensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        for tensor in output_tensors:
            if not isinstance(tensor, PbTensor):
                raise TritonModelException(
                    f"output_tensors: expected Tensor objects, got {type(tensor).__name__}"
                )
        if error is not None and not isinstance(error, TritonError):
            raise TritonModelException(f"error: expected a TritonError, got {type(error).__name__}")
        self._parameters = _checked_parameters({} if parameters is None else parameters)
        if error is not None and self._parameters:
            raise TritonModelException("parameters: a response with an error has none")
        self._tensors = list(output_tensors)
        self._error = error

    def output_tensors(self) -> list[PbTensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """Return the parameters as JSON."""
        return json.dumps(self._parameters)


class Logger:
    """Logger of models on top of Python's logging, `penstock.model_code`."""

    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR
    VERBOSE = logging.DEBUG

    @staticmethod
    def log(message: str, level: int = logging.INFO) -> None:
        log.log(level, "%s", message)

    @staticmethod
    def log_info(message: str) -> None:
        log.info("%s", message)

    @staticmethod
    def log_warn(message: str) -> None:
        log.warning("%s", message)

    @staticmethod
    def log_error(message: str) -> None:
        log.error("%s", message)

    @staticmethod
    def log_verbose(message: str) -> None:
        log.debug("%s", message)


class AutoConfig:
    """Argument of `auto_complete_config`: a model without a configuration adds its tensors."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {"max_batch_size": 0, "input": [], "output": []}

    def as_dict(self) -> dict[str, Any]:
        return self._values

    def add_input(self, properties: ParsedConfig) -> None:
        self._add("input", properties)

    def add_output(self, properties: ParsedConfig) -> None:
        self._add("output", properties)

    def set_max_batch_size(self, max_batch_size: int) -> None:
        self._values["max_batch_size"] = int(max_batch_size)

    def set_dynamic_batching(self) -> None:
        """Does nothing: a model without a configuration is batched anyway."""

    def set_model_transaction_policy(self, policy: ParsedConfig) -> None:
        self._values["model_transaction_policy"] = {"decoupled": bool(policy.get("decoupled"))}

    def _add(self, kind: str, properties: ParsedConfig) -> None:
        missing = [key for key in ("name", "data_type", "dims") if key not in properties]
        if missing:
            raise ValueError(f"{kind} has no {', '.join(missing)}")
        others = [each for each in self._values[kind] if each["name"] != properties["name"]]
        self._values[kind] = [*others, dict(properties)]


def get_model_dir() -> str:
    """Return the folder of the model's version, which has `model.py`."""
    folder = MODEL_DIR.get()
    if folder is None:
        raise TritonModelException("get_model_dir: no model is loaded")
    return folder


def v2_datatype(data_type: str) -> str:
    """Return v2's name of a datatype of config.pbtxt, such as TYPE_FP32."""
    name = str(data_type).removeprefix("TYPE_")
    name = "BYTES" if name == "STRING" else name
    if name not in DATATYPES:
        raise TritonModelException(f"data_type: {data_type!r} is not known")
    return name


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> PbTensor | None:
    return _by_name(inference_request.inputs(), name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> PbTensor | None:
    return _by_name(inference_response.output_tensors(), name)


def get_input_config_by_name(model_config: ParsedConfig, name: str) -> ParsedConfig | None:
    """Return the entry of an input in the parsed `model_config`, or None."""
    return next((item for item in model_config.get("input", ()) if item["name"] == name), None)


def get_output_config_by_name(model_config: ParsedConfig, name: str) -> ParsedConfig | None:
    return next((item for item in model_config.get("output", ()) if item["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: ParsedConfig) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string: str) -> type[np.generic]:
    """Convert `TYPE_FP32`, as in a model's configuration, to np.float32."""
    name = triton_type_string.removeprefix("TYPE_")
    return _numpy_type("BYTES" if name == "STRING" else name, triton_type_string)


def triton_to_np_type(data_type: int) -> type[np.generic]:
    """Convert a number from `PbTensor.triton_dtype` to a numpy type."""
    name = next((name for name, number in TYPE_NUMBERS.items() if number == data_type), "")
    return _numpy_type(name, data_type)


def np_to_triton_type(data_type: npt.DTypeLike) -> int:
    return TYPE_NUMBERS[np_to_triton_dtype(data_type)]


def np_to_triton_dtype(data_type: npt.DTypeLike) -> str:
    """Convert a numpy type to its name on the wire: np.float32 to FP32."""
    dtype = np.dtype(data_type)
    if dtype.kind in "OSU":
        return "BYTES"
    for name, datatype in DATATYPES.items():
        if datatype.numpy == dtype:
            return name
    raise TritonModelException(f"numpy {dtype} has no Triton datatype")


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load a model of the repository, or reload it; with `config`, a JSON text, and `files`, as a
    load over HTTP has them."""
    calls = importlib.import_module("penstock.backends.triton_calls")
    calls.load_model(model_name, config, files or {})


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model. Requests that it has are answered, perhaps after this call."""
    calls = importlib.import_module("penstock.backends.triton_calls")
    calls.manage("unload", model_name, parameters={"unload_dependents": bool(unload_dependents)})


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    calls = importlib.import_module("penstock.backends.triton_calls")
    is_ready: bool = calls.is_model_ready(model_name, str(model_version))
    return is_ready


@dataclass
class _Capsule:
    """Wrapper of a bare DLPack capsule, as numpy expects it."""

    capsule: object

    def __dlpack__(self, **wishes: object) -> object:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return DLPACK_CPU


def _checked_parameters(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return the parameters of a response, which are of the types that all protocols have."""
    if not isinstance(parameters, dict):
        raise TritonModelException(f"parameters: expected a dict, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(
                f"Expect parameters keys to have type str, found type {type(key)}"
            )
        if not isinstance(value, bool | int | str):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)}"
            )
        if isinstance(value, int) and not MIN_INT64 <= value <= MAX_INT64:
            raise TritonModelException(f"parameters: {key} = {value} has more than 64 bits")
    return dict(parameters)


def _by_name(tensors: Sequence[PbTensor], name: str) -> PbTensor | None:
    return next((tensor for tensor in tensors if tensor.name() == name), None)


def _numpy_type(name: str, asked: object) -> type[np.generic]:
    datatype = DATATYPES.get(name)
    if datatype is None or name == "BF16":
        raise TritonModelException(f"datatype {asked} has no numpy type")
    kind: type[np.generic] = datatype.numpy.type
    return kind


def _refuse(what: str) -> NoReturn:
    raise TritonModelException(f"{what} is not supported yet")
