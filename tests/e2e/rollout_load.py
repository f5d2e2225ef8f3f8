"""A model whose versions are good, slow, wrong, failing or crashing, and clients that count which
version answered. Every answer is checked."""

import contextlib
import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
from served import Served
from tritonclient.grpc import service_pb2, service_pb2_grpc

CODE = """
import os, time
import numpy as np

begun = time.monotonic()

def infer(inputs):
    x = inputs["x"]
    good = np.concatenate([x, 1.5 - x, np.full_like(x, -1)], axis=1)
    y = good
    if time.monotonic() - begun >= {after_s}:
{fault}
    return {{"y": y}}
"""
FAULTS = {
    "good": "pass",
    "slow": "time.sleep(3)",
    "wrong": "y = good[:, [1, 2, 0]]",
    "errors": "assert x[0, 0] > 0.5, 'too small'",
    "crash": "os._exit(3)",
}
CONFIG = """
backend: "python" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 3 }
parameters { key: "penstock.slo" value { string_value: "p99 < 1s" } }
version_policy { specific { versions: 1 } }
"""


def add_versions(root: Path, *kinds: str, name: str = "m", after_s: float = 0.0) -> Path:
    """Add a model with these versions; the first, version 1, is served."""
    folder = root / name
    for number, kind in enumerate(kinds, 1):
        (folder / str(number)).mkdir(parents=True)
        code = CODE.format(after_s=after_s, fault=f"        {FAULTS[kind]}")
        (folder / str(number) / "model.py").write_text(code)
    (folder / "config.pbtxt").write_text(CONFIG)
    return root


EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "*")


def call(served: Served, path: str, **body: object) -> dict:
    """POST if there is a body; the answer must be 200."""
    url = f"/v2/repository/models/m/{path}"
    status, answer = served.post(url, json.dumps(body).encode()) if body else served.get(url)
    assert status == 200, answer
    return json.loads(answer)


def promote(served: Served, version: int, **options: object) -> dict:
    return call(served, "promote", version=version, force="a test", **options)


def rollout(served: Served) -> dict:
    return call(served, "rollout")


def wait_for_end(served: Served, patience_s: float = 180.0) -> dict:
    """How the rollout stands when it has ended, or after so long."""
    ends = time.monotonic() + patience_s
    while (state := rollout(served))["decision"] == "running" and time.monotonic() < ends:
        time.sleep(0.2)
    return state


def expected(value: float) -> list[float]:
    return [np.float32(each) for each in (value, 1.5 - value, -1)]


class Clients:
    """Clients in threads, over HTTP and, if the server has it, gRPC; each has one request in flight
    and waits a little between them."""

    def __init__(self, served: Served, number: int = 4, headers: dict | None = None) -> None:
        self._served = served
        self._headers = headers or {}
        self._is_stopping = False
        has_grpc = hasattr(served, "grpc_address")
        kinds = [has_grpc and each % 2 == 1 for each in range(number)]
        self._threads = [threading.Thread(target=self._run, args=(each,)) for each in kinds]
        # Answers by version, errors by text, and answers with other numbers than the model's.
        self.versions: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.num_wrong = 0

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        for thread in self._threads:
            thread.join()

    def _run(self, is_grpc: bool) -> None:
        number, ask = 0, self._ask_grpc if is_grpc else self._ask_http
        with connect(self._served, is_grpc) as connection:
            while not self._is_stopping:
                number += 1
                value = (number % 10) / 10
                version, values = ask(connection, value)
                if values is None:
                    self.errors[version] += 1
                else:
                    self.versions[version] += 1
                    self.num_wrong += [np.float32(each) for each in values] != expected(value)
                time.sleep(0.01)

    def _ask_http(self, connection, value: float):
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}
        body = json.dumps({"inputs": [tensor]})
        connection.request("POST", "/v2/models/m/infer", body, self._headers)
        with connection.getresponse() as answer:
            told = json.loads(answer.read())
        if answer.status != 200:
            return f"{answer.status} {told['error']}", None
        return told["model_version"], told["outputs"][0]["data"]

    def _ask_grpc(self, stub, value: float):
        request = service_pb2.ModelInferRequest(model_name="m")
        request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
        request.raw_input_contents.append(np.float32(value).tobytes())
        metadata = [(name.lower(), text) for name, text in self._headers.items()]
        try:
            answer = stub.ModelInfer(request, metadata=metadata, timeout=60)
        except grpc.RpcError as error:
            return f"{error.code().name} {error.details()}", None
        return answer.model_version, np.frombuffer(answer.raw_output_contents[0], np.float32)


@contextlib.contextmanager
def connect(served: Served, is_grpc: bool) -> Iterator[object]:
    if is_grpc:
        with grpc.insecure_channel(served.grpc_address) as channel:
            yield service_pb2_grpc.GRPCInferenceServiceStub(channel)
    else:
        connection = http.client.HTTPConnection(served.address, timeout=60)
        yield connection
        connection.close()
