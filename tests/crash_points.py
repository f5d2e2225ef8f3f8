"""Commits, promotions and removals that end in the middle: killed, or failed by the disk, before
each single thing they do to the file system, and at random moments. `test_versions` runs this as a
script, a process without threads, because it forks; it prints what it found as JSON.

    python crash_points.py FOLDER (each|fail|random) (new|next|promote|remove) ROUNDS
"""

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import ConfigError, PenstockError
from penstock.repository import history, layout, manifest, versions
from penstock.types import TensorSpec

# Where Python announces what it is about to do; fsync is announced by `announce_fsync`.
EVENTS = ("open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "fcntl.flock", "fsync")
# Exit codes: the event of that number did not come; an error that is no answer to anybody.
UNREACHED, BROKEN = 77, 78
NAME = "model"
CONFIG = ModelConfig(
    name=NAME,
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "FP32", (4,)),),
    outputs=(TensorSpec("y", "FP32", (4,), label_file="labels.txt"),),
    max_batch_size=8,
    batching=BatchPolicy(8),
)


class Repository:
    """A repository with a steady model beside the one that is written."""

    def __init__(self, folder: Path, kind: str, num_bytes: int) -> None:
        self.root = folder / "repository"
        self.source = folder / "source"
        (self.source / "parts").mkdir(parents=True)
        self.root.mkdir()
        (self.source / "labels.txt").write_text("cat\ndog\n")
        (self.source / "parts" / "weights").write_bytes(os.urandom(num_bytes))
        steady = {"a": self.source / "labels.txt", "labels.txt": self.source / "labels.txt"}
        versions.commit(self.root, "steady", steady, _named("steady"))
        self.kind = kind
        self.prepare()

    def prepare(self) -> None:
        """As it was before the first round."""
        for path in (self.root / NAME, *self.root.glob(".staging-*")):
            shutil.rmtree(path, ignore_errors=True)
        for _ in range({"new": 0, "next": 1, "promote": 2, "remove": 2}[self.kind]):
            versions.commit(self.root, NAME, self.source, CONFIG)
        if self.kind in ("promote", "remove"):
            versions.promote(self.root, NAME, "2")

    def act(self) -> None:
        if self.kind == "promote":
            versions.promote(self.root, NAME, "1")
        elif self.kind == "remove":
            with contextlib.suppress(ConfigError):  # Done already, by the round before.
                versions.remove(self.root, NAME, "1", history.Cause(history.PRUNED))
        else:
            versions.commit(self.root, NAME, self.source, CONFIG, {"slo": "p99 < 20ms"})

    def check(self) -> bool:
        """Whether the round has had its effect. Anything between all and nothing is an error."""
        found = layout.read(self.root)
        assert found.problems == {}, found.problems
        served = {config.name: config.version for config in found.configs}
        folder = self.root / NAME
        there = layout.version_folders(folder) if folder.exists() else []
        for version in there:
            manifest.check_digests(folder / version)
        done, todo = {
            "new": (["1"], []),
            "next": (["1", "2"], ["1"]),
            "promote": (["1", "2"], ["1", "2"]),
            "remove": (["2"], ["1", "2"]),
        }[self.kind]
        if folder.exists():
            assert history.unreadable_lines(folder) == []
        if self.kind == "promote":
            assert there == done
            policy = layout.read_message(folder).version_policy.specific
            assert list(policy.versions) in ([1], [2])
            return served[NAME] == "1"
        assert there in (done, todo)
        assert served.get(NAME) == (there[-1] if there else None)
        return there == done


def _named(name: str) -> ModelConfig:
    return ModelConfig(
        name, "1", "null", "", CONFIG.inputs, CONFIG.outputs, 8, CONFIG.batching, file="a"
    )


def in_child(run: Callable[[], None]) -> int:
    """Run and leave; the process id."""
    pid = os.fork()
    if pid:
        return pid
    code = BROKEN
    try:
        with contextlib.suppress(OSError, PenstockError):
            run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    """Its exit code; -9 when it was killed. An error that no caller expects is one here too."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code != BROKEN
    return code


def announce_fsync() -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        sys.audit("fsync", fd)
        real(fd)

    os.fsync = fsync


def before_event(number: int, do: Callable[[], None]) -> list[str]:
    """Do something before the event of that number; the event, once it was reached."""
    count = 0
    reached: list[str] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event in EVENTS:
            count += 1
            if count == number:
                reached.append(event)
                do()

    sys.addaudithook(hook)
    return reached


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def fail() -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def at_each_event(subject: Repository, do: Callable[[], None]) -> dict[str, Any]:
    outcomes: Counter[bool] = Counter()
    number = 0
    while True:
        number += 1

        def run(number: int = number) -> None:
            announce_fsync()
            reached = before_event(number, do)
            try:
                subject.act()
            finally:
                if not reached:
                    os._exit(UNREACHED)

        code = ended(in_child(run))
        is_done = subject.check()
        if code == UNREACHED:
            assert is_done
            break
        outcomes[is_done] += 1
        # What was left behind disturbs nobody and is removed by the next writer.
        subject.act()
        assert not list(subject.root.rglob(".staging-*"))
        subject.prepare()
    return {"rounds": number - 1, "done": outcomes[True], "not done": outcomes[False]}


def seconds_of(subject: Repository) -> float:
    began = time.perf_counter()
    subject.act()
    seconds = time.perf_counter() - began
    subject.prepare()
    return seconds


def at_random(subject: Repository, rounds: int) -> dict[str, Any]:
    outcomes: Counter[bool] = Counter()
    usual_s = min(seconds_of(subject) for _ in range(3))
    for _ in range(rounds):
        subject.prepare()
        pid = in_child(subject.act)
        time.sleep(random.uniform(0, usual_s * 2))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        ended(pid)
        outcomes[subject.check()] += 1
    return {"rounds": rounds, "done": outcomes[True], "not done": outcomes[False]}


def main() -> None:
    folder, how, kind, rounds = sys.argv[1:]
    subject = Repository(Path(folder), kind, 3 << 20 if how == "random" else 1 << 10)
    if how == "random":
        print(json.dumps(at_random(subject, int(rounds))))
    else:
        print(json.dumps(at_each_event(subject, die if how == "each" else fail)))


if __name__ == "__main__":
    main()
