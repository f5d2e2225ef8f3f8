"""Records a sample of a model's requests and answers, if the operator has given a folder.

A sampled request gets a sink that copies its inputs when it is submitted and its outputs when it is
answered, redacts both, and hands them to the writer's thread. Runs on the event loop and never
waits. Knows no protocol; files are `recording_files`'.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.config import ModelConfig, RecordPolicy
from penstock.errors import ConfigError, PenstockError
from penstock.repository.record_settings import PARTS
from penstock.serving.metrics import ModelMetrics
from penstock.serving.record_writer import RecordJob, RecordWriter, RingState
from penstock.serving.recording_files import RingPlace, SegmentRing, claim_folder
from penstock.types import ReplySink, Request, Response, Tensor
from penstock.wire.recording import (
    OK,
    RecordedRequest,
    RecordedTensor,
    describe,
    encode_description,
)

# Requests with more bytes of tensors are not recorded: copying them would delay other requests. On
# the build machine (2 cores, 2026-11) 16 MiB take 4 ms.
MAX_RECORD_BYTES = 16 << 20
# A record takes at most this share of a shard's ring.
MAX_RING_SHARE = 0.25
# Room for a record's description, beside its tensors.
DESCRIPTION_BYTES = 512
# Why requests that were sampled are not recorded.
REASONS = ("queue_full", "too_large", "shared_memory", "not_encodable", "disk")
# A wall clock that jumps by more than this is followed; smaller steps would reorder requests.
CLOCK_STEP_S = 1.0


@dataclass(slots=True, eq=False)
class RequestRecorder:
    """Samples requests of one version. `redacted` are names of tensors, datatypes, "id" and
    "parameters". If `declared` are given, the names of the model's tensors, others are redacted
    too: a client that misspells a name sends the same secret."""

    state: RingState
    writer: RecordWriter
    metrics: ModelMetrics
    version: str
    policy: RecordPolicy
    redacted: frozenset[str]
    declared: frozenset[str] = frozenset()
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    random: random.Random = field(default_factory=random.Random)
    # Requests until the next one that is recorded.
    _left: int = 0
    _offset_s: float = 0.0

    def __post_init__(self) -> None:
        self.metrics.num_unrecorded = dict.fromkeys(REASONS, 0)
        self.state.num_open += 1
        self._left = self._gap()

    def close(self) -> None:
        self.state.num_open -= 1
        self.writer.end(self.state)

    @property
    def max_bytes(self) -> int:
        return min(MAX_RECORD_BYTES, int(self.state.ring.max_bytes * MAX_RING_SHARE))

    def is_next(self) -> bool:
        """Count a request; return whether it is in the sample."""
        self._left -= 1
        if self._left > 0:
            return False
        self._left = self._gap()
        return True

    def see(self, request: Request) -> None:
        """Record the request if it is in the sample. Call it before it is admitted."""
        if request.is_mirror or not self.is_next():
            return
        if request.uses_regions:
            self.drop("shared_memory")
            return
        taken = self.take(request.inputs)
        if taken is not None:
            request.sink = TapSink(request.sink, self, *taken)

    def take(
        self, tensors: Sequence[Tensor]
    ) -> tuple[list[RecordedTensor], list[bytes], int] | None:
        """Copy tensors; return their descriptions, their bytes and how many are held. None if
        they are too large, or too much is held already."""
        described = [describe(each, is_redacted=self.is_hidden(each)) for each in tensors]
        num_held = DESCRIPTION_BYTES + sum(each.nbytes for each in described)
        if not self.hold(num_held):
            return None
        return described, self._copies(tensors), num_held

    def hold(self, num_bytes: int) -> bool:
        """Take room for the bytes of a request; count it as dropped if there is none."""
        if num_bytes > self.max_bytes:
            self.drop("too_large")
            return False
        if not self.writer.hold(num_bytes):
            self.drop("queue_full")
            return False
        return True

    def drop(self, reason: str) -> None:
        self.metrics.num_unrecorded[reason] += 1

    def answer(self, tap: TapSink, request: Request, answer: Response | PenstockError) -> None:
        """Record a request with its final answer."""
        outputs: list[RecordedTensor] = []
        data, num_held = tap.data, tap.num_held
        if isinstance(answer, Response):
            tensors = answer.outputs
            outputs = [describe(each, is_redacted=self.is_hidden(each)) for each in tensors]
            size = sum(each.nbytes for each in outputs)
            if num_held + size > self.max_bytes or not self.writer.hold(size):
                self.writer.give_back(num_held)
                self.drop("too_large" if num_held + size > self.max_bytes else "queue_full")
                return
            data, num_held = [*data, *self._copies(tensors)], num_held + size
        received = request.timings.received
        ended = request.timings.completed or self.clock()
        record = RecordedRequest(
            arrived=self.arrival(received),
            id="" if "id" in self.redacted else request.id,
            version=self.version,
            status=OK if isinstance(answer, Response) else type(answer).__name__,
            latency_s=ended - received,
            caller=hash_caller(request.caller),
            parameters={} if "parameters" in self.redacted else dict(request.parameters or {}),
            inputs=tuple(tap.inputs),
            outputs=tuple(outputs),
        )
        self.write(record, data, num_held)

    def write(self, record: RecordedRequest, data: Sequence[bytes] = (), num_held: int = 0) -> None:
        """Hand a record to the thread. Its description may be of any size: what exceeds the bytes
        that are held for the record already is held too, or the record is dropped."""
        try:
            description = encode_description(record)
        except ValueError:
            self.writer.give_back(num_held)
            self.drop("not_encodable")
            return
        missing = max(0, len(description) + sum(map(len, data)) - num_held)
        if num_held + missing > self.max_bytes or not self.writer.hold(missing):
            self.writer.give_back(num_held)
            self.drop("too_large" if num_held + missing > self.max_bytes else "queue_full")
            return
        num_held += missing
        self.writer.put(RecordJob(self.state, self.metrics, description, data, num_held))

    def is_hidden(self, tensor: Tensor) -> bool:
        """Whether the bytes of a tensor must not be written."""
        if tensor.name in self.redacted or tensor.datatype in self.redacted:
            return True
        return bool(self.declared) and tensor.name not in self.declared

    def arrival(self, received: float) -> float:
        """Return the wall-clock time of a moment of the monotonic clock."""
        offset_s = self.wall() - self.clock()
        if abs(offset_s - self._offset_s) > CLOCK_STEP_S:
            self._offset_s = offset_s
        return received + self._offset_s

    def _copies(self, tensors: Sequence[Tensor]) -> list[bytes]:
        return [bytes(each.data) for each in tensors if not self.is_hidden(each)]

    def _gap(self) -> int:
        """Return how many requests on the next recorded one is: geometric, so that clients that
        send in a rhythm are sampled like others."""
        share = self.policy.share
        if share >= 1:
            return 1
        return 1 + int(self.random.expovariate(-math.log1p(-share)))


class TapSink:
    """The sink of a recorded request: records the final answer, then passes it on."""

    __slots__ = ("_inner", "_recorder", "data", "inputs", "num_held")

    def __init__(
        self,
        inner: ReplySink,
        recorder: RequestRecorder,
        inputs: list[RecordedTensor],
        data: list[bytes],
        num_held: int,
    ) -> None:
        self._inner = inner
        self._recorder = recorder
        self.inputs = inputs
        self.data = data
        self.num_held = num_held

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        try:
            if final:
                self._recorder.answer(self, request, answer)
        finally:
            # Whatever happens to the record, the client gets its answer.
            self._inner.respond(request, answer, final)


@dataclass(eq=False)
class Recorders:
    """The recordings of all models in one process. `folder` None: the operator has given none."""

    folder: Path | None = None
    place: RingPlace = field(default_factory=RingPlace)
    writer: RecordWriter = field(default_factory=RecordWriter)
    _states: dict[str, RingState] = field(default_factory=dict)
    # The descriptor that keeps other servers out.
    _claim: int | None = None

    def claim(self, folder: Path) -> None:
        """Record to this folder, which no other server may use; ConfigError if that fails."""
        self._claim = claim_folder(folder)
        self.folder = folder

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError if the model wants to be recorded and there is no folder for that."""
        if self.folder is None and config.record is not None and config.record.max_bytes:
            raise ConfigError(
                "parameters.penstock.record*: requests are recorded only where the operator gives "
                "a folder: start the server with --record DIR, or remove these parameters"
            )

    def open(self, config: ModelConfig, metrics: ModelMetrics) -> RequestRecorder | None:
        """Begin to record a version; None if it is not recorded."""
        policy = config.record or RecordPolicy()
        if self.folder is None or not policy.max_bytes:
            return None
        self.writer.start()
        state = self._states.get(config.name)
        if state is None:
            ring = SegmentRing(self.folder / config.name, config.name, self.place)
            state = self._states[config.name] = RingState(ring, config.name)
        state.ring.policy = policy
        names = redacted_names(config, policy), declared_names(config, policy)
        return RequestRecorder(state, self.writer, metrics, config.version, policy, *names)

    def close(self) -> None:
        """Write what is queued, and let go of the folder. Blocks for a moment."""
        self.writer.close()
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None


def redacted_names(config: ModelConfig, policy: RecordPolicy) -> frozenset[str]:
    """Return the names of redacted tensors and parts of requests; datatypes stand for all inputs
    and outputs that have them."""
    specs = (*config.inputs, *config.outputs)
    by_type = {spec.name for spec in specs if spec.datatype in policy.redact}
    return frozenset(policy.redact) | by_type


def declared_names(config: ModelConfig, policy: RecordPolicy) -> frozenset[str]:
    """Return the names of the model's tensors if some are redacted; otherwise nothing."""
    if not set(policy.redact) - set(PARTS):
        return frozenset()
    return frozenset(spec.name for spec in (*config.inputs, *config.outputs))


def hash_caller(caller: bytes) -> str:
    """Return a name for an API key by which nobody can authenticate; empty without one."""
    return hashlib.sha256(b"penstock recording" + caller).hexdigest()[:16] if caller else ""
