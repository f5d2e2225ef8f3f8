"""Runs a `TritonPythonModel`: each request of a batch is seen and answered by itself.

A decoupled model answers by response senders, in any thread and at any time, and `execute` returns
None. If its `execute` is a coroutine, those of several batches run at once on one event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import platform
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Protocol

import numpy as np

from penstock.backends import Batch, BatchRequest, Execution, Outputs, Responder, Runner
from penstock.backends import triton_python_backend_utils as pb_utils
from penstock.backends.finished import Unanswered, finish
from penstock.backends.python_code import Code, end_model
from penstock.backends.python_signature import TRITON
from penstock.backends.stateful import END, ID, START
from penstock.backends.triton_responses import OneResponse, fail_open, read_response
from penstock.config import ModelConfig
from penstock.errors import BackendFailed, describe_error
from penstock.repository import pbtxt
from penstock.types import Parameter
from penstock.wire.frames import RequestPart

log = logging.getLogger("penstock.python")


class TritonModel(Protocol):
    def execute(self, requests: list[pb_utils.InferenceRequest], /) -> object: ...


class TritonRunner(Runner):
    """A `TritonPythonModel`, called as Triton calls it."""

    needs_requests = True

    def __init__(self, config: ModelConfig, code: Code, model: TritonModel) -> None:
        self._config = config
        self._code = code
        self._model = model
        self.is_decoupled = config.is_decoupled
        self._datatypes = {spec.name: spec.datatype for spec in config.inputs}
        self._output_names = [spec.name for spec in config.outputs]
        # Runs coroutines of a decoupled model.
        self._tasks: LoopThread | None = None

    def built(self) -> Mapping[str, str]:
        return describe_built(TRITON)

    def start(self, batch: Batch) -> Execution:
        """Run a batch. Without `batch.requests` it counts as one request with one answer."""
        parts = batch.requests or (RequestPart("", batch.num_rows),)
        if self.is_decoupled:
            self._start_decoupled(batch, parts)
            return Unanswered()
        senders = [OneResponse() for _ in parts]
        requests = self._requests(batch, parts, senders)
        responses = self._code.result(self._model.execute(requests))
        if responses is None and any(request.has_sender for request in requests):
            responses = [None] * len(parts)
        if not isinstance(responses, Sequence) or len(responses) != len(parts):
            got = len(responses) if isinstance(responses, Sequence) else type(responses).__name__
            raise BackendFailed(
                f"execute: expected {len(parts)} responses to {len(parts)} requests, got {got}"
            )
        told = [_answer(*each) for each in zip(responses, requests, senders, strict=True)]
        parameters = [given for _, given in told]
        return finish(batch, [answer for answer, _ in told], parameters=parameters)

    def close(self) -> None:
        if self._tasks is not None:
            self._tasks.close()
        end_model(self._code, getattr(self._model, "finalize", None))

    def _start_decoupled(self, batch: Batch, parts: Sequence[BatchRequest]) -> None:
        if not batch.responders:
            raise BackendFailed("a decoupled model answers only requests of a server")
        result = self._model.execute(self._requests(batch, parts, batch.responders))
        if inspect.iscoroutine(result):
            if self._tasks is None:
                self._tasks = LoopThread()
            self._tasks.start(_run(result, batch.responders, self._config))
        elif result is not None:
            raise BackendFailed(_not_none(self._config, result))

    def _requests(
        self,
        batch: Batch,
        parts: Sequence[BatchRequest],
        responders: Sequence[Responder],
    ) -> list[pb_utils.InferenceRequest]:
        """Return each request with its rows of the stacked inputs, as views."""
        is_batched = self._config.max_batch_size > 0
        requests: list[pb_utils.InferenceRequest] = []
        row = 0
        for index, part in enumerate(parts):
            end = row + part.num_rows
            if self._config.joins_requests:
                # Ragged inputs have no rows in common; each request is a piece.
                own = dict(batch.all_pieces[index])
            else:
                own = {name: a[row:end] if is_batched else a for name, a in batch.inputs.items()}
            given = part.parameters
            flags = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START * bool(given.get(START))
            flags |= pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END * bool(given.get(END))
            tensors = [pb_utils.Tensor(name, a, self._datatypes[name]) for name, a in own.items()]
            request = pb_utils.InferenceRequest(
                request_id=part.id,
                correlation_id=_correlation_id(given),
                inputs=tensors,
                requested_output_names=part.outputs or self._output_names,
                model_name=self._config.name,
                model_version=int(self._config.version),
                flags=flags,
                parameters={key: given[key] for key in given if key not in (ID, START, END)},
            )
            request.answer_by(responders[index])
            requests.append(request)
            row = end
        return requests


class LoopThread:
    """An event loop in a thread, for coroutines that nobody waits for."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, task: Coroutine[object, object, None]) -> None:
        asyncio.run_coroutine_threadsafe(task, self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _run(
    result: Coroutine[object, object, object],
    responders: Sequence[Responder],
    config: ModelConfig,
) -> None:
    """Await the `execute` of one batch; its error is that of requests that are not answered yet."""
    try:
        returned = await result
    except BaseException as error:  # A model's code may raise anything.
        fail_open(responders, BackendFailed(explain(error)))
        return
    if returned is not None:
        fail_open(responders, BackendFailed(_not_none(config, returned)))


def explain(error: BaseException) -> str:
    """Log an exception of the model that nobody catches, and return its text."""
    log.error("the model raised %s", type(error).__name__, exc_info=error)
    return describe_error(error)


def _not_none(config: ModelConfig, result: object) -> str:
    got = type(result).__name__
    return (
        f"Python model '{config.name}_0_0' is using the decoupled mode and the execute function "
        f"must return None. It sends its responses; got {got}"
    )


def _answer(
    response: object, request: pb_utils.InferenceRequest, sender: OneResponse
) -> tuple[Outputs | Exception, Mapping[str, Parameter]]:
    if response is None and request.has_sender:
        return sender.wait()
    if not isinstance(response, pb_utils.InferenceResponse):
        got = type(response).__name__
        return BackendFailed(f"execute: expected an InferenceResponse, got {got}"), {}
    return read_response(response)


def make_arguments(config: ModelConfig) -> dict[str, str]:
    """Return the arguments that Triton passes to `initialize`."""
    return {
        "model_config": json.dumps(pbtxt.to_json(config)),
        "model_instance_kind": "CPU",
        "model_instance_name": f"{config.name}_0_0",
        "model_instance_device_id": "0",
        "model_repository": str(config.folder.parent),
        "model_version": config.version,
        "model_name": config.name,
    }


def _correlation_id(parameters: Mapping[str, Parameter]) -> int | str:
    id = parameters.get(ID, 0)
    return id if isinstance(id, int | str) else 0


def describe_built(form: str) -> Mapping[str, str]:
    return {"python": platform.python_version(), "numpy": np.__version__, "form": form}
