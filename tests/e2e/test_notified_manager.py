"""A real server tells the service manager that started it when it is ready, alive and stopping."""

import os
import socket
from pathlib import Path

import pytest
from served import Served, null_model


def receive(manager: socket.socket) -> list[bytes]:
    """The next message's states: those that did not fit into a full socket come together."""
    return manager.recv(1000).split(b"\n")


@pytest.mark.parametrize("shards", ["1", "2"])
def test_ready_alive_and_stopping_are_told(tmp_path: Path, shards: str) -> None:
    root = null_model(tmp_path / "models", "model", a_ms=1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        served = Served(root, "--shards", shards, environment=environment)
        # While models load, only signs of life come.
        told = receive(manager)
        while b"READY=1" not in told:
            told += receive(manager)
        assert set(told) - {b"READY=1"} <= {b"WATCHDOG=1"}
        assert served.status("/v2/health/ready") == 200
        assert set(receive(manager)) == {b"WATCHDOG=1"}
        log = os.dup(served.errors.fileno())
        assert served.terminate() == 0
        rest: list[bytes] = []
        manager.setblocking(False)
        while b"STOPPING=1" not in rest:
            rest += receive(manager)
    with open(log) as file:
        file.seek(0)
        assert "WARNING" not in file.read()
