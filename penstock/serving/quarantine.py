"""Which requests and API keys a model refuses because they killed its workers.

A death is *pinned* on a request when the worker that died ran nothing else. One `Quarantine` per
model counts pinned deaths by request body and by API key. Knows neither workers nor clocks. Pure.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.types import Buffer, Parameter

MAX_BODY_DEATHS = 2
MAX_KEY_DEATHS = 5
# Bodies that may kill without a single answer in between before the model itself is at fault.
MAX_SUSPECTS = 3
# How long a quarantine lasts, and how long a death counts towards one.
QUARANTINE_S = 600.0
# Bodies and keys that are remembered; the one that killed least recently is forgotten first.
MAX_REMEMBERED = 4096
# A fingerprint is the number of bytes of all inputs, and a digest.
SIZE_BYTES, DIGEST_BYTES = 8, 16


@dataclass(frozen=True, slots=True)
class Part:
    """One input of a request, in the model's order of inputs."""

    name: str
    shape: tuple[int, ...]
    data: Buffer


def fingerprint(parts: Iterable[Part], parameters: Mapping[str, Parameter] | None = None) -> bytes:
    """Digest of everything that a model sees of a request, whatever protocol carried it. The
    request's id is left out: clients change it with every attempt."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    num_bytes = 0
    for part in parts:
        num_bytes += len(part.data)
        digest.update(f"{part.name}{list(part.shape)}{len(part.data)};".encode())
        digest.update(part.data)
    if parameters:
        digest.update(repr(sorted(parameters.items())).encode())
    return _size(num_bytes) + digest.digest()


def _size(num_bytes: int) -> bytes:
    return num_bytes.to_bytes(SIZE_BYTES, "big")


@dataclass(slots=True)
class Offender:
    """A body or a key that killed. `until` is when its quarantine ends; 0: it has none."""

    num_deaths: int
    last_death: float
    until: float = 0.0


class Offenders:
    """Bodies, or keys: quarantined when they reach `max_deaths`. In order of the last death."""

    def __init__(self, max_deaths: int) -> None:
        self._max_deaths = max_deaths
        self._known: dict[bytes, Offender] = {}
        self.num_quarantined = 0
        # The same by the beginning of their names.
        self._starts: Counter[bytes] = Counter()

    def died(self, name: bytes, now: float) -> bool:
        """Count a death; True when it begins a quarantine."""
        self.expire(now)
        known = self._known.pop(name, None) or Offender(0, now)
        self._known[name] = known
        known.num_deaths += 1
        known.last_death = now
        if len(self._known) > MAX_REMEMBERED:
            self.forget(next(iter(self._known)))
        if known.until or known.num_deaths < self._max_deaths:
            return False
        known.until = now + QUARANTINE_S
        self.num_quarantined += 1
        self._starts[name[:SIZE_BYTES]] += 1
        return True

    def has_like(self, start: bytes) -> bool:
        """Whether a quarantined name begins like this."""
        return start in self._starts

    def left_s(self, name: bytes, now: float) -> float:
        """How much longer it is quarantined; 0: it is not."""
        known = self._known.get(name)
        return 0.0 if known is None else max(0.0, known.until - now)

    def forget(self, name: bytes) -> None:
        known = self._known.pop(name, None)
        if known is not None and known.until:
            self.num_quarantined -= 1
            self._starts -= Counter([name[:SIZE_BYTES]])  # Keeps no zeros.

    def expire(self, now: float) -> None:
        """Forget those whose quarantine, or last death, is long ago."""
        while self._known:
            name, known = next(iter(self._known.items()))
            if max(known.until, known.last_death + QUARANTINE_S) > now:
                return
            self.forget(name)


class Quarantine:
    """Bodies need a fingerprint only while `has_bodies`, or once a death is pinned.

    A model that dies on any request is at fault itself: once several bodies killed without a single
    answer in between, their deaths are not held against them and count as a crash loop instead.
    They still count against API keys: clients that send nothing but poison to a quiet model look
    the same, and each key may cause a limited number of deaths.
    """

    def __init__(self) -> None:
        self._bodies = Offenders(MAX_BODY_DEATHS)
        self._keys = Offenders(MAX_KEY_DEATHS)
        # Bodies that killed since a worker last answered, and batches of several that did.
        self._suspects: set[bytes] = set()
        self._num_batches = 0

    @property
    def has_bodies(self) -> bool:
        return self._bodies.num_quarantined > 0

    def has_body_of(self, num_bytes: int) -> bool:
        """Whether a body of this size is quarantined: only then is a fingerprint worth its time."""
        return self._bodies.has_like(_size(num_bytes))

    @property
    def is_active(self) -> bool:
        """Whether a body or a key is quarantined."""
        return self._bodies.num_quarantined > 0 or self._keys.num_quarantined > 0

    def answered(self) -> None:
        """A worker has survived a batch: the model is able to run requests."""
        if self._suspects or self._num_batches:
            self._suspects.clear()
            self._num_batches = 0

    def died(self, body: bytes, key: bytes, now: float) -> Verdict:
        """A death was pinned on this request; `key` is empty where the client needs none."""
        self._suspects.add(body)
        is_key = bool(key) and self._keys.died(key, now)
        if self._is_model_at_fault:
            for suspect in self._suspects:
                self._bodies.forget(suspect)
            return Verdict(is_excused=False, quarantines_key=is_key)
        is_body = self._bodies.died(body, now)
        return Verdict(is_excused=True, quarantines_body=is_body, quarantines_key=is_key)

    def died_in_company(self) -> bool:
        """A worker died while it ran several requests. True when it is likely that one of them is
        at fault: while bodies are quarantined, more of their kind may come."""
        self._num_batches += 1
        return self.has_bodies and not self._is_model_at_fault

    @property
    def _is_model_at_fault(self) -> bool:
        return len(self._suspects) + self._num_batches > MAX_SUSPECTS

    def body_left_s(self, body: bytes, now: float) -> float:
        return self._bodies.left_s(body, now)

    def key_left_s(self, key: bytes, now: float) -> float:
        return self._keys.left_s(key, now)

    def expire(self, now: float) -> None:
        self._bodies.expire(now)
        self._keys.expire(now)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Consequences of a pinned death. `is_excused`: the request is at fault, not the model."""

    is_excused: bool
    quarantines_body: bool = False
    quarantines_key: bool = False
