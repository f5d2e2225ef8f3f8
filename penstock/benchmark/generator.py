"""A generator process: sends the load that the conductor asks for and reports the outcomes.

Started as `python -m penstock.benchmark.generator`. Questions arrive on stdin, answers leave on the
original stdout; the process exits when stdin closes. The conductor decides when to stop and what
counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, assert_never

import uvloop
from msgspec import structs

from penstock import units
from penstock.benchmark import messages
from penstock.benchmark.exchange import TimedExchange
from penstock.benchmark.loops import (
    ClosedLoop,
    Feed,
    OpenLoop,
    RepeatedFeed,
    share_of,
    shared_times,
)
from penstock.benchmark.pacer import Closed, Replay
from penstock.benchmark.results import ColdStart
from penstock.benchmark.targets.kinds import open_target
from penstock.data import Origin, RequestForm, open_source
from penstock.errors import ConfigError, PenstockError
from penstock.processes import framing
from penstock.system import garbage
from penstock.system.file_limit import raise_file_limit

REPORT_S = 0.1
# Open loops start with this many connections and open more on demand.
NUM_OPEN_AT_FIRST = 16
# Limits of shared memory, of all generators together. The server keeps 1,024 forms of requests, and
# requests that differ in a place differ in form: so it knows them all, as those of a client that
# uses a few places again and again.
MAX_SHARED_INPUTS = 512
MAX_SHARED_BYTES = 1 << 30


class Generator:
    """Answers the conductor's questions; `tell` sends it an answer."""

    def __init__(self, setup: messages.SetUp, tell: Callable[[messages.Answer], None]) -> None:
        self._setup = setup
        self._tell = tell
        self._target = open_target(setup.target)
        self._form: RequestForm
        self._feed: Feed | RepeatedFeed
        self._running: ClosedLoop | OpenLoop | None = None
        self._report: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._give_up_at = 0.0
        self._num_waited_before = 0

    async def answer(self, question: messages.Question) -> None:
        match question:
            case messages.SetUp():
                await self._open()
            case messages.PrepareLoad():
                await self._prepare(question)
            case messages.Go():
                assert self._running is not None
                self._running.start(question.start)
                self._plan_report()
            case messages.StopLoad():
                assert self._running is not None
                self._give_up_at = max(question.at, time.monotonic()) + question.patience_s
                if self._ending is None:
                    self._running.stop(question.at)
                    self._ending = asyncio.ensure_future(self._end())
                    # A failure reaches the loop's exception handler: no one awaits this task.
                    self._ending.add_done_callback(lambda task: task.cancelled() or task.result())
            case messages.Count():
                self._tell(messages.Counted(await self._target.counters()))
            case _:
                assert_never(question)

    async def close(self) -> None:
        if self._report is not None:
            self._report.cancel()
        if self._running is not None:
            self._running.close()
        await self._target.close()

    async def _open(self) -> None:
        description, self._form = await self._target.describe()
        origin = self._open_feed()
        # Some targets connect in `describe`, and in-process models never.
        is_connected = self._target.num_connections > 0
        began = time.monotonic()
        await self._target.open(1)
        connect_s = None if is_connected else time.monotonic() - began
        cold_start = ColdStart(connect_s=connect_s, load_s=self._target.load_s)
        opened = messages.TargetOpened(description, origin, cold_start)
        if self._setup.is_first:
            first = await self._ask_once()
            cold_start.first_s = first.done - first.sent
            opened.first_failure = first.failure or ""
        self._tell(opened)

    def _open_feed(self) -> Origin:
        """Open the inputs, starting at the first one."""
        setup = self._setup
        source = open_source(setup.inputs, self._form, setup.index, setup.num_processes)
        if not setup.target.shared_memory:
            self._feed = Feed(source, self._target)
            return source.origin
        number = setup.num_processes
        limits = max(1, MAX_SHARED_INPUTS // number), MAX_SHARED_BYTES // number
        feed = self._feed = RepeatedFeed(source, self._target, *limits)
        inputs = f"{units.count(feed.num_inputs, 'input')} ({units.size(feed.num_bytes)})"
        text = f"each process has {inputs} in shared memory and repeats its first {len(feed):,}"
        return structs.replace(source.origin, text=f"{source.origin.text}; {text} requests")

    async def _ask_once(self) -> TimedExchange:
        answered: asyncio.Future[TimedExchange] = asyncio.get_running_loop().create_future()
        exchange = TimedExchange(0.0, self._feed.next(), answered.set_result)
        exchange.due = time.monotonic()
        self._target.send(exchange)
        return await answered

    async def _prepare(self, question: messages.PrepareLoad) -> None:
        load, place = question.load, (self._setup.index, self._setup.num_processes)
        if self._running is not None:
            self._running.close()
        if isinstance(load, Replay):
            # A trace always starts with its own first request.
            if isinstance(self._feed, RepeatedFeed):
                self._feed.restart()
            else:
                self._open_feed()
        if isinstance(load, Closed):
            share = share_of(load.concurrency, *place)
            await self._target.open(share)
            self._running = ClosedLoop(self._feed, self._target, share)
        else:
            await self._target.open(NUM_OPEN_AT_FIRST)
            due = shared_times(load, question.seed, *place)
            self._running = OpenLoop(self._feed, self._target, due)
        self._ending = None
        self._num_waited_before = self._target.num_waited
        # Lost connections of the load before are freed, so they do not pile up.
        garbage.freeze()
        self._tell(messages.LoadPrepared())

    async def _end(self) -> None:
        """Wait for the requests in flight until `_give_up_at`, then cancel them."""
        assert self._running is not None
        ended = self._running.ended
        while not ended.is_set() and (left_s := self._give_up_at - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, REPORT_S)):
                    await ended.wait()
        if not ended.is_set():
            while not self._running.give_up():
                await asyncio.sleep(0)
            await self._target.cancel()
            await ended.wait()
        if self._report is not None:
            self._report.cancel()
        self._tell_progress()
        self._running.close()
        self._tell(messages.Ended(self._running.is_through))

    def _plan_report(self) -> None:
        self._report = asyncio.get_running_loop().call_later(REPORT_S, self._make_report)

    def _make_report(self) -> None:
        self._tell_progress()
        self._plan_report()

    def _tell_progress(self) -> None:
        assert self._running is not None
        in_flight, now = self._running.in_flight, time.monotonic()
        report = messages.GeneratorReport(
            at=now,
            columns=self._running.collector.take(),
            in_flight=in_flight.now,
            max_in_flight=in_flight.most,
            in_flight_area_s=in_flight.area_s(now),
            num_connections=self._target.num_connections,
            num_waited=self._target.num_waited - self._num_waited_before,
            cpu_s=time.thread_time(),
        )
        self._tell(report)


