"""Servers of builds, as `penstock serve` runs them, and the rows that are sent to them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import math
import re
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import msgspec
import numpy as np
import psutil

from penstock.benchmark.pacer import Load
from penstock.benchmark.plan import BenchPlan, LevelProgress
from penstock.benchmark.results import BenchRun
from penstock.benchmark.run import Conductor
from penstock.benchmark.targets import TargetSpec
from penstock.config import ModelConfig
from penstock.data import InputSpec
from penstock.errors import BackendFailed, ConfigError
from penstock.optimizer.candidates import Build
from penstock.optimizer.machine import Conditions
from penstock.optimizer.plan import Plan
from penstock.optimizer.simulate import Row, fitted
from penstock.optimizer.this_machine import CpuMeter
from penstock.optimizer.time_plan import CutOff
from penstock.optimizer.trials import stacked
from penstock.processes.tool import ToolProcess
from penstock.serving.explain import Explanation
from penstock.serving.padding import bf16_floats
from penstock.types import DATATYPES, Array, RequestedOutput, TensorSpec, pack_bytes
from penstock.wire.v2_client import HEAD_LENGTH, decode_answer, encode_infer

# Receives what is being done, for the live view.
Watch = Callable[[str], None]

START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.05
ASK_TIMEOUT_S = 10.0
ADDRESS = re.compile(r"(http://[^\s\"/]+/v2)\b")
# Maximum number of distinct rows to send.
MAX_ROWS = 4096
MAX_BYTES = 256 << 20
MAX_CLIENTS = 256
# Client timeouts: this long, or this multiple of the SLO's latency limit; LONG_PATIENCE_S without
# such a limit. Overloaded builds are not waited for.
PATIENCE_S = 3.0
LONG_PATIENCE_S = 60.0
PATIENCE = 3.0
# Clients that ask for answers to compare.
NUM_CLIENTS = 16
# Requests per instance: a model that degrades with use shows it after some hundreds.
NUM_REQUESTS = 1024
TIMEOUT_S = 60.0
# A server in slo mode refuses requests that would be late; the client retries this often.
NUM_TRIES = 20
RETRY_S = 0.02


class ServedEndpoint:
    """`penstock serve` with one build on a free port; stopped when the block ends in any way, and
    killed when this process dies. `data` is the file with its inputs."""

    # Duration of a throughput probe, and precision of the search for the highest rate.
    probe_s = 2.0
    precision = 0.05
    # Whether answers are streams, which take seconds.
    is_streaming = False

    def __init__(self, build: Build, data: str) -> None:
        self.build = build
        self.data = data
        self.address = ""
        # State of the machine during the last measurement.
        self.conditions = Conditions()
        self.start_timeout_s = START_TIMEOUT_S

    def __enter__(self) -> Self:
        # Builds hard-link files that they do not change.
        flags = "--allow-hard-links --http-port 0 --no-grpc --no-metrics --drain-s 1"
        self._process = ToolProcess("penstock", ["serve", str(self.build.folder), *flags.split()])
        try:
            self.address = self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # Workers normally end with the server; any that remain are killed.
        self._process.stop(STOP_TIMEOUT_S)

    def target(self, plan: Plan) -> TargetSpec:
        return TargetSpec(self.address, timeout_s=patience_s(plan.slo.latency_s))

    def inputs(self, plan: Plan) -> InputSpec:
        return InputSpec(path=self.data, seed=plan.seed)

    def level_s(self, plan: Plan, load: Load) -> float:
        """Return the longest measurement of a load."""
        return plan.duration_s

    @property
    def num_clients(self) -> int:
        """Number of clients that keep it busy."""
        return num_clients(self.build.config)

    @property
    def is_running(self) -> bool:
        return self._process.is_running

    @property
    def memory_bytes(self) -> int:
        """Memory of all workers; shared memory counts once."""
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            for worker in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    use = worker.memory_full_info()
                    total += getattr(use, "pss", use.rss)
        return total

    @property
    def gpu_memory_bytes(self) -> list[int]:
        """GPU memory of each worker, as reported by the server; empty on CPUs."""
        # No proxy: the server is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with contextlib.suppress(OSError):
            with opener.open(f"{self.address}/explain", timeout=ASK_TIMEOUT_S) as answer:
                explained = msgspec.json.decode(answer.read(), type=Explanation)
            return [each.gpu_memory_bytes for each in explained.instances if each.gpu_memory_bytes]
        return []

    def measured(self, plan: BenchPlan, watch: Watch) -> BenchRun:
        """Run the bench once; BackendFailed with the server's log if it failed."""

        def report(progress: LevelProgress) -> None:
            p99 = "" if math.isnan(progress.p99_s) else f", p99 {progress.p99_s * 1e3:.3g} ms"
            watch(f"{progress.level}, {progress.phase} {progress.elapsed_s:.0f} s{p99}")

        meter = CpuMeter()
        try:
            run = asyncio.run(Conductor(plan, report, lambda run: None).measure())
        except ConfigError as error:
            raise ConfigError([f"{text}{self._tail}" for text in error.problems]) from None
        # At too high a rate, all answers of a level may time out if they take seconds.
        may_be_late = self.is_streaming and self.is_running
        if not run.levels or (run.problem and not may_be_late):
            raise BackendFailed(f"{run.problem or 'nothing was measured'}{self._tail}")
        self.conditions = meter.read()
        if self.build.config.uses_gpu:
            # The speed probe measures the CPU, which does not compute the model.
            self.conditions = msgspec.structs.replace(self.conditions, speed_s=0.0)
        return run

    def answers(self, rows: Sequence[Row], seconds: float) -> list[tuple[int, dict[str, Array]]]:
        """Return the server's answers with the index of each row, some rows several times; as many
        as `seconds` allow, and at least one per client. A build may answer well in a trial process
        and differently here: in a second instance, after many requests, or because of its
        environment. So those of the build to commit are compared with what the gate judged."""
        address, config = self.address, self.build.config
        messages = self._messages(rows)
        num_requests = max(len(rows), NUM_REQUESTS * config.num_instances)
        ends_at = time.monotonic() + seconds
        turns = [range(n, num_requests, NUM_CLIENTS) for n in range(NUM_CLIENTS)]
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            asked = [pool.submit(_be_client, address, messages, each, ends_at) for each in turns]
            answers = [answer for client in asked for answer in client.result()]
        return self._as_rows(rows, answers)

    def answers_once(
        self, rows: Sequence[Row], ends_at: float, outputs: Sequence[str] = ()
    ) -> list[dict[str, Array]]:
        """Return the answer to each row, of these outputs only if any are named; an empty one where
        time ran out first. BackendFailed if the server refuses a row."""
        messages = self._messages(rows, outputs)
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            turns = [range(n, len(rows), NUM_CLIENTS) for n in range(min(NUM_CLIENTS, len(rows)))]
            asked = [
                pool.submit(_be_client, self.address, messages, each, ends_at) for each in turns
            ]
            found = dict(
                self._as_rows(rows, [each for client in asked for each in client.result()])
            )
        if math.isinf(ends_at) and len(found) < len(rows):
            missing = next(place for place in range(len(rows)) if place not in found)
            raise BackendFailed(f"the server refused example {missing} {NUM_TRIES} times")
        return [found.get(place, {}) for place in range(len(rows))]

    def _messages(
        self, rows: Sequence[Row], outputs: Sequence[str] = ()
    ) -> list[tuple[int, bytes]]:
        wanted, config = [RequestedOutput(name) for name in outputs], self.build.config
        return [encode_infer(stacked(config, [row]), wanted) for row in fitted(rows, config)]

    def _as_rows(
        self, rows: Sequence[Row], answers: list[tuple[int, dict[str, Array]]]
    ) -> list[tuple[int, dict[str, Array]]]:
        """Remove the batch dimension that the rows do not have."""
        config = self.build.config
        if config.max_batch_size == 0 or fitted(rows, config) is not rows:
            return answers
        return [(place, {n: each[0, ...] for n, each in found.items()}) for place, found in answers]

    @property
    def _tail(self) -> str:
        return self._process.tail("the server")

    def _wait_until_ready(self) -> str:
        last = time.monotonic() + self.start_timeout_s
        while time.monotonic() < last:
            # Polled before reading: the output of an ended process is then complete.
            has_ended = not self._process.is_running
            found = ADDRESS.search(self._process.output)
            if found:
                return f"{found[1]}/models/{self.build.config.name}"
            if has_ended:
                raise BackendFailed(f"the server did not start{self._tail}")
            time.sleep(POLL_S)
        kind = CutOff if self.start_timeout_s < START_TIMEOUT_S else BackendFailed
        raise kind(f"not ready after {self.start_timeout_s:.3g} s{self._tail}")


