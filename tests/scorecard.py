"""The reliability scorecard: one row at a time, with a journal, so that an interrupted run resumes.

    python tests/scorecard.py 11          # run row 11 as often as it has to be run
    python tests/scorecard.py 11 --again  # forget what the journal says about this commit
    python tests/scorecard.py --table     # the table of docs/reliability.md, from the journal

A row is a list of tests, run three times (long ones once); the worst run counts. Each finished run
is a line of `.bench/scorecard.jsonl`, with the commit, the outcome and what the tests printed. Runs
of the same commit that are in the journal are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
JOURNAL = ROOT / ".bench" / "scorecard.jsonl"
FAULTS = "tests/e2e/test_faults.py::"
NOT_MEASURED = "not measured yet"
MAX_FIGURES = 40
# Lines that pytest itself writes.
PYTEST = re.compile(
    r"=|tests/|\s*$|platform |rootdir|plugins|cachedir|timeout|collect|hypothesis|PASSED|FAILED|E "
)


@dataclass(frozen=True, slots=True)
class Row:
    """`tests` are what pytest runs; `missing` is the part of the row that no test covers yet, and
    `pending` the part that waits for a feature. `triton` is the figure of Triton 2.51."""

    number: int
    title: str
    target: str
    tests: tuple[str, ...] = ()
    triton: str = ""
    runs: int = 3
    missing: str = ""
    pending: str = ""

    @property
    def command(self) -> str:
        return f"make verify ROW={self.number}" if self.tests else ""


ROWS = (
    Row(
        1,
        "rolling reload, ten times, under load",
        "0 lost; p99 while reloading at most twice the steady one",
        (
            "tests/e2e/test_control.py::test_reloading_under_load_loses_nothing_and_stays_fast",
            "tests/e2e/test_control.py::test_new_versions_under_grpc_load_lose_nothing_and_stay_fast",
        ),
        "0 lost, p99 7 ms to 1.43 s",
    ),
    Row(
        2,
        "a new version that breaks its SLO is rolled back",
        "automatic, 0 lost; detected within 30 s, swapped within 2 s",
        ("tests/test_operate_story.py::test_the_story",),
        "manual",
        runs=1,
    ),
    Row(
        3,
        "reload with a damaged or half-written version",
        "the old version serves on, 0 lost; 1,000 crash points",
        (
            "tests/e2e/test_commit.py",
            "tests/repository/test_versions.py::test_killed_a_thousand_times_it_is_done_or_it_never_was",
        ),
        "keeps the old version",
        runs=1,
    ),
    Row(
        4,
        "kill -9 of one of two instances under load",
        "0 lost; two instances again within 1 s and the load time",
        (f"{FAULTS}test_kill_9_under_load_loses_nothing[2]",),
        "a killed instance is not restarted",
    ),
    Row(
        5,
        "kill -9 of the only instance under load",
        "0 lost; recovery within 1 s and the load time",
        (f"{FAULTS}test_kill_9_under_load_loses_nothing[1]",),
        "all requests fail, no recovery",
    ),
    Row(
        6,
        "an instance killed every second, 10 min",
        "99.9 % answered, no hang, no wrong answer, no orphan",
        (f"{FAULTS}test_a_random_killer[10min]",),
        runs=1,
    ),
    Row(
        7,
        "an instance that hangs or exceeds its memory",
        "only its batch fails; killed within the time-out and 1 s, and replaced",
        ("tests/e2e/test_hangs.py",),
    ),
    Row(
        8,
        "kill -9 of a shard",
        "its children are gone within 1 s; 0 left-overs",
        (
            f"{FAULTS}test_a_killer_of_shards_for_twenty_seconds",
            f"{FAULTS}test_a_shard_that_stands_still_is_replaced",
        ),
        "stubs notice and exit",
    ),
    Row(
        9,
        "SIGTERM under load",
        "accepted requests finish; new ones get 503; exit code 0 within the drain time",
        (
            f"{FAULTS}test_sigterm_under_load",
            "tests/e2e/test_grpc.py::test_sigterm_finishes_what_was_accepted_and_refuses_the_rest",
        ),
        "serves on for up to 30 s; exit code 1 after a fault",
    ),
    Row(
        10,
        "rolling restart of two servers behind a proxy",
        "0 lost",
        ("tests/e2e/test_rolling_restart.py",),
    ),
    Row(
        11,
        "overload 2x, 5x and 10x, open loop",
        "goodput 95 % of peak; accepted p99 within the SLO; refusals p99 within 10 ms; normal p99 "
        "2 s after the load drops; memory bounded",
        ("tests/e2e/test_overload.py",),
        "unbounded: p50 2 s to 4 s; bounded: goodput 15 % to 30 % of peak",
        missing="60 s at 2x and 10x, which run for 6 s and ask for 75 % to 90 % of peak",
    ),
    Row(
        12,
        "priorities under 5x overload",
        "high class p99 within the SLO; no tenant below 90 % of its share",
        ("tests/e2e/test_fairness.py",),
    ),
    Row(
        13,
        "100 queued requests abandoned",
        "the next request waits for one batch at most",
        (
            f"{FAULTS}test_abandoned_requests_delay_the_next_by_at_most_one_batch",
            "tests/e2e/test_language_model_served.py::"
            "test_a_hundred_that_leave_in_the_middle_leave_nothing_behind",
        ),
        "runs them all, 2.08 s",
    ),
    Row(
        14,
        "10,000 idle and 2,000 slow connections",
        "health and infer p99 at most doubled; slow ones closed at their time-outs",
        ("tests/e2e/test_slow_clients.py",),
        "unaffected, never closes them",
    ),
    Row(
        15,
        "malformed requests, HTTP and gRPC",
        "0 crashes, 0 hangs, 0 answers 5xx, 0 accepted",
        ("tests/e2e/test_malformed.py",),
        "3 crashes, 39 of 105 answers 500",
    ),
    Row(
        16,
        "fuzzed parsers",
        "0 crashes, 0 uncaught exceptions",
        ("tests/fuzz/test_targets.py", "tests/e2e/test_openapi_conformance.py"),
        runs=1,
        missing="a million inputs a parser (`make fuzz`), 100,000 over the wire",
    ),
    Row(
        17,
        "differential against Triton",
        "the same bits and the same class of status",
        ("tests/e2e/test_differential.py",),
        runs=1,
    ),
    Row(
        18,
        "third-party clients",
        "all examples pass; perf_analyzer's counts are ours",
        pending="the clients' own suites",
    ),
    Row(
        19,
        "soak: 2 million requests, 2,000 loads, 10,000 cancels, 100,000 regions",
        "at most 1 MiB per 100,000 requests in the second half; nothing left open",
        (
            "tests/e2e/test_soak.py::test_nothing_grows[2M]",
            "tests/e2e/test_soak.py::test_a_planted_leak_of_1_kib_per_request_is_found",
        ),
        "its own limit is 100 MB in the second half",
        runs=1,
    ),
    Row(
        20,
        "load and unload race, 32 threads x 256",
        "no deadlock; each call gets a definite answer",
        ("tests/e2e/test_load_race.py",),
    ),
    Row(
        21,
        "full disk",
        "0 lost while it is full; no partial state afterwards",
        ("tests/e2e/test_full_disk.py",),
    ),
    Row(
        22,
        "descriptors and processes exhausted, clock jumps",
        "sheds load, recovers, does not spin; time-outs stay what they are",
        ("tests/e2e/test_exhaustion.py",),
        missing="clock jumps in workers; the test's reach the core",
    ),
    Row(
        23,
        "a request that kills its worker",
        "it fails after two tries at most; its batch-mates succeed",
        (f"{FAULTS}test_a_request_that_kills_its_worker_fails_alone_under_load",),
        "the model is gone",
    ),
    Row(
        24,
        "reload, kills, overload and slow clients together, 10 min",
        "99.9 % of accepted requests answered; p99 within the SLO outside 2 s per fault",
        ("tests/e2e/test_mixed_faults.py::test_everything_at_once[10min]",),
        runs=1,
    ),
    Row(
        25,
        "security gate",
        "every route needs its scope; no pickle",
        ("tests/protocols/test_gate.py", "tests/test_architecture.py"),
        runs=1,
    ),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a row. `figures` are the lines that its tests printed."""

    row: int
    commit: str
    began: str
    took_s: float
    num_passed: int
    num_failed: int
    figures: tuple[str, ...] = ()

    @property
    def has_passed(self) -> bool:
        return self.num_passed > 0 and self.num_failed == 0


