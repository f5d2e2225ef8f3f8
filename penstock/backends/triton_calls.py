"""Business logic scripting: `InferenceRequest.exec` and its variants, in terms of `model_calls`.

Errors of the called model, and of the server on the way to it, are responses with an error, as in
Triton. A request that is wrong in itself, or a place where no calls are possible, raises.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import closing

import numpy as np

from penstock.backends import triton_python_backend_utils as pb_utils
from penstock.backends.model_calls import (
    AwaitedAnswers,
    CalledAnswer,
    CalledAnswers,
    ModelCall,
    find_line,
)
from penstock.backends.triton_responses import TritonModelException
from penstock.errors import NotReady, PenstockError, error_text
from penstock.types import Parameter, Tensor, from_array, to_array

# Codes of errors by their class; others are internal.
CODES = {
    "NotFound": pb_utils.TritonError.NOT_FOUND,
    "InvalidRequest": pb_utils.TritonError.INVALID_ARG,
    "TooLarge": pb_utils.TritonError.INVALID_ARG,
    "NotReady": pb_utils.TritonError.UNAVAILABLE,
    "Overloaded": pb_utils.TritonError.UNAVAILABLE,
    "QuotaExceeded": pb_utils.TritonError.UNAVAILABLE,
    "DeadlineExceeded": pb_utils.TritonError.UNAVAILABLE,
    "Unsupported": pb_utils.TritonError.UNSUPPORTED,
    "Cancelled": pb_utils.TritonError.CANCELLED,
}
LATEST = -1


def call_once(request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
    call = describe(request)
    try:
        answers = CalledAnswers(call)
    except PenstockError as error:
        return _failed(error)
    with closing(answers):
        return _only(call, next(answers))


def call_for_all(request: pb_utils.InferenceRequest) -> Iterator[pb_utils.InferenceResponse]:
    """Return the responses as they come. The request is sent at once."""
    try:
        answers = CalledAnswers(describe(request))
    except PenstockError as error:
        return iter([_failed(error)])
    return _iterate(answers)


async def await_one(request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
    call = describe(request)
    try:
        answers = AwaitedAnswers(call)
    except PenstockError as error:
        return _failed(error)
    with closing(answers):
        return _only(call, await anext(answers))


async def await_all(request: pb_utils.InferenceRequest) -> AwaitedResponses:
    try:
        answers = AwaitedAnswers(describe(request))
    except PenstockError as error:
        return AwaitedResponses(None, _failed(error))
    return AwaitedResponses(answers)


class AwaitedResponses:
    """Responses to one call, for `async for`, and for `for` as models of Triton have it."""

    def __init__(
        self, answers: AwaitedAnswers | None, failure: pb_utils.InferenceResponse | None = None
    ) -> None:
        self._answers = answers
        self._failure = failure

    def __iter__(self) -> Iterator[pb_utils.InferenceResponse]:
        yield from self._failures()
        if self._answers is not None:
            with closing(self._answers):
                yield from (_response(each) for each in self._answers if not each.is_empty)

    async def __aiter__(self) -> AsyncIterator[pb_utils.InferenceResponse]:
        for failure in self._failures():
            yield failure
        if self._answers is not None:
            with closing(self._answers):
                async for answer in self._answers:
                    if not answer.is_empty:
                        yield _response(answer)

    def _failures(self) -> Sequence[pb_utils.InferenceResponse]:
        return [] if self._failure is None else [self._failure]


def load_model(name: str, config: object, files: object) -> None:
    """Load a model; its code may have given anything."""
    if not isinstance(config, str):
        raise TritonModelException(f"config: expected a JSON text, got {type(config).__name__}")
    if not isinstance(files, Mapping):
        text = f"expected paths with their bytes, got {type(files).__name__}"
        raise TritonModelException(f"files: {text}")
    for each, data in files.items():
        if not isinstance(each, str) or not isinstance(data, bytes | bytearray | memoryview):
            raise TritonModelException(
                f"files: expected paths with their bytes, got {each!r:.100} with "
                f"{type(data).__name__}"
            )
    sent = [Tensor(each, "UINT8", (len(data),), data) for each, data in files.items()]
    manage("load", name, inputs=sent, parameters={"config": config} if config else {})


def is_model_ready(name: str, version: str) -> bool:
    answer = _manage(ModelCall(name, version, action="model_ready"))
    if answer.error_kind in ("", "NotFound", "NotReady"):
        return not answer.error_kind
    raise TritonModelException(answer.error)


def manage(
    action: str,
    name: str,
    *,
    inputs: Sequence[Tensor] = (),
    parameters: Mapping[str, Parameter],
) -> None:
    """Load or unload a model; TritonModelException if that fails."""
    answer = _manage(ModelCall(name, inputs=inputs, parameters=parameters, action=action))
    if answer.error_kind:
        raise TritonModelException(answer.error)


def _manage(call: ModelCall) -> CalledAnswer:
    if not call.model_name or not isinstance(call.model_name, str):
        raise TritonModelException(f"expected the name of a model, got {call.model_name!r}")
    try:
        answers = CalledAnswers(call)
    except PenstockError as error:
        raise TritonModelException(f"model '{call.model_name}': {error_text(error)}") from None
    with closing(answers):
        return next(answers)


def describe(request: pb_utils.InferenceRequest) -> ModelCall:
    """Return the call of a request; TritonModelException if the model's code made it wrongly."""
    name = request.model_name()
    if not name or not isinstance(name, str):
        raise TritonModelException(
            f"InferenceRequest: model_name must be the name of the model to call, got {name!r}"
        )
    try:
        find_line()
    except NotReady as error:
        raise TritonModelException(f"cannot call model '{name}': {error}") from None
    outputs = request.requested_output_names()
    if not all(isinstance(each, str) for each in outputs):
        raise TritonModelException(
            f"InferenceRequest: requested_output_names must be names of outputs, got {outputs!r}"
        )
    version = request.model_version()
    return ModelCall(
        name,
        "" if version == LATEST else str(version),
        [_to_tensor(each) for each in request.inputs()],
        tuple(outputs),
        str(request.request_id()),
        _parameters(request),
    )


