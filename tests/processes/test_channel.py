"""Datagrams to a child: in order, with descriptors, also while the socket is full."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

import pytest

from penstock.processes.channel import Datagrams, socket_pair

NAME = "waits-in-a-channel"


def num_copies() -> int:
    """Descriptors of the file that are open in this process; others' come and go."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(NAME in link for link in links)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("is_read", [True, False])
def test_descriptors_of_frames_that_wait_are_kept_until_they_leave(is_read: bool) -> None:
    async def main() -> None:
        ours, theirs = socket_pair()
        with ours, theirs:
            loop = asyncio.get_running_loop()
            sender = Datagrams(loop, ours, lambda data: None, lambda: None)
            num_sent = 0
            while not sender.num_waiting:
                sender.send(b"filler" * 10_000)
                num_sent += 1
            fd = os.memfd_create(NAME)
            os.write(fd, b"text")
            sender.send(b"last", (fd,))
            os.close(fd)
            assert num_copies() == 1
            if is_read:
                for _ in range(num_sent - 1):
                    theirs.recv(1 << 20)
                await until(lambda: not sender.num_waiting)
                theirs.recv(1 << 20)
                _, fds, _, _ = socket.recv_fds(theirs, 100, 1)
                assert os.pread(fds[0], 4, 0) == b"text"
                os.close(fds[0])
            sender.close()

    asyncio.run(main())
    assert num_copies() == 0
