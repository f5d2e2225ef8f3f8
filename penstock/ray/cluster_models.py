"""The models of an application on a cluster, each behind the handle of its replicas: asks one
replica, or all, and adds up what they say. Knows no protocol, and handles only by theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

import penstock
from penstock.errors import NotFound, NotReady, Overloaded
from penstock.ray.cluster_messages import ClusterAnswer, ClusterCall, decode_answer, encode_call
from penstock.ray.replica_figures import add_statistics, join_metrics
from penstock.repository.layout import listed
from penstock.serving.management import EXTENSIONS

READY_TIMEOUT_S = 5.0
# A model without replicas: its handle waits for one.
UNREACHABLE = (NotReady, TimeoutError)
# Extensions that need the repository of one machine.
LOCAL = ("model_repository",)


class ModelHandle(Protocol):
    """The replicas of one model. Errors are PenstockErrors."""

    async def call(self, data: bytes, prefix: Sequence[int] = ()) -> bytes:
        """Let one replica answer. NotReady if none can."""

    def stream(self, data: bytes, prefix: Sequence[int] = ()) -> AsyncIterator[bytes]:
        """Let one replica answer in parts."""

    async def figures(self) -> Mapping[str, tuple[bytes, bytes]]:
        """Return metrics and statistics of each replica, by its name."""


class ClusterModels:
    """`texts` are the language models among them."""

    def __init__(
        self,
        handles: Mapping[str, ModelHandle],
        texts: Sequence[str] = (),
        server_id: str = "penstock",
    ) -> None:
        self._handles = handles
        self.texts = frozenset(texts)
        self._server_id = server_id

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._handles))

    def find(self, name: str) -> ModelHandle:
        handle = self._handles.get(name)
        if handle is None:
            loaded = listed(list(self))
            raise NotFound(f"Request for unknown model: '{name}' is not found; loaded: {loaded}")
        return handle

    async def ask(self, model: str, call: ClusterCall) -> bytes:
        """Return what one replica answers; raise its error."""
        return decode_answer(await self.find(model).call(encode_call(call))).check()

    async def ask_each(self, call: ClusterCall) -> list[ClusterAnswer]:
        """Return what one replica of each model answers, without models that have none."""
        data = encode_call(call)

        async def ask(name: str) -> ClusterAnswer | None:
            try:
                async with asyncio.timeout(READY_TIMEOUT_S):
                    return decode_answer(await self.find(name).call(data))
            except UNREACHABLE:
                return None

        found = await asyncio.gather(*map(ask, self))
        return [each for each in found if each is not None]

    async def manage(self, action: str, model: str, version: str = "") -> bytes:
        """Return the JSON of a management action, from one replica of the model."""
        call = ClusterCall("manage", memoryview(b""), action=action, version=version)
        return await self.ask(model, call)

    # The application as a whole.

    async def check_ready(self) -> None:
        """Raise NotReady with the models that have no replica that can answer."""
        names = list(self)
        states = await asyncio.gather(*(self.is_ready(name) for name in names))
        missing = [name for name, is_ready in zip(names, states, strict=True) if not is_ready]
        if missing:
            raise NotReady(f"not ready: {', '.join(missing)}")

    async def is_ready(self, name: str) -> bool:
        """Return whether a replica can answer. One that has too much to do is ready: otherwise a
        load balancer would take the whole application out of service under overload."""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                with suppress(Overloaded):
                    await self.manage("model_ready", name)
        except UNREACHABLE:
            return False
        return True

    def describe(self) -> bytes:
        """Return v2's description of the server, as JSON."""
        extensions = [each for each in EXTENSIONS if each not in LOCAL]
        told = {"name": self._server_id, "version": penstock.__version__, "extensions": extensions}
        return msgspec.json.encode(told)

    async def index(self) -> bytes:
        """Return the versions of all models and their state, as v2's repository index."""
        rows: list[object] = []
        for name in self:
            try:
                async with asyncio.timeout(READY_TIMEOUT_S):
                    versions = msgspec.json.decode(await self.manage("metadata", name))["versions"]
                is_ready = await self.is_ready(name)
            except UNREACHABLE:
                versions, is_ready = [""], False
            state = "READY" if is_ready else "UNAVAILABLE"
            rows += [
                {"name": name, "version": each, "state": state, "reason": ""} for each in versions
            ]
        return msgspec.json.encode(rows)

    async def statistics(self, model: str = "", version: str = "") -> bytes:
        """Return v2's statistics, added up over the replicas."""
        found: list[object] = []
        for figures in await self._figures([model] if model else list(self)):
            if figures:
                told = [msgspec.json.decode(each[1])["model_stats"] for each in figures.values()]
                added = add_statistics(told)
                assert isinstance(added, list)
                found += [each for each in added if version in ("", each["version"])]
        if version and not found:
            raise NotFound(f"Request for unknown model: '{model}' version {version} is not found")
        return msgspec.json.encode({"model_stats": found})

    async def metrics(self) -> bytes:
        """Return the metrics of all replicas as Prometheus text."""
        texts: dict[str, str] = {}
        for figures in await self._figures(list(self)):
            texts |= {replica: each[0].decode() for replica, each in figures.items()}
        return join_metrics(texts).encode()

    async def _figures(self, names: Sequence[str]) -> Sequence[Mapping[str, tuple[bytes, bytes]]]:
        return await asyncio.gather(*(self.find(name).figures() for name in names))
