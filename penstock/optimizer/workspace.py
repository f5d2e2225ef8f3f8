"""The folder of a run below the repository: where the model is opened, and where its original,
builds and journal are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil

from penstock.errors import ConfigError
from penstock.optimizer import folders
from penstock.optimizer.candidates import Build, Candidate
from penstock.optimizer.plan import Plan
from penstock.repository import layout

# Below the repository; readers of repositories skip names that start with a dot.
WORK = ".optimize"
ORIGINAL = "original"
OPENING = ".opening-"

T = TypeVar("T")


def work_folder(plan: Plan) -> Path:
    """Return the folder of all runs of a model."""
    return Path(plan.out).absolute() / WORK / plan.name


def report_path(plan: Plan) -> Path:
    """Return the default path of the report."""
    return work_folder(plan) / "report.html"


@contextmanager
def open_model(plan: Plan, open_at: Callable[[Path], T]) -> Iterator[T]:
    """Open the model in a temporary folder of this process, until the run's folder is known."""
    work = work_folder(plan)
    folder = work / f"{OPENING}{os.getpid()}"
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


def sweep(work: Path) -> None:
    """Remove folders of processes that were killed while opening a model."""
    for folder in work.glob(f"{OPENING}*"):
        pid = folder.name.removeprefix(OPENING)
        if not pid.isdigit() or not psutil.pid_exists(int(pid)) or int(pid) == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)


def place(build: Build, folder: Path) -> Build:
    """Put the original into the run's folder, unless the run that this one resumes has done so."""
    if not folder.is_dir():
        draft = folder.with_name(f".{folder.name}") / folder.name
        shutil.rmtree(draft.parent, ignore_errors=True)
        draft.parent.mkdir(parents=True)
        folders.write(build, build.config, draft)
        os.rename(draft, folder)
        draft.parent.rmdir()
    return Build(Candidate(), folder, layout.read(folder).configs[-1])
