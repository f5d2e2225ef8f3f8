"""Closed loops keep their number under way; open loops send when due, whatever is answered."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator

import numpy as np
import pytest
from waiting import until

from penstock.benchmark import loops
from penstock.benchmark.exchange import ExchangeColumns, TimedExchange, floats
from penstock.benchmark.loops import (
    Alarm,
    ClosedLoop,
    Feed,
    InFlightCount,
    OpenLoop,
    RepeatedFeed,
    share_of,
    shared_times,
)
from penstock.benchmark.pacer import Flat, Open, due_times
from penstock.data import Origin, Sample


class Numbers:
    """A source whose samples are counted; every third example is the same one."""

    origin = Origin("numbers", is_random=False)

    def __init__(self) -> None:
        self._count = itertools.count()

    def next(self) -> tuple[int | None, Sample]:
        number = next(self._count)
        return number % 3, Sample(fields={"number": number % 3})


class Scripted:
    """A target that answers when told to."""

    def __init__(self) -> None:
        self.under_way: list[TimedExchange] = []
        self.num_sent = 0
        self.num_encoded = 0
        self.failure: str | None = None
        self.answer_after_s: float | None = None

    def encode(self, sample: Sample) -> bytes:
        self.num_encoded += 1
        return str(sample.fields["number"]).encode()

    def send(self, exchange: TimedExchange) -> None:
        exchange.sent = time.monotonic()
        self.num_sent += 1
        self.under_way.append(exchange)
        if self.answer_after_s is not None:
            asyncio.get_running_loop().call_later(self.answer_after_s, self.answer, exchange)

    def answer(self, exchange: TimedExchange) -> None:
        self.under_way.remove(exchange)
        exchange.done = time.monotonic()
        exchange.failure = self.failure
        exchange.finish(exchange)


Scenario = Callable[[], Coroutine[None, None, None]]


def run(scenario: Scenario) -> None:
    asyncio.run(scenario())


def due_of(columns: ExchangeColumns) -> list[float]:
    return floats(columns.due).tolist()


def test_items_of_examples_that_come_again_are_encoded_once() -> None:
    target = Scripted()
    feed = Feed(Numbers(), target)
    assert [feed.next() for _ in range(6)] == [b"0", b"1", b"2"] * 2
    assert target.num_encoded == 3


class Arrays:
    """A source of arrays of 100 bytes: new ones, or the same few examples again and again."""

    origin = Origin("arrays", is_random=False)

    def __init__(self, num_examples: int | None = None) -> None:
        self._count = itertools.count()
        self._num_examples = num_examples

    def next(self) -> tuple[int | None, Sample]:
        number = next(self._count) % (self._num_examples or 1_000_000)
        array = np.full(100, number % 256, np.uint8)
        index = None if self._num_examples is None else number
        return index, Sample({"x": array}, {"number": number})


@pytest.mark.parametrize(
    ("num_examples", "max_inputs", "max_bytes", "num_inputs", "num_requests"),
    [
        (None, 5, 10_000, 5, 5),
        (None, 50, 1_099, 10, 10),
        (None, 50, 10, 1, 1),
        (3, 5, 10_000, 3, loops.MAX_REPEATED),
        (30, 5, 10_000, 5, 5),
    ],
)
def test_first_requests_are_encoded_at_once_and_repeated(
    num_examples: int | None, max_inputs: int, max_bytes: int, num_inputs: int, num_requests: int
) -> None:
    target = Scripted()
    feed = RepeatedFeed(Arrays(num_examples), target, max_inputs, max_bytes)
    assert (feed.num_inputs, feed.num_bytes) == (num_inputs, 100 * num_inputs)
    assert len(feed) == num_requests
    assert target.num_encoded == num_inputs
    first = [feed.next() for _ in range(num_requests)]
    assert first[:num_inputs] == [str(number).encode() for number in range(num_inputs)]
    assert [feed.next() for _ in range(num_requests)] == first
    assert feed.next() == first[0]
    feed.restart()
    assert feed.next() == first[0]
    assert target.num_encoded == num_inputs, "nothing is encoded during the load"


def test_a_closed_loop_keeps_its_number_under_way() -> None:
    async def scenario() -> None:
        target = Scripted()
        loop = ClosedLoop(Feed(Numbers(), target), target, 5)
        loop.start(time.monotonic())
        await until(lambda: target.under_way)
        assert len(target.under_way) == 5
        for _ in range(20):
            target.answer(target.under_way[0])
            assert len(target.under_way) == 5
        assert loop.in_flight.now == loop.in_flight.most == 5
        loop.stop(time.monotonic())
        assert not loop.ended.is_set()
        while target.under_way:
            target.answer(target.under_way[0])
        assert loop.ended.is_set()
        assert target.num_sent == 25
        assert len(due_of(loop.collector.take())) == 25
        loop.close()

    run(scenario)


def test_the_first_requests_are_due_at_the_start_however_late_the_process_wakes_up() -> None:
    """A level shorter than the delay has requests all the same."""

    async def scenario() -> None:
        target = Scripted()
        loop = ClosedLoop(Feed(Numbers(), target), target, 2)
        start = time.monotonic()
        loop.start(start)
        time.sleep(0.02)  # The whole process stands still.
        loop.stop(start + 0.01)
        assert not loop.ended.is_set()
        await until(lambda: target.under_way)
        assert [each.due for each in target.under_way] == [start, start]
        while target.under_way:
            target.answer(target.under_way[0])
        assert loop.ended.is_set() and target.num_sent == 2
        loop.close()

    run(scenario)


def test_a_closed_loop_pauses_after_a_failure_and_goes_on() -> None:
    async def scenario() -> None:
        target = Scripted()
        loop = ClosedLoop(Feed(Numbers(), target), target, 1)
        loop.start(time.monotonic())
        await until(lambda: target.under_way)
        target.failure = "connection lost"
        target.answer(target.under_way[0])
        assert target.under_way == []
        await until(lambda: len(target.under_way) == 1)
        target.failure = None
        loop.stop(time.monotonic())
        target.answer(target.under_way[0])
        assert loop.ended.is_set()
        loop.close()

    run(scenario)


def test_a_closed_loop_that_is_stopped_while_it_pauses_ends() -> None:
    async def scenario() -> None:
        target = Scripted()
        target.failure = "connection refused"
        loop = ClosedLoop(Feed(Numbers(), target), target, 1)
        loop.start(time.monotonic())
        await until(lambda: target.under_way)
        target.answer(target.under_way[0])
        loop.stop(time.monotonic())
        await until(loop.ended.is_set)
        assert target.num_sent == 1
        loop.close()

    run(scenario)


def test_the_number_under_way_is_summed_over_time() -> None:
    """One for 4 seconds, another for 2 of them: 6 request-seconds."""
    zero = time.monotonic()
    in_flight = InFlightCount()
    in_flight.begin(zero + 1)
    in_flight.begin(zero + 3)
    assert in_flight.area_s(zero + 4) == pytest.approx(4.0)
    in_flight.end(zero + 5)
    in_flight.end(zero + 5)
    assert in_flight.area_s(zero + 9) == pytest.approx(6.0)
    assert (in_flight.now, in_flight.most) == (0, 2)


def test_an_open_loop_does_not_wait_for_answers() -> None:
    async def scenario() -> None:
        target = Scripted()
        loop = OpenLoop(Feed(Numbers(), target), target, iter([0.0, 0.01, 0.02, 0.03]))
        start = time.monotonic()
        loop.start(start)
        await until(lambda: loop.is_through)
        assert len(target.under_way) == 4
        assert not loop.ended.is_set()
        assert [each.due - start for each in target.under_way] == pytest.approx(
            [0.0, 0.01, 0.02, 0.03]
        )
        assert all(each.sent >= each.due for each in target.under_way)
        while target.under_way:
            target.answer(target.under_way[0])
        assert loop.ended.is_set()
        loop.close()

    run(scenario)


def test_a_stalled_generator_sends_late_and_says_when_it_was_due() -> None:
    """The stall is in the latency: due times do not move."""

    async def scenario() -> None:
        target = Scripted()
        loop = OpenLoop(Feed(Numbers(), target), target, iter([0.0, 0.01, 0.02]))
        start = time.monotonic()
        loop.start(start)
        time.sleep(0.1)  # The whole process stands still.
        await until(lambda: len(target.under_way) == 3)
        assert [each.due - start for each in target.under_way] == pytest.approx([0.0, 0.01, 0.02])
        assert all(each.sent - start >= 0.1 for each in target.under_way)
        loop.close()

    run(scenario)


def test_nothing_is_sent_that_is_due_after_the_stop() -> None:
    async def scenario() -> None:
        def endless() -> Iterator[float]:
            yield from itertools.count(0.0, 0.01)

        target = Scripted()
        target.answer_after_s = 0.001
        loop = OpenLoop(Feed(Numbers(), target), target, endless())
        start = time.monotonic()
        loop.start(start)
        loop.stop(start + 0.045)
        await until(loop.ended.is_set)
        due = due_of(loop.collector.take())
        assert [each - start for each in due] == pytest.approx([0.0, 0.01, 0.02, 0.03, 0.04])
        assert not loop.is_through
        loop.close()

    run(scenario)


def test_an_open_loop_without_requests_ends_at_once() -> None:
    async def scenario() -> None:
        target = Scripted()
        loop = OpenLoop(Feed(Numbers(), target), target, iter([]))
        loop.start(time.monotonic())
        assert loop.ended.is_set() and loop.is_through
        loop.close()

    run(scenario)


@pytest.mark.parametrize(("concurrency", "num_processes"), [(1, 1), (7, 3), (2, 4), (64, 2)])
def test_shares_add_up(concurrency: int, num_processes: int) -> None:
    shares = [share_of(concurrency, index, num_processes) for index in range(num_processes)]
    assert sum(shares) == concurrency
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("num_processes", [1, 2, 3, 5])
def test_the_processes_together_send_the_whole_schedule(num_processes: int) -> None:
    load = Open(Flat(1000.0), "gamma", 3.0)
    whole = np.concatenate(list(itertools.islice(due_times(load, 5), 4)))
    taken: list[float] = []
    for index in range(num_processes):
        share = shared_times(load, 5, index, num_processes)
        taken += itertools.takewhile(lambda due: due <= whole[-1], share)
    assert sorted(taken) == whole.tolist()


def test_a_server_that_is_far_behind_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held back leaves as soon as there is room, and counts from when it was due."""
    monkeypatch.setattr(loops, "MAX_UNDER_WAY", 3)

    async def scenario() -> None:
        target = Scripted()
        loop = OpenLoop(Feed(Numbers(), target), target, iter([0.0] * 5 + [0.01] * 3))
        start = time.monotonic()
        loop.start(start)
        await asyncio.sleep(0.05)
        await until(lambda: len(target.under_way) == 3)
        for num_answered in range(1, 9):
            target.answer(target.under_way[0])
            await asyncio.sleep(0.01)
            expected = min(3, 8 - num_answered)
            await until(lambda expected=expected: len(target.under_way) == expected)
        await until(loop.ended.is_set)
        due = [each - start for each in due_of(loop.collector.take())]
        assert due == pytest.approx([0.0] * 5 + [0.01] * 3, abs=1e-6)
        loop.close()

    run(scenario)


