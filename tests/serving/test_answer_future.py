"""A future that makes its condition late behaves as one of `concurrent.futures`."""

import asyncio
import threading
import weakref
from concurrent import futures

import numpy as np
import pytest

from penstock.errors import BackendFailed, Unsupported
from penstock.serving.answer_future import AnswerFuture
from penstock.types import Request, Response


class Cancels:
    """Counts the requests that are cancelled."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __call__(self, request: Request) -> None:
        self.requests.append(request)


def make(cancels: Cancels | None = None) -> AnswerFuture:
    future = AnswerFuture(cancels or Cancels())
    future.request = Request(future, (), 0.0)
    return future


def answer(future: AnswerFuture, number: int = 1) -> None:
    arrays = {"y": np.full((1, 2), number, np.float32)}
    future.request.respond(Response("model", "1", (), arrays=arrays))


def number_of(future: AnswerFuture) -> float:
    return float(future.result(timeout=60)["y"][0, 0])


def test_an_answer_before_anybody_waits() -> None:
    future = make()
    assert not future.done() and not future.cancelled() and not future.running()
    answer(future, 7)
    assert future.done() and not future.cancelled()
    assert number_of(future) == 7 and future.exception() is None
    assert "finished" in repr(future)


def test_who_waits_first_is_woken() -> None:
    future = make()
    timer = threading.Timer(0.05, answer, [future, 3])
    timer.start()
    assert number_of(future) == 3
    timer.join()


def test_waiting_has_a_limit() -> None:
    future = make()
    with pytest.raises(futures.TimeoutError):
        future.result(timeout=0)
    answer(future, 2)
    assert number_of(future) == 2


def test_an_error_is_raised_each_time() -> None:
    future = make()
    future.request.respond(BackendFailed("broken"))
    for _ in range(2):
        with pytest.raises(BackendFailed, match="broken"):
            future.result(timeout=0)
    assert isinstance(future.exception(), BackendFailed) and future.done()


@pytest.mark.parametrize("is_late", [False, True])
def test_callbacks_run_once(is_late: bool) -> None:
    future, called = make(), []
    if is_late:
        answer(future)
    future.add_done_callback(called.append)
    if not is_late:
        assert called == []
        answer(future)
    assert called == [future]


def test_a_cancelled_request_has_no_answer() -> None:
    cancels = Cancels()
    future, called = make(cancels), []
    future.add_done_callback(called.append)
    assert future.cancel() and future.cancelled() and future.done()
    assert cancels.requests[0] is future.request and called == [future]
    answer(future)
    with pytest.raises(futures.CancelledError):
        future.result(timeout=0)


def test_an_answered_request_cannot_be_cancelled() -> None:
    cancels = Cancels()
    future = make(cancels)
    answer(future, 5)
    assert not future.cancel() and cancels.requests == []
    assert number_of(future) == 5


def test_wait_and_as_completed_take_it() -> None:
    some = [make() for _ in range(4)]
    answer(some[0], 0)
    done, left = futures.wait(some, timeout=0, return_when=futures.FIRST_COMPLETED)
    assert done == {some[0]} and len(left) == 3
    timers = [threading.Timer(0.02, answer, [each, n]) for n, each in enumerate(some) if n]
    for timer in timers:
        timer.start()
    assert sorted(number_of(each) for each in futures.as_completed(some, timeout=60)) == [
        0,
        1,
        2,
        3,
    ]
    assert futures.wait(some, timeout=60).not_done == set()


def test_an_event_loop_can_await_it_and_cancel_it() -> None:
    cancels = Cancels()

    async def use() -> float:
        first, second = make(), make(cancels)
        threading.Timer(0.02, answer, [first, 9]).start()
        value = float((await asyncio.wrap_future(first))["y"][0, 0])
        waiting = asyncio.wrap_future(second)
        waiting.cancel()
        await asyncio.sleep(0)
        assert second.cancelled()
        return value

    assert asyncio.run(use()) == 9
    assert len(cancels.requests) == 1


@pytest.mark.parametrize("use", ["result", "wait", "callback", "cancel"])
def test_whoever_comes_while_it_is_answered_sees_the_answer(use: str) -> None:
    """Races of an answer with the making of the condition."""
    some = [make() for _ in range(2000)]
    called: list[futures.Future] = []
    begin = threading.Barrier(2)

    def answer_all() -> None:
        begin.wait()
        for number, future in enumerate(some):
            answer(future, number)

    thread = threading.Thread(target=answer_all)
    thread.start()
    begin.wait()
    num_cancelled = 0
    if use == "wait":
        assert futures.wait(some, timeout=60).not_done == set()
    for future in some:
        if use == "callback":
            future.add_done_callback(called.append)
        elif use == "cancel":
            num_cancelled += future.cancel()
        else:
            future.result(timeout=60)
    thread.join()
    assert len(called) == (len(some) if use == "callback" else 0)
    assert sum(future.cancelled() for future in some) == num_cancelled
    for number, future in enumerate(some):
        if not future.cancelled():
            assert number_of(future) == number


@pytest.mark.parametrize("is_error", [False, True])
def test_what_is_answered_is_freed_without_the_garbage_collector(is_error: bool) -> None:
    future = make()
    assert future.request is not None
    gone = weakref.ref(future)
    request = future.request
    if is_error:
        request.respond(BackendFailed("it broke"))
    else:
        answer(future)
    del future, request
    assert gone() is None


def test_the_thread_that_answers_must_not_wait() -> None:
    future = AnswerFuture(Cancels(), threading.get_ident())
    future.request = Request(future, (), 0.0)
    for wait in (future.result, future.exception):
        with pytest.raises(Unsupported, match="blocks the thread that answers"):
            wait()
        with pytest.raises(futures.TimeoutError):
            wait(timeout=0)
    answer(future, 4)
    assert number_of(future) == 4 and future.exception() is None
