"""Two servers behind haproxy are restarted one after the other: no client notices.

Each can serve 1,000/s (batches of 16 rows in 16 ms); the load is 70 % of that, so that one server
can carry it while the other restarts. Run by `make verify`.
"""

import asyncio
import time
from pathlib import Path

import pytest
import uvloop
from haproxy import Proxy, haproxy
from open_loop import OpenLoop, OpenTally, intended_times, percentile
from served import Served, null_model

pytestmark = [pytest.mark.verify, pytest.mark.timeout(180)]

RATE = 0.7 * 1000
DURATION_S = 20.0
NUM_CONNECTIONS = 64


def restart(servers: dict[str, Served], name: str, root: Path) -> None:
    """At the same port, which the proxy knows."""
    old = servers[name]
    assert old.terminate() == 0
    servers[name] = Served(root, "--http-port", str(old.port))


def roll(servers: dict[str, Served], proxy: Proxy, root: Path, drains: bool) -> float:
    """Restart all servers, one after the other; returns how long that took."""
    began = time.monotonic()
    for name in servers:
        if drains:
            proxy.drain(name)
        restart(servers, name, root)
        if drains:
            proxy.undrain(name)
        proxy.wait_until_up(name)
    return time.monotonic() - began


@pytest.mark.parametrize("drains", [True, False], ids=["drained", "retried"])
def test_a_rolling_restart_loses_nothing(tmp_path: Path, drains: bool):
    """Either the proxy drains a server before it is stopped and never retries, or the server is
    stopped at once and the proxy sends what it refuses to the other one."""
    root = null_model(tmp_path / "models", "model", max_batch=16, a_ms=4, c_ms=0.75)
    servers: dict[str, Served] = {}

    async def scenario(proxy: Proxy) -> tuple[OpenTally, float]:
        times = intended_times(RATE, 1.0, DURATION_S, seed=1)
        load = OpenLoop(proxy.port, "model", times)
        running = asyncio.create_task(load.run(NUM_CONNECTIONS))
        await asyncio.sleep(2)
        took_s = await asyncio.to_thread(roll, servers, proxy, root, drains)
        assert took_s < DURATION_S - 4, "the load has ended before the restarts"
        return await running, took_s

    try:
        servers |= {name: Served(root) for name in ("a", "b")}
        ports = {name: server.port for name, server in servers.items()}
        with haproxy(tmp_path, ports, retries=not drains) as proxy:
            tally, took_s = uvloop.run(scenario(proxy))
            num_retries = int(proxy.stats("BACKEND")["wretr"])
    finally:
        codes = [each.terminate() for each in servers.values() if each.process.poll() is None]
    print(
        f"\n2 servers restarted in {took_s:.1f} s at {RATE:g}/s, "
        f"{'drained first' if drains else f'{num_retries} requests retried by the proxy'}: "
        f"{tally.num_due - len(tally.answered_s)} of {tally.num_due} requests lost, "
        f"p99 {percentile(tally.answered_s, 0.99) * 1e3:.0f} ms"
    )
    assert tally.num_cut == 0
    assert set(tally.statuses) == {200}, tally.statuses
    assert len(tally.answered_s) == tally.num_due
    assert codes == [0, 0]
