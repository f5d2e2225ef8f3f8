"""Which models' files differ from what was loaded. Pure: files are given by their stamps, and time
is an argument.

A change counts once it has lasted: copies and editors write in parts. `Reloader` and `Poller` look
at the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.repository.file_stamps import Stamps


@dataclass(frozen=True, slots=True)
class SeenFiles:
    """The files of a model, and since when they have looked like this."""

    stamps: Stamps
    since: float


class FileWatch:
    """Reports each change of a model once, when at least two looks in a row, `settle_s` apart or
    more, have found the same files."""

    def __init__(self, settle_s: float = 0.0) -> None:
        self._settle_s = settle_s
        self._loaded: dict[str, Stamps] = {}
        self._seen: dict[str, SeenFiles] = {}

    @property
    def names(self) -> list[str]:
        """The models that are known, with files or without."""
        return list(self._loaded)

    def know(self, name: str, stamps: Stamps) -> None:
        """Take these files as loaded, if the model is new."""
        self._loaded.setdefault(name, stamps)

    def changed(self, found: Mapping[str, Stamps], now: float) -> list[str]:
        """Return the models whose files differ from what was loaded, and take those as loaded. A
        model that is not known had no files."""
        changed: list[str] = []
        for name, stamps in found.items():
            seen = self._seen.get(name)
            if seen is None or seen.stamps != stamps:
                self._seen[name] = SeenFiles(stamps, now)
            elif now - seen.since >= self._settle_s and self._loaded.get(name, {}) != stamps:
                self._loaded[name] = stamps
                changed.append(name)
        return changed
