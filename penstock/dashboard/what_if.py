"""Predicts the latency of a loaded version at another rate, from batch times that it measured.

The times T(b) are those of the SLO's batcher, or else the means of executed batches. One process at
a time simulates, within a limit; the event loop only waits.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from penstock.config import LLM, SLO_OFF
from penstock.errors import BackendFailed, NotReady, Overloaded, Unsupported
from penstock.processes.tool import ToolProcess
from penstock.serving.catalog import Catalog
from penstock.serving.served import Served
from penstock.system.cores import usable_cores
from penstock.wire.live import WhatIfAnswer, WhatIfBody, WhatIfJob, WhatIfResult

CHILD = "penstock.dashboard.what_if_child"
TIMEOUT_S = 20.0
# Fewer requests per second are not worth a comparison.
MIN_RATE = 1.0
MEASURED = "mean times of executed batches"
LEARNT = "T(b) of the SLO's batcher"
EXTRAPOLATED = "Only batches of {} rows have run; larger ones are taken to cost as much per row."
SATURATED = "The instances can do at most {:.0f}/s; above, the queue grows or requests are refused."
NOT_RISING = "Not known well, and taken to be that of the next smaller batch: {}."
CACHED = "All requests are simulated as computed; the response cache answers some at once."
SHAPES = "Requests of several shapes are simulated as one shape."


class WhatIf:
    """Belongs to the core's event loop."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._running = asyncio.Lock()

    async def predict(self, body: WhatIfBody, current_rate: float = 0.0) -> WhatIfAnswer:
        """Simulate a version; `current_rate` is that of the last seconds. Raises Unsupported for
        models that cannot be simulated, NotReady before a batch has run."""
        model = self._catalog.find(body.model, str(body.version))
        _check(model)
        if self._running.locked():
            raise Overloaded("another prediction is running; ask again in a moment", 2.0)
        await self._running.acquire()
        simulation: asyncio.Future[WhatIfResult] | None = None
        try:
            await model.refresh()
            times_s, basis, notes = batch_times(model)
            config = model.config
            num_ready = sum(each.is_ready for each in model.processes)
            job = WhatIfJob(
                replace(config, written="", notes=(), warnings=(), warmups=()),
                times_s,
                basis == LEARNT,
                body.instances or max(1, num_ready),
                usable_cores(),
                [body.rate, current_rate] if current_rate >= MIN_RATE else [body.rate],
                "" if config.slo == SLO_OFF else config.slo,
            )
            simulation = asyncio.ensure_future(asyncio.to_thread(run, job))
            result = await asyncio.shield(simulation)
        finally:
            if simulation is None or simulation.done():
                self._running.release()
            else:
                # The client has left; its simulation goes on.
                simulation.add_done_callback(self._end)
        if body.rate > result.capacity:
            notes.append(SATURATED.format(result.capacity))
        if model.metrics.num_caches:
            notes.append(CACHED)
        asked, *others = result.predictions
        return WhatIfAnswer(
            config.name,
            config.version,
            asked,
            others[0] if others else None,
            result.capacity,
            times_s,
            basis,
            notes,
        )

    def _end(self, simulation: asyncio.Future[WhatIfResult]) -> None:
        """Let another simulation run, after one whose client has left."""
        self._running.release()
        if not simulation.cancelled():
            simulation.exception()


def _check(model: Served) -> None:
    if model.config.backend == LLM:
        raise Unsupported("language models are not simulated: their batches change at each step")
    if model.config.is_ensemble:
        raise Unsupported("ensembles are not simulated; ask for their members")
    if model.config.has_one_owner:
        what = "of sequences, decoupled models and those with a limited rate of executions"
        raise Unsupported(f"models {what} are not simulated")
    if model.config.is_staged:
        raise Unsupported("models of several stages are not simulated")
    if model.config.batching.max_tokens is not None:
        raise Unsupported("models with a token budget are not simulated")


def batch_times(model: Served) -> tuple[dict[int, float], str, list[str]]:
    """Return the seconds of a batch by its rows, where they come from, and remarks on them."""
    notes: list[str] = []
    paces = model.explain().paces
    if len(paces) > 1:
        notes.append(SHAPES)
    if paces and len(paces[0].times_s) > 1:
        return _rising(paces[0].times_s, notes), LEARNT, notes
    measured = {
        size: (batch.input_s + batch.infer_s + batch.output_s) / batch.count
        for size, batch in sorted(model.metrics.batches.items())
        if batch.count
    }
    if not measured:
        raise NotReady("no batch has run yet: send some requests first")
    most = max(1, model.config.max_batch_size) if model.config.batching.is_dynamic else 1
    return _rising(_extrapolated(measured, most, notes), notes), MEASURED, notes


def _extrapolated(measured: Mapping[int, float], most: int, notes: list[str]) -> dict[int, float]:
    """Return times that reach to the largest batch. One size alone says nothing about others."""
    times_s = dict(measured)
    if len(times_s) == 1 and most > 1:
        ((rows, time_s),) = measured.items()
        notes.append(EXTRAPOLATED.format(rows))
        times_s[most] = time_s * most / rows if most > rows else time_s
    return times_s


def _rising(times_s: Mapping[int, float], notes: list[str]) -> dict[int, float]:
    """Return times of which none is shorter than that of a smaller batch: such a time is an
    estimate of a size that has hardly run."""
    found: dict[int, float] = {}
    longest_s = 0.0
    for rows, time_s in sorted(times_s.items()):
        longest_s = found[rows] = max(longest_s, time_s)
    if changed := [f"T({rows})" for rows, time_s in found.items() if time_s > times_s[rows]]:
        notes.append(NOT_RISING.format(", ".join(changed)))
    return found


def run(job: WhatIfJob) -> WhatIfResult:
    """Simulate in a process. Not for the event loop."""
    with tempfile.TemporaryFile() as file:
        file.write(msgspec.json.encode(job))
        file.seek(0)
        fd = file.fileno()
        with ToolProcess(CHILD, [str(fd)], pass_fds=[fd]) as process:
            try:
                status = process.wait(TIMEOUT_S)
            except TimeoutError:
                raise BackendFailed(f"the simulation took longer than {TIMEOUT_S:.0f} s") from None
            if status != os.EX_OK:
                raise BackendFailed(f"the simulation failed: {process.describe_end()}")
            return msgspec.json.decode(process.output, type=WhatIfResult)
