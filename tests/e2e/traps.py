"""What the traps for `penstock optimize` are made of: models whose times and faults are known, and
passes that build them.

Run as a program it is the command with passes of its own choice:
`python traps.py NAME,NAME,... optimize ...`.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from penstock.config import ModelConfig
from penstock.errors import BackendFailed
from penstock.optimizer import folders, measurements, passes
from penstock.optimizer.candidates import Build, Skip, Step
from penstock.optimizer.facts import Facts
from penstock.optimizer.optimization_files import read_optimization
from penstock.optimizer.passes import BuildContext, PassContext
from penstock.optimizer.passes.int8_dynamic import Int8Dynamic
from penstock.optimizer.passes.int8_static import Int8Static, with_kept
from penstock.optimizer.results import Optimization
from penstock.profiling.results import Profile
from penstock.repository import layout, manifest

SERVING = ("batching", "instances")

# A model that takes its time: so long for each row, and longer when it has been left alone.
SLEEPER = """
import time

ROW_MS, COLD_MS, FACTOR = {row_ms!r}, {cold_ms!r}, {factor!r}
IDLE_S = 0.004
last = time.perf_counter()


def infer(inputs):
    global last
    x = inputs["x"]
    is_cold = time.perf_counter() - last > IDLE_S
    time.sleep((len(x) * ROW_MS + (COLD_MS if is_cold else 0.0)) / 1e3)
    last = time.perf_counter()
    return {{"y": x * FACTOR}}
