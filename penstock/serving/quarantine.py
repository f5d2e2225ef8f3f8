"""Quarantine of poison requests: which requests and API keys a model refuses because they killed
its workers.

A death is *pinned* on a request when the worker that died ran nothing else. One `Quarantine` per
model, in the core, counts pinned deaths by request body and by API key. Those who admit requests
have a `QuarantineTable` each, which `PoisonGuard` asks about requests. Knows no worker, and the
time is an argument or the model's clock. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import Quarantined
from penstock.types import Buffer, Parameter, Request, Tensor

if TYPE_CHECKING:
    from penstock.serving.context import ModelContext

MAX_BODY_DEATHS = 2
MAX_KEY_DEATHS = 5
# After more than this many killer bodies without an answer in between, the model is at fault.
MAX_SUSPECTS = 3
# How long a quarantine lasts, and how long a death counts towards one.
QUARANTINE_S = 600.0
# Limit on remembered bodies and on keys; the least recent killer is forgotten first.
MAX_REMEMBERED = 4096
# A fingerprint is the total size of the inputs followed by a digest.
SIZE_BYTES, DIGEST_BYTES = 8, 16


def fingerprint(
    inputs: Iterable[Tensor], parameters: Mapping[str, Parameter] | None = None
) -> bytes:
    """Return a digest of all that a model sees of a request, whatever the protocol: the inputs, in
    the model's order. The id is left out: clients change it with every attempt."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    num_bytes = 0
    for each in inputs:
        num_bytes += len(each.data)
        digest.update(f"{each.name}{list(each.shape)}{len(each.data)};".encode())
        digest.update(each.data)
    if parameters:
        digest.update(repr(sorted(parameters.items())).encode())
    return _size(num_bytes) + digest.digest()


def _size(num_bytes: int) -> bytes:
    return num_bytes.to_bytes(SIZE_BYTES, "big")


@dataclass(slots=True)
class Offender:
    """A body or key that killed workers. `until`: end of its quarantine; 0: not quarantined."""

    num_deaths: int
    last_death: float
    until: float = 0.0


class Offenders:
    """Bodies or keys that killed workers, by last death; quarantined at `max_deaths`."""

    def __init__(self, max_deaths: int) -> None:
        self._max_deaths = max_deaths
        self._known: dict[bytes, Offender] = {}
        # The end of each quarantine.
        self.quarantined: dict[bytes, float] = {}

    def died(self, name: bytes, now: float) -> bool:
        """Count a death; True if it starts a quarantine."""
        self.expire(now)
        known = self._known.pop(name, None) or Offender(0, now)
        self._known[name] = known
        known.num_deaths += 1
        known.last_death = now
        if len(self._known) > MAX_REMEMBERED:
            self.forget(next(iter(self._known)))
        if known.until or known.num_deaths < self._max_deaths:
            return False
        known.until = self.quarantined[name] = now + QUARANTINE_S
        return True

    def forget(self, name: bytes) -> None:
        self._known.pop(name, None)
        self.quarantined.pop(name, None)

    def expire(self, now: float) -> None:
        """Forget those whose quarantine, or last death plus QUARANTINE_S, has passed."""
        while self._known:
            name, known = next(iter(self._known.items()))
            if max(known.until, known.last_death + QUARANTINE_S) > now:
                return
            self.forget(name)


class Quarantine:
    """Pinned deaths of one model: the judge, of which a model has one. Bodies need a fingerprint
    only while one is quarantined, or once a death is pinned.

    A model that crashes on any request is itself at fault: once several bodies killed workers
    without an answer in between, their deaths no longer count against them but as a crash loop.
    They still count against API keys: a client that sends only poison to an idle model looks the
    same, and each key may cause a limited number of deaths.
    """

    def __init__(self) -> None:
        self._bodies = Offenders(MAX_BODY_DEATHS)
        self._keys = Offenders(MAX_KEY_DEATHS)
        # The ends of the quarantines, which a `QuarantineTable` copies.
        self.bodies, self.keys = self._bodies.quarantined, self._keys.quarantined
        # Bodies, and number of multi-request batches, that killed a worker since the last answer.
        self._suspects: set[bytes] = set()
        self._num_batches = 0

    def answered(self) -> None:
        """Note that a worker answered a batch: the model can run requests."""
        self._suspects.clear()
        self._num_batches = 0

    def died(self, body: bytes, key: bytes, now: float) -> DeathVerdict:
        """Pin a death on this request; no key is counted if `key` is empty."""
        self._suspects.add(body)
        is_key = bool(key) and self._keys.died(key, now)
        is_excused, is_body = not self._is_model_at_fault, False
        if is_excused:
            is_body = self._bodies.died(body, now)
        else:
            for suspect in self._suspects:
                self._bodies.forget(suspect)
        return DeathVerdict(is_excused, is_body, is_key)

    def died_in_company(self) -> bool:
        """Note that a worker died while it ran several requests. True if one of them is probably at
        fault: while bodies are quarantined, similar ones may follow."""
        self._num_batches += 1
        return bool(self.bodies) and not self._is_model_at_fault

    @property
    def _is_model_at_fault(self) -> bool:
        return len(self._suspects) + self._num_batches > MAX_SUSPECTS

    def expire(self, now: float) -> None:
        self._bodies.expire(now)
        self._keys.expire(now)


