"""Open-loop load on an application of a Ray cluster, and repositories for it. Needs no Ray."""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

CONFIG = """name: "{name}"
backend: "python"
max_batch_size: 0
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }} ]
instance_group [ {{ count: {instances} kind: KIND_CPU }} ]
parameters {{ key: "penstock.max_wait_ms" value {{ string_value: "0" }} }}
version_policy {{ specific {{ versions: [ {version} ] }} }}
"""
# Takes a fixed time, without computing, so that a laptop can scale it.
MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep({seconds} * len(requests))
        value = np.array([{version}], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", value)]) for _ in requests]
"""
BODY = json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [1]}]})
TIMEOUT_S = 60.0
NUM_CONNECTIONS = 64


def write_pace(
    root: Path, name: str, seconds: float, versions: int = 1, instances: int = 1
) -> None:
    """Write a model that takes this long for a request, and answers with its version. It refuses
    none: what is lost is not lost to overload."""
    for version in range(1, versions + 1):
        folder = root / name / str(version)
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(MODEL.format(seconds=seconds, version=version))
    choose(root, name, 1, instances)


def choose(root: Path, name: str, version: int, instances: int = 1) -> None:
    """Serve this version from the next read on."""
    text = CONFIG.format(name=name, version=version, instances=instances)
    (root / name / "config.pbtxt").write_text(text)


@dataclass(frozen=True)
class LoadResult:
    """One request. `outcome` is 200, its status and error, or the name of an exception."""

    due_s: float
    latency_s: float
    outcome: str
    version: str = ""


@dataclass
class LoadTally:
    results: list[LoadResult] = field(default_factory=list)

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(each.outcome for each in self.results)

    @property
    def num_lost(self) -> int:
        return sum(each.outcome != "200" for each in self.results)

    def percentile_ms(self, share: float) -> float:
        ordered = sorted(each.latency_s for each in self.results if each.outcome == "200")
        return 1e3 * ordered[int(share * (len(ordered) - 1))] if ordered else 0.0

    def __str__(self) -> str:
        told = ", ".join(f"{count} x {name}" for name, count in sorted(self.outcomes.items()))
        p50, p99 = self.percentile_ms(0.5), self.percentile_ms(0.99)
        return f"{len(self.results)} sent, {told}; p50 {p50:.0f} ms, p99 {p99:.0f} ms"


class OpenLoad:
    """Sends requests at constant intervals, whatever becomes of them, from a thread. Use it in a
    `with` block, and read `tally` after it. `rate` may change at any time."""

    def __init__(self, port: int, path: str, rate: float, body: str = BODY) -> None:
        self._port = port
        self._path = path
        self._body = body
        self.rate = rate
        self.tally = LoadTally()
        self._due: queue.Queue[float | None] = queue.Queue()
        self._stop = threading.Event()
        self.began = time.monotonic()
        clients = [threading.Thread(target=self._work) for _ in range(NUM_CONNECTIONS)]
        self._threads = [threading.Thread(target=self._pace), *clients]

    def __enter__(self) -> OpenLoad:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for _ in self._threads:
            self._due.put(None)
        for each in self._threads:
            each.join()

    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    def _pace(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            due += 1 / self.rate
            time.sleep(max(0.0, due - time.monotonic()))
            self._due.put(due)

    def _work(self) -> None:
        connection: http.client.HTTPConnection | None = None
        while (due := self._due.get()) is not None:
            try:
                if connection is None:
                    address = ("127.0.0.1", self._port)
                    connection = http.client.HTTPConnection(*address, timeout=TIMEOUT_S)
                connection.request("POST", self._path, self._body)
                answer = connection.getresponse()
                data = answer.read()
                is_good = answer.status == 200
                outcome = "200" if is_good else f"{answer.status} {data.decode()[:200]}"
                version = json.loads(data)["model_version"] if is_good else ""
            except Exception as error:  # Whatever happens to a request is an outcome.
                outcome, version = type(error).__name__, ""
                if connection is not None:
                    connection.close()
                connection = None
            latency_s = time.monotonic() - due
            self.tally.results.append(LoadResult(due - self.began, latency_s, outcome, version))
        if connection is not None:
            connection.close()


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 60.0) -> float:
    """Return after how many seconds it holds; AssertionError if it does not."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, f"not within {limit_s:.0f} s: {what}"
        time.sleep(0.2)
    return time.monotonic() - began
