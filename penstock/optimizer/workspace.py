"""The folder of a run below the repository: where the model is opened, and where its original,
builds and journal are; and whether the disk has room for them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import psutil

from penstock import units
from penstock.errors import ConfigError, PenstockError
from penstock.optimizer import folders
from penstock.optimizer.candidates import Build
from penstock.optimizer.plan import Plan

# Journal, report and configuration files.
MARGIN_BYTES = 4 << 20
# The run's folder has a copy of the original; a candidate and the version are at most as large.
COPIES = 3


class WriteFailed(Exception):
    """The run cannot write its own files. Not a PenstockError: no candidate caused it."""


def free_bytes(path: Path) -> int:
    """Return the free space of the file system that holds a path, or will hold it."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def size_of(folder: Path) -> int:
    """Return the size of all files below a folder, following links to files."""
    files = (os.path.join(path, name) for path, _, names in os.walk(folder) for name in names)
    return sum(os.path.getsize(file) for file in files if os.path.exists(file))


def missing_room(path: Path, num_bytes: int) -> str:
    """Return `needs 40 MiB, 12 MiB free`, or empty if these bytes and the margin fit."""
    needed, free = num_bytes + MARGIN_BYTES, free_bytes(path)
    return "" if needed <= free else f"needs {units.size(needed)}, {units.size(free)} free"


def check_room(out: Path, model: Path, *, is_resumed: bool) -> None:
    """Raise ConfigError if space is short. A resumed run has all its files but the version."""
    copies = 1 if is_resumed else COPIES
    missing = missing_room(out, copies * size_of(model))
    if missing:
        ways = "free some space, or choose another repository with --out"
        raise ConfigError([f"{out}: not enough disk space for this model: {missing}; {ways}"])


# Below the repository; readers of repositories skip names that start with a dot.
WORK = ".optimize"
ORIGINAL = "original"
OPENING = ".opening-"

T = TypeVar("T")


def work_folder(plan: Plan) -> Path:
    """Return the folder of all runs of a model."""
    return Path(plan.out).absolute() / WORK / plan.name


def report_path(plan: Plan) -> Path:
    return work_folder(plan) / "report.html"


@contextmanager
def open_model(plan: Plan, open_at: Callable[[Path], T]) -> Iterator[T]:
    """Open the model in a temporary folder of this process, until the run's folder is known. A run
    that leaves nothing else there leaves no folder that was not there before."""
    work = work_folder(plan)
    folder = work / f"{OPENING}{os.getpid()}"
    made = [each for each in (work, *work.parents) if not each.exists()]
    try:
        try:
            sweep(work)
            folder.mkdir(parents=True)
            subject = open_at(folder / plan.name)
        except OSError as error:
            raise ConfigError([f"{error.filename or work}: {error.strerror or error}"]) from None
        yield subject
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            for each in made:
                each.rmdir()


@contextmanager
def kept_if_useful(folder: Path, is_useful: Callable[[], bool]) -> Iterator[None]:
    """Remove a run's folder if the run is refused and no later one can resume from it."""
    try:
        yield
    except PenstockError:
        if not is_useful():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def sweep(work: Path) -> None:
    """Remove folders of processes that were killed while opening a model."""
    for folder in work.glob(f"{OPENING}*"):
        pid = folder.name.removeprefix(OPENING)
        if not pid.isdigit() or not psutil.pid_exists(int(pid)) or int(pid) == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)


def place(build: Build, folder: Path) -> Build:
    """Write a build to this folder, unless an earlier run has done so: builds are immutable."""
    if not folder.is_dir():
        draft = folder.with_name(f".{folder.name}") / folder.name
        # Left by a run that was killed while writing.
        shutil.rmtree(draft.parent, ignore_errors=True)
        draft.parent.mkdir(parents=True)
        folders.write(build, build.config, draft)
        os.rename(draft, folder)
        draft.parent.rmdir()
    return Build(build.candidate, folder, folders.read_config(folder))
