"""Clients' memory and a model on a GPU: copies from pinned client pages, truncated files, memory of
the GPU itself; `make test-gpu`."""

import base64
import ctypes
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as http_client
import tritonclient.utils.shared_memory as shm
from e2e.served import Served
from tritonclient.utils import InferenceServerException

import penstock

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(300),
]

# 160 kB a row: copied from the client's pages. The model adds one.
ROW = 40_000
MODULE = """
import torch
from torch import nn


class AddOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x + self.one


def factory():
    return AddOne()
"""
CONFIG = """
backend: "pytorch" max_batch_size: 8
dynamic_batching {{ default_queue_policy {{ default_timeout_microseconds: 60000000 }} }}
input {{ name: "x" data_type: TYPE_FP32 dims: {row} }}
output {{ name: "y" data_type: TYPE_FP32 dims: {row} }}
instance_group {{ kind: KIND_GPU count: 2 gpus: 0 }}
"""


@pytest.fixture(scope="module", params=[1, 4])
def served(tmp_path_factory: pytest.TempPathFactory, request) -> Iterator[Served]:
    root: Path = tmp_path_factory.mktemp("models")
    for name, row in (("large", ROW), ("small", 16)):
        version = root / name / "1"
        version.mkdir(parents=True)
        (version / "module.py").write_text(MODULE)
        (root / name / "config.pbtxt").write_text(CONFIG.format(row=row))
        save_file({"one": torch.ones(1)}, version / "model.safetensors")
    with Served(root, "--shared-memory", "--shards", str(request.param)) as server:
        yield server


def numbers(seed: int, row: int = ROW, rows: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, (rows, row)).astype(np.float32)


def tensors(name: str, row: int, place: int, rows: int = 1) -> dict[str, list]:
    """An input and an output side by side in a region."""
    nbytes = rows * row * 4
    given = http_client.InferInput("x", [rows, row], "FP32")
    given.set_shared_memory(name, nbytes, offset=place)
    wanted = http_client.InferRequestedOutput("y")
    wanted.set_shared_memory(name, nbytes, offset=place + nbytes)
    return {"inputs": [given], "outputs": [wanted]}


@pytest.mark.parametrize(("model", "row"), [("large", ROW), ("small", 16)])
def test_shared_requests_and_others_share_batches(served: Served, model: str, row: int):
    name = f"penstock-test-{secrets.token_hex(8)}"
    handle = shm.create_shared_memory_region(name, f"/{name}", 16 * 2 * ROW * 4)
    client = http_client.InferenceServerClient(served.address)
    client.register_system_shared_memory(name, f"/{name}", 16 * 2 * ROW * 4)
    failures: list[str] = []

    def ask(number: int) -> None:
        own = http_client.InferenceServerClient(served.address)
        place = number * 2 * ROW * 4
        try:
            for turn in range(40):
                values = numbers(100 * number + turn, row)
                if number % 2:
                    shm.set_shared_memory_region(handle, [values], offset=place)
                    own.infer(model, **tensors(name, row, place))
                    found = shm.get_contents_as_numpy(
                        handle, np.float32, [1, row], offset=place + row * 4
                    )
                else:
                    sent = http_client.InferInput("x", [1, row], "FP32")
                    sent.set_data_from_numpy(values)
                    found = own.infer(model, [sent]).as_numpy("y")
                if not np.array_equal(found, values + 1):
                    failures.append(f"{number}: another answer in turn {turn}")
        except Exception as error:
            failures.append(f"{number}: {error}")
        finally:
            own.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.unregister_system_shared_memory(name)
    client.close()
    shm.destroy_shared_memory_region(handle)
    assert not failures


