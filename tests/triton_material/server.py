"""`penstock serve` on Triton's ports, which its examples and tests have written in them."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

PORTS = (8000, 8001, 8002)
START_LIMIT_S = 180
STOP_LIMIT_S = 60
LOAD_LIMIT_S = 120
CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS = 0x8914
IFF_UP = 1


class StartError(Exception):
    pass


def isolate_ports() -> bool:
    """Give this process a network of its own, where Triton's ports are free. Needs root."""
    if ctypes.CDLL(None).unshare(CLONE_NEWNET) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as loopback:
        fcntl.ioctl(loopback, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
    return True


def busy_ports() -> list[int]:
    busy = []
    for port in PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                busy.append(port)
    return busy


@contextmanager
def serving(
    repositories: Sequence[Path],
    log: Path,
    num_shards: int,
    flags: Sequence[str],
    environment: Mapping[str, str],
) -> Iterator[subprocess.Popen[bytes]]:
    """Serve the repositories until the block ends; raise StartError if that fails."""
    command = [sys.executable, "-m", "penstock", "serve", *map(str, repositories)]
    # Clients check the name.
    command += ["--shards", str(num_shards), "--id", "triton", *flags]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, **environment},
        )
    try:
        wait_until_live(process, log)
        yield process
    finally:
        stop(process)


def wait_until_live(process: subprocess.Popen[bytes], log: Path) -> None:
    ends = time.monotonic() + START_LIMIT_S
    while b"127.0.0.1:8000/v2" not in log.read_bytes():
        if process.poll() is not None:
            raise StartError("\n".join(log.read_text(errors="replace").splitlines()[-20:]))
        if time.monotonic() > ends:
            raise StartError(f"not ready after {START_LIMIT_S} s")
        time.sleep(0.05)


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    # The workers' end follows; the next server needs the ports.
    ends = time.monotonic() + STOP_LIMIT_S
    while busy_ports() and time.monotonic() < ends:
        time.sleep(0.05)


def state_of(name: str) -> str:
    """Ask the repository index for a model's state; empty if it is ready."""
    entries = json.loads(post("/v2/repository/index")[1])
    found = [each for each in entries if each["name"] == name]
    if not found:
        return "not in the repository index"
    state = found[0].get("state", "")
    return "" if state == "READY" else found[0].get("reason") or state


def load_and_unload(name: str) -> str:
    """Load a model, and unload it with what came along; return why it cannot be loaded."""
    status, body = post(f"/v2/repository/models/{name}/load")
    if status != 200:
        return json.loads(body)["error"]
    parameters = b'{"parameters": {"unload_dependents": true}}'
    post(f"/v2/repository/models/{name}/unload", parameters)
    return ""


def post(path: str, body: bytes = b"{}") -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{PORTS[0]}{path}", body)
    try:
        with urllib.request.urlopen(request, timeout=LOAD_LIMIT_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
