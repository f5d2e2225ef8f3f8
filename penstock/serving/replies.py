"""Answers of one model: each admitted request gets exactly one, which then counts in the metrics.

Keeps the order of answers if the model must, remembers the last batches, and logs overload. Knows
neither queues nor workers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from penstock.errors import InvalidRequest, Overloaded, PenstockError, QuotaExceeded
from penstock.serving.answer_order import Answered, AnswerSequencer
from penstock.serving.batches import BatchRecord, History, RunningBatch
from penstock.serving.context import ModelContext, log_about
from penstock.serving.elsewhere import NOTHING_ELSEWHERE, Elsewhere
from penstock.serving.metrics import Waits
from penstock.serving.request_memory import RequestMemory
from penstock.serving.slab import Segment
from penstock.types import Array, Request, Response, from_array
from penstock.wire import frames
from penstock.wire.statuses import make_error

log = logging.getLogger("penstock.model")
# Overload is over when no request has been refused for this long.
QUIET_S = 5.0
# Other shards are looked at again after this time, while an answer waits for them.
LOOK_AGAIN_S = 0.001


class Refusals:
    """Stretches of overload, for the log: one line when a model starts to refuse requests for lack
    of capacity and one when it stops, however many it refuses."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._last = 0.0
        self._num_refused = 0

    def refused(self, now: float) -> bool:
        """Count a refused request; True if it starts a stretch of overload."""
        begins = self._began is None
        if self._began is None:
            self._began = now
            self._num_refused = 0
        self._last = now
        self._num_refused += 1
        return begins

    def ended(self, now: float) -> tuple[int, float] | None:
        """Return the refusals and the seconds of a stretch that has ended, once; ask often."""
        if self._began is None or now - self._last < QUIET_S:
            return None
        stretch = self._num_refused, self._last - self._began
        self._began = None
        return stretch


class AnswerOrder:
    """Sends the answers of one model in turn. Belongs to an event loop."""

    def __init__(
        self, clock: Callable[[], float], elsewhere: Elsewhere = NOTHING_ELSEWHERE
    ) -> None:
        self._sequencer = sequencer = AnswerSequencer(clock, elsewhere)
        self.enter, self.tick = sequencer.enter, sequencer.show
        self._timer: asyncio.TimerHandle | None = None

    def respond(self, request: Request, answer: Response | PenstockError) -> None:
        """Answer the request once all earlier ones have been answered."""
        if isinstance(answer, Response):
            answer.keeper = None
            for output in answer.outputs:
                output.data = bytes(output.data)  # The answer may outlive its slab row.
        self._send(self._sequencer.finish(request.turn, (request, answer)))

    def close(self) -> None:
        """Send what still waits for other shards."""
        self._send(self._sequencer.release(waits=False))
        if self._timer is not None:
            self._timer.cancel()

    def _look_again(self) -> None:
        self._timer = None
        self._send(self._sequencer.release())

    def _send(self, ready: list[Answered]) -> None:
        for request, answer in ready:
            request.respond(answer)
        if self._timer is None and self._sequencer.waits_for_others:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(LOOK_AGAIN_S, self._look_again)


