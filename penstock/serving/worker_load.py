"""Loads the Runner of a worker: files checked, batching and padding proved, every size warm.

Also words the problems of a load that fails, and decides whether a worker that ran out of memory
has to be replaced.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from penstock.backends import LoadRunner, Runner, backend
from penstock.backends.processing import model_in
from penstock.config import MIB, ModelConfig
from penstock.errors import ConfigError
from penstock.repository import checksums, manifest
from penstock.serving.executor import MAX_ERROR_CHARS, explain_error
from penstock.serving.proof import apply_proof, prove
from penstock.serving.warmups import warm_up_all, warm_up_as_asked
from penstock.wire import frames

# Limits on the problems that a failed load reports, and on their total length, to fit a frame.
MAX_PROBLEMS, MAX_PROBLEM_CHARS = 100, 65536
# The wording of Python, numpy, torch and C++ libraries.
OUT_OF_MEMORY = re.compile(r"MemoryError|bad_alloc|allocate|out of memory", re.IGNORECASE)
# A worker is replaced when it keeps more than this share of what was free after its load.
MAX_KEPT_SHARE = 0.5


def load_runner(
    config: ModelConfig, proof: frames.Proof | None
) -> tuple[Runner, frames.WorkerReady]:
    """Load a runner and report on it; with an earlier worker's `proof`, if there is one."""
    began = time.perf_counter()
    runner = _checked_backend(config)(config)
    proof = proof or prove(config, runner)
    apply_proof(runner, proof)
    timings, of_buckets = warm_up_all(config, runner, proof)
    warm_up_as_asked(config, runner)
    model_in(runner).settle()
    load_s, needs_requests = time.perf_counter() - began, runner.needs_requests
    built = dict(runner.built())
    return runner, frames.WorkerReady(
        frames.VERSION, load_s, built, timings, needs_requests, proof, of_buckets
    )


def _checked_backend(config: ModelConfig) -> LoadRunner:
    """Import the backend while a thread checks the version's files against their digests; both take
    seconds. No code of the version runs before the check passes."""
    with ThreadPoolExecutor(1) as pool:
        checked: Future[None] | None = None
        if config.manifest or config.checksums:
            checked = pool.submit(_check_files, config)
        found = backend(config.backend)
        if checked is not None:
            checked.result()
    return found


def _check_files(config: ModelConfig) -> None:
    if config.manifest:
        manifest.check_digests(Path(config.manifest).parent)
    checksums.check(config.checksums)


def describe_load_error(error: BaseException, config: ModelConfig) -> tuple[str, ...]:
    """Return the problems that a failed load reports."""
    problems = error.problems if isinstance(error, ConfigError) else (explain_error(error),)
    problems = _shorten(problems)
    if config.memory_bytes is None or not OUT_OF_MEMORY.search("; ".join(problems)):
        return problems
    limit = f"parameters.penstock.memory_bytes limits it to {config.memory_bytes} bytes"
    return (*problems, limit)


def _shorten(problems: Sequence[str]) -> tuple[str, ...]:
    """Keep what fits a frame, and say how many problems were left out."""
    kept = [problem[:MAX_ERROR_CHARS] for problem in problems[:MAX_PROBLEMS]]
    while sum(map(len, kept)) > MAX_PROBLEM_CHARS:
        kept.pop()
    num_left = len(problems) - len(kept)
    return (*kept, *([f"{num_left} more problems"] if num_left else []))


def read_private_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Return how much memory, as limited by RLIMIT_DATA, this process has."""
    for line in status.read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


class MemoryLimit:
    """The `penstock.memory_bytes` of one worker; created when its model is loaded and warm.

    A batch that is too large fails and frees its memory. A leak stays: all later batches would
    fail, and so fast that the worker would attract most of the load.
    """

    def __init__(
        self, limit_bytes: int, read_bytes: Callable[[], int] = read_private_bytes
    ) -> None:
        self._limit_bytes = limit_bytes
        self._read_bytes = read_bytes
        free_bytes = max(0, limit_bytes - read_bytes())
        self._max_kept_bytes = limit_bytes - int((1 - MAX_KEPT_SHARE) * free_bytes)

    def restart_reason(self, errors: Iterable[str]) -> str:
        """Return why a new worker should replace this one after a batch that failed with `errors`;
        empty if it need not. Call it when the exceptions are gone, since they hold memory."""
        if not any(OUT_OF_MEMORY.search(error) for error in errors):
            return ""
        gc.collect()
        kept_bytes = self._read_bytes()
        if kept_bytes <= self._max_kept_bytes:
            return ""
        return (
            f"it ran out of memory and keeps {kept_bytes // MIB} MiB of the "
            f"{self._limit_bytes // MIB} MiB that parameters.penstock.memory_bytes allows"
        )
