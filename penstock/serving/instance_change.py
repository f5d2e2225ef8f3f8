"""A change of a loaded model's number of instances, without loading the model again.

Says which changes that is possible for, and waits for the workers that are added: the change has
failed when one of them cannot be loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.processes.restarts import MAX_LOAD_DEATHS
from penstock.serving.instance import Instance

REASON = "instance_group has changed"


def changes_instances_only(old: ModelConfig, new: ModelConfig) -> bool:
    """Whether two configurations of a model differ in the number of its instances and nothing else.
    On GPUs, instances share a worker that has a fixed number; the rate limiter knows the
    instances that a model had at its start; and what is loaded on demand may have none."""
    if old.num_instances == new.num_instances or old.with_instances_of(new) != new:
        return False
    is_planned = old.uses_gpu or new.uses_gpu or old.scaling.is_on_demand
    return not (is_planned or old.rate_limits)


class InstanceChange:
    """Done when all these instances have a ready worker, or when one cannot be loaded."""

    def __init__(self, added: Iterable[Instance]) -> None:
        # The worker of a leaving one is not the one that is waited for.
        self._missing = {each for each in added if not each.is_ready or each.is_leaving}
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._problems: tuple[str, ...] = ()
        self._check()

    def ready(self, instance: Instance) -> None:
        self._missing.discard(instance)
        self._check()

    def died(self, instance: Instance, reason: str) -> None:
        """Hear that a worker has died. One that crashes while it loads is started again, a few
        times."""
        if instance not in self._missing or instance.is_dismissed:
            return
        text = instance.load_error
        if not text and instance.crashes.num_deaths + 1 >= MAX_LOAD_DEATHS:
            text = f"a worker {reason} while loading, {MAX_LOAD_DEATHS} times; see the log"
        if text:
            self._problems = (f"{REASON}: {text}",)
            self._missing.clear()
            self._check()

    async def wait(self) -> None:
        """Return when all are ready. ConfigError if one cannot be loaded."""
        await self._done
        if self._problems:
            raise ConfigError(self._problems)

    def _check(self) -> None:
        if not self._missing and not self._done.done():
            self._done.set_result(None)