class Servers:
    """A server for each build, with the rows in a file. Idle servers sleep, so callers with enough
    memory keep them for the next measurement; `close` stops all. `is_alone`: one at a time, because
    each takes all the memory there is."""

    def __init__(
        self, make: Callable[[Build], ServedEndpoint] | None = None, *, is_alone: bool = False
    ) -> None:
        """`make` returns the endpoint of a build that is not sent rows."""
        self._make = make
        self.is_alone = is_alone
        self._stack = contextlib.ExitStack()
        # Start timeout of the next server.
        self.start_timeout_s: Callable[[], float] = lambda: START_TIMEOUT_S
        self._endpoints: dict[Path, ServedEndpoint] = {}
        # Row files by form of the inputs, which is the same for nearly all builds.
        self._files: dict[object, str] = {}

    def open(self, builds: Sequence[Build], rows: Sequence[Row]) -> list[ServedEndpoint]:
        """Return endpoints of these builds, started if needed. Rows must be the same each time."""
        has_others = bool(self._endpoints)
        try:
            return [self._open_one(build, rows) for build in builds]
        except BackendFailed:
            if not has_others:
                raise
            # Other servers may hold the memory that this one needs.
            self.close()
            return [self._open_one(build, rows) for build in builds]

    def close(self) -> None:
        self._endpoints.clear()
        self._files.clear()
        self._stack.close()

    def _open_one(self, build: Build, rows: Sequence[Row]) -> ServedEndpoint:
        known = self._endpoints.get(build.folder)
        if known is not None and known.is_running:
            return known
        if self.is_alone:
            self.close()
        if self._make is not None:
            endpoint = self._make(build)
        else:
            endpoint = ServedEndpoint(build, self._written(build.config, rows))
        endpoint.start_timeout_s = self.start_timeout_s()
        self._stack.enter_context(endpoint)
        self._endpoints[build.folder] = endpoint
        return endpoint

    def _written(self, config: ModelConfig, rows: Sequence[Row]) -> str:
        form = config.inputs, config.max_batch_size > 0
        if form not in self._files:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-"))
            self._files[form] = write_rows(rows, config, Path(folder))
        return self._files[form]


