"""How a `TritonPythonModel` answers by response senders: any number of responses if it is
decoupled, otherwise one.

`ResponseSender` is what a model has of `backends.Responder`. `OneResponse` is the responder of a
model that is not decoupled. Any thread may send.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.backends import Outputs, Responder
from penstock.errors import (
    AlreadyExists,
    BackendFailed,
    Cancelled,
    InvalidRequest,
    NotFound,
    NotReady,
    PenstockError,
    UnknownFailure,
    Unsupported,
)
from penstock.types import Parameter

if TYPE_CHECKING:
    from penstock.backends.triton_python_backend_utils import InferenceResponse

NO_FLAGS, FINAL = 0, 1
# Classes of `TritonError`'s codes; the others are failures of the model.
ERRORS: Mapping[int, type[PenstockError]] = {
    0: UnknownFailure,
    2: NotFound,
    3: InvalidRequest,
    4: NotReady,
    5: Unsupported,
    6: AlreadyExists,
    7: Cancelled,
}


class TritonModelException(Exception):
    """Raised by models, and by `triton_python_backend_utils` for what is not supported or wrong."""


class ResponseSender:
    """Triton's InferenceResponseSender."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self._is_closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = NO_FLAGS) -> None:
        if flags not in (NO_FLAGS, FINAL):
            expected = f"expected {NO_FLAGS} or TRITONSERVER_RESPONSE_COMPLETE_FINAL"
            raise TritonModelException(f"send: flags are {flags}; {expected}")
        if response is None and flags != FINAL:
            raise TritonModelException(
                "send: expected a response, or the flag TRITONSERVER_RESPONSE_COMPLETE_FINAL"
            )
        if self._is_closed:
            raise TritonModelException("send: the response sender is closed; the last was final")
        answer, parameters = (None, None) if response is None else read_response(response)
        self._is_closed = flags == FINAL
        try:
            self._responder.send(answer, is_final=flags == FINAL, parameters=parameters)
        except BackendFailed as error:
            raise TritonModelException(f"send: {error}") from error

    def is_cancelled(self) -> bool:
        return self._responder.is_cancelled


class OneResponse:
    """Keeps the response of a request that has exactly one, sent in whatever thread."""

    is_cancelled = False

    def __init__(self) -> None:
        self._answer: Outputs | Exception | None = None
        self._parameters: Mapping[str, Parameter] = {}
        self._is_final = threading.Event()

    def send(
        self,
        answer: Outputs | Exception | None,
        *,
        is_final: bool,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        if answer is not None and self._answer is not None:
            text = "several responses to a request; the model is not decoupled"
            answer, parameters = BackendFailed(text), {}
        if answer is not None:
            self._answer, self._parameters = answer, parameters or {}
        if is_final:
            self._is_final.set()

    def wait(self) -> tuple[Outputs | Exception, Mapping[str, Parameter]]:
        """Return the response and its parameters, once the final one was sent."""
        self._is_final.wait()
        if self._answer is None:
            return BackendFailed("no response to a request; the model is not decoupled"), {}
        return self._answer, self._parameters


def read_response(
    response: InferenceResponse,
) -> tuple[Outputs | Exception, Mapping[str, Parameter]]:
    """Return the outputs of a response, or its error, and its parameters."""
    error = response.error()
    if error is not None:
        return ERRORS.get(error.code(), BackendFailed)(error.message()), {}
    outputs = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
    parameters: Mapping[str, Parameter] = json.loads(response.parameters())
    return outputs, parameters


def fail_open(responders: Sequence[Responder], error: Exception) -> None:
    """Fail the requests that have no final response yet."""
    for responder in responders:
        try:
            responder.send(error, is_final=True)
        except BackendFailed:
            continue  # It has its final response.
