"""Models in this process, with the server's Model and batcher. `LocalModel` has its own event loop
and a thread as worker; `start` is for callers that have a loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from penstock.backends import NO_ENSEMBLE
from penstock.config import ModelConfig, ScalingConfig
from penstock.errors import InvalidRequest, NotReady, Unsupported
from penstock.processes.child import StartLife
from penstock.repository.layout import RepositoryScan
from penstock.repository.model_source import resolve
from penstock.serving.answer_future import AnswerFuture, check_may_block
from penstock.serving.context import log_about
from penstock.serving.drift import InputDrift
from penstock.serving.held_rows import HeldRows
from penstock.serving.model import Model
from penstock.serving.pipeline import StagePipeline, make_model
from penstock.serving.placement import place
from penstock.serving.registered import RegisteredRows, register
from penstock.serving.served import Served
from penstock.serving.supervisor import ThreadLife
from penstock.system import devices
from penstock.types import Array, Request, Tensor, to_array
from penstock.wire.arrays import MIN_VIEW_BYTES, Given, InputForm, InputReader

log = logging.getLogger("penstock.local")
Kind = TypeVar("Kind", bound=Served)


class ModelThread(Generic[Kind]):
    """A model on an event loop in its own thread, for callers in any thread."""

    def __init__(self, config: ModelConfig, starting: Coroutine[object, object, Kind]) -> None:
        self.config = config
        # Guards the hand-over to the loop against closing.
        self._lock = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._model = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        except BaseException:
            self._end_loop()
            raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.config.name}/{self.config.version}>"

    def statistics(self) -> dict[str, Any]:
        """Return an entry of v2's statistics, as in a server's `/stats`."""

        async def read() -> dict[str, Any]:
            return self._model.metrics.statistics()

        self._check_may_block("statistics()")
        with self._lock:
            if self._is_closed:
                raise self._closed()
            answer = asyncio.run_coroutine_threadsafe(read(), self._loop)
        return answer.result()

    def close(self) -> None:
        """Answer queued requests with an error and stop. Closing again does nothing."""
        self._check_may_block("close()")
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._close_model(), self._loop).result()
        self._end_loop()

    async def _close_model(self) -> None:
        await self._model.close()

    def _check_may_block(self, call: str) -> None:
        check_may_block(call, self._thread.ident or 0)

    def _closed(self) -> NotReady:
        return NotReady(f"model '{self.config.name}' is closed")

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class LocalModel(ModelThread[Model | StagePipeline]):
    """A model of tensors, with a thread as worker."""

    def __init__(self, model: str | ModelConfig, version: str = "") -> None:
        """`model` is a model's folder, or a configuration that is placed already."""
        if not isinstance(model, ModelConfig):
            model = choose(resolve(model).read(), model, version)
        check_answers_once(model)
        # Threads of the caller's process do not come and go.
        model = replace(model, scaling=ScalingConfig())
        self._has_batch = model.max_batch_size > 0
        self._reader = InputReader(model.inputs, model.name, has_batch=self._has_batch)
        # Requests on their way to the loop, which is woken only if it does not look for them.
        self._sent: deque[Request] = deque()
        self._is_taking_due = False
        super().__init__(model, start(model, ThreadLife))

    def __enter__(self) -> LocalModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def register(self, arrays: Array | Mapping[str, Array]) -> RegisteredRows:
        """Return rows that `submit` takes by reference. The arrays have a first dimension of rows;
        they must have the datatype of the input and be C-contiguous."""
        return register(self, self.config, self._reader, arrays)

    def infer(self, inputs: Given | RegisteredRows) -> dict[str, Array]:
        """Return outputs by name. A model that needs one input takes a single array; if the model
        has a batch dimension, so must the arrays."""
        self._check_may_block("infer()")
        return self.submit(inputs).result()

    def submit(self, inputs: Given | RegisteredRows, *, copy: bool = False) -> AnswerFuture:
        """Like `infer`, without waiting: concurrent requests are batched. Small arrays are
        copied; large ones (MIN_VIEW_BYTES) must not change before the answer, unless with `copy`.
        Registered ones never may."""
        future = AnswerFuture(self.cancel, self._thread.ident or 0)
        rows: HeldRows | None = None
        form: InputForm | None
        if isinstance(inputs, RegisteredRows):
            registration = inputs.registration
            if registration.owner is not self:
                raise InvalidRequest(f"the rows are not registered with '{self.config.name}'")
            tensors, form = registration.read(inputs.start, inputs.stop)
            rows = inputs
        else:
            tensors, form = self._reader.read(inputs, copy=copy)
        future.request = request = Request(future, tensors, time.monotonic())
        request.form = form
        request.takes_arrays = True
        if self._has_batch and tensors and len(tensors[0].data) >= MIN_VIEW_BYTES:
            request.rows = rows or _held(tensors)
        self.send(request)
        return future

    def send(self, request: Request) -> None:
        """Submit a request made elsewhere. Its sink is called on the model's thread and must copy
        what it keeps of the answer."""
        with self._lock:
            if self._is_closed:
                raise self._closed()
            self._sent.append(request)
            if not self._is_taking_due:
                self._is_taking_due = True
                self._loop.call_soon_threadsafe(self._take_sent)

    def drift(self) -> Sequence[InputDrift]:
        """Return how the inputs so far compare with the version's evidence; empty without any."""

        async def read() -> Sequence[InputDrift]:
            return list(self._model.drift)

        self._check_may_block("drift()")
        with self._lock:
            if self._is_closed:
                raise self._closed()
            answer = asyncio.run_coroutine_threadsafe(read(), self._loop)
        return answer.result()

    def cancel(self, request: Request) -> None:
        """Cancel a request. Its sink is notified, unless it was answered before."""
        with self._lock:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(self._model.cancel, request)

    def _take_sent(self) -> None:
        sent, submit = self._sent, self._model.submit
        if not sent:
            self._is_taking_due = False
            # A request sent before that line did not wake the loop.
            if not sent:
                return
            self._is_taking_due = True
        for _ in range(len(sent)):
            submit(sent.popleft())
        # Look again in the next turn, because bursts are common and a wake-up is a system call.
        self._loop.call_soon(self._take_sent)


