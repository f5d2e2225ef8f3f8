"""Model control: operators load, unload and list models through it, whatever the protocol.

Reads the repository off the event loop. Changes are allowed in explicit mode only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from penstock.errors import InvalidRequest, NotAllowed, StorageFull, Unsupported
from penstock.repository import layout, model_source, staging
from penstock.serving.catalog import Catalog, IndexEntry


class Control:
    """Model control for one repository, at `path`. `is_explicit` allows loading and unloading;
    `allows_hard_links` allows model files with several hard links."""

    def __init__(
        self, catalog: Catalog, path: str, is_explicit: bool, allows_hard_links: bool = False
    ) -> None:
        self._catalog = catalog
        self._path = path
        self._is_explicit = is_explicit
        self._allows_hard_links = allows_hard_links

    async def index(self, only_ready: object = False) -> list[dict[str, str]]:
        """Return one row per version, without empty fields."""
        if not isinstance(only_ready, bool):
            raise InvalidRequest("'ready' must be true or false")
        names = await asyncio.to_thread(lambda: model_source.resolve(self._path).names())
        entries = self._catalog.index(names)
        return [_row(entry) for entry in entries if entry.state == "READY" or not only_ready]

    async def load(self, name: str, parameters: Collection[str] = ()) -> None:
        """Load or replace a model. If this call is cancelled, nothing changes."""
        self._check_explicit()
        if parameters:
            raise Unsupported("load takes no parameters here: the repository is what is loaded")
        await self.reload(name)

    async def reload(self, name: str) -> None:
        """Load or replace a model in any mode; if it cannot be loaded, the old one stays."""
        found = await asyncio.to_thread(self._read, name)
        await self._catalog.load(found)
        failure = self._catalog.failure(name)
        if failure is not None:
            text = f"failed to load '{name}': {'; '.join(failure.problems)}"
            raise StorageFull(text) if staging.says_full(text) else InvalidRequest(text)

    def _read(self, name: str) -> layout.RepositoryScan:
        found = model_source.resolve(self._path).read_one(name)
        return found if self._allows_hard_links else layout.refuse_hard_links(found)

    async def unload(self, name: str) -> None:
        self._check_explicit()
        await self._catalog.unload(name)

    def _check_explicit(self) -> None:
        if not self._is_explicit:
            raise NotAllowed(
                "explicit model load / unload is not allowed: "
                "start the server with --model-control-mode explicit"
            )


def _row(entry: IndexEntry) -> dict[str, str]:
    row = {"name": entry.name}
    for key in ("version", "state", "reason"):
        if value := getattr(entry, key):
            row[key] = value
    return row
