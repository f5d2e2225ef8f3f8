"""What every target of a load test must do, as tests (`penstock.benchmark.targets` states it).

A target's test class inherits `TargetContract`, and `NetworkTargetContract` instead if it talks to
a server. That one puts a `Relay` between the two, which can hold answers back, cut connections and
go away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from penstock.benchmark.exchange import TimedExchange
from penstock.benchmark.targets import Target, TargetSpec
from penstock.benchmark.targets.kinds import open_target
from penstock.data import Sample
from penstock.errors import ConfigError

TEST_TIMEOUT_S = 30.0


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """On the event loop that generators use."""

    async def limited() -> None:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await scenario

    uvloop.run(limited())


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


class Sent:
    """An exchange that was given to a target, and how often it was ended."""

    def __init__(self, target: Target, item: Any) -> None:
        self.num_ended = 0
        self._ended = asyncio.Event()
        self.exchange = TimedExchange(time.monotonic(), item, self._end)
        target.send(self.exchange)

    def _end(self, exchange: TimedExchange) -> None:
        assert exchange is self.exchange
        self.num_ended += 1
        self._ended.set()

    async def end(self) -> TimedExchange:
        await self._ended.wait()
        return self.exchange


def assert_good(exchange: TimedExchange) -> None:
    assert exchange.failure is None
    assert exchange.due <= exchange.sent <= exchange.done <= time.monotonic()


class Relay:
    """TCP in between, in the test's own event loop."""

    def __init__(self, port: int) -> None:
        self.num_accepted = 0
        self.port = 0
        self._upstream = port
        self._server: asyncio.Server | None = None
        # Connections that are being made when all are cut are cut as well.
        self._num_cuts = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()

    async def start(self) -> None:
        """Listen, on the same port as before."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def hold(self) -> None:
        """Answers wait here; requests go through."""
        self._flows.clear()

    def resume(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        self._num_cuts += 1
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def stop(self) -> None:
        """Nobody listens any more."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        num_cuts = self._num_cuts
        there = await asyncio.open_connection("127.0.0.1", self._upstream)
        if self._num_cuts > num_cuts or self._server is None:
            writer.transport.abort()
            there[1].transport.abort()
            return
        self._writers += [writer, there[1]]
        loop = asyncio.get_running_loop()
        for task in (
            loop.create_task(self._forward(reader, there[1], False)),
            loop.create_task(self._forward(there[0], writer, True)),
        ):
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_answer: bool
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                if is_answer:
                    await self._flows.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


class TargetContract:
    """`spec` gives a target that works, `sample` an input that fits it, `misfit` one that does
    not (None: everything fits)."""

    def spec(self) -> TargetSpec:
        raise NotImplementedError

    def sample(self) -> Sample:
        raise NotImplementedError

    def misfit(self) -> Sample | None:
        return None

    @asynccontextmanager
    async def opened(self, spec: TargetSpec) -> AsyncIterator[tuple[Target, Any]]:
        """A target that is described and open, and an item for it."""
        target = open_target(spec)
        try:
            await target.describe()
            await target.open(1)
            yield target, target.encode(self.sample())
        finally:
            await target.close()

    def test_describes_itself(self) -> None:
        async def scenario() -> None:
            spec = self.spec()
            target = open_target(spec)
            try:
                description, form = await target.describe()
                assert description.protocol and description.address == spec.address
                assert form.kind in ("tensors", "prompt", "messages", "fields")
                again, same_form = await target.describe()
                assert (again, same_form) == (description, form)
            finally:
                await target.close()

        run(scenario())

    def test_answers_an_exchange_once(self) -> None:
        async def scenario() -> None:
            async with self.opened(self.spec()) as (target, item):
                sent = Sent(target, item)
                assert_good(await sent.end())
                assert_good(await Sent(target, item).end())
                await asyncio.sleep(0)
                assert sent.num_ended == 1

        run(scenario())

    def test_answers_many_at_once(self) -> None:
        async def scenario() -> None:
            async with self.opened(self.spec()) as (target, item):
                sent = [Sent(target, item) for _ in range(100)]
                for each in sent:
                    assert_good(await each.end())
                assert [each.num_ended for each in sent] == [1] * 100

        run(scenario())

    def test_the_next_may_be_sent_while_one_ends(self) -> None:
        """What a closed loop does."""

        async def scenario() -> None:
            async with self.opened(self.spec()) as (target, item):
                ended: list[TimedExchange] = []
                enough = asyncio.Event()

                def finish(exchange: TimedExchange) -> None:
                    ended.append(exchange)
                    if len(ended) < 50:
                        target.send(TimedExchange(time.monotonic(), item, finish))
                    else:
                        enough.set()

                target.send(TimedExchange(time.monotonic(), item, finish))
                await enough.wait()
                for exchange in ended:
                    assert_good(exchange)

        run(scenario())

    def test_an_input_that_does_not_fit_is_refused_in_words(self) -> None:
        async def scenario() -> None:
            misfit = self.misfit()
            if misfit is None:
                return
            async with self.opened(self.spec()) as (target, _):
                with pytest.raises(ConfigError) as caught:
                    target.encode(misfit)
                assert all(caught.value.problems)

        run(scenario())

    def test_what_is_sent_after_close_is_cancelled(self) -> None:
        async def scenario() -> None:
            async with self.opened(self.spec()) as (target, item):
                await target.close()
                exchange = await Sent(target, item).end()
                assert exchange.failure == "cancelled"
                assert exchange.sent <= exchange.done

        run(scenario())

    def test_counters_count_what_was_sent(self) -> None:
        async def scenario() -> None:
            async with self.opened(self.spec()) as (target, item):
                before = await target.counters()
                for _ in range(5):
                    assert_good(await Sent(target, item).end())
                after = await target.counters()
                assert (before is None) == (after is None)
                if before is not None and after is not None:
                    assert after.num_success - before.num_success == 5
                    assert after.success_ns > before.success_ns

        run(scenario())