def write_rows(rows: Sequence[Row], config: ModelConfig, folder: Path) -> str:
    """Write a bench data file with the model's inputs only. Empty without rows: inputs are then
    drawn from the signature."""
    if not rows:
        return ""
    chosen = fitted(rows[: _num_sent(rows)], config)
    specs = [spec for spec in config.inputs if spec.name in chosen[0]]
    if all(_is_stackable(spec, chosen) for spec in specs):
        path = folder / "rows.npz"
        stacks = ((spec, np.stack([row[spec.name] for row in chosen])) for spec in specs)
        arrays = {spec.name: _plain(spec, stack) for spec, stack in stacks}
        np.savez(path, **arrays)  # type: ignore[arg-type]
        return str(path)
    path = folder / "rows.jsonl"
    with path.open("wb") as file:
        for row in chosen:
            line = {spec.name: _json(spec, row[spec.name]) for spec in specs if spec.name in row}
            file.write(msgspec.json.encode(line) + b"\n")
    return str(path)


def _num_sent(rows: Sequence[Row]) -> int:
    """Return how many rows to send: at most `MAX_ROWS`, with at most `MAX_BYTES`."""
    total = 0
    for count, row in enumerate(rows[:MAX_ROWS]):
        total += sum(_num_bytes(array) for array in row.values())
        if total > MAX_BYTES:
            return max(1, count)
    return min(len(rows), MAX_ROWS)