def check_answers_once(config: ModelConfig) -> None:
    """Raise Unsupported for a model whose answers have no end that callers could wait for, or whose
    members are not here."""
    if config.is_ensemble:
        raise Unsupported(f"model '{config.name}': {NO_ENSEMBLE}")
    if config.is_decoupled:
        text = "is decoupled: its requests have any number of responses, which in-process calls"
        raise Unsupported(f"model '{config.name}' {text} do not take; serve it")


def _held(tensors: Sequence[Tensor]) -> HeldRows | None:
    """Return rows of large tensors that stay where they are; None if there is a text."""
    arrays: dict[str, Array] = {}
    for each in tensors:
        if each.datatype == "BYTES" or not each.shape:
            return None
        array = arrays[each.name] = to_array(each)
        array.flags.writeable = False
    return HeldRows(arrays, 0, tensors[0].shape[0])


async def start(config: ModelConfig, start_life: StartLife) -> Model | StagePipeline:
    """Start a model on the running loop with this kind of workers; ConfigError when they cannot
    load it. In-process callers wait without limit, unless the configuration sets one."""
    if config.batching.max_wait_s is None:
        config = replace(config, batching=replace(config.batching, max_wait_s=0.0))
    for warning in config.warnings:
        log_about(log, logging.WARNING, config, ": config.pbtxt: %s", warning)
    if config.record is not None and config.record.max_bytes:
        log_about(
            log, logging.INFO, config, " is not recorded: only `penstock serve --record` does"
        )
    return await started(make_model(config, start_life))


async def started(model: Kind) -> Kind:
    """Start a model; close it if that fails."""
    try:
        await model.start()
    except BaseException:
        await model.close()
        raise
    return model


def place_here(config: ModelConfig) -> ModelConfig:
    """Place the model on the available GPUs if it uses any; ConfigError if it names others."""
    return place(config, devices.read_gpus()) if config.uses_gpu else config


def choose(found: RepositoryScan, where: object, version: str = "") -> ModelConfig:
    """Return the one model found, placed; ConfigError if there are several or none of `version`."""
    return place_here(found.only(where, version, "give the folder of one model"))