class NetworkTargetContract(TargetContract):
    """`port` is the server's; `spec_at` gives a target that reaches it by another port. A target
    with a fixed number of calls on each connection says so in `num_calls`."""

    num_calls = 1

    def port(self) -> int:
        raise NotImplementedError

    def spec_at(self, port: int, max_connections: int = 64) -> TargetSpec:
        raise NotImplementedError

    def spec(self) -> TargetSpec:
        return self.spec_at(self.port())

    @asynccontextmanager
    async def relayed(self) -> AsyncIterator[Relay]:
        relay = Relay(self.port())
        await relay.start()
        try:
            yield relay
        finally:
            await relay.stop()

    def test_says_that_nobody_is_there(self) -> None:
        async def scenario() -> None:
            async with self.relayed() as relay:
                await relay.stop()
                target = open_target(self.spec_at(relay.port))
                try:
                    with pytest.raises(ConfigError, match="cannot be reached"):
                        await target.describe()
                finally:
                    await target.close()

        run(scenario())

    def test_an_exchange_with_a_dead_server_fails_in_words(self) -> None:
        async def scenario() -> None:
            async with (
                self.relayed() as relay,
                self.opened(self.spec_at(relay.port)) as (target, item),
            ):
                await relay.stop()
                for _ in range(3):
                    exchange = await Sent(target, item).end()
                    assert exchange.failure
                    assert len(exchange.failure) < 200
                    assert exchange.sent <= exchange.done

        run(scenario())

    def test_close_cancels_what_is_under_way(self) -> None:
        async def scenario() -> None:
            async with (
                self.relayed() as relay,
                self.opened(self.spec_at(relay.port)) as (target, item),
            ):
                relay.hold()
                sent = [Sent(target, item) for _ in range(3)]
                await asyncio.sleep(0.01)
                await target.close()
                for each in sent:
                    exchange = await each.end()
                    assert exchange.failure == "cancelled"
                    assert exchange.sent <= exchange.done
                assert [each.num_ended for each in sent] == [1] * 3

        run(scenario())

    def test_a_lost_connection_fails_what_is_under_way_and_is_made_anew(self) -> None:
        async def scenario() -> None:
            async with (
                self.relayed() as relay,
                self.opened(self.spec_at(relay.port)) as (target, item),
            ):
                assert_good(await Sent(target, item).end())
                relay.hold()
                sent = Sent(target, item)
                await asyncio.sleep(0.01)
                relay.cut()
                assert (await sent.end()).failure
                relay.resume()
                while (exchange := await Sent(target, item).end()).failure is not None:
                    await asyncio.sleep(0.01)
                assert_good(exchange)
                assert sent.num_ended == 1
                assert relay.num_accepted >= 2

        run(scenario())

    def test_waits_its_turn_when_all_connections_are_busy(self) -> None:
        async def scenario() -> None:
            async with (
                self.relayed() as relay,
                self.opened(self.spec_at(relay.port, max_connections=1)) as (target, item),
            ):
                # Connections that only describe are not counted.
                num_accepted = relay.num_accepted
                relay.hold()
                first = [Sent(target, item) for _ in range(self.num_calls)]
                last = Sent(target, item)
                await asyncio.sleep(0.01)
                assert not any(each.num_ended for each in (*first, last))
                relay.resume()
                ended = [await each.end() for each in first]
                assert_good(await last.end())
                assert last.exchange.sent >= min(exchange.done for exchange in ended)
                assert relay.num_accepted == num_accepted

        run(scenario())
