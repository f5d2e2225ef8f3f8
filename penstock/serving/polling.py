"""Poll mode: the models that are served follow the repository.

Looks at the files every few seconds, off the event loop, and loads, reloads or unloads what
`FileWatch` says has changed. Runs on the core's event loop; nothing that a model does stops it.
"""

from __future__ import annotations

import asyncio
import logging
import time

from penstock.errors import PenstockError
from penstock.repository.file_stamps import Stamps, stamps_below
from penstock.serving.control import Control
from penstock.serving.file_watch import FileWatch

log = logging.getLogger("penstock.poll")


class Poller:
    """Made before the models are read: what changes after that is loaded by a later poll."""

    def __init__(self, control: Control, interval_s: float) -> None:
        self._control = control
        self._interval_s = interval_s
        # Why the last look failed.
        self._problem = ""
        # Two polls are never closer than the interval, whatever the clock's resolution.
        self._watch = FileWatch(settle_s=interval_s / 2)
        for name, stamps in self._look().items():
            self._watch.know(name, stamps)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.poll(time.monotonic())
            except Exception:  # Later polls must not miss what changes.
                log.exception("a poll of the model repository failed")

    async def poll(self, now: float) -> None:
        """Look once, and return when everything that has changed is served, or has failed."""
        try:
            found = await asyncio.to_thread(self._look)
        except (OSError, PenstockError) as error:
            # Not the same as an empty repository: nothing is unloaded.
            if str(error) != self._problem:
                log.warning("the model repository cannot be read: %s", error)
            self._problem = str(error)
            return
        self._problem = ""
        gone: dict[str, Stamps] = {name: {} for name in self._watch.names if name not in found}
        changed = self._watch.changed(found | gone, now)
        await asyncio.gather(*(self._follow(name, bool(found.get(name))) for name in changed))

    async def _follow(self, name: str, is_there: bool) -> None:
        try:
            if is_there:
                log.info("%s has changed and is loaded", name, extra={"model": name})
                await self._control.reload(name)
            else:
                log.info("%s was removed and is unloaded", name, extra={"model": name})
                await self._control.remove(name)
        except PenstockError as error:
            log.warning("%s was not changed: %s", name, error, extra={"model": name})
        except Exception:  # Other models go on.
            log.exception("%s could not be changed", name, extra={"model": name})

    def _look(self) -> dict[str, Stamps]:
        found = self._control.sources.folders()
        return {name: stamps_below(paths) for name, paths in found.items()}
