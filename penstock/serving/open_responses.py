"""Requests of a decoupled model that have some of their responses: from the worker's frames to
their sinks.

A batch is the dispatcher's until its worker takes the next one; from then on it is here, until all
its requests have their final responses. Knows neither queue nor process.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import BackendFailed
from penstock.serving.batches import RunningBatch
from penstock.serving.context import ModelContext
from penstock.serving.replies import Replies, has_ended
from penstock.serving.request_memory import RequestMemory
from penstock.serving.response_counts import ResponseTimes
from penstock.serving.worker_place import WorkerPlace
from penstock.types import Request, Response, Tensor
from penstock.wire import frames
from penstock.wire.statuses import make_error


class OpenResponses:
    """`workers` are the dispatcher's."""

    def __init__(
        self,
        context: ModelContext,
        workers: Sequence[WorkerPlace],
        memory: RequestMemory,
        replies: Replies,
    ) -> None:
        self._config = context.config
        self._metrics = context.metrics
        self._workers = workers
        self._memory = memory
        self._replies = replies
        self._clock = context.clock

    def respond(self, worker: WorkerPlace, frame: frames.Responded) -> bool:
        """Pass a response on, and give its memory back; return whether it was a final one."""
        batch = self._find(worker, frame.batch)
        # A generator that runs for long is not hung while it responds.
        now = worker.answered_at = self._clock()
        if batch is not None and frame.index in batch.unanswered:
            self._pass_on(worker, batch, frame, now)
        if frame.outputs:
            offsets = tuple(extent.offset for extent in frame.outputs)
            worker.send(frames.Release(offsets))
        if batch is not None and frame.is_final:
            batch.unanswered.pop(frame.index, None)
            if batch in worker.returned:
                self._end(worker, batch)
        return frame.is_final

    def returned(self, worker: WorkerPlace, batch: RunningBatch, frame: frames.Done) -> None:
        """The worker takes the next batch; count this one."""
        for request in batch.requests:
            request.timings.compute_s = frame.input_s, frame.infer_s, frame.output_s
        now = self._clock()
        self._replies.count(batch, (), now, batch.num_rows)
        for request in batch.finished:
            self._metrics.passed(request)
        batch.finished.clear()
        batch.has_returned = True
        worker.returned.append(batch)
        self._end(worker, batch)

    def cancel(self, request: Request) -> None:
        """Tell the worker of a request that its client is gone."""
        for worker in self._workers:
            for batch in (*worker.batches, *worker.returned):
                if batch.unanswered and request in batch.requests:
                    index = batch.requests.index(request)
                    worker.send(frames.CancelRequest(batch.id, index))
                    return

    def fail_begun(self, batch: RunningBatch, reason: str) -> None:
        """Fail the requests of a dead worker that have had responses: they cannot run again."""
        text = f"the worker of model '{self._config.name}' {reason} after the first response"
        for index, request in enumerate(batch.requests):
            progress = batch.unanswered.get(index)
            if progress is not None and progress.count:
                self._replies.fail(request, BackendFailed(text), "BACKEND")
        for request in batch.finished:
            self._metrics.passed(request)

    def _find(self, worker: WorkerPlace, number: int) -> RunningBatch | None:
        return next((b for b in (*worker.batches, *worker.returned) if b.id == number), None)

    def _end(self, worker: WorkerPlace, batch: RunningBatch) -> None:
        """Forget a batch whose requests all have their final responses."""
        if not batch.unanswered:
            worker.returned.remove(batch)
            self._memory.release_batch(batch)

    def _pass_on(
        self, worker: WorkerPlace, batch: RunningBatch, frame: frames.Responded, now: float
    ) -> None:
        request, times = batch.requests[frame.index], batch.unanswered[frame.index]
        counts = self._metrics.responses
        if has_ended(request):
            counts.cancelled(times, now)
            return
        if frame.error:
            counts.failed(times, now)
            self._replies.fail(request, make_error(frame.error_kind, frame.error), "BACKEND")
            return
        if not times.count:
            request.timings.first_response = now
        counts.answered(times, now, is_empty=frame.is_empty)
        answer = Response(self._config.name, self._config.version, self._read(worker, frame))
        answer.parameters = frame.parameters or None
        answer.is_empty = frame.is_empty
        if not frame.is_final:
            request.respond(answer, final=False)
            return
        request.timings.completed = now
        self._replies.finish(request, answer)
        if batch.has_returned:
            self._metrics.passed(request)
        else:
            batch.finished.append(request)

    def _read(self, worker: WorkerPlace, frame: frames.Responded) -> list[Tensor]:
        """Return views of the outputs."""
        assert worker.link is not None or not frame.outputs, "its response came on it"
        outputs: list[Tensor] = []
        for extent in frame.outputs:
            assert worker.link is not None
            view = worker.link.output_spill.view[extent.offset : extent.offset + extent.nbytes]
            outputs.append(Tensor(extent.name, extent.datatype, extent.shape, view))
        return outputs


def open_batch(batch: RunningBatch) -> None:
    """Note that no request of a batch has had a response."""
    batch.unanswered = {index: ResponseTimes(batch.started) for index in range(len(batch.requests))}
