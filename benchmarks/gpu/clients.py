"""What dynamic batching gives: a model served in this process, single rows from clients that send
the next as soon as they have an answer, and how busy the GPU is meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.config import CPU, ModelConfig
from penstock.serving import local
from penstock.serving.local import LocalModel
from penstock.system import devices

# NVML's utilisation is of about the last second: what was before must not be in it.
SETTLE_S, SAMPLE_S = 1.0, 0.25
Arrays = dict[str, np.ndarray]


@dataclass
class Clients:
    """So many on their way at a time; each answer sends the next."""

    model: LocalModel
    rows: Sequence[Arrays]
    num_sent: int = 0
    # For each answer: how long it took, and when it came, in seconds.
    times: list[tuple[float, float]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _is_over: bool = False
    _done: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def begin(self, count: int) -> None:
        for _ in range(count):
            self._send()

    def end(self, count: int) -> None:
        """Wait until all have their last answer."""
        self._is_over = True
        for _ in range(count):
            self._done.acquire()

    def _send(self) -> None:
        began = time.perf_counter()
        row = self.rows[self.num_sent % len(self.rows)]
        self.num_sent += 1
        self.model.submit(row).add_done_callback(lambda future: self._receive(future, began))

    def _receive(self, future: Future[Any], began: float) -> None:
        now = time.perf_counter()
        problem = future.exception()
        if problem is not None:
            self.problems.append(str(problem))
            self._is_over = True
        else:
            self.times.append((now - began, now))
        if self._is_over:
            self._done.release()
            return
        self._send()


def served(
    config: ModelConfig,
    rows: Sequence[Arrays],
    count: int,
    seconds: float,
    hold: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, float]:
    """Rows a second, latency, mean batch and the GPU's utilisation of `count` clients, measured
    while the GPU is held."""
    with LocalModel(local.place_here(config)) as model, hold():
        return measured(model, rows, count, seconds, is_on_gpu=config.device != CPU)


def measured(
    model: LocalModel,
    rows: Sequence[Arrays],
    count: int,
    seconds: float,
    *,
    is_on_gpu: bool,
    read: Callable[[], Sequence[devices.GpuUse]] = devices.read_uses,
) -> dict[str, float]:
    clients = Clients(model, rows)
    clients.begin(count)
    time.sleep(SETTLE_S if is_on_gpu else 0.0)
    before, began = batches_of(model), time.perf_counter()
    uses: list[devices.GpuUse] = []
    while time.perf_counter() - began < seconds:
        time.sleep(min(SAMPLE_S, seconds))
        if is_on_gpu:
            uses += read()[:1]
    after, ended = batches_of(model), time.perf_counter()
    clients.end(count)
    if clients.problems:
        raise RuntimeError(f"{len(clients.problems)} requests failed: {clients.problems[0]}")
    times = [took for took, at in clients.times if began <= at <= ended]
    found = {
        "clients": count,
        "served_per_s": len(times) / (ended - began),
        "p50_ms": float(np.percentile(times, 50)) * 1e3,
        "p99_ms": float(np.percentile(times, 99)) * 1e3,
        "mean_batch": (after[0] - before[0]) / max(1, after[1] - before[1]),
    }
    return found | _busy(uses)


def _busy(uses: Sequence[devices.GpuUse]) -> dict[str, float]:
    """Means of what the GPU told."""
    shares = [each.utilization for each in uses if each.utilization is not None]
    watts = [each.power_watts for each in uses if each.power_watts is not None]
    found = {"utilization": float(np.mean(shares))} if shares else {}
    return found | ({"power_watts": float(np.mean(watts))} if watts else {})


def batches_of(model: LocalModel) -> tuple[int, int]:
    """Rows and batches so far."""
    told = model.statistics()
    return int(told["inference_count"]), int(told["execution_count"])


def as_served(config: ModelConfig, max_batch: int) -> ModelConfig:
    """Return the configuration with batches of at most `max_batch` rows; 1: no batching."""
    batching = replace(config.batching, max_batch_size=max_batch, is_dynamic=max_batch > 1)
    return replace(config, max_batch_size=max_batch, batching=batching)
