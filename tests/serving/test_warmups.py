"""Warm-up batches: the data that `model_warmup` asks for, and that workers run them."""

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from doubles import Puppets

from penstock.backends.null import NullRunner
from penstock.config import BatchPolicy, ModelConfig, Warmup, WarmupInput
from penstock.errors import ConfigError
from penstock.serving import worker_load
from penstock.serving.model import Model
from penstock.serving.warmups import make_batch
from penstock.types import DATATYPES, TensorSpec, pack_bytes

CONFIG = ModelConfig(
    name="echo",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "FP32", (-1,)),),
    outputs=(TensorSpec("y", "FP32", (-1,)),),
    max_batch_size=8,
    batching=BatchPolicy(8, is_dynamic=True),
)


def warmup(source: str, datatype: str = "FP32", file: str = "", folder: str = "") -> Warmup:
    return Warmup("w", 2, (WarmupInput("x", datatype, (3,), source, file),), folder=folder)  # type: ignore[arg-type]


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("source", ["zero", "random"])
def test_every_datatype_has_data(datatype: str, source: str):
    batch = make_batch(CONFIG, warmup(source, datatype))
    values = batch.inputs["x"]
    assert values.shape == (2, 3)
    assert values.dtype == DATATYPES[datatype].numpy
    assert not values.flags.writeable
    assert batch.num_rows == 2
    if datatype == "BYTES":
        assert all(isinstance(value, bytes) for value in values.ravel())
    elif source == "zero":
        assert not values.any()
    if source == "random":
        assert len(set(values.ravel().tolist())) > 1


def test_random_data_are_the_same_at_every_load():
    one, two = (make_batch(CONFIG, warmup("random")).inputs["x"] for _ in range(2))
    np.testing.assert_array_equal(one, two)


def test_a_model_without_a_batch_dimension_gets_no_rows():
    config = replace(CONFIG, max_batch_size=0)
    assert make_batch(config, warmup("zero")).inputs["x"].shape == (3,)


class TestFiles:
    row = np.array([1, 2, 3], np.float32)

    def make(self, folder: Path, data: bytes, datatype: str = "FP32") -> np.ndarray:
        (folder / "raw").write_bytes(data)
        return make_batch(CONFIG, warmup("file", datatype, "raw", str(folder))).inputs["x"]

    def test_one_row_stands_for_all(self, tmp_path: Path):
        assert self.make(tmp_path, self.row.tobytes()).tolist() == [[1, 2, 3]] * 2

    def test_all_rows(self, tmp_path: Path):
        both = np.stack([self.row, -self.row])
        assert self.make(tmp_path, both.tobytes()).tolist() == both.tolist()

    def test_strings(self, tmp_path: Path):
        words = np.array([b"a", b"", b"cc"], dtype=object)
        assert self.make(tmp_path, pack_bytes(words), "BYTES")[1].tolist() == [b"a", b"", b"cc"]

    def test_a_file_of_another_size_is_an_error_that_names_it(self, tmp_path: Path):
        with pytest.raises(ConfigError, match="raw does not fill 'x'; expected FP32 values of"):
            self.make(tmp_path, bytes(7))

    def test_a_file_that_has_gone(self, tmp_path: Path):
        with pytest.raises(ConfigError, match="raw cannot be read: No such file"):
            make_batch(CONFIG, warmup("file", "FP32", "raw", str(tmp_path)))


class Watched(NullRunner):
    """Remembers the batches it got."""

    seen: list[np.ndarray] = []

    def start(self, batch):
        self.seen.append(np.array(batch.inputs["x"]))
        return super().start(batch)


def test_workers_run_them_before_they_are_ready(monkeypatch):
    monkeypatch.setattr(worker_load, "backend", lambda name: Watched)
    monkeypatch.setattr(Watched, "seen", [])
    config = replace(CONFIG, warmups=(replace(warmup("random"), count=3),))

    async def main() -> None:
        puppets = Puppets()
        model = Model(config, start_life=puppets)
        starting = asyncio.ensure_future(model.start())
        await puppets.step_all()
        await starting
        wanted = make_batch(config, config.warmups[0]).inputs["x"]
        matching = [each for each in Watched.seen if np.array_equal(each, wanted)]
        assert len(matching) == 3
        closing = asyncio.ensure_future(model.close())
        while not closing.done():
            await puppets.step_all()
        await closing

    asyncio.run(main())


def test_a_model_that_fails_on_its_warm_up_is_not_loaded():
    config = replace(
        CONFIG, options={"null.fail_on": "0"}, inputs=(TensorSpec("x", "INT64", (-1,)),)
    )
    config = replace(
        config, outputs=(TensorSpec("y", "INT64", (-1,)),), warmups=(warmup("zero", "INT64"),)
    )

    async def main() -> None:
        puppets = Puppets()
        model = Model(config, start_life=puppets)
        starting = asyncio.ensure_future(model.start())
        await puppets.step_all()
        with pytest.raises(ConfigError):
            await starting
        closing = asyncio.ensure_future(model.close())
        while not closing.done():
            await puppets.step_all()
        await closing

    asyncio.run(main())


def test_a_file_with_another_checksum_blocks_the_load(tmp_path):
    file = tmp_path / "1" / "model.bin"
    file.parent.mkdir()
    file.write_bytes(b"weights")
    digest = hashlib.md5(b"weights", usedforsecurity=False).hexdigest()
    config = replace(CONFIG, checksums=((str(file), digest),))
    worker_load.load_runner(config, None)
    file.write_bytes(b"others")
    with pytest.raises(ConfigError, match=r"1/model.bin: its MD5 is .*, model_repository_agents"):
        worker_load.load_runner(config, None)
