"""A real server and clients on the same machine that share memory with it: Triton's client and its
own utilities, over HTTP and gRPC, with one or several shards."""

import base64
import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
import tritonclient.utils.shared_memory as shm
from served import Served, null_model
from tritonclient.utils import InferenceServerException, serialize_byte_tensor
from waiting import wait_until

import penstock

ROW = 40_000
CONFIG = """
backend: "null" max_batch_size: 8 dynamic_batching {{
  default_queue_policy {{ default_timeout_microseconds: 60000000 }}
}}
input {{ name: "x" data_type: TYPE_FP32 dims: [ {row} ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ {row} ] }}
parameters {{ key: "null.a_ms" value {{ string_value: "{a_ms}" }} }}
"""
CODE = """
import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb.get_input_tensor_by_name(request, "text").as_numpy()
        number = pb.get_input_tensor_by_name(request, "number").as_numpy()
        return pb.InferenceResponse(
            [pb.Tensor("joined", text + text), pb.Tensor("grown", np.repeat(number, 3))]
        )
"""
PYTHON = """
backend: "python" max_batch_size: 0
input { name: "text" data_type: TYPE_STRING dims: [ -1 ] }
input { name: "number" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "joined" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "grown" data_type: TYPE_INT32 dims: [ -1 ] }
"""


def add_model(folder: Path, name: str, config: str) -> None:
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(config)


