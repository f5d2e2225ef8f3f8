"""The split of one model's requests between its stable version and a candidate.

Chooses the version of each request, counts what both do, and runs some requests in the other
version as well (mirrors), to compare the answers. A mirror runs after the client has its answer and
only if the other version has nothing queued; their number is limited. Belongs to the event loop of
a shard; the core sets its rule (`frames.SplitRule`).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.errors import Cancelled, InvalidRequest, PenstockError
from penstock.serving.divergence import Divergence
from penstock.serving.response_cache import SHARED_BYTES
from penstock.serving.served import Served
from penstock.serving.split_counts import LATENCY, SideCounts, SplitCounts, is_failure, is_miss
from penstock.types import ReplySink, Request, Response, Tensor
from penstock.wire.frames import SplitRule

# Inputs and outputs of a request that is mirrored, and mirrors in flight at a time.
MAX_MIRROR_BYTES = 4 << 20
MAX_MIRRORS = 4
# Mirrors that may follow each other at once are those of so many seconds.
BURST_S = 0.2
CANDIDATE, STABLE = b"candidate", b"stable"


class MirrorRequest(Request):
    """A copy of a client's request, for another version. No client waits for it, so it is not
    counted in the metrics of requests."""

    __slots__ = ()
    is_mirror = True


class TrafficSplit:
    """`counts` are those of this shard since the rollout began."""

    def __init__(
        self,
        rule: SplitRule,
        stable: Served,
        candidate: Served,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stable, self.candidate = stable, candidate
        self.counts = SplitCounts(rollout=rule.rollout)
        self._divergence = Divergence(stable.config, self.counts)
        self.clock = clock
        self._random = random.Random()
        self._tokens, self._filled_at = min(1.0, rule.mirrored_per_s), clock()
        self._num_mirrors = 0
        for model in (stable, candidate):
            model.metrics.has_mirrors = True
        self.set_rule(rule)

    def set_rule(self, rule: SplitRule) -> None:
        """Split in another way from now on; the counts go on."""
        self.rule = rule
        self._header = rule.header.lower().encode()
        self._hash_header = rule.hash_header.lower().encode()
        self._named = {
            CANDIDATE: self.candidate,
            STABLE: self.stable,
            self.candidate.config.version.encode(): self.candidate,
            self.stable.config.version.encode(): self.stable,
        }

    def pick(self, headers: Mapping[bytes, bytes]) -> Served:
        """Return the version that answers a request with these headers. InvalidRequest if a header
        names no version of the rollout."""
        rule = self.rule
        if rule.mode == "shadow":
            return self.stable
        named = headers.get(self._header)
        if named is not None:
            chosen = self._find(named)
        else:
            key = headers.get(self._hash_header) if self._hash_header else None
            place = self._random.random() if key is None else place_of(key, rule.salt)
            chosen = self.candidate if place < rule.share else self.stable
        return self.confirm(chosen)

    def confirm(self, chosen: Served) -> Served:
        """Return the version that was picked before, or the stable one if it is not ready."""
        if chosen is self.candidate and chosen.is_ready and self.rule.mode != "shadow":
            return chosen
        if chosen is self.candidate:
            self.counts.num_fallbacks += 1
        return self.stable

    def _find(self, named: bytes) -> Served:
        if (found := self._named.get(named.strip().lower())) is None:
            versions = f"{self.stable.config.version} or {self.candidate.config.version}"
            text = f"{self.rule.header}: '{named.decode('latin-1')}' is no version of the rollout"
            raise InvalidRequest(f"{text}; expected candidate, stable, {versions}")
        return found

    def side(self, model: Served) -> SideCounts:
        return self.counts.candidate if model is self.candidate else self.counts.stable

    def watch(self, request: Request, model: Served) -> None:
        """Count what becomes of a request that this version is about to get."""
        inputs = self._copy_inputs(request) if self.takes_mirror() else None
        request.sink = SplitSink(self, model, request.sink, inputs)

    # Mirrors.

    def takes_mirror(self) -> bool:
        """Return whether a request may be mirrored now, and count it if it may."""
        now, per_s = self.clock(), self.rule.mirrored_per_s
        most = max(1.0, BURST_S * per_s)
        self._tokens = min(most, self._tokens + (now - self._filled_at) * per_s)
        self._filled_at = now
        if self._tokens < 1 or self._num_mirrors >= MAX_MIRRORS:
            return False
        self._tokens -= 1
        return True

    def _copy_inputs(self, request: Request) -> list[Tensor] | None:
        if request.uses_regions or request.rows is not None:
            return None
        return _copy(request.inputs)

    def ended(self, sink: SplitSink, request: Request, answer: Response | PenstockError) -> None:
        """Count a request that its client got an answer to, and mirror it if it is to be. Answers
        from a response cache say nothing about a version: the stable one has more of them."""
        if isinstance(answer, Response) and answer.keeper is SHARED_BYTES:
            return
        note_answer(self.side(sink.model), request, answer, self.rule)
        if sink.model is self.candidate and self._is_too_large(request, answer):
            self.counts.candidate.num_failed += 1
        if sink.inputs is None or isinstance(answer, PenstockError):
            return
        outputs = None if answer.arrays is not None else _copy(answer.outputs)
        if outputs is None:
            self.counts.num_dropped += 1
            return
        self.begin_mirror(partial(self._mirror, sink, request, outputs))

    def _is_too_large(self, request: Request, answer: Response | PenstockError) -> bool:
        """Whether the candidate has refused more rows than it takes, but the stable version does
        take: no fault of the client."""
        if not isinstance(answer, InvalidRequest) or not request.inputs:
            return False
        num_rows = next(iter(request.inputs[0].shape), 0)
        most = self.candidate.config.max_batch_size
        return 0 < most < num_rows <= self.stable.config.max_batch_size

    def begin_mirror(self, run: Callable[[], None]) -> None:
        """Run a mirror once the client's answer is on its way. It ends with `dropped` or
        `mirrored`."""
        self._num_mirrors += 1
        asyncio.get_running_loop().call_soon(run)

    def _mirror(self, sink: SplitSink, request: Request, outputs: list[Tensor]) -> None:
        target = self.stable if sink.model is self.candidate else self.candidate
        if is_busy(target) or sink.inputs is None:
            self.dropped()
            return
        received = self.clock()
        reply = MirrorSink(self, target, outputs)
        mirror = MirrorRequest(reply, sink.inputs, received, id=request.id, outputs=request.outputs)
        mirror.form, mirror.parameters = request.form, request.parameters
        mirror.chain = request.chain
        # Behind all that clients wait for.
        mirror.priority = target.config.batching.num_priorities
        target.submit(mirror)

    def dropped(self) -> None:
        self._num_mirrors -= 1
        self.counts.num_dropped += 1

    def mirrored(self) -> None:
        self._num_mirrors -= 1
        self.counts.num_mirrored += 1

    def compared(
        self, sink: MirrorSink, request: Request, answer: Response | PenstockError
    ) -> None:
        """Compare the answers of both versions."""
        is_candidate, is_shadow = sink.target is self.candidate, self.rule.mode == "shadow"
        if isinstance(answer, PenstockError) and not (is_candidate and is_failure(answer)):
            # The stable version failed, or clients' requests need the version.
            self.dropped()
            return
        self.mirrored()
        if is_candidate and is_shadow:
            note_answer(self.counts.candidate, request, answer, self.rule)
        if isinstance(answer, PenstockError):
            if not is_shadow:
                # Failures of a canary are those that clients see; this one is a row apart.
                self._divergence.fail(request.num_rows)
            return
        pair = (sink.outputs, answer.outputs) if is_candidate else (answer.outputs, sink.outputs)
        self._divergence.compare(*pair)


def renew_split(
    known: TrafficSplit | None, rule: SplitRule, stable: Served, candidate: Served
) -> TrafficSplit:
    """Return the split of this rule: a known one of the same rollout, or a new one."""
    if known is None or known.rule.rollout != rule.rollout:
        return TrafficSplit(rule, stable, candidate)
    known.set_rule(rule)
    return known


@dataclass(slots=True, eq=False)
class SplitSink:
    """Passes the answer on to the client, then to the split."""

    split: TrafficSplit
    model: Served
    inner: ReplySink
    # Copies for the mirror; None: the request is not mirrored.
    inputs: list[Tensor] | None

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        self.inner.respond(request, answer, final)
        if final:
            self.split.ended(self, request, answer)


@dataclass(slots=True, eq=False)
class MirrorSink:
    """Receives the answer to a mirror; `outputs` are those of the client's request."""

    split: TrafficSplit
    target: Served
    outputs: list[Tensor]

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        if final:
            self.split.compared(self, request, answer)


