"""To a real GPU and back; `make test-gpu`. Without one: tests/backends/test_torch_cuda.py."""

import asyncio
import mmap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from doubles import RecordingSink

from penstock.backends import Batch, backend
from penstock.config import BatchPolicy, ModelConfig
from penstock.serving.model import Model
from penstock.serving.slab import Segment
from penstock.types import Request, TensorSpec, from_array

torch = pytest.importorskip("torch")
open_device = pytest.importorskip("penstock.backends.torch_cuda").open_device
save_file = pytest.importorskip("safetensors.torch").save_file
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
        self.last = nn.Linear(256, 8)

    def forward(self, x):
        return {"y": self.last(torch.relu(self.layers(x)))}

class Peeks(Net):
    def forward(self, x):
        # A look at values, which no graph can hold.
        return super().forward(x if float(x.sum()) > 1e30 else x * 2)

class Hungry(Net):
    def forward(self, x):
        if len(x) == 16:
            # More than any GPU has.
            torch.empty(1 << 45, dtype=torch.uint8, device=x.device)
        return super().forward(x)

def factory():
    torch.manual_seed(0)
    return Net()

def hungry():
    torch.manual_seed(0)
    return Hungry()

def peeking():
    torch.manual_seed(0)
    return Peeks()
"""
NUM = 16
GRAPHS = {"penstock.cuda_graphs": "on"}


def rows(count: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 256)).astype(np.float32)


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    (tmp_path / "module.py").write_text(MODULE)
    space: dict[str, object] = {}
    exec(MODULE, space)
    save_file(space["factory"]().state_dict(), tmp_path / "model.safetensors")
    return ModelConfig(
        name="net",
        version="1",
        backend="pytorch",
        artifact=str(tmp_path / "module.py"),
        inputs=(TensorSpec("x", "FP32", (256,)),),
        outputs=(TensorSpec("y", "FP32", (8,)),),
        max_batch_size=NUM,
        batching=BatchPolicy(NUM, is_dynamic=True),
        device="cuda",
    )


def answer(runner, values: np.ndarray) -> np.ndarray:
    (outputs,) = runner.start(Batch({"x": values}, len(values))).wait()
    return outputs["y"].copy()


def wanted(config: ModelConfig, values: np.ndarray) -> np.ndarray:
    return answer(backend("pytorch")(replace(config, device="cpu", options={})), values)


def test_graphs_give_what_the_model_gives(config):
    runner = backend("pytorch")(replace(config, options=GRAPHS))
    for seed in range(4):
        for count in (1, 3, 16):
            values = rows(count, seed)
            np.testing.assert_allclose(
                answer(runner, values), wanted(config, values), rtol=1e-2, atol=1e-3
            )
    assert runner.built()["cuda_graphs"] == "3"


def test_lanes_begin_when_weights_are_ready():
    """They do not wait for the stream of whoever loads."""
    x = torch.ones(8192, 8192, device="cuda:0")
    torch.cuda.synchronize()
    for _ in range(40):
        torch.mm(x, x)
    assert not torch.cuda.default_stream().query()
    open_device("cuda:0")
    assert torch.cuda.default_stream().query()


def test_what_cannot_be_captured_runs_without_and_says_so(config):
    options = {**GRAPHS, "penstock.factory": "peeking"}
    runner = backend("pytorch")(replace(config, options=options))
    for seed in range(3):
        values = rows(4, seed)
        np.testing.assert_allclose(
            answer(runner, values), wanted(config, values * 2), rtol=1e-2, atol=1e-3
        )
    assert runner.built()["cuda_graphs"] == "0"
    assert runner.built()["without_cuda_graph"].startswith("1 shapes: ")


def test_shared_memory_is_pinned_and_copied_from(config):
    runner = backend("pytorch")(config)
    segment = Segment(1 << 20)
    runner.pin(segment.view)
    assert runner.built()["copies"] == "from shared memory"
    values = np.frombuffer(segment.view[: NUM * 256 * 4], np.float32).reshape(NUM, 256)
    values[:] = rows(NUM)
    values.flags.writeable = False
    np.testing.assert_allclose(
        answer(runner, values), wanted(config, rows(NUM)), rtol=1e-2, atol=1e-3
    )


def test_memory_that_cannot_be_pinned_is_gone_around(config):
    runner = backend("pytorch")(config)
    with mmap.mmap(-1, 4096, prot=mmap.PROT_READ) as read_only:
        runner.pin(memoryview(read_only))
    assert runner.built()["copies"] == "by way of pinned memory"
    values = rows(NUM)
    np.testing.assert_allclose(answer(runner, values), wanted(config, values), rtol=1e-2, atol=1e-3)


def test_batches_on_their_way_do_not_disturb_each_other(config):
    runner = backend("pytorch")(replace(config, num_instances=2, options=GRAPHS))
    answer(runner, rows(NUM))
    for seed in range(0, 40, 2):
        first, second = rows(NUM, seed), rows(NUM, seed + 1)
        one = runner.start(Batch({"x": first}, NUM))
        other = runner.start(Batch({"x": second}, NUM))
        for execution, values in ((one, first), (other, second)):
            (outputs,) = execution.wait()
            np.testing.assert_allclose(outputs["y"], wanted(config, values), rtol=1e-2, atol=1e-3)
            assert execution.prepare_s > 0


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_types_are_cast_on_the_device(config, dtype):
    runner = backend("pytorch")(replace(config, options={**GRAPHS, "penstock.dtype": dtype}))
    values = rows(NUM)
    for _ in range(2):
        found = answer(runner, values)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted(config, values), atol=6e-2)


@pytest.mark.parametrize("num_instances", [1, 2, 3])
def test_served_by_one_worker(config, num_instances):
    """A process of its own, shared memory, and every answer that of its request."""
    served = replace(config, num_instances=num_instances, options=GRAPHS)
    expected = wanted(config, rows(64))

    async def main() -> None:
        model = Model(served)
        await model.start()
        (worker,) = model.host.instances
        assert worker.ready is not None and worker.ready.built["slots"] == str(num_instances)
        assert worker.ready.built["cuda_graphs"] == "5"
        requests = []
        for number in range(640):
            tensor = from_array("x", "FP32", rows(64)[number % 64][None])
            requests.append(Request(RecordingSink(), [tensor], 0.0))
            model.submit(requests[-1])
            if number % 7 == 0:
                await asyncio.sleep(0.0005)
        await model.drain()
        for number, request in enumerate(requests):
            (outputs,) = request.sink.outputs
            np.testing.assert_allclose(outputs["y"][0], expected[number % 64], rtol=1e-2, atol=1e-3)
        await model.close()

    asyncio.run(main())


def test_a_batch_that_finds_no_memory_fails_alone(config):
    runner = backend("pytorch")(replace(config, options={"penstock.factory": "hungry"}))
    with pytest.raises(torch.OutOfMemoryError):
        runner.start(Batch({"x": rows(16)}, 16))
    assert runner.built()["memory_given_back"] == "1 times"
    values = rows(4)
    np.testing.assert_allclose(answer(runner, values), wanted(config, values), rtol=1e-2, atol=1e-3)


def test_memory_is_looked_at_while_batches_run(config):
    runner = backend("pytorch")(replace(config, num_instances=2, options=GRAPHS))
    answer(runner, rows(NUM))
    runner.settle()
    for seed in range(300):
        answer(runner, rows(NUM, seed))
    assert runner.restart_reason == ""
    assert int(runner.built()["gpu_memory_bytes"]) > 0