@pytest.fixture(scope="module", params=[1, 2, 4])
def served(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    add_model(folder, "m", CONFIG.format(row=ROW, a_ms=1))
    add_model(folder, "slow", CONFIG.format(row=ROW, a_ms=300))
    flags = ("--shared-memory", "--shards", str(request.param))
    with Served(folder, *flags, grpc=True) as server:
        if request.param > 1:
            wait_until(lambda: server.has_shards(request.param))
        yield server


class Peer:
    """A client of either protocol, with regions that end with it."""

    def __init__(self, protocol: str, served: Served) -> None:
        self.lib = http_client if protocol == "http" else grpc_client
        address = served.address if protocol == "http" else served.grpc_address
        self.api = self.lib.InferenceServerClient(address)
        self.handles: list[Any] = []

    def close(self) -> None:
        self.api.unregister_system_shared_memory()
        for handle in self.handles:
            with contextlib.suppress(shm.SharedMemoryException):
                shm.destroy_shared_memory_region(handle)
        self.api.close()

    def region(self, nbytes: int) -> tuple[Any, str]:
        """Create shared memory; return Triton's handle, and its name, which is its key too."""
        name = f"penstock-test-{secrets.token_hex(8)}"
        self.handles.append(shm.create_shared_memory_region(name, f"/{name}", nbytes))
        return self.handles[-1], name

    def registered(self, nbytes: int) -> tuple[Any, str]:
        handle, name = self.region(nbytes)
        self.api.register_system_shared_memory(name, f"/{name}", nbytes)
        return handle, name

    def input(self, name: str, shape: list[int], datatype: str, *place: Any) -> Any:
        made = self.lib.InferInput(name, shape, datatype)
        made.set_shared_memory(*place)
        return made

    def output(self, name: str, *place: Any) -> Any:
        made = self.lib.InferRequestedOutput(name)
        made.set_shared_memory(*place)
        return made

    def names(self) -> set[str]:
        status = self.api.get_system_shared_memory_status()
        return set(status.regions) if self.lib is grpc_client else {each["name"] for each in status}


@pytest.fixture(params=["http", "grpc"])
def peer(served: Served, request: Any) -> Iterator[Peer]:
    made = Peer(request.param, served)
    yield made
    made.close()


def numbers(seed: int, rows: int = 1) -> Any:
    return np.random.default_rng(seed).random((rows, ROW), np.float32)


def test_inputs_are_read_and_outputs_written_in_place(peer: Peer):
    nbytes = 3 * ROW * 4
    handle, name = peer.registered(2 * nbytes)
    for seed in range(5):
        values = numbers(seed, 3)
        shm.set_shared_memory_region(handle, [values])
        found = peer.api.infer(
            "m",
            [peer.input("x", [3, ROW], "FP32", name, nbytes)],
            outputs=[peer.output("y", name, nbytes, nbytes)],
        )
        answer = shm.get_contents_as_numpy(handle, np.float32, [3, ROW], offset=nbytes)
        assert np.array_equal(answer, values)
        told = found.get_output("y")
        shape = told["shape"] if isinstance(told, dict) else list(told.shape)
        assert shape == [3, ROW]


def test_either_side_may_be_in_the_message(peer: Peer):
    handle, name = peer.registered(ROW * 4)
    values = numbers(1)
    shm.set_shared_memory_region(handle, [values])
    found = peer.api.infer("m", [peer.input("x", [1, ROW], "FP32", name, ROW * 4)])
    assert np.array_equal(found.as_numpy("y"), values)
    sent = peer.lib.InferInput("x", [1, ROW], "FP32")
    sent.set_data_from_numpy(values + 1)
    peer.api.infer("m", [sent], outputs=[peer.output("y", name, ROW * 4)])
    assert np.array_equal(shm.get_contents_as_numpy(handle, np.float32, [1, ROW]), values + 1)


def test_requests_in_shared_memory_and_others_share_batches(served: Served, peer: Peer):
    """Every answer is that of its request, whatever is beside it in its batch."""
    handle, name = peer.registered(16 * ROW * 4)
    failures: list[str] = []

    def ask(number: int) -> None:
        own = Peer("http" if peer.lib is http_client else "grpc", served)
        place = number * ROW * 4
        try:
            for turn in range(12):
                values = numbers(100 * number + turn)
                if number % 2:
                    shm.set_shared_memory_region(handle, [values], offset=place)
                    own.api.infer(
                        "m",
                        [own.input("x", [1, ROW], "FP32", name, ROW * 4, place)],
                        outputs=[own.output("y", name, ROW * 4, place)],
                    )
                    read = shm.get_contents_as_numpy(handle, np.float32, [1, ROW], offset=place)
                else:
                    sent = own.lib.InferInput("x", [1, ROW], "FP32")
                    sent.set_data_from_numpy(values)
                    read = own.api.infer("m", [sent]).as_numpy("y")
                if not np.array_equal(read, values):
                    failures.append(f"{number}: another answer in turn {turn}")
        except Exception as error:
            failures.append(f"{number}: {error}")
        finally:
            own.api.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_regions_are_listed_and_names_are_taken_once(peer: Peer):
    _, name = peer.registered(4096)
    assert peer.names() == {name}
    with pytest.raises(InferenceServerException, match="already in manager"):
        peer.api.register_system_shared_memory(name, f"/{name}", 64)
    peer.api.unregister_system_shared_memory(name)
    peer.api.unregister_system_shared_memory(name)
    assert peer.names() == set()
    with pytest.raises(InferenceServerException, match="Unable to find system shared memory"):
        peer.api.get_system_shared_memory_status(name)
    peer.api.register_system_shared_memory(name, f"/{name}", 64, offset=4032)
    asked = peer.input("x", [1, ROW], "FP32", name, ROW * 4)
    with pytest.raises(InferenceServerException, match=f"{ROW * 4} bytes at 0 of 64"):
        peer.api.infer("m", [asked])


def refusals(peer: Peer, name: str) -> dict[str, Callable[[], object]]:
    register, nbytes = peer.api.register_system_shared_memory, ROW * 4
    return {
        "Unable to open": lambda: register("new", "/penstock-no-such-file", 64),
        "expected the name of a file": lambda: register("new", "/../etc/passwd", 64),
        "exceed its": lambda: register("new", f"/{name}", 1 << 40),
        "byte_size 0": lambda: register("new", f"/{name}", 0),
        "no such memfd": lambda: register("new", f"memfd:1:1:{'0' * 32}", 64),
        "expected 1 to 200 printable": lambda: register("x" * 201, f"/{name}", 64),
        "Expected 160000, got 64": lambda: peer.api.infer(
            "m", [peer.input("x", [1, ROW], "FP32", name, 64)]
        ),
        "Unable to find shared memory region: 'none'": lambda: peer.api.infer(
            "m", [peer.input("x", [1, ROW], "FP32", "none", nbytes)]
        ),
        "(64 bytes) should be at least 160000 bytes to hold": lambda: peer.api.infer(
            "m",
            [peer.input("x", [1, ROW], "FP32", name, nbytes)],
            outputs=[peer.output("y", name, 64)],
        ),
    }


def test_what_is_wrong_is_explained_and_harms_nothing(peer: Peer):
    handle, name = peer.registered(ROW * 4)
    for words, call in refusals(peer, name).items():
        with pytest.raises(InferenceServerException, match=re.escape(words)) as caught:
            call()
        assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
    with pytest.raises(InferenceServerException, match="this server has no GPU"):
        peer.api.register_cuda_shared_memory("g", base64.b64encode(bytes(64)), 0, 64)
    shm.set_shared_memory_region(handle, [numbers(3)])
    found = peer.api.infer("m", [peer.input("x", [1, ROW], "FP32", name, ROW * 4)])
    assert np.array_equal(found.as_numpy("y"), numbers(3))


def test_requests_are_answered_although_their_region_is_unregistered(served: Served, peer: Peer):
    handle, name = peer.registered(2 * ROW * 4)
    values = numbers(9)
    shm.set_shared_memory_region(handle, [values])
    failures: list[Exception] = []

    def ask() -> None:
        own = Peer("http" if peer.lib is http_client else "grpc", served)
        try:
            own.api.infer(
                "slow",
                [own.input("x", [1, ROW], "FP32", name, ROW * 4)],
                outputs=[own.output("y", name, ROW * 4, ROW * 4)],
            )
        except Exception as error:
            failures.append(error)
        finally:
            own.api.close()

    def num_started() -> int:
        text = served.get("/metrics")[1].decode()
        waiting = re.findall(r'nv_inference_pending_request_count{model="slow".*} (\d+)', text)
        return sum(map(int, waiting))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)  # Some run, some wait; either way they have their memory.
    wait_until(lambda: num_started() > 0 or not any(each.is_alive() for each in threads))
    peer.api.unregister_system_shared_memory(name)
    assert name not in peer.names()
    for thread in threads:
        thread.join()
    # A request that came after the call does not find it; no other error is allowed.
    assert all("Unable to find" in str(error) for error in failures)
    assert len(failures) < len(threads)
    answer = shm.get_contents_as_numpy(handle, np.float32, [1, ROW], offset=ROW * 4)
    assert np.array_equal(answer, values)


