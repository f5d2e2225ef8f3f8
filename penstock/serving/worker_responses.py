"""Responses of a decoupled model, from its worker to the shard: any number for each request.

`BatchThread` runs batches in a thread of its own, so that the worker goes on to hear that memory is
free and that clients are gone. Responses leave in whatever thread the model sends them, also long
after its batch has returned. Inputs are copied: a model may use them until its last response.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from penstock.backends import Batch, Outputs
from penstock.config import ModelConfig
from penstock.errors import BackendFailed
from penstock.serving.executor import BatchExecutor, Part, checked_type, explain_error, kind_of
from penstock.serving.shard_link import ShardLink
from penstock.serving.worker_spill import Values
from penstock.types import Array, Parameter
from penstock.wire import frames

DROPPED = "the model dropped the request without a final response"


class OpenRequest:
    """One request until its final response. Its lock keeps the order of responses, whatever threads
    send them."""

    def __init__(self, config: ModelConfig, part: Part, index: int, ended: Callable[[], None]):
        self._config = config
        self._part = part
        self._index = index
        self._ended = ended
        self._lock = threading.Lock()
        # The client has its last answer; after an error, more may follow here.
        self._is_answered = False
        self.is_over = False
        self.is_cancelled = False

    @property
    def link(self) -> ShardLink:
        return self._part.link

    def send(
        self,
        answer: Outputs | Exception | None,
        is_final: bool,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        with self._lock:
            if self.is_over:
                raise BackendFailed("the final response of this request was sent before")
            try:
                if not self._is_answered:
                    self._pass_on(answer, is_final, parameters or {})
            except Exception as error:
                # The client hears of it, whatever the model does, and of nothing after it.
                self._fail(error)
                raise
            finally:
                if is_final:
                    self.is_over = True
                    self._ended()

    def end(self, error: BaseException) -> None:
        """Fail the request, unless it has its final response."""
        with self._lock:
            if self.is_over:
                return
            if not self._is_answered:
                self._fail(error)
            self.is_over = True
            self._ended()

    def _pass_on(
        self,
        answer: Outputs | Exception | None,
        is_final: bool,
        parameters: Mapping[str, Parameter],
    ) -> None:
        if isinstance(answer, Exception):
            self._fail(answer)
            return
        extents: tuple[frames.Extent, ...] = ()
        if answer and not self.link.is_gone and not self.is_cancelled:
            extents = self._part.memory.spill.write_when_free(
                self._checked(answer), lambda: self.link.is_gone
            )
        frame = frames.Responded(
            self._part.frame.batch, self._index, extents, is_final, answer is None
        )
        frame.parameters = dict(parameters)
        try:
            self.link.send(frame)
        except OSError as error:
            self._part.memory.spill.release(each.offset for each in extents)
            text = f"the response's description does not fit a frame: {error.strerror}"
            raise BackendFailed(text) from None
        self._is_answered = is_final

    def _checked(self, outputs: Outputs) -> Values:
        request = self._part.frame.requests[self._index]
        specs = {spec.name: spec for spec in self._config.outputs}
        if unknown := sorted(set(outputs) - set(specs)):
            raise BackendFailed(f"the model has no output '{unknown[0]}'; it has {sorted(specs)}")
        return [
            (spec, checked_type(spec, outputs[name], self._config.max_batch_size > 0))
            for name, spec in specs.items()
            if name in outputs and (not request.outputs or name in request.outputs)
        ]

    def _fail(self, error: BaseException) -> None:
        """Tell the client; what follows is dropped."""
        self._is_answered = True
        batch, text = self._part.frame.batch, explain_error(error)
        kind = kind_of(error)
        self.link.send(
            frames.Responded(batch, self._index, is_final=True, error=text, error_kind=kind)
        )


class RequestResponder:
    """What a model has of an open request (`backends.Responder`)."""

    def __init__(self, request: OpenRequest, dropped: Callable[[OpenRequest], None]) -> None:
        self._request = request
        self._dropped = dropped

    @property
    def is_cancelled(self) -> bool:
        return self._request.is_cancelled

    def send(
        self,
        answer: Outputs | Exception | None,
        *,
        is_final: bool,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        self._request.send(answer, is_final, parameters)

    def __del__(self) -> None:
        # Any thread may be here, with any lock: only a note is left.
        if not self._request.is_over:
            self._dropped(self._request)


class BatchThread:
    """`starts` is called in the thread before a batch; `returned` after it, with its errors, before
    the worker takes the next; `ended` in any thread, when a batch has returned and all its requests
    have their final responses."""

    def __init__(
        self,
        executor: BatchExecutor,
        config: ModelConfig,
        starts: Callable[[Sequence[Part]], None],
        returned: Callable[[Part, Sequence[str]], None],
        ended: Callable[[Part], None],
    ) -> None:
        self._executor = executor
        self._config = config
        self._starts = starts
        self._returned = returned
        self._ended = ended
        # Guards the next two.
        self._lock = threading.Lock()
        # By the number of the link and the batch; requests by index, and None while it runs.
        self._open: dict[tuple[int, int], dict[int | None, OpenRequest | None]] = {}
        # Parts to run, and requests that were dropped; a put is safe in a finalizer.
        self._jobs: queue.SimpleQueue[Part | OpenRequest | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a batch runs, or a request is open."""
        return bool(self._open)

    def submit(self, part: Part) -> None:
        count = len(part.frame.requests)
        requests: dict[int | None, OpenRequest | None] = {
            index: OpenRequest(self._config, part, index, partial(self._end, part, index))
            for index in range(count)
        }
        requests[None] = None
        with self._lock:
            self._open[_key(part)] = requests
        self._jobs.put(part)

    def cancel(self, link: ShardLink, frame: frames.CancelRequest) -> None:
        with self._lock:
            request = self._open.get((link.number, frame.batch), {}).get(frame.index)
        if request is not None:
            request.is_cancelled = True

    def lose(self, link: ShardLink) -> None:
        """Cancel the requests of a shard that is gone."""
        with self._lock:
            requests = [each for batch in self._open.values() for each in batch.values()]
        for request in requests:
            if request is not None and request.link is link:
                request.is_cancelled = True
        if link.memory is not None:
            link.memory.spill.wake()

    def close(self) -> None:
        """End the thread after the batches that were submitted."""
        self._jobs.put(None)
        self._thread.join()

    def _end(self, part: Part, index: int | None) -> None:
        """Forget a request that has its final response, or the run of the batch."""
        key = _key(part)
        with self._lock:
            batch = self._open[key]
            del batch[index]
            is_over = not batch
            if is_over:
                del self._open[key]
        if is_over:
            self._ended(part)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, OpenRequest):
                job.end(BackendFailed(DROPPED))
            else:
                self._run(job)
            del job  # Nothing of a request is kept while the next is waited for.

    def _run(self, part: Part) -> None:
        with self._lock:
            requests = [each for each in self._open[_key(part)].values() if each is not None]
        began = gathered = time.perf_counter()
        errors: list[str] = []
        try:
            batch = self._gather(part, requests)
            gathered = time.perf_counter()
            self._starts([part])
            answers = list(self._executor.runner.start(batch).wait())
            if answers:
                raise BackendFailed("a decoupled model sends its answers, and returns none")
        except BaseException as error:  # Any exception of the model is answered.
            errors.append(explain_error(error))
            for each in requests:
                each.end(BackendFailed(errors[0]))
        took = gathered - began, time.perf_counter() - gathered, 0.0
        self._returned(part, errors)
        part.link.send(frames.Done(part.frame.batch, *took))
        self._end(part, None)

    def _gather(self, part: Part, requests: Sequence[OpenRequest]) -> Batch:
        batch, faults = self._executor.gather_one(part)
        inputs: dict[str, Array] = {name: np.array(batch.inputs[name]) for name in batch.inputs}
        for index, fault in faults.items():
            requests[index].send(fault, is_final=False)
        responders = [RequestResponder(each, self._jobs.put) for each in requests]
        return replace(batch, inputs=inputs, pieces=(), responders=responders)


def _key(part: Part) -> tuple[int, int]:
    return part.link.number, part.frame.batch