def _parameters(request: pb_utils.InferenceRequest) -> Mapping[str, Parameter]:
    """Return the parameters, with those that have arguments of their own under the names that
    clients use for them."""
    found: dict[str, Parameter] = {}
    for key, value in json.loads(request.parameters()).items():
        if not isinstance(value, bool | int | float | str):
            kinds = "a bool, int, float or str"
            problem = f"InferenceRequest: parameter '{key}' must be {kinds}, got {value!r}"
            raise TritonModelException(problem)
        found[key] = value
    if request.timeout():
        found["timeout"] = request.timeout()
    if request.correlation_id():
        found["sequence_id"] = request.correlation_id()
    if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
        found["sequence_start"] = True
    if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
        found["sequence_end"] = True
    return found


def _to_tensor(given: object) -> Tensor:
    if not isinstance(given, pb_utils.PbTensor):
        raise TritonModelException(
            f"InferenceRequest: inputs must be pb_utils.Tensor objects, got {type(given).__name__}"
        )
    return from_array(given.name(), given.v2_datatype(), given.as_numpy())


def _to_pb(tensor: Tensor) -> pb_utils.PbTensor:
    array = to_array(tensor)
    # The answer belongs to the model, which may write to it as in Triton.
    if not array.flags.writeable:
        array = np.array(array)
    return pb_utils.PbTensor(tensor.name, array, "BF16" if tensor.datatype == "BF16" else "")


def _failed(error: PenstockError) -> pb_utils.InferenceResponse:
    return _error(type(error).__name__, error_text(error))


def _error(kind: str, text: str) -> pb_utils.InferenceResponse:
    code = CODES.get(kind, pb_utils.TritonError.INTERNAL)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, code))


def _response(answer: CalledAnswer) -> pb_utils.InferenceResponse:
    if answer.error_kind:
        return _error(answer.error_kind, answer.error)
    outputs, parameters = map(_to_pb, answer.outputs), dict(answer.parameters)
    return pb_utils.InferenceResponse(list(outputs), parameters=parameters)


def _only(call: ModelCall, answer: CalledAnswer) -> pb_utils.InferenceResponse:
    if answer.is_final and not answer.is_empty:
        return _response(answer)
    count = "no response" if answer.is_empty else "several responses"
    what = f"model '{call.model_name}' gives {count}"
    return _error("Unsupported", f"{what}; call it with decoupled=True and iterate over them")


def _iterate(answers: CalledAnswers) -> Iterator[pb_utils.InferenceResponse]:
    with closing(answers):
        for answer in answers:
            if not answer.is_empty:
                yield _response(answer)
