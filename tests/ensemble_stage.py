"""Ensembles in a catalog, with their members' workers on strings."""

import asyncio
from dataclasses import replace

import numpy as np
from doubles import Puppets, RecordingSink, settle

from penstock.config import BatchPolicy, EnsembleStep, MemoryPolicy, ModelConfig
from penstock.repository.layout import RepositoryScan
from penstock.serving.catalog import Catalog
from penstock.types import Request, RequestedOutput, TensorSpec, from_array

MEMORY = MemoryPolicy(slab_bytes=1024, max_slabs=2, spill_bytes=1 << 16)
ROW = (TensorSpec("x", "INT64", (2,)),)
OUT_ROW = (TensorSpec("y", "INT64", (2,)),)
MEMBER = ModelConfig(
    name="member",
    version="1",
    backend="null",
    artifact="",
    inputs=ROW,
    outputs=OUT_ROW,
    max_batch_size=8,
    batching=BatchPolicy(8, is_dynamic=True),
    memory=MEMORY,
)


def member(name, **changes):
    return replace(MEMBER, name=name, **changes)


def step(model, version="", inputs=None, outputs=None, **maps):
    """`maps` are of one input x and one output y, as `takes` and `makes`."""
    inputs = inputs or {"x": maps["takes"]}
    return EnsembleStep(model, version, inputs, outputs or {"y": maps["makes"]})


def ensemble(*steps, name="whole", inputs=("IN",), outputs=("OUT",), dims=(2,), max_batch=8):
    specs = [tuple(TensorSpec(n, "INT64", dims) for n in each) for each in (inputs, outputs)]
    return ModelConfig(
        name=name,
        version="1",
        backend="ensemble",
        artifact="",
        inputs=specs[0],
        outputs=specs[1],
        max_batch_size=max_batch,
        batching=BatchPolicy(max(1, max_batch)),
        num_instances=0,
        steps=steps,
    )


class Stage:
    def __init__(self) -> None:
        self.puppets = Puppets()
        self.catalog = Catalog(start_life=self.puppets)
        # The worker of each model, the latest if it was loaded again.
        self._lives = {}

    async def act(self, change) -> None:
        task = asyncio.ensure_future(change)
        while not task.done():
            await self.puppets.step_all()
            await asyncio.sleep(0)
        await task

    async def load(self, *configs) -> None:
        """Load members one by one, then ensembles."""
        for config in configs:
            if not config.is_ensemble:
                await self.act(self.catalog.load(RepositoryScan([config])))
                self._lives[config.name] = self.puppets.alive[-1]
        await self.load_together(*(config for config in configs if config.is_ensemble))

    async def load_together(self, *configs) -> None:
        await self.act(self.catalog.load(RepositoryScan(list(configs))))

    def find(self, name="whole"):
        return self.catalog.find(name)

    def send(self, request, name="whole"):
        self.find(name).submit(request)
        return request

    async def step(self, name) -> None:
        """Let the worker of one model do what it was told, and no other."""
        await settle()
        while self._lives[name].has_work:
            self._lives[name].step()
            await settle()


def run(scenario) -> None:
    async def main() -> None:
        stage = Stage()
        await scenario(stage)
        await stage.act(stage.catalog.close())
        assert stage.puppets.alive == []

    asyncio.run(main())


def ask(value, *outputs, rows=1, names=("IN",), kind=Request):
    tensors = [from_array(name, "INT64", np.full((rows, 2), value, np.int64)) for name in names]
    wanted = [RequestedOutput(name) for name in outputs]
    return kind(RecordingSink(), tensors, 0.0, outputs=wanted)


def values(request) -> dict[str, list]:
    assert request.sink.num_final == 1, request.sink.answers
    assert request.sink.error is None, request.sink.error
    [outputs] = request.sink.outputs
    return {name: array.tolist() for name, array in outputs.items()}


def error(request):
    assert request.sink.num_final == 1
    return request.sink.error
