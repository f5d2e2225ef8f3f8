"""A server on a node, without Ray around it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from ray_doubles import EXAMPLES, run

from penstock.api.ray_options import RayOptions
from penstock.api.server_handle import ServerHandle
from penstock.errors import NotReady
from penstock.ray import core_claims, node_server
from penstock.ray.node_server import (
    NodeServer,
    NodeSpec,
    StartedServer,
    claim_cores,
    server_options,
)

OPTIONS = server_options(RayOptions(http_port=0, grpc_port=0, ingress="penstock"))


def test_it_serves_until_it_ends_and_tells_when_its_server_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_server, "assigned_cpus", lambda: 0.0)

    async def test() -> None:
        server = NodeServer.__new__(NodeServer)
        spec = NodeSpec(str(EXAMPLES / "identity"), "", OPTIONS)
        await server.__init__(spec)  # type: ignore[misc]
        await server.check_health()
        address = await server.address()
        assert address["url"].startswith("http://127.0.0.1:")
        os.kill(int(address["pid"]), signal.SIGKILL)
        async with asyncio.timeout(10):
            while True:
                try:
                    await server.check_health()
                except NotReady as error:
                    if str(error) == "the server has ended":
                        break
        ending = server.__del__()
        assert ending is not None
        await ending
        assert server.__del__() is None
        with pytest.raises(NotReady):
            await server.check_health()

    run(test)


def test_it_runs_on_the_cores_that_it_has_claimed() -> None:
    core = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    start = StartedServer(str(EXAMPLES / "identity"), OPTIONS, frozenset({core}))

    def start_in_thread() -> tuple[ServerHandle, set[int]]:
        return start(), os.sched_getaffinity(0)

    async def test() -> None:
        handle, after = await asyncio.to_thread(start_in_thread)
        # Threads of a pool are used again.
        assert after == before
        try:
            assert os.sched_getaffinity(handle.pid) == {core}
        finally:
            handle.stop()

    run(test)


def test_cores_are_claimed_if_ray_has_assigned_a_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(core_claims.CoreClaim.__init__, "__defaults__", (tmp_path,))
    monkeypatch.setattr(node_server, "usable_cores", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert claim_cores(0.5) is None
    assert claim_cores(4.0) is None
    first = claim_cores(3.0)
    assert first is not None and first.cores == {0, 1, 2}
    assert claim_cores(2.0) is None
    first.release()
    again = claim_cores(2.0)
    assert again is not None and len(again.cores) == 2
    again.release()
