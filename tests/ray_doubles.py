"""A cluster without Ray: the replicas are objects of this process, with real workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import NotReady
from penstock.ray.ingress import ClusterApp, IngressSpec
from penstock.ray.replica import ModelReplica, ReplicaSpec

EXAMPLES = Path(__file__).parents[1] / "examples" / "repository"
LIMIT_S = 60.0


def run(test: Callable[[], Any]) -> None:
    """Run an `async def` test."""

    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test()

    asyncio.run(limited())


@asynccontextmanager
async def started_replica(
    model: str, repository: Path = EXAMPLES, versions: Sequence[str] = ("1",), **spec: Any
) -> AsyncIterator[ModelReplica]:
    """A replica as Ray makes and ends it."""
    replica = ModelReplica.__new__(ModelReplica)
    given = ReplicaSpec(str(repository), model, tuple(versions), digest="", **spec)
    await replica.__init__(given, num_cpus=1)  # type: ignore[misc]
    try:
        yield replica
    finally:
        ending = replica.__del__()
        assert ending is not None and replica.__del__() is None
        await ending


@dataclass
class LocalHandle:
    """Calls replicas in turns. `prefixes` are what a router would get; without replicas, calls fail
    as they do when all are gone."""

    replicas: Sequence[ModelReplica] = ()
    name: str = "r"
    prefixes: list[Sequence[int]] = field(default_factory=list)
    num_calls: int = 0

    async def call(self, data: bytes, prefix: Sequence[int] = ()) -> bytes:
        return await self._next(prefix).call(data, prefix=prefix)

    async def stream(self, data: bytes, prefix: Sequence[int] = ()) -> AsyncIterator[bytes]:
        async for part in self._next(prefix).stream(data, prefix=prefix):
            yield part

    async def figures(self) -> Mapping[str, tuple[bytes, bytes]]:
        found = [await each.figures() for each in self.replicas]
        return {f"{self.name}{number}": each[1:] for number, each in enumerate(found)}

    def _next(self, prefix: Sequence[int]) -> ModelReplica:
        self.prefixes.append(prefix)
        self.num_calls += 1
        if not self.replicas:
            raise NotReady("its replica is gone")
        return self.replicas[self.num_calls % len(self.replicas)]


@asynccontextmanager
async def cluster(models: Mapping[str, LocalHandle], **spec: Any) -> AsyncIterator[ClusterApp]:
    """The application of an ingress, started and stopped as Ray does it."""
    app = ClusterApp(IngressSpec(**spec), models)
    events: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    sent: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    living = asyncio.create_task(app({"type": "lifespan"}, events.get, sent.put))
    await events.put({"type": "lifespan.startup"})
    assert (await sent.get())["type"] == "lifespan.startup.complete"
    try:
        yield app
    finally:
        await events.put({"type": "lifespan.shutdown"})
        await living