def read_journal(path: Path) -> list[Run]:
    """A line that is not whole, because its writer was killed, is left out."""
    runs = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            values = json.loads(line)
            runs.append(Run(**{**values, "figures": tuple(values["figures"])}))
        except (ValueError, TypeError, KeyError):
            continue
    return runs


def append(path: Path, run: Run) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        # A line of its own, whatever a killed writer left.
        file.write("\n" * (file.tell() > 0) + json.dumps(asdict(run)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def run_tests(row: Row, commit: str) -> Run:
    """One run, with pytest in a process of its own; what it prints is shown as it comes."""
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    start = time.monotonic()
    lines: list[str] = []
    # `-m ""`: tests that are not long belong to rows too.
    command = [sys.executable, "-m", "pytest", "-m", "", "-v", "-s", "-rA", *row.tests]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    counts = count_outcomes(lines)
    failed = counts["failed"] + counts["error"]
    if process.returncode != 0:
        failed = max(1, failed)
    took_s = round(time.monotonic() - start, 1)
    return Run(row.number, commit, began, took_s, counts["passed"], failed, find_figures(lines))


def count_outcomes(lines: Sequence[str]) -> dict[str, int]:
    """From pytest's last line."""
    last = next((line for line in reversed(lines) if re.search(r" in [\d.]+s", line)), "")
    return {
        kind: sum(int(count) for count in re.findall(rf"(\d+) {kind}", last))
        for kind in ("passed", "failed", "error", "skipped")
    }


def find_figures(lines: Sequence[str]) -> tuple[str, ...]:
    """What tests printed that has a number in it, up to the reports at the end."""
    found = []
    for line in lines:
        if re.match(r"=+ (FAILURES|ERRORS|PASSES|short test summary)", line):
            break
        if not PYTEST.match(line) and re.search(r"\d", line):
            found.append(line.strip())
    return tuple(found[:MAX_FIGURES])


def resume(
    row: Row, commit: str, journal: Path, run_once: Callable[[Row, str], Run] = run_tests
) -> list[Run]:
    """All runs of the row at this commit: those of the journal, and those that are missing."""
    done = [run for run in read_journal(journal) if (run.row, run.commit) == (row.number, commit)]
    for _ in range(row.runs - len(done)):
        run = run_once(row, commit)
        append(journal, run)
        done.append(run)
    return done[: row.runs]


def worst(runs: Sequence[Run]) -> Run:
    """A run that failed, or else the longest."""
    return max(runs, key=lambda run: (run.num_failed, run.took_s))


def describe(row: Row, runs: Sequence[Run]) -> str:
    """The figure of a row, from its runs at one commit."""
    if not runs:
        return NOT_MEASURED
    passed = sum(run.has_passed for run in runs)
    text = f"{passed} of {len(runs)} runs passed, {runs[-1].began[:10]} at {runs[-1].commit[:7]}"
    return "; ".join((text, *worst(runs).figures[:2]))


def table(journal: Path) -> str:
    """In Markdown; of each row the runs of the commit that it ran last at."""
    lines = [
        "| row | test | target | command | figure | Triton 2.51 | open |",
        "|---|---|---|---|---|---|---|",
    ]
    runs = read_journal(journal)
    for row in ROWS:
        own = [run for run in runs if run.row == row.number]
        last = [run for run in own if run.commit == own[-1].commit]
        is_open = [f"missing: {row.missing}"] if row.missing else []
        is_open += [f"pending: {row.pending}"] if row.pending else []
        cells = (
            str(row.number),
            row.title,
            row.target,
            f"`{row.command}`" if row.command else "",
            describe(row, last),
            row.triton,
            "; ".join(is_open),
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def find_commit() -> str:
    """With a mark where files differ from it."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    found = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a row of the reliability scorecard.")
    parser.add_argument("row", type=int, nargs="?", choices=[row.number for row in ROWS])
    parser.add_argument("--journal", type=Path, default=JOURNAL)
    parser.add_argument("--again", action="store_true", help="run again what the journal has")
    parser.add_argument("--table", action="store_true", help="print the table and end")
    given = parser.parse_args()
    if given.table:
        print(table(given.journal))
        return 0
    if given.row is None:
        parser.error("a row is required, for example: make verify ROW=11")
    row = ROWS[given.row - 1]
    if not row.tests:
        print(f"row {row.number}, {row.title}: nothing to run. {row.missing or row.pending}")
        return 2
    if given.again:
        others = [run for run in read_journal(given.journal) if run.row != row.number]
        given.journal.unlink(missing_ok=True)
        for run in others:
            append(given.journal, run)
    runs = resume(row, find_commit(), given.journal)
    print(f"\nrow {row.number}, {row.title}: {describe(row, runs)}\ntarget: {row.target}")
    return 0 if all(run.has_passed for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
