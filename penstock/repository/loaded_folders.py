"""Models that came with the parameters of a load: a private temporary repository of this server.

Each load gets a folder of its own, so that a version that still answers keeps its files. The
folders are readable by the server's user only, locked while the server lives, and removed with it;
those of a killed server are removed by the next one. Knows nothing of what is loaded.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from threading import Lock

from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.repository import layout, staging
from penstock.types import Buffer


class LoadedFolders:
    """Makes its folder with the first model. `parent` is shared by the servers of a user."""

    def __init__(self, parent: Path | None = None) -> None:
        name = f"penstock-loaded-{os.getuid()}"
        self._parent = parent or Path(tempfile.gettempdir()) / name
        self._root: Path | None = None
        self._number = 0
        self._open = ExitStack()
        self._lock = Lock()

    def write(self, name: str, config: str, files: Mapping[PurePosixPath, Buffer]) -> Path:
        """Write a model, and return the repository that holds nothing else. StorageFull if there is
        no room; then nothing is left."""
        with staging.explain_full(f"{name}: the files of the load were not stored"):
            # Loads of several models are written at once.
            with self._lock:
                self._root = self._root or self._claim()
                self._number += 1
                repository = self._root / str(self._number)
            try:
                staging.write(repository / name / layout.CONFIG, config.encode())
                for path, data in files.items():
                    staging.write(repository / name / path, bytes(data))
            except BaseException:
                shutil.rmtree(repository, ignore_errors=True)
                raise
        return repository

    def holds(self, config: ModelConfig) -> bool:
        """Whether a version came with a load."""
        return self._root is not None and Path(config.artifact).is_relative_to(self._root)

    def release(self, config: ModelConfig) -> None:
        """Remove the files of a version that has ended, if it came with a load."""
        if self._root is None or not self.holds(config):
            return
        number, name, version, *_ = Path(config.artifact).relative_to(self._root).parts
        repository = self._root / number
        shutil.rmtree(repository / name / version, ignore_errors=True)
        if not layout.version_folders(repository / name):
            self.discard(repository)

    def discard(self, repository: Path) -> None:
        """Remove what `write` returned."""
        shutil.rmtree(repository, ignore_errors=True)

    def close(self) -> None:
        self._root = None
        self._open.close()

    def _claim(self) -> Path:
        """Make the folder of this server, and remove those of servers that were killed."""
        parent = self._parent
        parent.mkdir(mode=0o700, exist_ok=True)
        found = parent.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(f"{parent}: is not a folder of this user; remove it")
        parent.chmod(0o700)
        staging.remove_abandoned(parent)
        return self._open.enter_context(staging.stage(parent)).resolve()
