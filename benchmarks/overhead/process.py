"""One server as a tree of processes: start, wait until ready, CPU time, stop."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

START_TIMEOUT_S = 90
STOP_TIMEOUT_S = 10


class StartError(Exception):
    """The server did not come up; the text says why, as far as its log tells."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What is needed to start a server. Ready is a 200 for each of ready_paths."""

    command: Sequence[str]
    port: int
    ready_paths: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def running(launch: Launch, log_path: Path) -> Iterator[psutil.Process]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with log_path.open("wb") as log:
        server = subprocess.Popen(
            launch.command,
            env={**env, **launch.env},
            cwd=launch.cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    process = psutil.Process(server.pid)
    try:
        _wait_ready(server, launch, log_path)
        yield process
    finally:
        _stop(process)
        server.wait()


def _wait_ready(server: subprocess.Popen[bytes], launch: Launch, log_path: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise StartError(f"exited with {server.returncode}: {_last_line(log_path)}")
        if all(_answers_200(launch.port, path) for path in launch.ready_paths):
            return
        time.sleep(0.2)
    raise StartError(f"not ready after {START_TIMEOUT_S} s: {_last_line(log_path)}")


def _answers_200(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _last_line(log_path: Path) -> str:
    lines = log_path.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it wrote nothing"


def cpu_seconds(process: psutil.Process) -> dict[int, float]:
    """User and system time so far of every process in the tree."""
    seconds = {}
    for member in _tree(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = member.cpu_times()
            seconds[member.pid] = times.user + times.system
    return seconds


def cpu_between(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


def _tree(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _stop(process: psutil.Process) -> None:
    members = _tree(process)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.terminate()
    _, alive = psutil.wait_procs(members, timeout=STOP_TIMEOUT_S)
    for member in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(alive, timeout=STOP_TIMEOUT_S)
