"""Thousands of connections that are idle, slow, or not read, beside clients that work as usual.

Run by `make verify`. The slow clients are in a process of their own; the machine's cores are shared
by them, the server and the client whose latencies count.
"""

import asyncio
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import uvloop
from open_loop import OpenLoop, OpenTally, intended_times, percentile
from served import Served, null_model
from slow_clients import Outcomes, SlowClients

from penstock.config import HttpLimits

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from text_server import NAME, write_model

pytestmark = [pytest.mark.verify, pytest.mark.timeout(300)]

NUM_IDLE, NUM_HEADS, NUM_BODIES, NUM_STREAMS = 10_000, 1_000, 1_000, 200
# All of them, and what the server has open besides.
MAX_FILES = 13_000
LIMITS = HttpLimits()
# Time-outs are looked at once a second; on two cores the clients themselves are late too. 10,000 of
# them more so: for a client a connection begins before the server accepts it.
LATE_S, IDLE_LATE_S = 4.0, 8.0
RATE, MEASURED_S = 150.0, 20.0
MAX_BYTES_PER_IDLE = 20 * 1024
HEALTH = b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A `null` model and a language model, and descriptors for everybody."""
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        new = (max(old[0], MAX_FILES), max(old[1], MAX_FILES))
        resource.setrlimit(resource.RLIMIT_NOFILE, new)
    except (PermissionError, ValueError):
        pytest.skip(f"needs {MAX_FILES} descriptors, {old[1]} are allowed: raise ulimit -n")
    limits = {"penstock.max_num_seqs": "32", "penstock.kv_cache_bytes": str(16 << 20)}
    write_model(null_model(tmp_path, "model", a_ms=1), limits, max_length=512)
    server = Served(tmp_path)
    yield server
    if server.process.poll() is None:
        assert server.terminate() == 0
    resource.setrlimit(resource.RLIMIT_NOFILE, old)


def stream_message() -> bytes:
    """A stream of some 300 KB, most of it about the prompt: more than the kernel and the server
    buffer for a client that does not read (some 200 KB)."""
    body = {"model": NAME, "prompt": "on the mat " * 100, "max_tokens": 50, "ignore_eos": True}
    content = json.dumps(body | {"stream": True, "logprobs": 20, "echo": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}"
    return f"{head}\r\n\r\n{content}".encode()


def wait_until_generated(served: Served) -> None:
    """The engine has no work left: what is generated waits for its readers."""
    ends = time.monotonic() + 40
    names = ("penstock:num_requests_running", "penstock:num_requests_waiting")
    while True:
        lines = served.get("/metrics")[1].decode().splitlines()
        counts = [float(line.split()[-1]) for line in lines if line.startswith(names)]
        if len(counts) == 2 and not any(counts):
            return
        assert time.monotonic() < ends, counts
        time.sleep(0.2)


def measure(served: Served, seed: int) -> tuple[OpenTally, OpenTally]:
    """Inferences and health checks, both at a low rate."""

    async def both() -> tuple[OpenTally, OpenTally]:
        times = [intended_times(RATE, 1.0, MEASURED_S, seed + number) for number in range(2)]
        infer = OpenLoop(served.port, "model", times[0])
        health = OpenLoop(served.port, "model", times[1], message=HEALTH)
        found = await asyncio.gather(infer.run(16), health.run(16))
        return found[0], found[1]

    tallies = uvloop.run(both())
    for tally in tallies:
        assert tally.num_cut == 0
        assert tally.statuses == {200: tally.num_due}, tally.statuses
    return tallies


def p99_ms(tally: OpenTally) -> float:
    return percentile(tally.answered_s, 0.99) * 1e3


def wait_for_files(core: psutil.Process, count: int, until: float) -> int:
    """How many descriptors the core has when it has at most `count`, or at last."""
    while (found := core.num_fds()) > count and time.monotonic() < until:
        time.sleep(0.2)
    return found


def check_closed(
    outcomes: Outcomes, timeout_s: float, status: int | None, late_s: float = LATE_S
) -> None:
    """Every connection that ended lasted as long as its time-out and got the reason."""
    lasted_s = outcomes.lasted_s
    assert lasted_s and outcomes.num_refused == 0
    assert timeout_s - 1 <= min(lasted_s) and max(lasted_s) <= timeout_s + late_s
    assert set(outcomes.statuses) == ({status} if status else set())


def test_idle_and_slow_connections_delay_nobody_and_are_closed(served: Served):
    core = psutil.Process(served.process.pid)
    # Descriptors that are opened once and stay open are open now.
    assert served.get("/metrics")[0] == 200
    body = {"model": NAME, "prompt": "the cat", "max_tokens": 4}
    assert served.post("/v1/completions", json.dumps(body).encode())[0] == 200
    before = measure(served, 1)
    num_files = core.num_fds()
    clients = SlowClients(served.port, stream_message())
    try:
        clients.open(stream=NUM_STREAMS)
        wait_until_generated(served)
        rss = core.memory_info().rss
        assert clients.open(idle=NUM_IDLE)["idle"].num_opened == NUM_IDLE
        bytes_per_idle = (core.memory_info().rss - rss) / NUM_IDLE
        clients.open(head=NUM_HEADS, body=NUM_BODIES)
        opened = time.monotonic()
        num_open = core.num_fds() - num_files
        # The clients have used all cores to connect.
        time.sleep(2)
        during = measure(served, 3)
        clients.open()
        # Heads are opened again until now, bodies and streams are older.
        ends = opened + LIMITS.body_timeout_s + LATE_S
        num_left = wait_for_files(core, num_files + NUM_IDLE, ends) - num_files
        ends = opened + LIMITS.keep_alive_s + IDLE_LATE_S
        num_files_after = wait_for_files(core, num_files, ends)
        outcomes = clients.open()
    finally:
        clients.close()
    lines = ", ".join(
        f"{what} p99 {p99_ms(old):.1f} -> {p99_ms(new):.1f} ms"
        for what, old, new in zip(("infer", "health"), before, during, strict=True)
    )
    print(
        f"\nslow clients: {num_open} connections open, {lines}, "
        f"{bytes_per_idle / 1024:.1f} KiB per idle connection, "
        f"{num_files_after - num_files:+d} descriptors at the end"
    )
    # Some heads may have been closed already.
    assert num_open >= 0.95 * (NUM_IDLE + NUM_HEADS + NUM_BODIES + NUM_STREAMS)
    assert num_left <= NUM_IDLE, "a slow connection is still open"
    assert num_files_after <= num_files
    check_closed(outcomes["head"], LIMITS.header_timeout_s, 408)
    check_closed(outcomes["body"], LIMITS.body_timeout_s, 408)
    check_closed(outcomes["idle"], LIMITS.keep_alive_s, None, IDLE_LATE_S)
    assert len(outcomes["idle"].lasted_s) == NUM_IDLE
    assert len(outcomes["body"].lasted_s) == NUM_BODIES
    assert bytes_per_idle <= MAX_BYTES_PER_IDLE
    for old, new in zip(before, during, strict=True):
        assert p99_ms(new) <= 2 * p99_ms(old)