def test_truncated_files_crash_nothing(served: Served):
    """Pinned pages stay; what is read otherwise is a 400. The worker lives on, with its GPU."""
    before = {process.pid for process in served.processes()}
    name = f"penstock-test-{secrets.token_hex(8)}"
    size = 2 * ROW * 4
    handle = shm.create_shared_memory_region(name, f"/{name}", size)
    client = http_client.InferenceServerClient(served.address)
    client.register_system_shared_memory(name, f"/{name}", size)
    fd, ends = os.open(f"/dev/shm/{name}", os.O_RDWR), time.monotonic() + 5
    outcomes: set[str] = set()

    def ask(number: int) -> None:
        own = http_client.InferenceServerClient(served.address)
        model, row = ("large", ROW) if number % 2 else ("small", 16)
        while time.monotonic() < ends:
            try:
                own.infer(model, **tensors(name, row, 0))
                outcomes.add("answered")
            except InferenceServerException as error:
                outcomes.add("400" if error.status() == "400" else str(error))
        own.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    while time.monotonic() < ends:
        for nbytes in (0, 4096, size, ROW * 4, size):
            os.ftruncate(fd, nbytes)
            time.sleep(0.002)
    for thread in threads:
        thread.join()
    os.ftruncate(fd, size)
    os.close(fd)
    assert outcomes <= {"answered", "400"} and "answered" in outcomes
    assert {process.pid for process in served.processes()} == before
    # A region that is registered again has the file's new pages.
    client.unregister_system_shared_memory(name)
    client.register_system_shared_memory(name, f"/{name}", size)
    shm.set_shared_memory_region(handle, [numbers(1)])
    client.infer("large", **tensors(name, ROW, 0))
    found = shm.get_contents_as_numpy(handle, np.float32, [1, ROW], offset=ROW * 4)
    assert np.array_equal(found, numbers(1) + 1)
    client.unregister_system_shared_memory(name)
    client.close()
    shm.destroy_shared_memory_region(handle)


def test_penstocks_client(served: Served):
    with penstock.Client(f"http://{served.address}", model="large") as client:
        for seed in range(20):
            values = numbers(seed, rows=4)
            assert np.array_equal(client.infer(values)["y"], values + 1)


class GpuMemory:
    """Memory of this process on GPU 0, with its cudaIpcMemHandle_t."""

    def __init__(self, nbytes: int) -> None:
        torch.cuda.init()
        torch.zeros(1, device="cuda:0")
        self.driver = ctypes.CDLL("libcuda.so.1")
        self._address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(self._address), ctypes.c_size_t(nbytes))
        raw = ctypes.create_string_buffer(64)
        self._call("cuIpcGetMemHandle", raw, self._address)
        self.handle = base64.b64encode(raw.raw)

    def write(self, offset: int, values: np.ndarray) -> None:
        there = ctypes.c_uint64(self._address.value + offset)
        here = ctypes.c_void_p(values.ctypes.data)
        self._call("cuMemcpyHtoD_v2", there, here, ctypes.c_size_t(values.nbytes))

    def read(self, offset: int, shape: tuple[int, ...]) -> np.ndarray:
        values = np.empty(shape, np.float32)
        there = ctypes.c_uint64(self._address.value + offset)
        here = ctypes.c_void_p(values.ctypes.data)
        self._call("cuMemcpyDtoH_v2", here, there, ctypes.c_size_t(values.nbytes))
        return values

    def close(self) -> None:
        self._call("cuMemFree_v2", self._address)

    def _call(self, name: str, *arguments: object) -> None:
        assert getattr(self.driver, name)(*arguments) == 0, name


def test_memory_of_the_gpu(served: Served):
    memory, size = GpuMemory(2 * ROW * 4), 2 * ROW * 4
    client = http_client.InferenceServerClient(served.address)
    client.register_cuda_shared_memory("gpu", memory.handle, 0, size)
    status = client.get_cuda_shared_memory_status()
    assert status == [{"name": "gpu", "device_id": 0, "byte_size": size}]
    for model, row in (("large", ROW), ("small", 16)):
        for seed in range(5):
            memory.write(0, numbers(seed, row))
            client.infer(model, **tensors("gpu", row, 0))
            assert np.array_equal(memory.read(row * 4, (1, row)), numbers(seed, row) + 1)
    client.unregister_cuda_shared_memory("gpu")
    assert client.get_cuda_shared_memory_status() == []
    client.close()
    memory.close()


def test_handles_that_cannot_be_opened_harm_nobody_else(served: Served):
    before = {process.pid for process in served.processes()}
    client = http_client.InferenceServerClient(served.address)
    client.register_cuda_shared_memory("bad", base64.b64encode(bytes(64)), 0, 1 << 20)
    with pytest.raises(InferenceServerException, match="CUDA shared memory") as caught:
        client.infer("large", **tensors("bad", ROW, 0))
    assert caught.value.status() == "400"
    memory = GpuMemory(1 << 12)
    client.register_cuda_shared_memory("short", memory.handle, 0, 1 << 30)
    with pytest.raises(InferenceServerException, match="were registered, but"):
        client.infer("large", **tensors("short", ROW, 0))
    client.unregister_cuda_shared_memory()
    sent = http_client.InferInput("x", [1, ROW], "FP32")
    sent.set_data_from_numpy(numbers(3))
    assert np.array_equal(client.infer("large", [sent]).as_numpy("y"), numbers(3) + 1)
    assert {process.pid for process in served.processes()} == before
    client.close()
    memory.close()