def note_answer(
    side: SideCounts, request: Request, answer: Response | PenstockError, rule: SplitRule
) -> None:
    """Count one ended request of a version."""
    took_s = request.timings.completed - request.timings.received
    if isinstance(answer, PenstockError):
        note_error(side, answer, {LATENCY: took_s}, rule)
    else:
        side.add(LATENCY, took_s, rule.limits)


def note_error(
    side: SideCounts, error: PenstockError, spans_s: Mapping[str, float], rule: SplitRule
) -> None:
    """Count a request without an answer. `spans_s` is how long each metric had taken by then; if
    the client has left, those count that were late."""
    if is_failure(error):
        side.num_failed += 1
    for metric, span_s in spans_s.items():
        limits = [limit for name, limit in rule.limits if name == metric]
        if is_miss(error):
            side.add(metric, math.inf, rule.limits)
        elif isinstance(error, Cancelled) and limits and span_s > max(limits):
            side.add(metric, span_s, rule.limits)


def is_busy(model: Served) -> bool:
    """Whether a version has no capacity to spare for mirrors."""
    return not model.is_ready or model.num_waiting > 0


def place_of(key: bytes, salt: bytes) -> float:
    """Return a number between 0 and 1 that is the same for a key in all processes. A key that the
    candidate gets with some share it also gets with a larger one."""
    digest = hashlib.blake2b(key, digest_size=8, key=salt).digest()
    return int.from_bytes(digest) / 2**64


def _copy(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """Return copies in private memory; None if they are too large, or not here."""
    if any(each.place is not None for each in tensors):
        return None
    if sum(each.nbytes for each in tensors) > MAX_MIRROR_BYTES:
        return None
    return [Tensor(each.name, each.datatype, each.shape, bytes(each.data)) for each in tensors]
