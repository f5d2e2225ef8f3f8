"""A real server tells the service manager that started it when it is ready, alive and stopping."""

import os
import socket
from pathlib import Path

import pytest
from served import Served, null_model


@pytest.mark.parametrize("shards", ["1", "2"])
def test_ready_alive_and_stopping_are_told(tmp_path: Path, shards: str) -> None:
    root = null_model(tmp_path / "models", "model", a_ms=1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        served = Served(root, "--shards", shards, environment=environment)
        told = [manager.recv(100)]
        while told[-1] != b"READY=1":
            told.append(manager.recv(100))
        # While models load, only signs of life come.
        assert set(told[:-1]) <= {b"WATCHDOG=1"}
        assert served.status("/v2/health/ready") == 200
        assert manager.recv(100) == b"WATCHDOG=1"
        log = os.dup(served.errors.fileno())
        assert served.terminate() == 0
        rest = []
        manager.setblocking(False)
        while b"STOPPING=1" not in rest:
            rest.append(manager.recv(100))
    with open(log) as file:
        file.seek(0)
        assert "WARNING" not in file.read()
