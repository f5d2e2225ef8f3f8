"""Runs wrk against a server that is up, and reads what it measured.

Timing and checking are separate runs at the same concurrency. Checking makes wrk parse every
response and takes CPU from the server on a small machine, so the timed run (one thread) only
counts statuses and socket errors, and the checked run after it compares every answer.

Latencies are as wrk 4.1 reports them: above twice the mean interval it adds the samples that a
stalled connection did not send (its correction of coordinated omission). This touches p99, for
every server alike, and hardly p50.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("wrk.lua")
ANSWER_TIMEOUT_S = 10


class LoadError(Exception):
    """The run gave no valid measurement: errors, wrong answers, or no result at all."""


@dataclass(frozen=True, slots=True)
class Timing:
    num_requests: int
    seconds: float
    p50_us: float
    p90_us: float
    p99_us: float
    max_us: float

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.seconds


def require_wrk() -> None:
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed: apt-get install wrk")


def time_requests(port: int, workload: Path, connections: int, seconds: float) -> Timing:
    result = _wrk(port, workload, connections, 1, seconds, "time")
    return Timing(
        num_requests=int(result["requests"]),
        seconds=result["duration_us"] / 1e6,
        p50_us=result["p50_us"],
        p90_us=result["p90_us"],
        p99_us=result["p99_us"],
        max_us=result["max_us"],
    )


def check_answers(port: int, workload: Path, connections: int, seconds: float) -> int:
    """Compares every answer for a while; returns how many there were."""
    return int(_wrk(port, workload, connections, connections, seconds, "check")["checked"])


def _wrk(
    port: int, workload: Path, connections: int, threads: int, seconds: float, mode: str
) -> dict[str, float]:
    # wrk takes whole seconds only.
    command = ["wrk", f"-t{threads}", f"-c{connections}", f"-d{max(1, round(seconds))}s"]
    command += [f"--timeout={ANSWER_TIMEOUT_S}s", "-s", str(SCRIPT)]
    command += [f"http://127.0.0.1:{port}/", "--", str(workload), mode]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds + 60, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise LoadError(f"wrk failed: {(done.stderr or done.stdout).strip()[-300:]}")
    result = json.loads(lines[-1].removeprefix("RESULT "))
    if result["wrong"]:
        raise LoadError(
            f"{result['wrong']} of {result['checked']} answers wrong, first: "
            f"{result['first_wrong']}"
        )
    for kind in ("status_errors", "socket_errors"):
        if result[kind]:
            raise LoadError(f"{result[kind]} {kind.replace('_', ' ')}")
    if not result["requests"] or (mode == "check" and not result["checked"]):
        raise LoadError("no answers")
    return dict(result)