"""
SLEEPER_CONFIG = """
backend: "python" max_batch_size: 4
dynamic_batching { }
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
"""


def sleeper(row_ms: float, cold_ms: float = 0.0, factor: float = 1.0) -> str:
    return SLEEPER.format(row_ms=row_ms, cold_ms=cold_ms, factor=factor)


def sleeper_entry(root: Path, row_ms: float, name: str = "sleeper") -> Path:
    """As an entry of a repository: what is optimised."""
    folder = root / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(sleeper(row_ms))
    (folder / "config.pbtxt").write_text(SLEEPER_CONFIG)
    return folder


@dataclass
class Other:
    """The sleeper with other times; `cold_ms` is what no loop around it sees."""

    name: str
    row_ms: float
    cold_ms: float = 0.0
    factor: float = 1.0
    stage: str = "compile"
    changes_answers: bool = False
    is_config_only: bool = field(default=False, init=False)

    def propose(self, situation: PassContext) -> list[Step | Skip]:
        return [Step(self.name, {"row_ms": str(self.row_ms)})]

    def build(self, parent: Build, step: Step, target: Path, workshop: BuildContext) -> None:
        folders.carry_over(parent, target, without=("model.py",))
        text = sleeper(self.row_ms, self.cold_ms, self.factor)
        (target / "1" / "model.py").write_text(text)
        folders.write_config(target, parent.config)

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        return []


def solid() -> Other:
    return Other("solid", 6.0)


def hollow() -> Other:
    """Twice as fast as `solid` when it runs without a pause; slower than all when it has to wait
    for requests, as processors are whose clock drops."""
    return Other("hollow", 2.5, cold_ms=40.0)


def sluggish() -> Other:
    return Other("sluggish", 48.0)


def wrong() -> Other:
    return Other("wrong", 1.0, factor=1.5)


def rough() -> Other:
    """Fast, and said to change answers: those who judge decide."""
    return Other("rough", 3.0, factor=1.0001, stage="quantise", changes_answers=True)


def crashing() -> "Crashing":
    return Crashing("crashing", 1.0)


class Crashing(Other):
    """Ends the process that loads it."""

    def build(self, parent: Build, step: Step, target: Path, workshop: BuildContext) -> None:
        super().build(parent, step, target, workshop)
        (target / "1" / "model.py").write_text("import os\nos.abort()\n")


class FloatStatic(Int8Static):
    """Says INT8 and copies the floats, as a library does that does not know the operators."""

    def build(self, parent: Build, step: Step, target: Path, workshop: BuildContext) -> None:
        folders.carry_over(parent, target)
        folders.write_config(target, parent.config)


class FloatDynamic(Int8Dynamic):
    def build(self, parent: Build, step: Step, target: Path, workshop: BuildContext) -> None:
        FloatStatic().build(parent, step, target, workshop)


class HalfStatic(Int8Static):
    """Quantises some layers and keeps quiet about the others."""

    def build(self, parent: Build, step: Step, target: Path, workshop: BuildContext) -> None:
        from penstock.optimizer.passes.int8_static import layers, prepared

        names = [node.name for node in layers(prepared(parent, parent.folder))]
        super().build(parent, with_kept(step, names[: len(names) // 2]), target, workshop)


# By the name of the choice: the pass it stands for, and what makes it.
OWN = {
    **{name: (name, name) for name in ("solid", "hollow", "sluggish", "wrong", "rough")},
    "crashing": ("crashing", "crashing"),
    "float-static": ("int8-static", "FloatStatic"),
    "float-dynamic": ("int8-dynamic", "FloatDynamic"),
    "half-static": ("int8-static", "HalfStatic"),
}
# Steps of adversaries, by the function that makes them.
FASTER = {
    "faster-exact": "faster_exact",
    "faster-compared": "faster_compared",
    "faster-choice": "faster_choice",
    "faster-lossy": "faster_lossy",
}


# In the place of a pass: the profiler fails, which costs the report a picture and a run its longest
# measurement.
UNPROFILED = "unprofiled"


def register(names: list[str]) -> None:
    """These passes, in this order, and no others."""
    if UNPROFILED in names:
        names.remove(UNPROFILED)
        measurements.profile_build = _fail
    known = {name: (name, passes.PASSES[name]) for name in passes.PASSES}
    known |= {each: (name, ("traps", factory)) for each, (name, factory) in OWN.items()}
    known |= {name: (name, ("adversaries", factory)) for name, factory in FASTER.items()}
    passes.PASSES = dict(known[name] for name in names)


def _fail(*_: object) -> Profile:
    raise BackendFailed("not profiled")


# The command.


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str
    found: Optimization | None

    @property
    def optimization(self) -> Optimization:
        assert self.found is not None, self.err
        return self.found

    @property
    def text(self) -> str:
        return self.out + self.err


class Command:
    """`penstock optimize`, with its own passes or with those that are named, in a folder."""

    def __init__(self, folder: Path, *flags: str, with_passes: tuple[str, ...] = ()) -> None:
        self._json = folder / "found.json"
        self._json.unlink(missing_ok=True)
        start = ["-m", "penstock"]
        if with_passes:
            start = [str(Path(__file__)), ",".join(with_passes)]
        self._files = [open(folder / name, "w+") for name in ("out.txt", "err.txt")]  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *start, "optimize", *flags, "--json", str(self._json)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=self._files[1],
            # As a job of a shell: Ctrl-C goes to all of its process group, and to nobody else.
            process_group=0,
            env={**os.environ, "COLUMNS": "200", "PYTHONPATH": _path()},
        )

    def said(self) -> str:
        """On stderr so far."""
        return os.pread(self._files[1].fileno(), 1 << 20, 0).decode()

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        last = time.monotonic() + timeout_s
        while text not in self.said():
            assert time.monotonic() < last and self.process.poll() is None, self.said()
            time.sleep(0.05)

    def press_ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, timeout_s: float = 300.0) -> Ran:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read())
        self.close()
        found = read_optimization(self._json) if self._json.exists() else None
        return Ran(code, *texts, found)

    def close(self) -> None:
        """Of one that was killed; what it said is not read."""
        for file in self._files:
            file.close()


def _path() -> str:
    """For the command as for this process, wherever it is started."""
    return os.pathsep.join(each for each in sys.path if each)


def optimized(folder: Path, *flags: str, with_passes: tuple[str, ...] = ()) -> Ran:
    return Command(folder, *flags, with_passes=with_passes).end()


# What is there afterwards.


def committed(root: Path, name: str) -> tuple[ModelConfig, dict[str, Any]]:
    """The newest version in the repository, and its evidence."""
    found = layout.read(root)
    assert not found.problems
    version = layout.version_folders(root / name)[-1]
    kept = manifest.read(root / name / version)
    assert kept is not None
    message = layout.read_message(root / name)
    return layout.read_version(root / name, version, message), kept.evidence


def num_versions(root: Path, name: str) -> int:
    folder = root / name
    return len(layout.version_folders(folder)) if folder.is_dir() else 0


def save_rows(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


if __name__ == "__main__":
    from penstock.cli import main

    sys.modules["traps"] = sys.modules["__main__"]
    register(sys.argv.pop(1).split(","))
    main()