def test_files_that_are_truncated_under_load_crash_nothing(served: Served):
    """Some requests fail with 400 meanwhile; all others are right, and no process has died."""
    before = {process.pid for process in served.processes()}
    peer = Peer("http", served)
    handle, name = peer.registered(2 * ROW * 4)
    values, fd = numbers(4), os.open(f"/dev/shm/{name}", os.O_RDWR)
    began, stop = time.monotonic(), threading.Event()
    outcomes: dict[str, int] = {}
    lock = threading.Lock()

    def ask(number: int) -> None:
        own = Peer("http", served)
        sent = own.lib.InferInput("x", [1, ROW], "FP32")
        sent.set_data_from_numpy(values)
        while not stop.is_set():
            outcome = "right"
            try:
                if number % 2:
                    own.api.infer(
                        "m",
                        [own.input("x", [1, ROW], "FP32", name, ROW * 4)],
                        outputs=[own.output("y", name, ROW * 4, ROW * 4)],
                    )
                elif not np.array_equal(own.api.infer("m", [sent]).as_numpy("y"), values):
                    outcome = "wrong"
            except InferenceServerException as error:
                is_expected = number % 2 and error.status() == "400" and "shorter" in str(error)
                outcome = "refused" if is_expected else str(error)
            with lock:
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
        own.api.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    while time.monotonic() < began + (2 if len(outcomes) > 1 else 60):
        for size in (0, 4096, 2 * ROW * 4, ROW * 4, 2 * ROW * 4):
            os.ftruncate(fd, size)
            time.sleep(0.002)
    stop.set()
    for thread in threads:
        thread.join()
    os.ftruncate(fd, 2 * ROW * 4)
    os.close(fd)
    assert set(outcomes) == {"right", "refused"}, outcomes
    assert {process.pid for process in served.processes()} == before
    shm.set_shared_memory_region(handle, [values])
    found = peer.api.infer("m", [peer.input("x", [1, ROW], "FP32", name, ROW * 4)])
    assert np.array_equal(found.as_numpy("y"), values)
    peer.close()


