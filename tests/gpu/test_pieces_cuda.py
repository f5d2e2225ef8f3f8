"""Batches whose rows are in the slabs of several shards, on a GPU; `make test-gpu`."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from shard_doubles import WorkerAlone
from waiting import wait_until

from penstock.backends import Batch, backend
from penstock.config import BatchPolicy, MemoryPolicy, ModelConfig
from penstock.serving.slab import Segment
from penstock.types import TensorSpec
from penstock.wire import frames

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

NUM_SLABS = ROWS_PER_SLAB = 8
NUM_ROWS = NUM_SLABS * ROWS_PER_SLAB
# 150 kB a row.
SHAPE = (3, 112, 112)
MODULE = """
from torch import nn

def factory():
    return nn.Sequential(nn.Conv2d(3, 4, 7, 4), nn.ReLU(), nn.Flatten(), nn.Linear(2916, 10))
"""


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    (tmp_path / "module.py").write_text(MODULE)
    space: dict[str, object] = {}
    exec(MODULE, space)
    torch.manual_seed(0)
    save_file(space["factory"]().state_dict(), tmp_path / "model.safetensors")
    return ModelConfig(
        name="images",
        version="1",
        backend="pytorch",
        artifact=str(tmp_path / "module.py"),
        inputs=(TensorSpec("input", "FP32", SHAPE),),
        outputs=(TensorSpec("y", "FP32", (10,)),),
        max_batch_size=NUM_ROWS,
        batching=BatchPolicy(NUM_ROWS, is_dynamic=True),
        memory=MemoryPolicy(spill_bytes=1 << 16),
        device="cuda:0",
    )


def images() -> np.ndarray:
    return np.random.default_rng(5).standard_normal((NUM_ROWS, *SHAPE)).astype(np.float32)


def in_slab(rows: np.ndarray) -> tuple[Segment, np.ndarray]:
    segment = Segment(rows.nbytes)
    array = np.frombuffer(segment.view, np.float32).reshape(rows.shape)
    array[...] = rows
    array.flags.writeable = False
    return segment, array


@pytest.mark.parametrize("num_rows", [NUM_ROWS, NUM_ROWS - 5], ids=["full", "padded"])
@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "not pinned"])
@pytest.mark.parametrize("cuda_graphs", ["on", "off"])
def test_eight_slabs_give_what_one_gives(config, num_rows, is_pinned, cuda_graphs):
    runner = backend("pytorch")(replace(config, options={"penstock.cuda_graphs": cuda_graphs}))
    rows = images()[:num_rows]
    whole, array = in_slab(rows)
    slabs = [in_slab(rows[start : start + 8]) for start in range(0, num_rows, 8)]
    segments = [whole, *(segment for segment, _ in slabs)]
    if is_pinned:
        for segment in segments:
            runner.pin(segment.view)
        assert runner.built()["copies"] == "from shared memory"
    list(runner.start(Batch({"input": array}, num_rows)).wait())  # Captures a graph.
    for _ in range(3):
        (expected,) = runner.start(Batch({"input": array}, num_rows)).wait()
        expected = expected["y"].copy()
        pieces = [{"input": each} for _, each in slabs]
        (found,) = runner.start(Batch.of(pieces, num_rows)).wait()
        assert found["y"].tobytes() == expected.tobytes()
    assert len(np.unique(expected, axis=0)) == num_rows, "rows differ"
    if is_pinned:
        for segment in segments:
            runner.unpin(segment.view)
        (found,) = runner.start(Batch.of(pieces, num_rows)).wait()
        assert found["y"].tobytes() == expected.tobytes(), "staged"
    runner.close()


def test_a_worker_merges_eight_shards_and_lets_them_go(config):
    """With `die` it pins memory, as a worker process does."""
    rows = images()
    worker = WorkerAlone(config, die=lambda: pytest.fail("the GPU is lost"))
    try:
        shards = [worker.attach(ROWS_PER_SLAB) for _ in range(NUM_SLABS)]
        for number, shard in enumerate(shards):
            shard.add_slab()
            shard.column(0, 0)[...] = rows[number * 8 : number * 8 + 8]
        worker.step()
        for shard in shards:
            shard.dispatch([(0, 0, ROWS_PER_SLAB)])
        answers: list[list[frames.Done]] = [[] for _ in shards]

        def all_answered() -> bool:
            worker.step()
            for found, shard in zip(answers, shards, strict=True):
                found += shard.receive()
            return all(answers)

        wait_until(all_answered)
        assert [done.total_rows for (done,) in answers] == [NUM_ROWS] * NUM_SLABS
        runner = backend("pytorch")(config)
        (expected,) = runner.start(Batch({"input": rows}, NUM_ROWS)).wait()
        found = np.concatenate([shard.rows(1) for shard in shards])
        np.testing.assert_allclose(found, expected["y"], rtol=1e-5, atol=1e-5)
        links = worker.worker.links
        for shard in shards[1:]:
            shard.close()
        wait_until(lambda: worker.step() or all(link.memory is None for link in links[1:]))
        shards[0].dispatch([(0, 0, 3)])
        wait_until(lambda: worker.step() or shards[0].receive())
    finally:
        worker.close()
