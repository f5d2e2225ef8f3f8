"""Messages with a length in front, over sockets and asyncio streams."""

import asyncio
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.processes import framing


@given(st.lists(st.binary(max_size=200), max_size=5), st.integers(1, 50))
def test_a_stream_gives_back_what_was_framed_however_it_is_cut(
    bodies: list[bytes], num_bytes: int
) -> None:
    data = b"".join(map(framing.frame, bodies))

    async def main() -> list[bytes]:
        stream = asyncio.StreamReader()
        for begin in range(0, len(data), num_bytes):
            stream.feed_data(data[begin : begin + num_bytes])
        stream.feed_eof()
        found = []
        while (body := await framing.read(stream)) is not None:
            found.append(body)
        return found

    assert asyncio.run(main()) == bodies


def test_a_socket_gives_back_what_was_sent_and_none_at_the_end() -> None:
    ours, theirs = socket.socketpair()
    bodies = [b"", b"x", bytes(1 << 20)]

    def send_all() -> None:
        with theirs:
            for body in bodies:
                framing.send(theirs, body)

    thread = threading.Thread(target=send_all)
    thread.start()
    with ours:
        assert [framing.receive(ours) for _ in bodies] == bodies
        assert framing.receive(ours) is None
    thread.join()


@pytest.mark.parametrize("num_bytes", [0, 3, 8, 10])
def test_a_message_that_is_cut_off_is_none(num_bytes: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(framing.frame(b"three")[:num_bytes])
        theirs.close()
        assert framing.receive(ours) is None
