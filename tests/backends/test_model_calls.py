"""Calls of a model's code, with a line that answers as told."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from penstock.backends import model_calls
from penstock.backends.model_calls import (
    AwaitedAnswers,
    CalledAnswer,
    CalledAnswers,
    Deliver,
    ModelCall,
    find_line,
)
from penstock.errors import NotReady


class FakeLine:
    """Answers each call with its number of answers."""

    def __init__(self, count: int = 1) -> None:
        self._count = count
        self.num_cancelled = 0
        self.deliver: Deliver

    def start(self, call: ModelCall, deliver: Deliver) -> Callable[[], None]:
        self.deliver = deliver
        for number in range(self._count):
            deliver(CalledAnswer(error=str(number), is_final=number == self._count - 1))
        return self.cancel

    def cancel(self) -> None:
        self.num_cancelled += 1


def test_a_thread_finds_its_own_line_and_others_the_last_one():
    found: list[object] = []
    ours, theirs = FakeLine(), FakeLine()
    model_calls.use(ours)

    def other() -> None:
        found.append(find_line())
        model_calls.use(theirs)
        found.append(find_line())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [ours, theirs] and find_line() is ours


def test_answers_come_in_order_until_the_final_one():
    line = FakeLine(3)
    model_calls.use(line)
    answers = CalledAnswers(ModelCall("m"))
    assert [each.error for each in answers] == ["0", "1", "2"] and list(answers) == []
    answers.close()

    async def wait() -> list[str]:
        awaited = AwaitedAnswers(ModelCall("m"))
        found = [each.error async for each in awaited]
        awaited.close()
        return found + [each.error async for each in awaited]

    assert asyncio.run(wait()) == ["0", "1", "2"]
    assert line.num_cancelled == 0


def test_what_is_closed_early_is_cancelled_once():
    line = FakeLine(0)
    model_calls.use(line)
    answers = CalledAnswers(ModelCall("m"))
    answers.close()
    answers.close()
    assert (line.num_cancelled, list(answers)) == (1, [])

    async def wait() -> None:
        awaited = AwaitedAnswers(ModelCall("m"))
        awaited.close()
        awaited.close()

    asyncio.run(wait())
    assert line.num_cancelled == 2
    # Its loop is gone; an answer that comes now is dropped.
    line.deliver(CalledAnswer())


def test_tasks_inherit_the_line_of_their_batch():
    line = FakeLine()
    model_calls.use(line)

    async def task() -> object:
        await asyncio.sleep(0)
        return find_line()

    async def two() -> list[object]:
        return list(await asyncio.gather(task(), task()))

    assert asyncio.run(two()) == [line, line]


def test_without_a_line_the_error_says_where_calls_are_possible():
    model_calls.use(None)
    with pytest.raises(NotReady, match="penstock serve"):
        find_line()
