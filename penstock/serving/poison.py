"""Recognises poison requests: refuses those in quarantine, and pins deaths of workers on others."""

from __future__ import annotations

import logging

from penstock.errors import Quarantined
from penstock.serving.context import ModelContext, log_about
from penstock.serving.quarantine import (
    MAX_BODY_DEATHS,
    MAX_KEY_DEATHS,
    DeathVerdict,
    Part,
    Quarantine,
    fingerprint,
)
from penstock.types import Buffer, Request

log = logging.getLogger("penstock.model")


class PoisonGuard:
    """The quarantine of one model, by the requests themselves."""

    def __init__(self, context: ModelContext) -> None:
        self._config = context.config
        self._planner = context.planner
        self._clock = context.clock
        self.quarantine = Quarantine()

    def check(self, request: Request) -> None:
        """Raise Quarantined for a poison request, or if its API key is quarantined. Only bodies of
        the same size as a quarantined one are hashed."""
        now = self._clock()
        quarantine, name = self.quarantine, self._config.name
        left_s = quarantine.key_left_s(request.caller, now)
        if left_s > 0:
            raise Quarantined(
                f"requests with this API key killed workers of model '{name}' "
                f"{MAX_KEY_DEATHS} times; the model refuses the key for {left_s:.0f} s more"
            )
        body = self._body(request)
        if not quarantine.has_body_of(sum(len(part.data) for part in body)):
            return
        left_s = quarantine.body_left_s(fingerprint(body, request.parameters), now)
        if left_s > 0:
            raise Quarantined(
                f"this request killed its worker of model '{name}' {MAX_BODY_DEATHS} times; the "
                f"model refuses it for {left_s:.0f} s more"
            )

    def pin(self, request: Request, was_killed_outside: bool) -> DeathVerdict:
        """Note that a worker died while it ran only this request. A kill from outside counts
        towards the quarantine of the request but not of its API key: an operator's kill hits
        whatever is running."""
        caller = b"" if was_killed_outside else request.caller
        body = fingerprint(self._body(request), request.parameters)
        verdict = self.quarantine.died(body, caller, self._clock())
        if verdict.quarantines_key:
            self._warn("an API key is quarantined: its requests killed %d workers", MAX_KEY_DEATHS)
        if verdict.quarantines_body:
            self._warn("a request is quarantined: it killed %d workers", MAX_BODY_DEATHS)
        return verdict

    def _warn(self, text: str, num_deaths: int) -> None:
        log_about(log, logging.WARNING, self._config, f": {text}", num_deaths)

    def _body(self, request: Request) -> list[Part]:
        """Return the inputs, whether or not they are in shared memory already."""
        slab, plan = request.ticket.slab, request.ticket.fit.plan
        if slab is None:
            tensors = [request.inputs[index] for index in plan.order]
            return [Part(tensor.name, tensor.shape, tensor.data) for tensor in tensors]
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
            parts.append(Part(self._config.inputs[index].name, (count, *shape), data))
        return parts
