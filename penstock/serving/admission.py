"""Admission to one model: a request is checked, counted and queued, or refused.

Checks what the request is (names, datatypes, shapes, sizes), who sent it (quarantine, quotas), and
through the batcher whether there is room for it. Knows no instance and no process.
"""

from __future__ import annotations

import contextlib
import math
import os

from penstock.errors import PenstockError
from penstock.serving.called_models import check_chain
from penstock.serving.context import ModelContext
from penstock.serving.plan import Fit, Ticket
from penstock.serving.quarantine import PoisonGuard
from penstock.serving.regions import Loan
from penstock.serving.replies import Replies, is_overload
from penstock.serving.request_memory import RequestMemory
from penstock.serving.request_queue import RequestQueue
from penstock.serving.slo_batcher import SloBatcher
from penstock.types import Request

# Interval between readings of how long the event loop waited for a CPU. A difference over more
# than LOOK_WITHIN_S says nothing about one request.
LOOK_EVERY_S, LOOK_WITHIN_S = 0.001, 0.5
SCHEDSTAT = "/proc/thread-self/schedstat"


class ProcessorWait:
    """How long the thread that creates it has waited for a CPU, as counted by the kernel; 0 if it
    does not count. Requests wait in the socket buffers meanwhile, without an arrival time: the SLO
    batcher hears of this wait, and refuses earlier."""

    def __init__(self, path: str = SCHEDSTAT) -> None:
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def total_s(self) -> float:
        """Return the total wait since the thread started."""
        if self._fd is None:
            return 0.0
        try:
            return int(os.pread(self._fd, 64, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    def close(self) -> None:
        """Safe to call again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Admission:
    def __init__(
        self,
        context: ModelContext,
        memory: RequestMemory,
        queue: RequestQueue,
        guard: PoisonGuard,
        replies: Replies,
    ) -> None:
        self._policy = context.config.batching
        self._label = f"{context.config.name}/{context.config.version}"
        self._outputs, self._has_rows = context.config.outputs, context.config.max_batch_size > 0
        self._regions = context.regions
        self._planner = context.planner
        self._known_fits = context.planner.known
        self._memory = memory
        self._queue = queue
        self._guard = guard
        self._quarantine = guard.table
        self._order = replies.order
        self._quotas = context.quotas
        self._shares = context.shares
        self._saturation = context.saturation
        self._clock = context.clock
        self._processor_wait = ProcessorWait()
        self.close = self._processor_wait.close
        self._looked_at = -math.inf
        self._waited_s = 0.0

    def admit(self, request: Request) -> None:
        """Queue the request, or raise why it is refused."""
        if request.chain:
            check_chain(request.chain, self._label)
        loan = self._regions.lend(request) if request.uses_regions else None
        fit = self._known_fits.get(request.form) or self._planner.fit(request)
        request.ticket = Ticket(fit)
        plan = fit.plan
        if loan is not None:
            self._check_loan(loan, request, fit)
        request.num_rows = plan.num_rows
        request.num_tokens = plan.num_tokens
        geometry = plan.geometry
        if geometry.layout is None:
            self._memory.check_size(request)
        if self._quarantine.is_active:
            self._guard.check(request)
        has_quotas = self._quotas.is_active
        if has_quotas:
            # The protocols check rates, since they also see requests that never reach a model.
            level = self._policy.level(request.priority)
            self._shares.check(request.caller, self._clock(), level)
        timings = request.timings
        timings.queued = now = self._clock()
        timings.saturated_s = self._saturation.at(now)
        queue = self._queue
        if queue.slo is not None and now >= self._looked_at + LOOK_EVERY_S:
            self._note_processor_wait(queue.slo, now)
        queue.batcher.add(request, geometry, now)
        if loan is not None:
            request.ticket.loan = loan
            loan.begin()
        if has_quotas:
            self._shares.enter(request, request.caller, level=request.priority)
        if self._order is not None and not request.is_mirror:
            request.turn = self._order.enter()

    def _check_loan(self, loan: Loan, request: Request, fit: Fit) -> None:
        """Check that outputs of a known size fit clients' memory. Inputs that are to be padded are
        read here."""
        if fit.plan.own_shapes is not None:
            loan.read(request.inputs)
        for index in fit.selection if loan.outputs else ():
            spec = self._outputs[index]
            if spec.is_fixed:
                num_rows = fit.plan.num_rows if self._has_rows else 1
                loan.check_output(spec.name, num_rows * spec.row_bytes(spec.shape))

    def refused(self, request: Request, error: PenstockError, num_held: int) -> None:
        """Tell the queue shares if the queue was full with this many requests; a request with its
        own deadline does not show that."""
        if self._quotas.is_active and is_overload(error) and request.timeout_s is None:
            self._shares.refused(num_held, self._clock(), request.priority)

    def _note_processor_wait(self, slo: SloBatcher, now: float) -> None:
        total_s = self._processor_wait.total_s()
        if now - self._looked_at <= LOOK_WITHIN_S:
            slo.note_wait(total_s - self._waited_s)
        self._waited_s, self._looked_at = total_s, now
