"""Compare how fast this tree serves with how fast another commit does, for continuous integration.

    python benchmarks/gate.py main    about two minutes

Serves `examples/repository/digits` from the other commit and from this tree, one after the other on
the same machine, and runs `penstock bench` of this tree against each: so the machine's speed and
the load generator cancel out. A regression has to show twice. Exit codes are those of `penstock
bench --gate`: 2 when this tree is slower. Pages and JSON are under .bench/gate.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".bench" / "gate"
REPOSITORY = ROOT / "examples" / "repository"
MODEL = "digits"
# 1, 2, 4, 8 and 16 clients. Shared runners are noisy, hence the wide tolerance.
LOAD = ("--concurrency", "1:16", "--duration", "5s")
TOLERANCE = "20"
NUM_TRIES = 2
MISSED = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base", help="commit to compare with, for example origin/main")
    base = parser.parse_args().base
    FOLDER.mkdir(parents=True, exist_ok=True)
    status = 0
    with checked_out(base) as tree:
        for _ in range(NUM_TRIES):
            status = compare(tree)
            if status != MISSED:
                break
    sys.exit(status)


def compare(base: Path) -> int:
    """Return the exit code of the gate."""
    baseline = str(FOLDER / "base.json")
    if status := measure(base, "base", ["--json", baseline]):
        return status
    return measure(ROOT, "this", ["--gate", "--baseline", baseline, "--tolerance", TOLERANCE])


def measure(tree: Path, name: str, flags: Sequence[str]) -> int:
    print(f"\nserved by {tree}", flush=True)
    with served(tree) as address:
        target = f"http://{address}/v2/models/{MODEL}"
        page = str(FOLDER / f"{name}.html")
        return subprocess.run(
            penstock("bench", target, *LOAD, "--html", page, *flags),
            env=environment(ROOT),
            check=False,
        ).returncode


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    tree = FOLDER / "base"
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "remove", "--force", str(tree)], capture_output=True, check=False)
    subprocess.run([*git, "add", "--force", "--detach", str(tree), commit], check=True)
    try:
        yield tree
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True)


@contextmanager
def served(tree: Path) -> Iterator[str]:
    flags = ["--http-port", "0", "--no-grpc", "--no-metrics"]
    process = subprocess.Popen(
        penstock("serve", str(REPOSITORY / MODEL), *flags),
        env=environment(tree),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if match := re.search(r"http://([\d.]+:\d+)", line):
                yield match[1]
                return
        raise SystemExit(f"{tree}: the server did not start")
    finally:
        process.terminate()
        process.wait()


def penstock(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock", *arguments]


def environment(tree: Path) -> dict[str, str]:
    """This tree's packages, but Penstock's own code from `tree`."""
    return os.environ | {"PYTHONPATH": str(tree)}


if __name__ == "__main__":
    main()