def test_regions_outlive_workers_and_shards(served: Served):
    peer = Peer("http", served)
    handle, name = peer.registered(2 * ROW * 4)
    num_shards = len(served.shards())
    ends: list[Callable[[], list[psutil.Process]]] = [served.workers]
    ends += [served.shards] if num_shards > 1 else []
    for find in ends:
        victims = find()
        for victim in victims:
            victim.kill()
        gone = {victim.pid for victim in victims}
        wait_until(lambda find=find, gone=gone: len({e.pid for e in find()} - gone) >= len(gone))
        wait_until(lambda: served.status("/v2/health/ready") == 200)
        for turn in range(12):  # Each connection may reach another shard.
            with contextlib.closing(http_client.InferenceServerClient(served.address)) as api:
                values = numbers(turn)
                shm.set_shared_memory_region(handle, [values])
                api.infer(
                    "m",
                    [peer.input("x", [1, ROW], "FP32", name, ROW * 4)],
                    outputs=[peer.output("y", name, ROW * 4, ROW * 4)],
                )
            found = shm.get_contents_as_numpy(handle, np.float32, [1, ROW], offset=ROW * 4)
            assert np.array_equal(found, values)
    peer.close()


def num_regions(served: Served) -> int:
    text = served.get("/metrics")[1].decode()
    return int(re.search(r'^penstock_shared_memory_regions{kind="system"} (\d+)$', text, re.M)[1])


def mapped(served: Served) -> int:
    """Descriptors of clients' memfds in all processes of the server."""
    count = 0
    for process in [psutil.Process(served.process.pid), *served.processes()]:
        for entry in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                name = os.readlink(entry)
                count += name.startswith("/memfd:penstock-") or "penstock-test-" in name
    return count


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_penstocks_client_shares_memory_by_itself(served: Served, protocol: str):
    address = served.address if protocol == "http" else served.grpc_address
    before = num_regions(served)
    with penstock.Client(f"{protocol}://{address}", model="m") as client:
        for seed in range(4):
            values = numbers(seed, 2)
            found = client.infer(values)["y"]
            assert np.array_equal(found, values) and found.flags.writeable
        assert num_regions(served) == before + 1
        small = client.infer(numbers(1))["y"]
        assert np.array_equal(small, numbers(1))
    assert num_regions(served) == before
    with penstock.Client(f"{protocol}://{address}", model="m", shared_memory=False) as client:
        assert np.array_equal(client.infer(values)["y"], values)
        assert num_regions(served) == before


def test_threads_of_one_client_do_not_mix_their_memory(served: Served):
    failures: list[int] = []
    with penstock.Client(f"http://{served.address}", model="m") as client:

        def ask(number: int) -> None:
            for turn in range(8):
                values = numbers(1000 * number + turn)
                if not np.array_equal(client.infer(values)["y"], values):
                    failures.append(number)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


CHILD = """
import sys, numpy as np, penstock
client = penstock.Client(sys.argv[1], model="m")
for _ in range(3):
    client.infer(np.ones((1, 40000), np.float32))
print("shared", flush=True)
sys.stdin.read()
"""


def test_the_memory_of_a_client_that_is_killed_is_freed(served: Served):
    before, held = num_regions(served), mapped(served)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, f"http://{served.address}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "shared\n"
    assert num_regions(served) == before + 1 and mapped(served) > held
    child.send_signal(signal.SIGKILL)
    child.communicate()
    wait_until(lambda: num_regions(served) == before)
    # Less if a region of an earlier test was still mapped.
    wait_until(lambda: mapped(served) <= held)


