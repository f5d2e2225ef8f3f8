"""Recognises poison requests: refuses those in quarantine, and pins deaths of workers on others."""

from __future__ import annotations

import logging

from penstock.errors import Quarantined
from penstock.serving.context import ModelContext, log_about
from penstock.serving.quarantine import MAX_BODY_DEATHS, MAX_KEY_DEATHS, DeathVerdict, Quarantine
from penstock.serving.request_memory import RequestMemory
from penstock.types import Request

log = logging.getLogger("penstock.model")


class PoisonGuard:
    """The quarantine of one model, by the requests themselves."""

    def __init__(self, context: ModelContext, memory: RequestMemory) -> None:
        self._config = context.config
        self._memory = memory
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
        if not quarantine.has_body_of(self._memory.num_body_bytes(request)):
            return
        left_s = quarantine.body_left_s(self._memory.fingerprint(request), now)
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
        body = self._memory.fingerprint(request)
        verdict = self.quarantine.died(body, caller, self._clock())
        if verdict.quarantines_key:
            self._warn("an API key is quarantined: its requests killed %d workers", MAX_KEY_DEATHS)
        if verdict.quarantines_body:
            self._warn("a request is quarantined: it killed %d workers", MAX_BODY_DEATHS)
        return verdict

    def _warn(self, text: str, num_deaths: int) -> None:
        log_about(log, logging.WARNING, self._config, f": {text}", num_deaths)