class QuarantineTable:
    """What a model refuses: a copy of the judge's quarantines, for those who ask with every
    request. Each entry is refused until its time, by the monotonic clock."""

    def __init__(self) -> None:
        self._bodies: dict[bytes, float] = {}
        self._keys: dict[bytes, float] = {}
        # Quarantined bodies by the start of their fingerprints: their size.
        self._sizes: set[bytes] = set()
        # An attribute, since every request asks: whether anything is quarantined.
        self.is_active = False

    def replace(self, bodies: Mapping[bytes, float], keys: Mapping[bytes, float]) -> None:
        self._bodies, self._keys = dict(bodies), dict(keys)
        self._sizes = {name[:SIZE_BYTES] for name in bodies}
        self.is_active = bool(bodies or keys)

    def expire(self, now: float) -> None:
        if self.is_active and min((*self._bodies.values(), *self._keys.values())) <= now:
            bodies, keys = self._bodies.items(), self._keys.items()
            self.replace(
                {name: until for name, until in bodies if until > now},
                {name: until for name, until in keys if until > now},
            )

    @property
    def has_bodies(self) -> bool:
        return bool(self._bodies)

    def has_body_of(self, num_bytes: int) -> bool:
        """Whether a body of this size is quarantined; if not, no fingerprint is needed."""
        return _size(num_bytes) in self._sizes

    def body_left_s(self, body: bytes, now: float) -> float:
        """Return how much longer it is quarantined; 0 if it is not."""
        return max(0.0, self._bodies.get(body, 0.0) - now)

    def key_left_s(self, key: bytes, now: float) -> float:
        return max(0.0, self._keys.get(key, 0.0) - now)


@dataclass(frozen=True, slots=True)
class DeathVerdict:
    """Consequences of a pinned death. `is_excused`: the request is at fault, not the model."""

    is_excused: bool
    quarantines_body: bool = False
    quarantines_key: bool = False


class PoisonGuard:
    """The quarantines of one model, by the requests themselves."""

    def __init__(self, context: ModelContext) -> None:
        self._config = context.config
        self._planner = context.planner
        self._clock = context.clock
        self.table = QuarantineTable()

    def check(self, request: Request) -> None:
        """Raise Quarantined for a poison request, or if its API key is quarantined. Only bodies of
        the same size as a quarantined one are hashed."""
        now = self._clock()
        table, name = self.table, self._config.name
        left_s = table.key_left_s(request.caller, now)
        if left_s > 0:
            raise Quarantined(
                f"requests with this API key killed workers of model '{name}' "
                f"{MAX_KEY_DEATHS} times; the model refuses the key for {left_s:.0f} s more"
            )
        body = self._body(request)
        if not table.has_body_of(sum(len(part.data) for part in body)):
            return
        left_s = table.body_left_s(fingerprint(body, request.parameters), now)
        if left_s > 0:
            raise Quarantined(
                f"this request killed its worker of model '{name}' {MAX_BODY_DEATHS} times; the "
                f"model refuses it for {left_s:.0f} s more"
            )

    def fingerprint(self, request: Request) -> bytes:
        return fingerprint(self._body(request), request.parameters)

    def _body(self, request: Request) -> list[Tensor]:
        """Return the inputs, whether or not they are in shared memory already."""
        slab, plan = request.ticket.slab, request.ticket.fit.plan
        if slab is None or request.rows is not None:
            return [request.inputs[index] for index in plan.order]
        geometry, view, count = plan.geometry, slab.seg.view, plan.num_rows
        parts: list[Tensor] = []
        for index, (offset, row_bytes) in enumerate(geometry.input_columns):
            start = offset + request.ticket.row * row_bytes
            data: Buffer = view[start : start + count * row_bytes]
            shape = geometry.row_shapes[index]
            if plan.own_shapes is not None:
                assert self._planner.pads is not None
                full, shape = shape, plan.own_shapes[index]
                data = self._planner.pads.read(index, data, shape, full)
            spec = self._config.inputs[index]
            parts.append(Tensor(spec.name, spec.datatype, (count, *shape), data))
        return parts