def test_a_client_goes_on_after_the_server_has_been_started_again(tmp_path: Path):
    add_model(tmp_path, "m", CONFIG.format(row=ROW, a_ms=0))
    with Served(tmp_path, "--shared-memory") as first:
        client = penstock.Client(f"http://{first.address}", model="m")
        assert np.array_equal(client.infer(numbers(1))["y"], numbers(1))
        port = first.port
    with Served(tmp_path, "--shared-memory", "--http-port", str(port)) as second:
        for seed in range(3):
            assert np.array_equal(client.infer(numbers(seed))["y"], numbers(seed))
        assert num_regions(second) == 1
        client.close()


def test_texts_and_outputs_of_any_size(tmp_path: Path):
    add_model(tmp_path, "code", PYTHON)
    (tmp_path / "code" / "1" / "model.py").write_text(CODE)
    with Served(tmp_path, "--shared-memory", grpc=True) as served:
        for protocol in ("http", "grpc"):
            peer = Peer(protocol, served)
            handle, name = peer.registered(4096)
            text = np.array([b"one", b"two"], np.object_)
            shm.set_shared_memory_region(handle, [serialize_byte_tensor(text)])
            shm.set_shared_memory_region(handle, [np.arange(5, dtype=np.int32)], offset=512)
            nbytes = sum(4 + len(each) for each in text)
            inputs = [
                peer.input("text", [2], "BYTES", name, nbytes),
                peer.input("number", [5], "INT32", name, 20, 512),
            ]
            outputs = [
                peer.output("joined", name, 512, 1024),
                peer.output("grown", name, 512, 2048),
            ]
            peer.api.infer("code", inputs, outputs=outputs)
            joined = shm.get_contents_as_numpy(handle, np.object_, [2], offset=1024)
            assert joined.tolist() == [b"oneone", b"twotwo"]
            grown = shm.get_contents_as_numpy(handle, np.int32, [15], offset=2048)
            assert grown.tolist() == np.repeat(np.arange(5), 3).tolist()
            short = [peer.output("grown", name, 59)]
            with pytest.raises(InferenceServerException, match="59 bytes. should be at least 60"):
                peer.api.infer("code", inputs, outputs=short)
            peer.close()


def test_a_model_of_several_stages(tmp_path: Path):
    """Its workers are not given its clients' tensors."""
    config = CONFIG.format(row=ROW, a_ms=0)
    (tmp_path / "m" / "1").mkdir(parents=True)
    code = "def twice(inputs):\n    return {'x': inputs['x'] * 2}\n"
    (tmp_path / "m" / "1" / "code.py").write_text(code)
    values = [
        onnx.helper.make_tensor_value_info(each, onnx.TensorProto.FLOAT, ["n", ROW])
        for each in "xy"
    ]
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "identity", values[:1], values[1:])
    opsets = [onnx.helper.make_opsetid("", 17)]
    made = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.save(made, tmp_path / "m" / "1" / "model.onnx")
    config = config.replace('"null" max', '"onnxruntime" max').partition("parameters")[0]
    config += """
parameters { key: "penstock.preprocess" value { string_value: "code.py:twice" } }
parameters { key: "penstock.model_inputs" value { string_value: "x:FP32[40000]" } }
"""
    (tmp_path / "m" / "config.pbtxt").write_text(config)
    with Served(tmp_path, "--shared-memory", grpc=True) as served:
        for protocol in ("http", "grpc"):
            peer = Peer(protocol, served)
            handle, name = peer.registered(2 * ROW * 4)
            shm.set_shared_memory_region(handle, [numbers(6)])
            asked = {
                "inputs": [peer.input("x", [1, ROW], "FP32", name, ROW * 4)],
                "outputs": [peer.output("y", name, ROW * 4, ROW * 4)],
            }
            peer.api.infer("m", **asked)
            found = shm.get_contents_as_numpy(handle, np.float32, [1, ROW], offset=ROW * 4)
            assert np.array_equal(found, numbers(6) * 2)
            os.truncate(f"/dev/shm/{name}", 100)
            with pytest.raises(InferenceServerException, match="its file is shorter"):
                peer.api.infer("m", **asked)
            peer.close()


