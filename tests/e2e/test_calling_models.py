"""Python models that call other models of their server (business logic scripting)."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent

import numpy as np
import onnx
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from onnx import TensorProto, helper
from served import Served
from tritonclient.utils import InferenceServerException
from waiting import wait_until

CONFIG = """
max_batch_size: 4 dynamic_batching {}
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
"""
# Adds 1 to what the first model of the parameter `chain` says of its input; that model calls the
# next one of it. Without a chain it says what became of a call while it was loaded.
CALLS = """
    import json
    import os
    from pathlib import Path

    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            (Path(pb_utils.get_model_dir()) / "pid").write_text(str(os.getpid()))
            try:
                pb_utils.InferenceRequest(model_name="double", inputs=[]).exec()
            except pb_utils.TritonModelException as error:
                self.error = str(error)

        def execute(self, requests):
            return [self.call(request) for request in requests]

        def call(self, request):
            chain = json.loads(request.parameters()).get("chain", "")
            if not chain:
                return pb_utils.InferenceResponse(error=pb_utils.TritonError(self.error))
            name, _, rest = chain.partition(" ")
            response = pb_utils.InferenceRequest(
                model_name=name,
                requested_output_names=["y"],
                inputs=[pb_utils.get_input_tensor_by_name(request, "x")],
                request_id=request.request_id(),
                parameters={"chain": rest} if rest else {},
                trace=request.trace(),
            ).exec()
            if response.has_error():
                error = pb_utils.TritonError(f"{name}: {response.error().message()}")
                return pb_utils.InferenceResponse(error=error)
            y = pb_utils.get_output_tensor_by_name(response, "y").as_numpy()
            return pb_utils.InferenceResponse([pb_utils.Tensor("y", y + 1)])
    """
# Both kinds of calls, at the same time and from threads, to a model and its caller.
MANY = """
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    import triton_python_backend_utils as pb_utils

    def ask(name, x):
        return pb_utils.InferenceRequest(
            model_name=name,
            requested_output_names=["y"],
            inputs=[pb_utils.Tensor("x", x)],
            parameters={"chain": "double"},
        )

    def y_of(response):
        assert not response.has_error(), response.error().message()
        return response.output_tensors()[0].as_numpy()

    class TritonPythonModel:
        async def execute(self, requests):
            return [await self.one(request.inputs()[0].as_numpy()) for request in requests]

        async def one(self, x):
            names = ["double", "caller"] * 4
            at_once = await asyncio.gather(*(ask(name, x).async_exec() for name in names))
            with ThreadPoolExecutor(4) as pool:
                threads = list(pool.map(lambda name: ask(name, x).exec(), names))
            streams = [y_of(each) async for each in await ask("double", x).async_exec(True)]
            streams += [y_of(each) for each in ask("double", x).exec(decoupled=True)]
            return pb_utils.InferenceResponse(
                [pb_utils.Tensor("y", sum(map(y_of, at_once + threads)) + sum(streams))]
            )
    """
# Ends its process on 9 and, the first time, on 7. On 4 it waits until the test lets it go on.
ODD = """
    import os
    import time
    from pathlib import Path

    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            return [self.answer(request.inputs()[0].as_numpy()) for request in requests]

        def answer(self, x):
            folder = Path(pb_utils.get_model_dir())
            if (x == 9).any() or ((x == 7).any() and not (folder / "died").exists()):
                (folder / "died").touch()
                os._exit(3)
            if (x == 4).any():
                (folder / "entered").touch()
                while not (folder / "open").exists():
                    time.sleep(0.01)
            return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
    """


def add(root: Path, name: str, code: str, more: str = "") -> Path:
    folder = root / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(dedent(code))
    (root / name / "config.pbtxt").write_text(f'backend: "python" {more} {CONFIG}')
    return folder


def add_onnx(root: Path, name: str) -> None:
    folder = root / name / "1"
    folder.mkdir(parents=True)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, None]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "double", [x], [y])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), folder / "model.onnx")
    (root / name / "config.pbtxt").write_text(f'backend: "onnxruntime" {CONFIG}')


def tensor(kind, *rows: float):
    values = np.array([[row] for row in rows or (1.0,)], np.float32)
    made = kind.InferInput("x", list(values.shape), "FP32")
    made.set_data_from_numpy(values)
    return made


@pytest.fixture(scope="module", params=["1", "2"])
def served(request, tmp_path_factory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("calling")
    add_onnx(root, "double")
    for name, code in {"caller": CALLS, "relay": CALLS, "many": MANY, "odd": ODD}.items():
        add(root, name, code)
    started = Served(root, "--shards", request.param, grpc=True)
    started.root = root
    yield started
    assert started.terminate() == 0


@pytest.fixture
def client(served: Served) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(served.grpc_address) as connected:
        yield connected


def ask(client, chain: str, *rows: float) -> list[float]:
    """Ask the first model of the chain, which calls the next."""
    name, _, rest = chain.partition(" ")
    parameters = {"chain": rest} if rest else None
    answer = client.infer(name, [tensor(grpcclient, *rows)], parameters=parameters)
    return answer.as_numpy("y")[:, 0].tolist()


def count(client, name: str) -> int:
    (stats,) = client.get_inference_statistics(name).model_stats
    return stats.inference_stats.success.count


def test_a_chain_of_two_python_models_and_an_onnx_model(served: Served, client):
    before = count(client, "double")
    assert ask(client, "relay caller double", 1, 2, 3) == [4, 6, 8]
    # A called model counts like any other.
    assert count(client, "double") == before + 1
    with httpclient.InferenceServerClient(served.address) as http:
        answer = http.infer("caller", [tensor(httpclient, 5)], parameters={"chain": "double"})
    assert answer.as_numpy("y").tolist() == [[11]]


def test_large_tensors_travel(client):
    values = np.arange(600_000, dtype=np.float32).reshape(2, -1)
    made = grpcclient.InferInput("x", list(values.shape), "FP32")
    made.set_data_from_numpy(values)
    answer = client.infer("relay", [made], parameters={"chain": "caller double"})
    np.testing.assert_array_equal(answer.as_numpy("y"), values * 2 + 2)


def test_calls_at_once_from_tasks_and_threads(client):
    # Eight of 2x and eight of 2x + 1, and two of 2x.
    assert ask(client, "many", 3) == [8 * 6 + 8 * 7 + 2 * 6]


def test_many_clients_at_once(served: Served):
    def work(worker: int) -> None:
        with grpcclient.InferenceServerClient(served.grpc_address) as own:
            for number in range(25):
                value = worker * 100 + number
                assert ask(own, "relay caller double", value) == [2 * value + 2]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


@pytest.mark.parametrize(
    ("chain", "words"),
    [
        ("caller nothing", "nothing: Request for unknown model: 'nothing' is not found"),
        ("caller caller", "caller: .*cycle.*: caller/1 -> caller/1"),
        ("caller relay caller", "relay: caller: .*cycle.*: caller/1 -> relay/1 -> caller/1"),
        ("caller", "cannot call model 'double'.*only while they run a request in a server"),
    ],
)
def test_a_call_that_cannot_be_made_fails_its_request_with_the_reason(client, chain, words):
    with pytest.raises(InferenceServerException, match=words):
        ask(client, chain, 1)


def test_a_callee_that_dies_runs_the_call_again_or_fails_it(client):
    assert ask(client, "caller odd", 7) == [8]
    with pytest.raises(InferenceServerException, match=r"odd: .*while running it, twice"):
        ask(client, "caller odd", 9)
    wait_until(lambda: client.is_model_ready("odd"))
    assert ask(client, "caller odd", 1) == [2]


def test_a_caller_that_is_killed_runs_again(served: Served, client):
    folder = served.root / "odd" / "1"
    answers: list[list[float]] = []
    asking = threading.Thread(target=lambda: answers.append(ask(client, "caller odd", 4)))
    asking.start()
    wait_until((folder / "entered").exists)
    os.kill(int((served.root / "caller" / "1" / "pid").read_text()), signal.SIGKILL)
    (folder / "open").touch()
    asking.join()
    assert answers == [[5]]
    assert ask(client, "caller odd", 1) == [2]