def test_large_requests_are_held_back_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "MAX_BYTES_UNDER_WAY", 4)

    async def scenario() -> None:
        target = Scripted()
        loop = OpenLoop(Feed(Numbers(), target), target, iter([0.0] * 9))  # One byte each.
        loop.start(time.monotonic())
        await asyncio.sleep(0.05)
        await until(lambda: len(target.under_way) == 5)
        loop.close()

    run(scenario)


def test_what_never_left_is_given_up_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "MAX_UNDER_WAY", 2)
    monkeypatch.setattr(loops, "MAX_GIVEN_UP", 4)

    async def scenario() -> None:
        target = Scripted()
        loop = OpenLoop(Feed(Numbers(), target), target, itertools.count(0.0, 0.001))
        start = time.monotonic()
        loop.start(start)
        await until(lambda: len(target.under_way) == 2)
        loop.stop(start + 0.0095)  # Ten were due, two have left.
        assert [loop.give_up() for _ in range(3)] == [False, True, True]
        assert not loop.ended.is_set()
        target.failure = "cancelled"
        while target.under_way:
            target.answer(target.under_way[0])
        assert loop.ended.is_set()
        assert target.num_sent == 2
        columns = loop.collector.take()
        assert (len(columns.failed), columns.failures) == (10, ["cancelled"])
        assert sorted(each - start for each in due_of(columns)) == pytest.approx(
            [index / 1000 for index in range(10)], abs=1e-6
        )
        assert np.count_nonzero(floats(columns.sent)) == 2
        loop.close()

    run(scenario)


