"""A model in this process, with the server's Model and batcher. `LocalModel` has its own event loop
and a thread as worker; `start` is for callers that have a loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from penstock import devices
from penstock.config import ModelConfig
from penstock.errors import ConfigError, InvalidRequest, NotReady, PenstockError
from penstock.model_source import resolve
from penstock.serving.model import Model
from penstock.serving.pipeline import StagePipeline, make_model
from penstock.serving.placement import place
from penstock.serving.supervisor import StartLife, ThreadLife
from penstock.types import (
    DATATYPES,
    Array,
    CallbackSink,
    Request,
    Response,
    TensorSpec,
    from_array,
    to_array,
)

log = logging.getLogger("penstock.local")


class LocalModel:
    """Owns an event loop in its own thread; `infer` may be called from any thread."""

    def __init__(self, path: str, version: str = "") -> None:
        self.config = _config(path, version)
        self._inputs = {spec.name: spec for spec in self.config.inputs}
        # Guards the hand-over to the loop against closing.
        self._lock = threading.Lock()
        self._is_closed = False
        # Requests on their way to the loop; one wake-up takes all of them.
        self._sent: deque[Request] = deque()
        self._is_taking_due = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._model = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:
            self._end_loop()
            raise

    def __enter__(self) -> LocalModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LocalModel {self.config.name}/{self.config.version}>"

    def infer(self, inputs: Array | Mapping[str, Array]) -> dict[str, Array]:
        """Return outputs by name. A model with one input takes a single array; if the model has a
        batch dimension, so must the arrays."""
        return self.submit(inputs).result()

    def submit(self, inputs: Array | Mapping[str, Array]) -> Future[dict[str, Array]]:
        """Like `infer`, without waiting: concurrent requests are batched."""
        future: Future[dict[str, Array]] = Future()

        def deliver(request: Request, answer: Response | PenstockError) -> None:
            if not future.set_running_or_notify_cancel():
                return
            if isinstance(answer, PenstockError):
                future.set_exception(answer)
            else:
                future.set_result({t.name: to_array(t).copy() for t in answer.outputs})

        tensors = [
            from_array(name, self._spec(name).datatype, _cast(self._spec(name), array))
            for name, array in self._named(inputs).items()
        ]
        request = Request(CallbackSink(deliver), tensors, time.monotonic())
        self.send(request)
        future.add_done_callback(lambda done: self._cancel_if(done, request))
        return future

    def send(self, request: Request) -> None:
        """Submit a request made elsewhere. Its sink is called on the model's thread and must copy
        what it keeps of the answer."""
        with self._lock:
            if self._is_closed:
                raise NotReady(f"model '{self.config.name}' is closed")
            self._sent.append(request)
            if not self._is_taking_due:
                self._is_taking_due = True
                self._loop.call_soon_threadsafe(self._take_sent)

    def cancel(self, request: Request) -> None:
        """Cancel a request. Its sink is notified, unless it was answered before."""
        with self._lock:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(self._model.cancel, request)

    def statistics(self) -> dict[str, Any]:
        """Return an entry of v2's statistics, as in a server's `/stats`."""
        with self._lock:
            if self._is_closed:
                raise NotReady(f"model '{self.config.name}' is closed")
            answer = asyncio.run_coroutine_threadsafe(self._statistics(), self._loop)
        return answer.result()

    def close(self) -> None:
        """Answer queued requests with an error and stop. Closing again does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._model.close(), self._loop).result()
        self._end_loop()

    def _cancel_if(self, future: Future[dict[str, Array]], request: Request) -> None:
        if future.cancelled():
            self.cancel(request)

    def _take_sent(self) -> None:
        # Reset first: requests sent from now on wake the loop again.
        self._is_taking_due = False
        for _ in range(len(self._sent)):
            self._model.submit(self._sent.popleft())

    async def _statistics(self) -> dict[str, Any]:
        return self._model.metrics.statistics()

    async def _start(self) -> Model | StagePipeline:
        return await start(self.config, ThreadLife)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _named(self, inputs: Array | Mapping[str, Array]) -> Mapping[str, Array]:
        if isinstance(inputs, Mapping):
            return inputs
        if len(self._inputs) != 1:
            raise InvalidRequest(
                f"model '{self.config.name}' has {len(self._inputs)} inputs; "
                f"give them by name: {', '.join(self._inputs)}"
            )
        return {next(iter(self._inputs)): inputs}

    def _spec(self, name: str) -> TensorSpec:
        spec = self._inputs.get(name)
        if spec is None:
            raise InvalidRequest(
                f"unexpected inference input '{name}' for model '{self.config.name}'; "
                f"it takes {', '.join(self._inputs)}"
            )
        return spec


async def start(config: ModelConfig, start_life: StartLife) -> Model | StagePipeline:
    """Start a model on the running loop with this kind of workers; ConfigError when they cannot
    load it. In-process callers wait without limit, unless the configuration sets one."""
    if config.batching.max_wait_s is None:
        config = replace(config, batching=replace(config.batching, max_wait_s=0.0))
    for warning in config.warnings:
        log.warning("%s/%s: config.pbtxt: %s", config.name, config.version, warning)
    model = make_model(config, start_life)
    try:
        await model.start()
    except BaseException:
        await model.close()
        raise
    return model


def placed(config: ModelConfig) -> ModelConfig:
    """Place the model on the available GPUs if it uses any; ConfigError if it names others."""
    return place(config, devices.read_gpus()) if config.uses_gpu else config


def _cast(spec: TensorSpec, values: Array) -> Array:
    """Cast within the kind of the datatype (float64 to FP32); refuse other casts."""
    array = np.asarray(values)
    if spec.datatype == "BYTES":
        if array.dtype.kind not in "OSUT":
            raise _wrong_type(spec, array)
        return array.astype(np.object_)
    target = DATATYPES[spec.datatype].numpy
    if array.dtype.kind in "iu" and target.kind in "iu":
        limits = np.iinfo(target)
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise InvalidRequest(
                f"inference input '{spec.name}' has values that do not fit {spec.datatype}"
            )
    elif not np.can_cast(array.dtype, target, "same_kind"):
        raise _wrong_type(spec, array)
    return array.astype(target, copy=False)


def _wrong_type(spec: TensorSpec, array: Array) -> InvalidRequest:
    return InvalidRequest(
        f"inference input '{spec.name}' data-type is {array.dtype}, "
        f"which cannot be given as '{spec.datatype}'"
    )


def _config(path: str, version: str) -> ModelConfig:
    found = resolve(path).read()
    problems = [f"{name}: {text}" for name, texts in found.problems.items() for text in texts]
    if problems:
        raise ConfigError(problems)
    configs = [config for config in found.configs if version in ("", config.version)]
    names = sorted({config.name for config in configs})
    if not configs:
        raise ConfigError([f"{path}: no version {version}"])
    if len(names) > 1:
        raise ConfigError([f"{path}: holds {', '.join(names)}; give the folder of one model"])
    return placed(configs[-1])
