"""Everything that must hold whatever the number of shards: one line of report per check.

    python tests/shard_checks.py               # all, at most 30 minutes on two cores
    python tests/shard_checks.py --only drain  # checks with this in their title
    python tests/shard_checks.py --list

Each check is some tests, run by pytest in a process of its own, or a command. What a check wrote is
in `.bench/shard-checks/`; the line shows the figures that it printed. Exit code 1 if one failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from scorecard import ROOT, count_outcomes, find_figures

LOGS = ROOT / ".bench" / "shard-checks"
NUM_SHARDS = (1, 2, 4)
# A check that takes longer hangs.
LIMIT_S = 900
# Lines of a failed check that are shown.
NUM_LINES = 30


@dataclass(frozen=True, slots=True)
class ShardCheck:
    """`tests` are arguments of pytest; `command` runs instead of it. `shards` is the number that
    servers of tests have unless the tests say otherwise."""

    title: str
    tests: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    shards: int = 1


def by_number(title: str, test: str) -> list[ShardCheck]:
    """Return a check for each number of shards."""
    path = f"tests/e2e/test_verify_shards.py::{test}"
    return [
        ShardCheck(f"{title}, {number} shards", (f"{path}[{number} shards]",))
        for number in NUM_SHARDS
    ]


def of_file(title: str, *paths: str, shards: int = 1, only: str = "") -> ShardCheck:
    """Return a check of the tests in files that are neither slow nor of `make verify`."""
    tests = (*(f"tests/{path}" for path in paths), "-m", "not verify and not slow")
    return ShardCheck(title, (*tests, f"-k={only}") if only else tests, shards=shards)


CHECKS = (
    *by_number("answers bit for bit", "test_bits"),
    *by_number("workers and shards killed under load", "test_faults"),
    *by_number("drain under load", "test_drain"),
    *by_number("reload under load", "test_reload"),
    *by_number("cancellation", "test_cancel"),
    *by_number("rate of an API key", "test_quota"),
    *by_number("quarantine", "test_quarantine"),
    ShardCheck(
        "poison of several keys, 4 shards",
        ("tests/e2e/test_poison.py", "-m", "slow and not verify", "-k", "not core"),
        shards=4,
    ),
    of_file("large bodies, 4 shards", "e2e/test_large_bodies.py", shards=4),
    of_file("counts, queue limits, SLO, random page", "e2e/test_shards_served.py"),
    of_file("steered connections", "e2e/test_accepting_shards.py", "protocols/test_acceptors.py"),
    of_file("routes as of one process", "e2e/test_shards_alike.py"),
    of_file("gRPC in shards", "e2e/test_grpc.py", only="shards"),
    of_file("TLS and quotas", "e2e/test_tls_served.py", "e2e/test_key_quotas.py", only="shards"),
    ShardCheck(
        "no torn values on the page",
        command=("tests/page_hammer.py", "--seconds", "20", "--readers", "2"),
    ),
    ShardCheck(
        "law in the simulator, 4 shards",
        ("tests/serving/test_shard_law.py", "-m", "", "-k=-4] or not test_all"),
    ),
    ShardCheck("law of the server, slow", ("tests/e2e/test_verify_shards.py::test_law[slow]",)),
    ShardCheck("law of the server, fast", ("tests/e2e/test_verify_shards.py::test_law[fast]",)),
)


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    has_passed: bool
    took_s: float
    figures: Sequence[str]
    lines: Sequence[str]


def run(check: ShardCheck) -> CheckOutcome:
    """Run a check; its output goes to a file of LOGS."""
    command = [sys.executable, "-m", "pytest", "-v", "-s", "-rA", *check.tests]
    if check.tests and "-m" not in check.tests:
        command += ["-m", ""]
    if check.command:
        command = [sys.executable, *check.command]
    environment = os.environ | {"TEST_SHARDS": str(check.shards)}
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{re.sub('[^a-z0-9]+', '-', check.title.lower())}.txt"
    began = time.monotonic()
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=file, stderr=file, timeout=LIMIT_S
            ).returncode
        except subprocess.TimeoutExpired:
            code = 1
            file.write(f"\nended after {LIMIT_S} s\n")
    lines = log.read_text(errors="replace").splitlines()
    figures = list(find_figures(lines))
    if check.tests:
        counts = count_outcomes(lines)
        if code == 0 and not counts["passed"]:
            code, figures = 1, ["not judged: the tests were skipped or not found"]
        elif counts["passed"] > 1:
            figures = [lowest(figures) or f"{counts['passed']} tests"]
    return CheckOutcome(code == 0, time.monotonic() - began, figures[-1:], lines)


def lowest(figures: Sequence[str]) -> str:
    """Return the figure of the case with the lowest goodput, if the figures are of that kind."""
    found = [(float(match[1]), each) for each in figures if (match := re.search(GOODPUT, each))]
    return f"lowest of {len(found)}: {min(found)[1]}" if found else ""


GOODPUT = r"goodput ([\d.]+) of one shard"


def main() -> int:
    parser = argparse.ArgumentParser(description="Check a server of 1, 2 and 4 shards.")
    parser.add_argument("--only", default="", help="checks with this in their title")
    parser.add_argument("--list", action="store_true", help="print the titles and end")
    given = parser.parse_args()
    checks = [check for check in CHECKS if given.only in check.title]
    if not checks:
        parser.error(f"no check has '{given.only}' in its title; --list prints them")
    if given.list:
        print("\n".join(check.title for check in checks))
        return 0
    num_failed, began = 0, time.monotonic()
    for check in checks:
        outcome = run(check)
        state = "passed" if outcome.has_passed else "FAILED"
        num_failed += not outcome.has_passed
        told = "".join(f"; {each}" for each in outcome.figures)
        print(f"{state} {outcome.took_s:6.1f} s  {check.title}{told}", flush=True)
        if not outcome.has_passed:
            print("\n".join(f"    {line}" for line in outcome.lines[-NUM_LINES:]), flush=True)
    took_min = (time.monotonic() - began) / 60
    print(f"{len(checks) - num_failed} of {len(checks)} checks passed in {took_min:.1f} min")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