# Alarms


def ring_times(*delays_s: float, wait_s: float = 0.2, cancels: bool = False) -> list[float]:
    """When it rang, in seconds from the start, after being set to each delay in turn."""

    async def scenario() -> list[float]:
        began = time.monotonic()
        rung: list[float] = []
        alarm = Alarm(asyncio.get_running_loop(), lambda: rung.append(time.monotonic() - began))
        for delay_s in delays_s:
            alarm.set(began + delay_s)
        if cancels:
            alarm.cancel()
        await asyncio.sleep(wait_s)
        alarm.close()
        return rung

    return asyncio.run(scenario())


def test_it_rings_once_and_not_early() -> None:
    (rung,) = ring_times(0.0305)
    assert rung >= 0.0305


def test_the_last_setting_counts() -> None:
    (rung,) = ring_times(0.01, 0.1)
    assert rung >= 0.1


def test_a_moment_that_has_passed_rings_at_once() -> None:
    assert len(ring_times(-5.0)) == 1


def test_a_cancelled_alarm_is_silent() -> None:
    assert ring_times(0.01, cancels=True) == []


def test_closing_twice_does_nothing() -> None:
    async def scenario() -> None:
        alarm = Alarm(asyncio.get_running_loop(), lambda: None)
        alarm.close()
        alarm.close()

    asyncio.run(scenario())
