"""New connections go where the core steers them: real sockets, a page in memory."""

import contextlib
import errno
import logging
import socket
import time
from collections.abc import Iterator

import pytest

from penstock.protocols import acceptors
from penstock.protocols.acceptors import SILENT_S, Acceptors, steer
from penstock.protocols.line import reserve
from penstock.serving.accept_policy import GROW_S
from penstock.serving.shared_page import Heartbeat, PageLayout, SharedPage

NUM_SHARDS = 4


@contextlib.contextmanager
def group(host: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    """Listeners that share a port."""
    with contextlib.ExitStack() as stack:
        listeners, port = [], 0
        for _ in range(NUM_SHARDS):
            listeners.append(stack.enter_context(reserve(host, port)))
            port = listeners[-1].getsockname()[1]
            listeners[-1].listen(256)
            listeners[-1].setblocking(False)
        yield listeners


def connect(listeners: list[socket.socket], count: int) -> list[int]:
    """Open connections; how many each listener got."""
    address, family = listeners[0].getsockname()[:2], listeners[0].family
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.socket(family)).connect(address)
        return [num_waiting(each) for each in listeners]


def num_waiting(listener: socket.socket) -> int:
    found = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
            found += 1
    return found


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_targets_get_connections(host: str) -> None:
    with group(host) as listeners:
        for targets in ((0,), (2,), (1, 3), (0, 1, 2, 3)):
            steer(listeners[0], targets)
            counts = connect(listeners, 60)
            assert sum(counts) == 60
            # None of 60 at random to one of four: once in 10 ** 7.
            assert {number for number, count in enumerate(counts) if count} == set(targets)


class Moves:
    """The core's acceptors on a clock of the test's own, which starts now."""

    def __init__(self, listeners: list[socket.socket], accepts_all: bool = False) -> None:
        self.page = SharedPage.in_memory(PageLayout(NUM_SHARDS, 1, 1))
        self.asked: list[tuple[int, int]] = []
        self.now = time.monotonic()
        self.cpu_s = [0.0] * NUM_SHARDS
        self.acceptors = Acceptors(
            [listeners],
            self.page,
            lambda shard, count: self.asked.append((shard, count)),
            accepts_all,
        )

    def beat(self, *busy: float | None, clients: int = 0) -> None:
        """A quarter of a second in which shards are busy so far; None: nothing is heard of one."""
        self.now += 0.25
        for shard, share in enumerate(busy):
            if share is not None:
                self.cpu_s[shard] += 0.25 * share
                num_clients = clients if shard == 0 else 0
                self.page.beat(shard, Heartbeat(self.now, self.cpu_s[shard], num_clients))
        self.acceptors.tick(self.now)


def test_the_first_accepts_until_it_is_busy_and_dead_shards_never() -> None:
    with group() as listeners:
        moves = Moves(listeners)
        # No shard lives yet: connections wait with all of them.
        assert moves.acceptors.accepting == (0, 1, 2, 3)
        moves.beat(0.0, 0.0, 0.0, 0.0)
        assert connect(listeners, 20) == [20, 0, 0, 0]
        while moves.acceptors.accepting == (0,):
            moves.beat(1.0, 0.0, 0.0, 0.0, clients=40)
        assert moves.acceptors.accepting == (0, 1) and moves.asked == [(0, 20)]
        assert connect(listeners, 20) == [0, 20, 0, 0], "while clients move there"
        moves.beat(0.5, 0.5, 0.0, 0.0, clients=20)
        assert 0 not in connect(listeners, 40)[:2]
        # The core keeps its listener, so the others keep their places.
        moves.page.clear_shard(0)
        moves.beat(None, 0.5, 0.0, 0.0)
        assert moves.acceptors.accepting == (1, 2)
        counts = connect(listeners, 40)
        assert counts[0] == counts[3] == 0 and counts[1] + counts[2] == 40


def test_a_silent_shard_gets_no_connections() -> None:
    with group() as listeners:
        moves = Moves(listeners)
        moves.beat(0.0, 0.0, 0.0, 0.0)
        for _ in range(int(SILENT_S / 0.25) + 1):
            moves.beat(None, 0.0, 0.0, 0.0)
        assert connect(listeners, 20) == [0, 20, 0, 0]


def test_all_accept_if_told() -> None:
    with group() as listeners:
        moves = Moves(listeners, accepts_all=True)
        for _ in range(20):
            moves.beat(1.0, 0.0, 0.0, 0.0, clients=40)
        assert 0 not in connect(listeners, 80) and not moves.asked


def test_where_the_kernel_refuses_all_accept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(listener: socket.socket, targets: tuple[int, ...]) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(acceptors, "steer", refuse)
    with group() as listeners, caplog.at_level(logging.WARNING):
        moves = Moves(listeners)
        for _ in range(int(10 * GROW_S / 0.25)):
            moves.beat(1.0, 0.0, 0.0, 0.0, clients=40)
        assert moves.acceptors.accepting == (0, 1, 2, 3) and not moves.asked
        assert 0 not in connect(listeners, 80)
    (line,) = caplog.messages
    assert line.startswith("all shards accept connections at all rates") and "permitted" in line
