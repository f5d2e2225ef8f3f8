"""systemd's protocol, with a real socket in the place of systemd."""

import socket
from pathlib import Path

import pytest

from penstock.system.service_manager import ALIVE, READY, SOCKET, ServiceManager


@pytest.mark.parametrize("is_abstract", [False, True])
def test_states_arrive(tmp_path: Path, is_abstract: bool) -> None:
    name = f"@{tmp_path.name}-notify" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0") if is_abstract else name)
        told = ServiceManager({SOCKET: name})
        told.tell(READY)
        told.tell(ALIVE)
        told.close()
        told.tell(ALIVE)
        assert [manager.recv(100), manager.recv(100)] == [b"READY=1", b"WATCHDOG=1"]
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.recv(100)


@pytest.mark.parametrize("environment", [{}, {SOCKET: ""}, {SOCKET: "/no/such/socket"}])
def test_without_a_manager_nothing_happens(environment: dict[str, str]) -> None:
    told = ServiceManager(environment)
    told.tell(READY)
    told.close()


def test_a_manager_that_is_busy_hears_it_later(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                while True:
                    other.sendto(b"other", str(tmp_path / "notify"))
        told = ServiceManager({SOCKET: str(tmp_path / "notify")})
        told.tell(ALIVE)
        told.tell(READY)
        with pytest.raises(BlockingIOError):
            while manager.recv(100) == b"other":
                pass
        told.tell(ALIVE)
        assert manager.recv(100) == b"READY=1\nWATCHDOG=1"
        told.tell(ALIVE)
        assert manager.recv(100) == b"WATCHDOG=1"
        told.close()


def test_a_manager_that_does_not_read_holds_nothing_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        told = ServiceManager({SOCKET: str(tmp_path / "notify")})
        for _ in range(10_000):
            told.tell(ALIVE)
        told.close()
