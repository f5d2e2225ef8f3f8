"""One version of a model as a Servable: admits, batches, dispatches and answers requests.

Owns the batcher, the shared-memory slabs and the batches in flight; runs on the core's event loop
without locks. Knows no protocol (requests carry their sink) and no process (the supervisor does).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from penstock.config import MIB, ModelConfig
from penstock.errors import (
    BackendFailed,
    ConfigError,
    InvalidRequest,
    NotReady,
    Overloaded,
    PenstockError,
    Quarantined,
    QuotaExceeded,
    TooLarge,
)
from penstock.processes.life import ProcessLife
from penstock.serving.batcher import Batcher, Sequencer
from penstock.serving.explain import Explanation, explain, mode_of
from penstock.serving.history import History, Record
from penstock.serving.metrics import ModelMetrics, Waits
from penstock.serving.padding import Pads
from penstock.serving.plan import Geometry, Plan, Planner, column_bytes
from penstock.serving.processor_wait import ProcessorWait
from penstock.serving.proof import agreed
from penstock.serving.quarantine import (
    MAX_BODY_DEATHS,
    MAX_KEY_DEATHS,
    Part,
    Quarantine,
    Verdict,
    fingerprint,
)
from penstock.serving.quotas import QueueShares, Quotas
from penstock.serving.refusals import Refusals
from penstock.serving.running_batch import RunningBatch
from penstock.serving.saturation import Saturation
from penstock.serving.slab import Extents, Layout, Segment, Slab, SlabPool, aligned
from penstock.serving.slo_batcher import SloBatcher
from penstock.serving.supervisor import Instance, StartLife, Supervisor
from penstock.serving.ticket import Ticket
from penstock.types import CANCELLED, Buffer, Request, Response, Tensor
from penstock.wire import frames

log = logging.getLogger("penstock.model")

State = Literal["LOADING", "READY", "UNAVAILABLE", "UNLOADING"]

VARIABLE_SLAB_BYTES = 4 * MIB
# Limit on the requests of one batch of extents, so that its frame stays small.
MAX_PARTS = 256
# Limit on one dispatch frame, which has to fit the socket buffer.
MAX_DISPATCH_BYTES = 128 * 1024
# With no instance ready, queued requests wait this long for one to come back, or LOAD_FACTOR times
# the model's load time if that is longer.
UNAVAILABLE_AFTER_S = 30.0
LOAD_FACTOR = 2
HANG_FACTOR = 20
# Suspects (see `Model._suspects`) wait this long for a spare worker, since they may kill theirs.
SUSPECT_PATIENCE_S = 30.0
# Interval between readings of how long the event loop waited for a CPU. A difference over more
# than LOOK_WITHIN_S says nothing about one request.
LOOK_EVERY_S, LOOK_WITHIN_S = 0.001, 0.5
QUEUE_TIMEOUT = Overloaded("Request timeout expired", reason="queue_timeout")
DROPPED = Overloaded(
    "Request timeout expired: the answer would have been late", reason="dropped_late"
)


class NoRoom(Exception):
    """The input spill has no room for the extents of another batch."""


class Model:
    """Invariant: an admitted request is in the batcher, in exactly one RunningBatch, or done."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        start_life: StartLife = ProcessLife,
        clock: Callable[[], float] = time.monotonic,
        quotas: Quotas | None = None,
    ) -> None:
        self.config = config
        self._quotas = quotas or Quotas()
        num_levels = max(1, config.batching.num_priorities)
        self._shares = QueueShares(self._quotas, config.batching.max_pending, num_levels)
        self.metrics = ModelMetrics(config.name, config.version, config.metric_tags)
        self.history = History()
        # How the model is served and why, if its configuration does not say.
        self.notes: tuple[str, ...] = ()
        self.state: State = "LOADING"
        self.reason = ""
        self._clock = clock
        self._saturation = Saturation(clock())
        self._refusals = Refusals()
        self._quarantine = Quarantine()
        # Suspects: requests whose worker died while poison requests are known. Each runs again
        # alone, and only when that cannot take the last worker from the other requests.
        self._suspects: deque[Request] = deque()
        # When a suspect was last tried, or when the first one was added.
        self._tried_suspect_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._slab_bytes = _slab_bytes(config)
        self._planner = Planner(config, self._slab_bytes)
        self._slo: SloBatcher | None = None
        if config.batching.slo_latency_s is not None:
            self._slo = SloBatcher(config.batching, config.num_instances)
        self._processor_wait = ProcessorWait()
        self._looked_at = -math.inf
        self._waited_s = 0.0
        self._batcher: Batcher | SloBatcher = self._slo or Batcher(config.batching)
        self._sequencer: Sequencer[tuple[Request, Response | PenstockError]] | None = None
        if config.batching.preserve_ordering:
            self._sequencer = Sequencer()
        self._input_spill = Segment(config.memory.spill_bytes)
        self._extents = Extents(config.memory.spill_bytes)
        self._supervisor = Supervisor(config, self, self._input_spill, start_life)
        self._most_slots = max(each.num_slots for each in self._supervisor.instances)
        self._pool = SlabPool(
            self._slab_bytes,
            max(config.memory.max_slabs, 2 * config.num_instances),
            self._supervisor.add_slab,
        )
        self._column = {
            index: column
            for column, index in enumerate(
                i for i, spec in enumerate(config.outputs) if spec.is_fixed
            )
        }
        self._needs_parts = len(self._column) < len(config.outputs)
        self._batch_ids = itertools.count(1)
        self._recent: dict[int, deque[float]] = {}
        self._is_pump_due = False
        self._is_answering = False
        self._last_num_requests = 0
        self._timer: asyncio.TimerHandle | None = None
        # Done when all instances are warm, or when loading failed and `_load_problems` is set. Not
        # an exception of the future: model and traceback would keep each other alive.
        self._first_ready: asyncio.Future[None] = self._loop.create_future()
        self._load_problems: Sequence[str] = ()
        # None while an instance is ready.
        self._without_instance_since: float | None = clock()
        self._idle_waiters: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        return f"<Model {self.config.name}/{self.config.version} {self.state}>"

    @property
    def labels(self) -> dict[str, str]:
        """Labels of this version in log lines."""
        return {"model": self.config.name, "version": self.config.version}

    @property
    def instances(self) -> Sequence[Instance]:
        return self._supervisor.instances

    @property
    def has_spare(self) -> bool:
        """Whether all wanted spare workers are loaded."""
        return self._supervisor.has_all_spares

    @property
    def batcher(self) -> Batcher | SloBatcher:
        return self._batcher

    @property
    def num_waiting(self) -> int:
        return self._batcher.num_waiting + len(self._suspects)

    @property
    def num_running(self) -> int:
        return sum(
            len(flight.requests) for instance in self.instances for flight in instance.batches
        )

    @property
    def num_slabs_held(self) -> int:
        return self._pool.num_in_use

    @property
    def num_extents_held(self) -> int:
        return self._extents.num_held

    @property
    def shown_state(self) -> State:
        """State in the repository index: unavailable while no instance can run."""
        return "UNAVAILABLE" if self.state == "READY" and not self.is_ready else self.state

    @property
    def is_ready(self) -> bool:
        """Whether an instance can run a batch."""
        return self.state == "READY" and any(i.is_ready for i in self.instances)

    @property
    def mode(self) -> str:
        return mode_of(self.config, self._batcher.policy)[0]

    def explain(self) -> Explanation:
        return explain(self, self._clock())

    async def start(self) -> None:
        """Start the workers and wait until all are warm. ConfigError if the model cannot load."""
        self._supervisor.start()
        await self._first_ready
        if self._load_problems:
            raise ConfigError(self._load_problems)

    async def drain(self) -> None:
        """Wait until everything admitted has been answered."""
        if self.num_waiting or self.num_running:
            waiter = self._loop.create_future()
            self._idle_waiters.append(waiter)
            await waiter

    async def close(self) -> None:
        """Stop the workers; requests still queued get an error."""
        self.state = "UNLOADING"
        if self._timer is not None:
            self._timer.cancel()
        self._fail_waiting(NotReady(f"model '{self.config.name}' is being unloaded"))
        await self._supervisor.stop()
        self._fail_waiting(NotReady(f"model '{self.config.name}' is being unloaded"))
        self._pool.close()
        self._input_spill.close()
        self._processor_wait.close()

    # Requests.

    def submit(self, request: Request) -> None:
        try:
            if self.state != "READY":
                raise NotReady(self._not_ready_text())
            fit = self._planner.fit(request)
            request.ticket = Ticket(fit)
            plan = fit.plan
            request.num_rows = plan.num_rows
            request.num_tokens = plan.num_tokens
            geometry = plan.geometry
            if geometry.layout is None:
                self._check_spill(request)
            if self._quarantine.is_active:
                self._check_quarantine(request)
            if self._quotas.is_active:
                self._check_quota(request)
            timings = request.timings
            timings.queued = now = self._clock()
            timings.saturated_s = self._saturation.at(now)
            if self._slo is not None and now >= self._looked_at + LOOK_EVERY_S:
                self._note_processor_wait(self._slo, now)
            self._batcher.add(request, geometry, now)
        except PenstockError as error:
            self._note_full(request, error)
            self.refused(error, request.timings.received)
            request.respond(error)
            return
        if self._quotas.is_active:
            self._shares.enter(request, request.caller, level=request.priority)
        if self._sequencer is not None:
            request.turn = self._sequencer.enter()
        if geometry.layout is None or self._place(request, plan, geometry.layout):
            self._wake()

    def _place(self, request: Request, plan: Plan, layout: Layout) -> bool:
        """Copy the request into the open slab, if there is room. False if that failed and the
        request was answered with an error."""
        try:
            slab = self._pool.place(plan.geometry, layout, plan.num_rows)
            if slab is not None:
                self._fill(request, slab)
        except Exception:  # A request that cannot be copied must not stay in the queue.
            self._cannot_place(request)
            return False
        return True

    def _note_full(self, request: Request, error: PenstockError) -> None:
        """Tell the queue shares that the queue was full. Requests with their own deadline say
        nothing about that."""
        if self._quotas.is_active and _is_overload(error) and request.timeout_s is None:
            num_held = self.num_waiting + self.num_running
            self._shares.refused(num_held, self._clock(), request.priority)

    def _check_quota(self, request: Request) -> None:
        """Raise QuotaExceeded when the key has filled its share of the queue. The protocols check
        rates, since they also see requests that never reach a model."""
        level = self.config.batching.level(request.priority)
        self._shares.check(request.caller, self._clock(), level)

    def _note_processor_wait(self, slo: SloBatcher, now: float) -> None:
        total_s = self._processor_wait.total_s()
        if now - self._looked_at <= LOOK_WITHIN_S:
            slo.note_wait(total_s - self._waited_s)
        self._waited_s, self._looked_at = total_s, now

    def refused(self, error: PenstockError, received: float) -> None:
        """Count a request that was not admitted, by this model or by a protocol that could not
        read it."""
        now = self._clock()
        self.metrics.refused(error)
        self.metrics.fail_s += now - received
        self._note_overload(error, now)

    def _wake(self) -> None:
        """Dispatch, now or at the end of this loop iteration."""
        is_alone = self._last_num_requests == 1 and self._batcher.num_waiting == 1
        if is_alone and not self._is_answering:
            # The last batch had one request: waiting for others would only add latency.
            self._pump()
        elif not self._is_pump_due:
            # All requests that this loop iteration reads can join the same batch.
            self._is_pump_due = True
            self._loop.call_soon(self._pump)

    def cancel(self, request: Request) -> None:
        """Cancel a request. In flight, it is still computed and its answer is dropped; queued, it
        never runs."""
        if _has_ended(request) or not hasattr(request, "ticket"):
            return
        if self._take_out(request):
            self._release(request, was_dispatched=False)
        self.metrics.failed("CANCELED")
        self._finish(request, CANCELLED)
        self._check_idle()

    def _take_out(self, request: Request) -> bool:
        """Remove a request from its queue; False if it is not queued."""
        if request in self._suspects:
            self._suspects.remove(request)
            return True
        return self._batcher.remove(request)

    def _cannot_place(self, request: Request) -> None:
        log.exception("%s: a request could not be placed in shared memory", self.config.name)
        self._batcher.remove(request)
        self._release(request, was_dispatched=False)
        self.metrics.failed("OTHER")
        self._finish(request, BackendFailed("the request could not be placed in shared memory"))

    def _fill(self, request: Request, slab: Slab) -> None:
        """Copy the tensors into the last rows of the slab and drop the request's own buffers."""
        ticket, count = request.ticket, request.num_rows
        plan, view = ticket.fit.plan, slab.seg.view
        ticket.slab = slab
        ticket.row = row = slab.next_row - count
        inputs = request.inputs
        if plan.own_shapes is not None:
            self._fill_padded(request, plan, slab)
            request.inputs = ()
            return
        for (offset, row_bytes), index in zip(plan.geometry.input_columns, plan.order, strict=True):
            start = offset + row * row_bytes
            view[start : start + count * row_bytes] = inputs[index].data
        request.inputs = ()

    def _fill_padded(self, request: Request, plan: Plan, slab: Slab) -> None:
        pads, geometry = self._planner.pads, plan.geometry
        assert pads is not None and plan.own_shapes is not None
        for index, (offset, row_bytes) in enumerate(geometry.input_columns):
            start = offset + request.ticket.row * row_bytes
            target = slab.seg.view[start : start + plan.num_rows * row_bytes]
            data = request.inputs[plan.order[index]].data
            pads.write(index, target, data, plan.own_shapes[index], geometry.row_shapes[index])
            self.metrics.padded_bytes += len(target)
            self.metrics.padding_bytes += len(target) - len(data)

    def _check_spill(self, request: Request) -> None:
        needed = sum(aligned(len(tensor.data)) for tensor in request.inputs)
        if needed > self._extents.capacity:
            raise TooLarge(
                f"the inputs take {needed} bytes, more than the {self._extents.capacity} that "
                f"model '{self.config.name}' has for them (parameters.penstock.spill_bytes)"
            )

    # Quarantine.

    def _check_quarantine(self, request: Request) -> None:
        """Raise Quarantined for a poison request, or if its API key is quarantined. Only bodies of
        the same size as a quarantined one are hashed."""
        now = self._clock()
        quarantine, name = self._quarantine, self.config.name
        left_s = quarantine.key_left_s(request.caller, now)
        if left_s > 0:
            raise Quarantined(
                f"requests with this API key killed workers of model '{name}' "
                f"{MAX_KEY_DEATHS} times; the model refuses the key for {left_s:.0f} s more"
            )
        if not quarantine.has_body_of(self._num_body_bytes(request)):
            return
        left_s = quarantine.body_left_s(self._body(request), now)
        if left_s > 0:
            raise Quarantined(
                f"this request killed its worker of model '{name}' {MAX_BODY_DEATHS} times; the "
                f"model refuses it for {left_s:.0f} s more"
            )

    def _body(self, request: Request) -> bytes:
        """Return the fingerprint of a request, whether or not it is in shared memory already."""
        slab = request.ticket.slab
        parts = self._sent(request) if slab is None else self._placed(request, slab)
        return fingerprint(parts, request.parameters)

    def _num_body_bytes(self, request: Request) -> int:
        slab = request.ticket.slab
        if slab is None:
            return sum(len(tensor.data) for tensor in request.inputs)
        return sum(len(part.data) for part in self._placed(request, slab))

    def _sent(self, request: Request) -> list[Part]:
        tensors = [request.inputs[index] for index in request.ticket.fit.plan.order]
        return [Part(tensor.name, tensor.shape, tensor.data) for tensor in tensors]

    def _placed(self, request: Request, slab: Slab) -> list[Part]:
        plan = request.ticket.fit.plan
        geometry, view, count = plan.geometry, slab.seg.view, plan.num_rows
        parts: list[Part] = []
        for index, (offset, row_bytes) in enumerate(geometry.input_columns):
            start = offset + request.ticket.row * row_bytes
            data: Buffer = view[start : start + count * row_bytes]
            shape = geometry.row_shapes[index]
            if plan.own_shapes is not None:
                assert self._planner.pads is not None
                full, shape = shape, plan.own_shapes[index]
                data = self._planner.pads.read(index, data, shape, full)
            parts.append(Part(self.config.inputs[index].name, (count, *shape), data))
        return parts

    def _pinned(self, request: Request, was_killed_outside: bool) -> Verdict:
        """Note that a worker died while it ran only this request. A kill from outside counts
        towards the quarantine of the request but not of its API key: an operator's kill hits
        whatever is running."""
        now = self._clock()
        caller = b"" if was_killed_outside else request.caller
        verdict = self._quarantine.died(self._body(request), caller, now)
        if verdict.is_excused and request.lost_with is not None:
            self._supervisor.excuse(request.lost_with)
            request.lost_with = None
        if verdict.quarantines_key:
            self._warn("an API key is quarantined: its requests killed %d workers", MAX_KEY_DEATHS)
        if verdict.quarantines_body:
            self._warn("a request is quarantined: it killed %d workers", MAX_BODY_DEATHS)
        if verdict.quarantines_body or verdict.quarantines_key:
            self._refuse_quarantined()
        return verdict

    def _refuse_quarantined(self) -> None:
        """Refuse quarantined requests that are already queued."""
        waiting = [request for lane in self._batcher.waiting() for request in lane.walk()]
        waiting += self._suspects
        for request in waiting:
            self._refuse_if_quarantined(request)

    def _refuse_if_quarantined(self, request: Request) -> bool:
        try:
            self._check_quarantine(request)
        except Quarantined as error:
            self._take_out(request)
            self._refuse(request, error)
            return True
        return False

    def _warn(self, text: str, *args: object) -> None:
        where = (self.config.name, self.config.version)
        log.warning(f"%s/%s: {text}", *where, *args, extra=self.labels)

    # Batches.

    def _pump(self) -> None:
        """Refuse expired requests, then dispatch batches to idle instances."""
        self._is_pump_due = False
        batcher = self._batcher
        now = self._clock()
        if self._slo is not None:
            for request in self._slo.take_dropped():
                self._refuse(request, DROPPED)
        for request in batcher.expire(now):
            self._refuse(request, QUEUE_TIMEOUT)
        self._try_suspect(now)
        for num_others in range(self._most_slots):
            # Instances with no batch come first, then those with one, and so on.
            for instance in self._supervisor.instances:
                while len(instance.batches) <= num_others and self._takes_batch(instance):
                    batch = batcher.next(now)
                    if batch is None:
                        self._arm_timer(now)
                        return
                    if self._is_refused_rerun(batch, now):
                        continue
                    if not self._dispatch(instance, batch, now):
                        break
        self._arm_timer(now, only_expiry=True)

    def _takes_batch(self, instance: Instance) -> bool:
        """Whether the instance may take another batch. A rerun gets the worker for itself, so that
        a crash can be attributed."""
        if not instance.is_idle:
            return False
        others = instance.batches
        if not others:
            return True
        if self._batcher.num_reruns or others[0].closed_by == "rerun":
            return False
        return not (self._suspects and self._may_try_suspect())

    def _try_suspect(self, now: float) -> None:
        """Run suspects on instances without batches."""
        while self._suspects and self._may_try_suspect():
            idle = [each for each in self.instances if each.is_idle and not each.batches]
            if not idle:
                return
            request = self._suspects.popleft()
            if self._refuse_if_quarantined(request):
                continue
            self._tried_suspect_at = now
            self._batcher.closed_by = "rerun"
            if not self._dispatch(idle[0], [request], now):
                return

    def _may_try_suspect(self) -> bool:
        """Whether a suspect may run now: one at a time, while all wanted spares are loaded. It may
        run without if there are no spares, or if some are missing for SUSPECT_PATIENCE_S; but a
        single ready worker first serves other requests for as long as it took to start."""
        ready = [each for each in self.instances if each.is_ready]
        if any(flight.closed_by == "rerun" for each in ready for flight in each.batches):
            return False
        is_patient = self._clock() - self._tried_suspect_at < SUSPECT_PATIENCE_S
        if self._supervisor.num_spares and (self._supervisor.has_all_spares or is_patient):
            return self._supervisor.has_all_spares
        if len(ready) > 1:
            return True
        return any(self._loop.time() - each.ready_at >= each.start_s for each in ready)

    def _arm_timer(self, now: float, only_expiry: bool = False) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_at = self._batcher.next_expiry if only_expiry else self._batcher.wake_at
        if wake_at is not None:
            self._timer = self._loop.call_later(max(0.0, wake_at - now), self._pump)

    def _is_refused_rerun(self, batch: list[Request], now: float) -> bool:
        """Refuse a rerun whose body or key was quarantined while it waited; True if it was."""
        if self._batcher.closed_by != "rerun" or not self._quarantine.is_active:
            return False
        if not self._refuse_if_quarantined(batch[0]):
            return False
        if self._slo is not None:
            self._slo.ended(now)
        return True

    def _refuse(self, request: Request, error: PenstockError) -> None:
        self._release(request, was_dispatched=False)
        self.metrics.refused(error)
        self._note_overload(error, self._clock())
        self._finish(request, error)
        self._check_idle()

    def _dispatch(self, instance: Instance, batch: list[Request], now: float) -> bool:
        """Send a batch to an instance. False if shared memory is full: the batch is queued again
        until one in flight is answered."""
        geometry = batch[0].ticket.fit.plan.geometry
        flight = RunningBatch(next(self._batch_ids), batch, now)
        try:
            if geometry.layout is not None:
                frame = self._rows_frame(flight, geometry)
            else:
                frame = self._extents_frame(flight, geometry)
            data = frames.encode(frame)
        except NoRoom:
            self._wait_for_room(flight, geometry)
            return False
        except Exception:  # A batch that cannot be encoded must not stop the others.
            log.exception("%s: a batch could not be dispatched", self.config.name)
            self._abandon(flight, BackendFailed("internal error; this is a bug"))
            return True
        if len(data) > MAX_DISPATCH_BYTES and self._shrink(flight, geometry):
            return self._dispatch(instance, flight.requests, now)
        if len(data) > frames.MAX_FRAME_BYTES // 4:
            self._abandon(flight, TooLarge("the request's id and parameters are too large"))
            return True
        saturated_s = self._saturation.at(now)
        for request in flight.requests:
            timings = request.timings
            timings.dispatched = now
            timings.instance_wait_s = saturated_s - timings.saturated_s
            flight.num_tokens += request.num_tokens
        flight.instance, flight.closed_by = instance.index, self._batcher.closed_by
        instance.batches.append(flight)
        self._note_idle(now)
        self._last_num_requests = len(flight.requests)
        self._supervisor.send_bytes(instance, data)
        return True

    def _wait_for_room(self, flight: RunningBatch, geometry: Geometry) -> None:
        self._ended(flight)
        if self._batcher.closed_by == "rerun":
            for request in flight.requests:
                self._run_again(request)
        else:
            self._batcher.put_back(flight.requests, geometry)

    def _abandon(self, flight: RunningBatch, error: PenstockError) -> None:
        """End a batch that was never sent with an error."""
        self._ended(flight)
        self._release_flight(flight)
        for request in flight.requests:
            if not _has_ended(request):
                self.metrics.failed("OTHER")
                self._finish(request, error)
        self._check_idle()

    def _ended(self, flight: RunningBatch) -> None:
        """Tell the batcher that the batch ended without a usable duration."""
        self._batcher.ended(flight.started)

    def _shrink(self, flight: RunningBatch, geometry: Geometry) -> bool:
        """Halve a batch whose dispatch frame is too long; False if it has one request."""
        requests = flight.requests
        if len(requests) < 2:
            return False
        half = len(requests) // 2
        self._release_extents(flight)
        for request in requests:
            self._requeued(request)
        self._batcher.put_back(requests[half:], geometry)
        flight.requests = requests[:half]
        return True

    def _rows_frame(self, flight: RunningBatch, geometry: Geometry) -> frames.Dispatch:
        layout = geometry.layout
        assert layout is not None
        self._place_all(flight, geometry, layout)
        runs: list[frames.Run] = []
        slab: Slab | None = None
        start = count = 0
        for request in flight.requests:
            ticket, num_rows = request.ticket, request.num_rows
            assert ticket.slab is not None
            if ticket.slab is slab and ticket.row == start + count:
                count += num_rows
            else:
                if slab is not None:
                    runs.append(frames.Run(slab.id, start, count))
                slab, start, count = ticket.slab, ticket.row, num_rows
            flight.num_rows += num_rows
            self._pool.dispatched(slab, num_rows)
        assert slab is not None
        runs.append(frames.Run(slab.id, start, count))
        parts = self._parts(flight.requests) if self._needs_parts else ()
        return frames.Dispatch(flight.id, tuple(runs), geometry.row_shapes, layout.capacity, parts)

    def _place_all(self, flight: RunningBatch, geometry: Geometry, layout: Layout) -> None:
        """Place the requests that arrived while every slab was full; queue again those that still
        do not fit."""
        for index, request in enumerate(flight.requests):
            if request.ticket.slab is not None:
                continue
            slab = self._pool.place(geometry, layout, request.num_rows, is_needed=index == 0)
            if slab is None:
                self._batcher.put_back(flight.requests[index:], geometry)
                flight.requests = flight.requests[:index]
                return
            self._fill(request, slab)

    def _parts(self, requests: Sequence[Request]) -> tuple[frames.RequestPart, ...]:
        return tuple(
            frames.RequestPart(
                request.id,
                request.num_rows,
                outputs=tuple(output.name for output in request.outputs),
                parameters=dict(request.parameters or {}),
                length=request.ticket.fit.plan.length,
            )
            for request in requests
        )

    def _extents_frame(self, flight: RunningBatch, geometry: Geometry) -> frames.Dispatch:
        parts: list[frames.RequestPart] = []
        for index, (request, part) in enumerate(
            zip(flight.requests, self._parts(flight.requests), strict=True)
        ):
            extents = self._place_extents(request, flight) if index < MAX_PARTS else None
            if extents is None:
                if index == 0:
                    assert self._extents.num_held, "one request fits an empty spill segment"
                    raise NoRoom
                self._batcher.put_back(flight.requests[index:], geometry)
                flight.requests = flight.requests[:index]
                break
            parts.append(
                frames.RequestPart(part.id, part.num_rows, extents, part.outputs, part.parameters)
            )
            flight.num_rows += request.num_rows
        return frames.Dispatch(flight.id, (), requests=tuple(parts))

    def _place_extents(
        self, request: Request, flight: RunningBatch
    ) -> tuple[frames.Extent, ...] | None:
        placed: list[frames.Extent] = []
        for tensor in request.inputs:
            nbytes = len(tensor.data)
            offset = self._extents.allocate(nbytes)
            if offset is None:
                for extent in placed:
                    self._extents.release(extent.offset)
                return None
            self._input_spill.view[offset : offset + nbytes] = tensor.data
            placed.append(frames.Extent(tensor.name, tensor.datatype, tensor.shape, offset, nbytes))
        flight.extents.extend(extent.offset for extent in placed)
        return tuple(placed)

    # Answers.

    def instance_answered(self, instance: Instance, frame: frames.FromWorker) -> None:
        # A sink may submit the next request during its callback. That one must not be dispatched
        # before the worker has its output spill back.
        self._is_answering = True
        try:
            self._answer(instance, frame)
        finally:
            self._is_answering = False
        self._pump_if_waiting()
        self._check_idle()

    def _answer(self, instance: Instance, frame: frames.FromWorker) -> None:
        flight = _taken(instance, frame)
        self._quarantine.answered()
        if flight is not None and isinstance(frame, frames.Done):
            self._deliver(instance, flight, frame)
        elif flight is not None and isinstance(frame, frames.Failed):
            now = instance.answered_at = self._clock()
            self._saturation.note(False, now)
            self._ended(flight)
            self._note_batch(flight, now, flight.waits(), 0.0, "the model failed")
            self._fail_batch(flight, frame.error)

    def _deliver(self, instance: Instance, flight: RunningBatch, frame: frames.Done) -> None:
        now = instance.answered_at = self._clock()
        self._saturation.note(False, now)
        self._note_duration(flight.num_rows, now - flight.started)
        geometry = flight.requests[0].ticket.fit.plan.geometry
        size = flight.num_tokens or flight.num_rows
        self._batcher.observe(geometry, size, flight.started, now)
        extents = frame.outputs
        if not extents:
            # Dispatch the next batch first: the worker computes while this loop encodes. Not while
            # the worker's spill still holds this answer.
            self._pump_if_waiting()
        answered: list[Request] = []
        compute_s = (frame.input_s, frame.infer_s, frame.output_s)
        name, version = self.config.name, self.config.version
        for index, request in enumerate(flight.requests):
            timings = request.timings
            timings.compute_s = compute_s
            if request.is_done or timings.completed > 0.0:
                continue
            timings.completed = now
            if index in frame.invalid:
                self.metrics.failed("OTHER")
                self._finish(request, InvalidRequest(frame.errors[index]))
            elif index in frame.errors:
                self.metrics.failed("BACKEND")
                self._finish(request, BackendFailed(frame.errors[index]))
            else:
                answered.append(request)
                outputs = self._outputs(request, instance, extents[index] if extents else ())
                response = Response(name, version, outputs)
                if request.ticket.fit.has_fixed_outputs:
                    response.form = request.ticket.fit
                self._finish(request, response)
        self._release_flight(flight)
        if extents:
            offsets = tuple(extent.offset for part in extents for extent in part)
            self._supervisor.send(instance, frames.Release(offsets))
        timings = flight.requests[0].timings
        waits = self.metrics.fold(answered, flight.num_rows, timings)
        if flight.num_tokens:
            self.metrics.batch_tokens.add(flight.num_tokens)
        self._note_batch(flight, now, waits, sum(compute_s), "answered")

    def _note_batch(
        self, flight: RunningBatch, ended: float, waits: Waits, compute_s: float, outcome: str
    ) -> None:
        batch_wait_s, instance_wait_s = waits
        record = Record(
            ended,
            flight.num_rows,
            len(flight.requests),
            flight.requests[0].ticket.fit.plan.geometry.row_shapes,
            batch_wait_s,
            instance_wait_s,
            compute_s,
            ended - flight.started,
            flight.instance,
            flight.closed_by,
            outcome,
            flight.num_tokens,
        )
        self.history.note(record)

    def _outputs(
        self, request: Request, instance: Instance, extents: Sequence[frames.Extent]
    ) -> list[Tensor]:
        """Return views of the outputs, in the order of the request."""
        outputs: list[Tensor] = []
        specs = self.config.outputs
        ticket, count = request.ticket, request.num_rows
        fit, slab = ticket.fit, ticket.slab
        for index in fit.selection:
            spec = specs[index]
            if slab is not None and index in self._column:
                offset, row_bytes = fit.plan.geometry.output_columns[self._column[index]]
                start = offset + ticket.row * row_bytes
                view = slab.seg.view[start : start + count * row_bytes]
                shape = (count, *spec.shape)
                outputs.append(Tensor(spec.name, spec.datatype, shape, view))
                continue
            extent = next(extent for extent in extents if extent.name == spec.name)
            assert instance.output_spill is not None
            view = instance.output_spill.view[extent.offset : extent.offset + extent.nbytes]
            outputs.append(Tensor(spec.name, spec.datatype, extent.shape, view))
        return outputs

    def _fail_batch(self, flight: RunningBatch, text: str) -> None:
        """Handle an exception of the model. In a batch the culprit is unknown, so each request runs
        again alone."""
        if len(flight.requests) > 1:
            self._rerun(flight)
            return
        self._blame(flight, text)

    def _blame(self, flight: RunningBatch, text: str) -> None:
        """End the one request of this batch with an error."""
        (request,) = flight.requests
        self._release_flight(flight)
        if not _has_ended(request):
            self.metrics.failed("BACKEND")
            self._finish(request, BackendFailed(text))

    def _finish(self, request: Request, answer: Response | PenstockError) -> None:
        if self._shares.held:
            self._shares.leave(request)
        if isinstance(answer, PenstockError):
            request.timings.completed = now = self._clock()
            self.metrics.fail_s += now - request.timings.received
        if self._sequencer is None:
            request.respond(answer)
            return
        if isinstance(answer, Response):
            for output in answer.outputs:
                output.data = bytes(output.data)  # The answer may outlive its slab row.
        for earlier, its_answer in self._sequencer.finish(request.turn, (request, answer)):
            earlier.respond(its_answer)

    def _release(self, request: Request, was_dispatched: bool = True) -> None:
        ticket = request.ticket
        slab = ticket.slab
        if slab is not None:
            ticket.slab = None
            self._pool.release(slab, request.num_rows, was_dispatched)

    def _requeued(self, request: Request) -> None:
        slab = request.ticket.slab
        if slab is not None:
            self._pool.requeued(slab, request.num_rows)

    def _release_extents(self, flight: RunningBatch) -> None:
        for offset in flight.extents:
            self._extents.release(offset)
        flight.extents = []

    def _release_flight(self, flight: RunningBatch) -> None:
        self._release_extents(flight)
        for request in flight.requests:
            self._release(request)
            request.inputs = ()

    # Instances.

    def instance_ready(self, instance: Instance) -> None:
        assert instance.ready is not None
        self.metrics.load_s = instance.ready.load_s
        if instance.ready.needs_requests:
            self._needs_parts = True
        for num_rows, duration_s in instance.ready.timings.items():
            self._note_duration(num_rows, duration_s)
        self._batcher.seed(instance.ready.timings)
        self._saturation.note(False, self._clock())
        self._without_instance_since = None
        self._count_executors()
        if all(each.is_ready for each in self.instances) and not self._first_ready.done():
            self._apply_proofs([each.ready for each in self.instances if each.ready is not None])
            self.state = "READY"
            self._first_ready.set_result(None)
        self._pump()

    def _apply_proofs(self, ready: Sequence[frames.Ready]) -> None:
        """Batch and pad only as far as every instance has proved harmless. No request is queued
        yet."""
        proof = agreed([each.proof for each in ready])
        self._supervisor.proof = proof
        notes = list(proof.notes)
        if proof.unbatched:
            notes.append(f"served one request at a time: {proof.unbatched}")
            self._stop_batching(ready)
        if proof.unpadded:
            notes.append(f"not padded: {proof.unpadded}")
        elif self.config.padding is not None:
            self._planner.pads = Pads(self.config)
            self._seed_buckets(ready)
        if self.config.unkept_note:
            notes.append(self.config.unkept_note)
        self.notes = (*notes, *self.config.warnings)
        for note in notes:
            # Notes of the proof are about what was not checked; that is served as configured.
            level = logging.INFO if note in proof.notes else logging.WARNING
            where = (self.config.name, self.config.version)
            log.log(level, "%s/%s: %s", *where, note, extra=self.labels)

    def _stop_batching(self, ready: Sequence[frames.Ready]) -> None:
        policy = replace(self.config.batching, is_dynamic=False)
        if self._slo is not None:
            self._slo = SloBatcher(policy, self.config.num_instances)
        self._batcher = self._slo or Batcher(policy)
        for each in ready:
            self._batcher.seed(each.timings)
        self._count_executors()

    def _seed_buckets(self, ready: Sequence[frames.Ready]) -> None:
        pads = self._planner.pads
        if pads is None:
            return
        for each in ready:
            for bucket, timings in each.bucket_timings.items():
                geometry = self._planner.bucket_geometry(bucket)
                self._batcher.seed(pads.warm_times(timings, bucket), geometry)

    def instance_died(self, instance: Instance, reason: str) -> bool:
        """Rerun each request of the instance's batches alone; one whose worker died before and that
        ran alone now fails. Return whether a request is to blame, rather than the model."""
        flights, instance.batches = instance.batches, []
        if self.state == "READY":
            self.metrics.num_restarts += 1
            if not instance.is_leaving:
                self.metrics.num_deaths["hang" if instance.is_hung else "crash"] += 1
        now = self._clock()
        # A death while loading does not restart the clock, so that queued requests still time out.
        if self._without_instance_since is None and not any(i.is_ready for i in self.instances):
            self._without_instance_since = now
        self._note_idle(now)
        self._count_executors()
        is_excused = bool(flights) and self._judge(flights, instance.was_killed_outside)
        for flight in flights:
            self._lost(flight, reason, now)
            if not is_excused and len(flight.requests) > 1:
                for request in flight.requests:
                    request.lost_with = instance.index
        if flights:
            self._pump()
            self._check_idle()
        return is_excused

    def _judge(self, flights: list[RunningBatch], was_killed_outside: bool) -> bool:
        """Whether a request killed the worker, rather than a broken model."""
        if len(flights) == 1 and len(flights[0].requests) == 1:
            return self._pinned(flights[0].requests[0], was_killed_outside).is_excused
        return self._quarantine.died_in_company()

    def _lost(self, flight: RunningBatch, reason: str, now: float) -> None:
        self._ended(flight)
        self._note_batch(flight, now, flight.waits(), 0.0, "the worker died")
        if len(flight.requests) == 1 and flight.requests[0].num_deaths > 0:
            name = self.config.name
            self._blame(flight, f"the worker of model '{name}' {reason} while running it, twice")
            return
        for request in flight.requests:
            request.num_deaths += 1
        self._rerun(flight)

    def _count_executors(self) -> None:
        num_ready = sum(each.num_slots for each in self.instances if each.is_ready)
        self._batcher.count_executors(num_ready, self._clock())

    def _rerun(self, flight: RunningBatch) -> None:
        """Queue each request of the batch to run again alone."""
        self._release_extents(flight)
        for request in flight.requests:
            if _has_ended(request):
                self._release(request)
                continue
            self._run_again(request)
            self._requeued(request)

    def _run_again(self, request: Request) -> None:
        """Run a request alone: as soon as possible, or as a suspect if it may have killed a
        worker."""
        if self._quarantine.has_bodies and request.num_deaths > 0:
            if not self._suspects:
                self._tried_suspect_at = self._clock()
            self._suspects.append(request)
        else:
            self._batcher.rerun_alone(request)

    def load_failed(self, problems: Sequence[str]) -> None:
        self.state = "UNAVAILABLE"
        self.reason = "; ".join(problems)
        if not self._first_ready.done():
            self._load_problems = problems
            self._first_ready.set_result(None)

    def hang_limit_s(self, instance: Instance) -> float | None:
        self._fail_if_unavailable()
        if not instance.batches:
            return None
        flight = instance.batches[0]
        recent = sorted(self._recent.get(_rung(flight.num_rows), ()))
        p99 = recent[int(len(recent) * 0.99)] if recent else 0.0
        limit_s = max(self.config.hang_s, HANG_FACTOR * p99)
        # Batches that were sent before this one ran first.
        return max(flight.started, instance.answered_at) + limit_s - self._clock()

    def _fail_if_unavailable(self) -> None:
        """Fail queued requests when no instance came back in time."""
        if self.state != "READY" or any(i.is_ready for i in self.instances):
            return
        patience_s = max(UNAVAILABLE_AFTER_S, LOAD_FACTOR * self.metrics.load_s)
        since = self._without_instance_since
        if self.num_waiting and since is not None and self._clock() - since > patience_s:
            self._fail_waiting(NotReady(self._not_ready_text()))

    def _fail_waiting(self, error: PenstockError) -> None:
        suspects = list(self._suspects)
        self._suspects.clear()
        for request in (*suspects, *self._batcher.drain()):
            self._release(request, was_dispatched=False)
            self.metrics.refused(error, "gave_up")
            self._finish(request, error)
        self._check_idle()

    def _not_ready_text(self) -> str:
        reason = self.reason or self._supervisor.last_reason
        detail = f": {reason}" if reason else ""
        return f"Model '{self.config.name}' is not at ready state{detail}"

    def _note_idle(self, now: float) -> None:
        for instance in self._supervisor.instances:
            if instance.is_idle:
                self._saturation.note(False, now)
                return
        self._saturation.note(True, now)

    def _note_overload(self, error: PenstockError, now: float) -> None:
        if _is_overload(error) and self._refusals.refused(now):
            log.warning(
                "%s/%s is overloaded and refuses requests (%s)",
                self.config.name,
                self.config.version,
                error.reason,
                extra={**self.labels, "reason": error.reason},
            )

    def tick(self) -> None:
        """Do periodic work; the supervisor calls this twice a second."""
        now = self._clock()
        self._quarantine.expire(now)
        # Queued requests may have expired although no instance became free.
        if self._suspects:
            self._pump()
        else:
            self._pump_if_waiting()
        over = self._refusals.ended(now)
        if over is not None:
            log.info(
                "%s/%s is no longer overloaded; %d requests were refused in %.1f s",
                self.config.name,
                self.config.version,
                over.num_refused,
                over.duration_s,
                extra={**self.labels, "num_refused": over.num_refused},
            )

    def _note_duration(self, num_rows: int, duration_s: float) -> None:
        rung = _rung(num_rows)
        recent = self._recent.get(rung)
        if recent is None:
            recent = self._recent[rung] = deque(maxlen=128)
        recent.append(duration_s)

    def _pump_if_waiting(self) -> None:
        if self.num_waiting:
            self._pump()

    def _check_idle(self) -> None:
        if self._idle_waiters and not self.num_waiting and not self.num_running:
            for waiter in self._idle_waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle_waiters.clear()


def _taken(instance: Instance, frame: frames.FromWorker) -> RunningBatch | None:
    """Remove the batch that the frame answers from the instance, and return it."""
    if isinstance(frame, frames.Done | frames.Failed):
        for index, flight in enumerate(instance.batches):
            if flight.id == frame.batch:
                del instance.batches[index]
                return flight
    return None


def _is_overload(error: PenstockError) -> bool:
    """Whether the error is a lack of capacity, rather than an exceeded quota."""
    return isinstance(error, Overloaded) and not isinstance(error, QuotaExceeded)


def _has_ended(request: Request) -> bool:
    """Whether the request has its answer, even if the sequencer still holds it back."""
    return request.is_done or request.timings.completed > 0.0


def _rung(num_rows: int) -> int:
    return num_rows.bit_length()


def _slab_bytes(config: ModelConfig) -> int:
    if config.memory.slab_bytes is not None:
        return config.memory.slab_bytes
    if config.max_batch_size == 0 or not all(spec.is_fixed for spec in config.inputs):
        return VARIABLE_SLAB_BYTES
    row_bytes = column_bytes(config, [spec.shape for spec in config.inputs])
    return max(4096, Layout.of(row_bytes, config.max_batch_size).nbytes)
