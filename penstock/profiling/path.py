"""Time one request around the model: with no other load, through the server's codec, batcher and
worker loop, in this process. Sockets are left out: `penstock bench` shows them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from threading import Event

from penstock.config import ModelConfig
from penstock.errors import PenstockError
from penstock.profiling.profiler import Packed
from penstock.profiling.results import RequestPhase
from penstock.serving.local import LocalModel
from penstock.types import Request, Response, TensorSpec
from penstock.wire.v2 import Codec
from penstock.wire.v2_client import encode_infer

NUM_WARM_UP = 3
TIMEOUT_S = 300.0


class TimedSender:
    """Sends requests one after the other and records the time of each part."""

    def __init__(self, config: ModelConfig, tensors: Sequence[Packed]) -> None:
        self._codec = Codec()
        self._specs: Sequence[TensorSpec] = config.outputs
        # If there is a function, it takes by far most of that part.
        before = "preprocess" if config.preprocess else "copy in"
        self._names = (before, "postprocess" if config.postprocess else "copy out")
        self._head, self._body = encode_infer(tensors)
        self._is_answered = Event()
        self._error: PenstockError | None = None
        self._encode_s = 0.0
        # For each request, its seconds by part, in the order it passes them.
        self.requests: list[dict[str, float]] = []

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        """Record the answer; called on the model's thread."""
        if isinstance(answer, PenstockError):
            self._error = answer
        else:
            began = time.perf_counter()
            self._codec.encode_answer(request, answer, self._specs)
            self._encode_s = time.perf_counter() - began
        if final:
            self._is_answered.set()

    def send(self, model: LocalModel) -> None:
        self._is_answered.clear()
        began = time.perf_counter()
        request = self._codec.decode_infer(self._body, self._head, self, time.monotonic())
        decode_s = time.perf_counter() - began
        model.send(request)
        if not self._is_answered.wait(TIMEOUT_S):
            raise PenstockError(f"no answer within {TIMEOUT_S:g} s")
        if self._error is not None:
            raise self._error
        timings = request.timings
        before, after = self._names
        parts = {"decode": decode_s, "queue": max(0.0, timings.dispatched - timings.queued)}
        parts |= {before: timings.compute_input_s, "compute": timings.compute_infer_s}
        self.requests.append(parts | {after: timings.compute_output_s, "encode": self._encode_s})


def buckets_of(
    config: ModelConfig, folder: Path, tensors: Sequence[Packed], num_runs: int
) -> list[RequestPhase]:
    """Return the median time of each part, in the order a request passes them."""
    sender = TimedSender(config, tensors)
    with LocalModel(str(folder), config.version) as model:
        for _ in range(NUM_WARM_UP + num_runs):
            sender.send(model)
    counted = sender.requests[NUM_WARM_UP:]
    return [RequestPhase(name, median(each[name] for each in counted)) for name in counted[0]]