def _num_bytes(array: Array) -> int:
    if array.dtype.kind == "O":
        return sum(len(each) for each in array.ravel().tolist())
    return int(array.nbytes)


def _is_stackable(spec: TensorSpec, rows: Sequence[Row]) -> bool:
    """Return whether rows fit one array. `file` is a parameter name of `np.savez`."""
    if spec.datatype == "BYTES" or spec.name == "file":
        return False
    shapes = {np.shape(row[spec.name]) if spec.name in row else None for row in rows}
    return len(shapes) == 1


def _plain(spec: TensorSpec, array: Array) -> Array:
    """Return the array as stored in files: rows hold BF16 as bits, files hold floats."""
    if spec.datatype == "BF16" and array.dtype == np.uint16:
        return bf16_floats(array)
    return np.asarray(array, DATATYPES[spec.datatype].numpy)


def _json(spec: TensorSpec, array: Array) -> object:
    if spec.datatype != "BYTES":
        return _plain(spec, np.asarray(array)).tolist()
    packed = base64.b64encode(pack_bytes(np.asarray(array))).decode()
    return {"content": {"b64": packed}, "shape": list(np.shape(array))}


def patience_s(limit_s: float | None) -> float:
    """Return the client's timeout. Without a latency limit, a batch may take long."""
    return LONG_PATIENCE_S if limit_s is None else max(PATIENCE_S, PATIENCE * limit_s)


def num_clients(config: ModelConfig) -> int:
    """Return enough clients that every instance has a full batch and the next one queued. In slo
    mode, late requests are refused and clients retry at once: many clients would leave the server
    no time to answer. So only one request is queued then, not a batch."""
    if config.is_ensemble:
        # Its members have the instances.
        return min(MAX_CLIENTS, max(NUM_CLIENTS, 2 * config.max_batch_size))
    is_refusing = config.batching.slo_latency_s is not None
    num_rows = 1 if is_refusing or not config.batching.is_dynamic else config.max_batch_size
    return min(MAX_CLIENTS, max(4, 2 * config.num_instances * num_rows))


def _be_client(
    address: str, messages: Sequence[tuple[int, bytes]], turns: Sequence[int], ends_at: float
) -> list[tuple[int, dict[str, Array]]]:
    parts = urlsplit(address)
    found: list[tuple[int, dict[str, Array]]] = []
    try:
        opened = http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT_S)
        with contextlib.closing(opened) as connection:
            for turn in turns:
                if time.monotonic() > ends_at and turn >= NUM_CLIENTS:
                    break
                place = turn % len(messages)
                answer = _infer(connection, f"{parts.path}/infer", messages[place], place)
                if answer is not None:
                    found.append((place, answer))
    except (OSError, http.client.HTTPException) as error:
        raise BackendFailed(f"the server did not answer: {error or type(error).__name__}") from None
    return found


def _infer(
    connection: http.client.HTTPConnection, path: str, message: tuple[int, bytes], place: int
) -> dict[str, Array] | None:
    """Send one request; None if the server refuses all tries. `place` names it in errors."""
    head_length, body = message
    for _ in range(NUM_TRIES):
        connection.request("POST", path, body, {HEAD_LENGTH: str(head_length)})
        response = connection.getresponse()
        data = response.read()
        if response.status == http.HTTPStatus.OK:
            return decode_answer(int(response.headers[HEAD_LENGTH]), data)
        if response.status != http.HTTPStatus.SERVICE_UNAVAILABLE:
            said = f"the server answered {response.status}: {data[:300]!r}"
            raise BackendFailed(f"example {place}: {said}")
        time.sleep(RETRY_S)
    return None
