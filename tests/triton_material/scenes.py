"""A scene is a model repository, a server on it and what is checked there; it is played once for
each number of shards. Each check, each test of a test file and each model that must load is an item
of the table."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from triton_material.server import StartError, load_and_unload, serving, state_of

LIMIT_S = 120


@dataclass(frozen=True, slots=True)
class Check:
    """A program that must end well, and print `says`."""

    title: str
    command: tuple[str, ...]
    folder: Path
    says: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TestFile:
    """A file of unit tests; each test is an item. `folder` and what it needs beside it, such as
    `../common`, are copied, as tests write files there. `only` names classes or tests, `without`
    tests that are not run; `log` is the name under which they read the server's log."""

    title: str
    file: str
    folder: Path
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    log: str = ""


@dataclass(frozen=True, slots=True)
class Scene:
    """`build` fills an empty folder with models. `loads` makes an item of each model: "at start" if
    the server loads them, "one by one" if they are loaded and unloaded here. A model of `refused`
    must not load."""

    title: str
    build: Callable[[Path], None]
    checks: tuple[Check | TestFile, ...] = ()
    flags: tuple[str, ...] = ()
    loads: Literal["", "at start", "one by one"] = ""
    refused: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    has_passed: bool
    note: str = ""


def play(scene: Scene, num_shards: int, work: Path) -> dict[str, Result]:
    """Play the scene; return the results of its items by title."""
    shutil.rmtree(work, ignore_errors=True)
    repository = work / "models"
    repository.mkdir(parents=True)
    scene.build(repository)
    flags = ("--no-exit-on-error", *scene.flags)
    results: dict[str, Result] = {}
    try:
        with serving([repository], work / "server.log", num_shards, flags, scene.environment):
            if scene.loads:
                results |= check_loads(scene, repository)
            for check in scene.checks:
                results |= (
                    run_tests(check, work) if isinstance(check, TestFile) else run(check, work)
                )
    except StartError as error:
        results[f"{scene.title}: start"] = Result(False, str(error))
    return results


def check_loads(scene: Scene, repository: Path) -> dict[str, Result]:
    names = sorted(path.name for path in repository.iterdir())
    find = load_and_unload if scene.loads == "one by one" else state_of
    results = {}
    for name in names:
        problem = find(name)
        if name in scene.refused:
            title = f"{scene.title}: {name} (must be refused)"
            results[title] = Result(bool(problem), "" if problem else "loaded")
        else:
            results[f"{scene.title}: {name}"] = Result(not problem, problem)
    return results


def run(check: Check, work: Path) -> dict[str, Result]:
    log = work / f"{file_name(check.title)}.log"
    with log.open("w") as file:
        try:
            code = subprocess.run(
                check.command,
                cwd=check.folder,
                env={**os.environ, **check.environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                timeout=LIMIT_S,
            ).returncode
        except subprocess.TimeoutExpired:
            code = 1
            file.write(f"\nended after {LIMIT_S} s")
    text = log.read_text(errors="replace")
    if code == 0 and check.says not in text:
        return {check.title: Result(False, f"'{check.says}' was not printed")}
    return {check.title: Result(code == 0, "" if code == 0 else last_line(text))}


def run_tests(check: TestFile, work: Path) -> dict[str, Result]:
    """Run the tests of a file, in a copy of its folder."""
    folder = copy_folder(check.folder, work)
    if check.log:
        (folder / check.log).unlink(missing_ok=True)
        (folder / check.log).symlink_to(work / "server.log")
    report = work / f"{file_name(check.title)}.jsonl"
    names = [*check.only, *(f"-{each}" for each in check.without)]
    script = Path(__file__).with_name("unit_tests.py")
    command = [sys.executable, str(script), str(report), str(LIMIT_S), check.file, *names]
    log = work / f"{file_name(check.title)}.log"
    environment = {**os.environ, "SERVER_LOG": check.log, **check.environment}
    with log.open("w") as file:
        try:
            subprocess.run(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                timeout=5 * LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            file.write(f"\nended after {5 * LIMIT_S} s")
    results = dict(read_report(check.title, report)) if report.exists() else {}
    return results or {check.title: Result(False, last_line(log.read_text(errors="replace")))}


def read_report(title: str, report: Path) -> Iterator[tuple[str, Result]]:
    for line in report.read_text().splitlines():
        case = json.loads(line)
        yield f"{title}: {case['name']}", Result(not case["fault"], case["fault"])


def copy_folder(folder: Path, work: Path) -> Path:
    """Copy the test that the folder belongs to, and what tests share, laid out as in QA."""
    root = next(each for each in folder.parents if each.name == "qa")
    copied = work / "qa"
    where = folder.relative_to(root)
    for name in ("common", "images", where.parts[0]):
        if not (copied / name).exists():
            shutil.copytree(root / name, copied / name)
    return copied / where


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


def file_name(title: str) -> str:
    return "".join(each if each.isalnum() else "-" for each in title)
