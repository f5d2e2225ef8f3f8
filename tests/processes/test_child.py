"""A child's frames and its death, with the other end of the socket in this process."""

import asyncio
import gc
import weakref

from penstock.processes.channel import socket_pair
from penstock.processes.child import ChildProcess


class MadeLife:
    """A life that ends when the test ends it, or when it is killed."""

    pid = 0
    was_killed_outside = False

    def __init__(self, loop, on_death):
        self.sock, self.theirs = socket_pair()
        self._loop, self._on_death = loop, on_death
        self.was_closed = False

    def kill(self):
        self.end("was killed")

    def end(self, reason):
        self.theirs.close()
        self._loop.call_soon(self._on_death, reason)

    def socket_closed(self):
        self.was_closed = True

    def has_room_for_another(self):
        return False


class Events:
    """All that a child says, in order."""

    def __init__(self, answers=()):
        self.all = []
        self._answers = answers

    def received(self, data):
        self.all.append(bytes(data))
        return bytes(data) in self._answers

    def died(self, reason):
        self.all.append(reason)

    def start(self):
        return ChildProcess(asyncio.get_running_loop(), MadeLife, self.received, self.died)


def test_frames_go_both_ways():
    async def main():
        events = Events()
        child = events.start()
        child.send(b"to it")
        assert child.life.theirs.recv(100) == b"to it"
        child.life.theirs.send(b"from it")
        while not events.all:
            await asyncio.sleep(0)
        assert events.all == [b"from it"]
        child.life.kill()
        await child.wait(60)

    asyncio.run(main())


def test_frames_sent_before_the_death_come_before_it():
    async def main():
        events = Events(answers={b"1", b"2"})
        child = events.start()
        for frame in (b"1", b"2", b"3"):
            child.life.theirs.send(frame)
        child.life.end("exited with status 3")
        await child.wait(60)
        assert events.all == [b"1", b"2", b"3", "exited with status 3"]

    asyncio.run(main())


def test_after_an_answer_the_next_frame_waits_for_the_next_turn():
    async def main():
        events = Events(answers={b"answer"})
        child = events.start()
        child.life.theirs.send(b"answer")
        child.life.theirs.send(b"next")
        child.read()
        assert events.all == [b"answer"]
        child.read()
        assert events.all == [b"answer", b"next"]
        child.life.kill()
        await child.wait(60)

    asyncio.run(main())


def test_a_frame_that_cannot_be_handled_does_not_hide_the_death(caplog):
    class Confused(Events):
        def received(self, data):
            raise ValueError("what is this?")

    async def main():
        events = Confused()
        child = events.start()
        life = child.life
        life.theirs.send(b"?")
        life.end("ended")
        await child.wait(60)
        assert events.all == ["ended"]

    asyncio.run(main())
    assert "what is this?" in caplog.text


def test_a_closed_socket_is_told_to_the_life():
    async def main():
        child = Events().start()
        life = child.life
        life.theirs.close()
        while not life.was_closed:
            await asyncio.sleep(0)
        life.kill()
        await child.wait(60)

    asyncio.run(main())


def test_one_that_does_not_stop_in_time_is_killed():
    async def main():
        events = Events()
        await events.start().wait(0)
        assert events.all == ["was killed"]

    asyncio.run(main())


def test_a_dead_child_is_freed_without_the_garbage_collector():
    async def main():
        child = Events().start()
        child.life.kill()
        await child.wait(60)
        freed = weakref.ref(child)
        del child
        await asyncio.sleep(0)
        assert freed() is None

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