def test_a_poison_request_is_found_and_refused(tmp_path: Path):
    null_model(tmp_path, "m", crash_on=13)
    with Served(tmp_path, "--shared-memory") as served:
        peer = Peer("http", served)
        handle, name = peer.registered(64)

        def ask(value: int) -> Any:
            shm.set_shared_memory_region(handle, [np.array([[value]], np.int32)])
            asked = peer.input("x", [1, 1], "INT32", name, 4)
            return peer.api.infer("m", [asked]).as_numpy("y")

        assert ask(1).tolist() == [[1]]
        with pytest.raises(InferenceServerException, match="twice"):
            ask(13)
        wait_until(lambda: served.status("/v2/health/ready") == 200)
        with pytest.raises(InferenceServerException, match="the model refuses it for"):
            ask(13)
        assert ask(2).tolist() == [[2]]
        peer.close()


def test_keys_need_the_scope_and_see_only_their_own(tmp_path: Path):
    add_model(tmp_path / "models", "m", CONFIG.format(row=ROW, a_ms=0))
    secrets_of = {name: secrets.token_hex(16) for name in ("a", "b", "plain")}
    keys = "".join(
        f'[[key]]\nname = "{name}"\nsecret = "{secret}"\nscopes = ["infer"{more}]\n'
        for name, secret in secrets_of.items()
        for more in ["" if name == "plain" else ', "shared_memory"']
    )
    (tmp_path / "keys.toml").write_text(keys)
    flags = ("--shared-memory", "--api-keys", str(tmp_path / "keys.toml"))
    with Served(tmp_path / "models", *flags) as served:
        api = http_client.InferenceServerClient(served.address)
        peer = Peer.__new__(Peer)
        peer.lib, peer.api, peer.handles = http_client, api, []
        handle, name = peer.region(ROW * 4)
        shm.set_shared_memory_region(handle, [numbers(5)])
        a, b, plain = ({"X-API-Key": secret} for secret in secrets_of.values())
        with pytest.raises(InferenceServerException, match="no scope 'shared_memory'"):
            api.register_system_shared_memory(name, f"/{name}", ROW * 4, headers=plain)
        api.register_system_shared_memory(name, f"/{name}", ROW * 4, headers=a)
        asked = [peer.input("x", [1, ROW], "FP32", name, ROW * 4)]
        found = api.infer("m", asked, headers=a).as_numpy("y")
        assert np.array_equal(found, numbers(5))
        for other in (b, plain):
            with pytest.raises(InferenceServerException, match="Unable to find shared memory"):
                api.infer("m", asked, headers=other)
        assert api.get_system_shared_memory_status(headers=b) == []
        api.unregister_system_shared_memory(headers=b)
        assert [each["name"] for each in api.get_system_shared_memory_status(headers=a)] == [name]
        for secret, uses in ((secrets_of["a"], 2), (secrets_of["plain"], 1)):
            client = penstock.Client(f"http://{served.address}", model="m", api_key=secret)
            assert np.array_equal(client.infer(numbers(2))["y"], numbers(2))
            status = api.get_system_shared_memory_status(headers=a)
            assert len(status) == uses, "a key without the scope sends the body"
            client.close()
        shm.destroy_shared_memory_region(handle)
        api.close()
        assert '"action": "system_shared_memory_register"' not in json.dumps(served.logged())
        assert "action=system_shared_memory_register" in served.logged()


def test_a_server_without_the_option_takes_none(tmp_path: Path):
    add_model(tmp_path, "m", CONFIG.format(row=ROW, a_ms=0))
    with Served(tmp_path) as served:
        client = penstock.Client(f"http://{served.address}", model="m")
        assert np.array_equal(client.infer(numbers(2))["y"], numbers(2))
        client.close()
        api = http_client.InferenceServerClient(served.address)
        with pytest.raises(InferenceServerException, match="start it with --shared-memory"):
            api.register_system_shared_memory("r", "/r", 64)
        asked = http_client.InferInput("x", [1, ROW], "FP32")
        asked.set_shared_memory("r", ROW * 4)
        with pytest.raises(InferenceServerException, match="--shared-memory"):
            api.infer("m", [asked])
        assert "system_shared_memory" not in api.get_server_metadata()["extensions"]
        api.close()