async def run(questions: asyncio.StreamReader, tell: Callable[[messages.Answer], None]) -> None:
    """Answer questions until the conductor disconnects or a failure occurs."""
    failures: list[BaseException] = []

    def fail(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        failures.append(context.get("exception") or RuntimeError(context["message"]))
        serving.cancel()

    asyncio.get_running_loop().set_exception_handler(fail)
    serving = asyncio.ensure_future(_serve(questions, tell))
    try:
        await asyncio.wait({serving})
        if failures:
            raise failures[0]
        serving.result()
    except PenstockError as error:
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        tell(messages.Broken(list(problems)))
    if failures and not serving.cancelled():
        serving.result()  # Closing failed, too.


async def _serve(questions: asyncio.StreamReader, tell: Callable[[messages.Answer], None]) -> None:
    generator = None
    try:
        while (body := await framing.read(questions)) is not None:
            question = messages.decode_question(body)
            if generator is None:
                assert isinstance(question, messages.SetUp), question
                generator = Generator(question, tell)
            await generator.answer(question)
    finally:
        if generator is not None:
            await generator.close()


async def _main(out: int) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    # A non-blocking write: a conductor that reads slowly must not delay the load.
    pipe = os.fdopen(out, "wb", 0)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, pipe)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    await run(reader, lambda answer: writer.write(framing.frame(messages.encode(answer))))
    with contextlib.suppress(ConnectionError):  # The conductor was killed.
        await writer.drain()
    writer.close()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The conductor decides when to stop.
    raise_file_limit()
    out = os.dup(1)
    os.dup2(2, 1)  # A model's prints must not mix with the answers.
    uvloop.run(_main(out))


if __name__ == "__main__":
    main()