class Replies:
    """Owns the history, the order of answers and the stretches of overload."""

    def __init__(
        self,
        context: ModelContext,
        memory: RequestMemory,
        elsewhere: Elsewhere = NOTHING_ELSEWHERE,
    ) -> None:
        self._config = context.config
        self._memory = memory
        self._metrics = context.metrics
        self._shares = context.shares
        self._clock = context.clock
        self.history = History()
        self._refusals = Refusals()
        # None if answers need no order.
        config = context.config
        is_ordered = config.batching.preserve_ordering and not config.is_decoupled
        self.order = AnswerOrder(context.clock, elsewhere) if is_ordered else None

    def finish(self, request: Request, answer: Response | PenstockError) -> None:
        """End an admitted request."""
        if self._shares.held:
            self._shares.leave(request)
        if isinstance(answer, PenstockError):
            request.timings.completed = now = self._clock()
            if not request.is_mirror:
                self._metrics.fail_s += now - request.timings.received
        if self.order is None or request.is_mirror:
            request.respond(answer)
        else:
            self.order.respond(request, answer)

    def fail(self, request: Request, error: PenstockError, reason: str) -> None:
        """End an admitted request with an error, unless it has ended."""
        if not has_ended(request):
            if not request.is_mirror:
                waited_s = self._clock() - request.timings.received
                self._metrics.failed(reason, error, self._metrics.is_late(waited_s))
            self.finish(request, error)

    def refuse(
        self, request: Request, error: PenstockError, reason: str = "", *, is_queued: bool = True
    ) -> None:
        """End an admitted request that never ran; `reason` overrides the error's own. If a worker
        has it (not `is_queued`), its memory is released with its batch."""
        if is_queued:
            self._memory.release(request, was_dispatched=False)
        elif has_ended(request):
            return
        if not request.is_mirror:
            self._metrics.refused(error, reason)
            self._note_overload(error, self._clock())
        self.finish(request, error)

    def refused(self, error: PenstockError, received: float) -> None:
        """Count a request that was not admitted, or that a protocol could not read."""
        now = self._clock()
        self._metrics.refused(error)
        self._metrics.fail_s += now - received
        self._note_overload(error, now)

    def deliver(
        self, batch: RunningBatch, frame: frames.Done, output_spill: Segment | None, now: float
    ) -> list[Request]:
        """Answer the requests of a batch; return those that were answered without an error."""
        answered: list[Request] = []
        extents = frame.outputs
        compute_s = (frame.input_s, frame.infer_s, frame.output_s)
        name, version = self._config.name, self._config.version
        for index, request in enumerate(batch.requests):
            timings = request.timings
            timings.compute_s = compute_s
            if request.is_done or timings.completed > 0.0:
                continue
            if index in frame.invalid:
                self.fail(request, InvalidRequest(frame.errors[index]), "OTHER")
            elif index in frame.errors:
                error = make_error(frame.kinds.get(index, ""), frame.errors[index])
                self.fail(request, error, "BACKEND")
            else:
                timings.completed = now
                answered.append(request)
                if batch.held is not None:
                    response = self._held_answer(request, batch.held.answers[index])
                else:
                    own = extents[index] if extents else ()
                    outputs = self._memory.outputs(request, output_spill, own)
                    response = Response(name, version, outputs)
                    fit = request.ticket.fit
                    if fit.has_fixed_outputs:
                        response.form = fit
                        response.keeper = self._memory
                if index in frame.parameters:
                    # Codecs cache by the form what they write before the tensors.
                    response.parameters, response.form = frame.parameters[index], None
                self.finish(request, response)
        return answered

    def _held_answer(self, request: Request, arrays: dict[str, Array]) -> Response:
        """Return an answer that is not in shared memory. Requests of other sinks may run in the
        same batch; they get tensors."""
        response = Response(self._config.name, self._config.version, ())
        if request.takes_arrays:
            response.arrays = arrays
        else:
            specs = [self._config.outputs[index] for index in request.ticket.fit.selection]
            response.outputs = [
                from_array(each.name, each.datatype, arrays[each.name]) for each in specs
            ]
        return response

    def count(
        self, batch: RunningBatch, answered: Sequence[Request], ended: float, num_rows: int
    ) -> None:
        """Count a batch that was delivered, in metrics and history. `num_rows` are those of all its
        parts; 0: another shard counts the execution."""
        timings = batch.requests[0].timings
        waits = self._metrics.fold(answered, batch.num_rows, timings, num_rows)
        if batch.num_tokens:
            self._metrics.batch_tokens.add(batch.num_tokens)
        self.note_batch(batch, ended, waits, sum(timings.compute_s), "answered")

    def note_batch(
        self, batch: RunningBatch, ended: float, waits: Waits, compute_s: float, outcome: str
    ) -> None:
        batch_wait_s, instance_wait_s = waits
        record = BatchRecord(
            ended,
            batch.num_rows,
            len(batch.requests),
            batch.requests[0].ticket.fit.plan.geometry.row_shapes,
            batch_wait_s,
            instance_wait_s,
            compute_s,
            ended - batch.started,
            batch.instance,
            batch.closed_by,
            outcome,
            batch.num_tokens,
        )
        self.history.note(record)

    def _note_overload(self, error: PenstockError, now: float) -> None:
        if is_overload(error) and self._refusals.refused(now):
            text, reason = " is overloaded and refuses requests (%s)", error.reason
            log_about(log, logging.WARNING, self._config, text, reason, reason=reason)

    def log_overload_end(self) -> None:
        """Log that overload is over, once; call it periodically."""
        over = self._refusals.ended(self._clock())
        if over is not None:
            text = " is no longer overloaded; %d requests were refused in %.1f s"
            log_about(log, logging.INFO, self._config, text, *over, num_refused=over[0])


def is_overload(error: PenstockError) -> bool:
    """Whether the error is a lack of capacity, rather than an exceeded quota."""
    return isinstance(error, Overloaded) and not isinstance(error, QuotaExceeded)


def has_ended(request: Request) -> bool:
    """Whether the request has its answer, even if the order of answers still holds it back."""
    return request.is_done or request.timings.completed > 0.0
