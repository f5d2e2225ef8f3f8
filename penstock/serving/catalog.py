"""Which models there are: name and version to Model, and what can be said about them.

Owned by the core's event loop. Without a version in the request the highest loaded one answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.config import ModelConfig
from penstock.errors import ConfigError, NotFound
from penstock.metrics import Pending
from penstock.serving.model import Model
from penstock.serving.supervisor import ProcessLife, StartLife

# Loading is mostly imports and disk; more at once only makes each slower.
MAX_LOADING = 4


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A model that was asked for and could not be loaded, and why."""

    name: str
    problems: tuple[str, ...]


class Catalog:
    def __init__(self, start_life: StartLife = ProcessLife) -> None:
        self._start_life = start_life
        self._models: dict[str, dict[str, Model]] = {}
        self._latest: dict[str, Model] = {}
        self.failures: list[LoadFailure] = []

    def __iter__(self) -> Iterator[Model]:
        for versions in self._models.values():
            yield from versions.values()

    @property
    def is_ready(self) -> bool:
        """Every model that was asked for can answer."""
        return not self.failures and all(model.is_ready for model in self)

    async def load(self, configs: Sequence[ModelConfig]) -> None:
        """Load all; one that fails is kept in `failures` and does not disturb the others."""
        limit = asyncio.Semaphore(MAX_LOADING)

        async def load_one(config: ModelConfig) -> None:
            async with limit:
                await self._load(config)

        async with asyncio.TaskGroup() as group:
            for config in configs:
                group.create_task(load_one(config))

    async def _load(self, config: ModelConfig) -> None:
        try:
            model = Model(config, start_life=self._start_life)
        except OSError as error:
            self.failures.append(LoadFailure(config.name, (f"shared memory: {error}",)))
            return
        try:
            await model.start()
        except ConfigError as error:
            self.failures.append(LoadFailure(config.name, error.problems))
            await model.close()
            return
        except asyncio.CancelledError:
            await model.close()
            raise
        versions = self._models.setdefault(config.name, {})
        versions[config.version] = model
        self._latest[config.name] = versions[max(versions, key=int)]

    def find(self, name: str, version: str = "") -> Model:
        model = self._latest.get(name) if not version else self._models.get(name, {}).get(version)
        if model is not None:
            return model
        if name not in self._models:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        raise NotFound(
            f"Request for unknown model: '{name}' version {version} is not found; "
            f"loaded: {', '.join(self.versions(name))}"
        )

    def versions(self, name: str) -> list[str]:
        return sorted(self._models.get(name, {}), key=int)

    def pending(self) -> list[Pending]:
        return [
            Pending(model.metrics, model.num_waiting, sum(i.is_ready for i in model.instances))
            for model in self
        ]

    async def drain(self) -> None:
        """Wait until every admitted request has its answer."""
        await asyncio.gather(*(model.drain() for model in self))

    async def close(self) -> None:
        await asyncio.gather(*(model.close() for model in self))
        self._models.clear()
        self._latest.clear()
