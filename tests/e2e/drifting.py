"""A committed version with statistics of its data, and clients that send rows like them or not."""

import http.client
import json
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
from served import Served

from penstock.optimizer.input_record import statistics_of
from penstock.repository import layout, versions
from penstock.types import Array

SIZE = 32


def normal(count: int, seed: int, shift: float = 0.0) -> Array:
    made = np.random.default_rng(seed).normal(shift, 1.0, (count, SIZE))
    return made.astype(np.float32)


def commit(root: Path, config: str = "", calibration: dict | None = None) -> Path:
    """Add version 1 of a `null` model FP32 [32] to a repository; return its folder."""
    draft = root / "draft" / "m"
    (draft / "1").mkdir(parents=True)
    text = f"""
    backend: "null" max_batch_size: 8 dynamic_batching {{ }}
    input {{ name: "x" data_type: TYPE_FP32 dims: {SIZE} }}
    output {{ name: "y" data_type: TYPE_FP32 dims: {SIZE} }}
    {config}
    """
    (draft / "config.pbtxt").write_text(text)
    found = layout.read(draft).configs[-1]
    rows = [{"x": row} for row in normal(1000, 1)]
    evidence = {"input_statistics": msgspec.to_builtins(statistics_of(found, rows))}
    repository = root / "models"
    repository.mkdir()
    versions.commit(repository, "m", draft / "1", found, evidence)
    return repository


class Clients:
    """Send rows of a normal distribution until stopped, about 400 a second in all."""

    def __init__(self, served: Served, shift: float = 0.0, num_clients: int = 4) -> None:
        self._address, self._shift = served.address, shift
        self._is_over = False
        self._threads = [
            threading.Thread(target=self._send, args=(seed,)) for seed in range(num_clients)
        ]
        for each in self._threads:
            each.start()

    def _send(self, seed: int) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=30)
        rows = normal(5000, 100 + seed, self._shift)
        number = 0
        while not self._is_over:
            data = rows[number % len(rows)].tobytes()
            number += 1
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, SIZE]}
            tensor["parameters"] = {"binary_data_size": len(data)}
            body = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
            head = json.dumps(body).encode()
            headers = {"Inference-Header-Content-Length": str(len(head))}
            connection.request("POST", "/v2/models/m/infer", head + data, headers)
            connection.getresponse().read()
            time.sleep(0.01)
        connection.close()

    def stop(self) -> None:
        self._is_over = True
        for each in self._threads:
            each.join()


def scraped(served: Served, name: str) -> float:
    text = served.get("/metrics")[1].decode()
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    return sum(float(line.split()[-1]) for line in lines)
