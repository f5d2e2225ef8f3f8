"""The worker's end of calls: every call that is started gets an answer, whatever happens."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from waiting import wait_until

from penstock.backends.model_calls import CalledAnswer, ModelCall, find_line
from penstock.errors import InvalidRequest, NotReady, TooLarge
from penstock.processes.channel import Channel, socket_pair
from penstock.serving.call_parcels import pack
from penstock.serving.worker_calls import Route, WaitClock, WorkerCalls
from penstock.types import from_array, to_array
from penstock.wire import frames

X = from_array("x", "INT32", np.arange(4, dtype=np.int32))
CALL = ModelCall("other", "2", [X], ("y",), "id", {"n": 1})


class Shards:
    """The other ends of the sockets of `calls`, by link."""

    def __init__(self, *links: int, hang_s: float = 1e3) -> None:
        self.calls = WorkerCalls(hang_s)
        self.ends: dict[int, Channel] = {}
        for link in links:
            ours, theirs = socket_pair()
            ours.setblocking(True)
            self.ends[link] = Channel(ours)
            self.calls.attach(link, theirs.detach())

    def read(self, link: int) -> frames.WorkerCall:
        data, _ = self.ends[link].receive()
        return frames.decode_worker_call(data)

    def answer(self, link: int, call: int, value: int = 0, final: bool = True) -> None:
        packed = pack([from_array("y", "INT32", np.array([value], np.int32))])
        self.ends[link].send(frames.encode(frames.CallAnswer(call, packed.parcel, final)))

    def close(self) -> None:
        self.calls.close()
        for end in self.ends.values():
            end.close()


@pytest.fixture
def shards() -> Iterator[Shards]:
    made = Shards(1, 2)
    yield made
    made.close()


def test_a_call_goes_to_the_shard_of_its_batch_and_its_answer_comes_back(shards: Shards):
    answers: queue.Queue[CalledAnswer] = queue.Queue()
    shards.calls.begin([Route(2, 7)])
    find_line().start(CALL, answers.put)
    frame = shards.read(2)
    assert isinstance(frame, frames.CallModel)
    assert (frame.model_name, frame.model_version, frame.batch) == ("other", "2", 7)
    assert (frame.id, frame.outputs, frame.parameters) == ("id", ("y",), {"n": 1})
    shards.answer(2, frame.call, 5, final=False)
    shards.answer(2, frame.call, 6)
    found = [answers.get(timeout=60) for _ in range(2)]
    assert [int(to_array(each.outputs[0])[0]) for each in found] == [5, 6]
    assert [each.is_final for each in found] == [False, True]


def test_code_that_runs_for_no_batch_calls_through_any_shard(shards: Shards):
    find_line().start(CALL, lambda answer: None)
    assert shards.read(1).batch == 0


def test_threads_get_their_own_answers(shards: Shards):
    found: dict[int, int] = {}

    def ask(number: int) -> None:
        answers: queue.Queue[CalledAnswer] = queue.Queue()
        shards.calls.start([Route(1, 1)], ModelCall(str(number)), answers.put)
        found[number] = int(to_array(answers.get(timeout=60).outputs[0])[0])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    pending = [shards.read(1) for _ in threads]
    for frame in reversed(pending):
        shards.answer(1, frame.call, 100 + int(frame.model_name))
    for thread in threads:
        thread.join()
    assert found == {number: 100 + number for number in range(20)}


def test_the_calls_of_a_shard_that_ends_fail_and_later_ones_go_elsewhere(shards: Shards):
    answers: queue.Queue[CalledAnswer] = queue.Queue()
    routes = [Route(1, 4), Route(2, 9)]
    shards.calls.start(routes, CALL, answers.put)
    other = shards.calls.start([Route(2, 9)], CALL, lambda answer: None)
    shards.ends.pop(1).close()
    failed = answers.get(timeout=60)
    assert failed.error_kind == "BackendFailed" and "shard" in failed.error
    shards.calls.detach(1)
    shards.calls.start(routes, CALL, answers.put)
    assert shards.read(2).batch == 9 and shards.read(2).batch == 9
    other()
    # A thread that goes on after its batch finds any shard.
    shards.calls.start([Route(1, 4)], CALL, answers.put)
    assert isinstance(shards.read(2), frames.CancelCall)
    assert shards.read(2).batch == 0


def test_a_cancelled_call_delivers_nothing(shards: Shards):
    answers: queue.Queue[CalledAnswer] = queue.Queue()
    cancel = shards.calls.start([Route(1, 1)], CALL, answers.put)
    number = shards.read(1).call
    cancel()
    cancel()
    assert shards.read(1) == frames.CancelCall(number)
    shards.answer(1, number)
    shards.calls.start([Route(1, 1)], CALL, answers.put)
    shards.answer(1, shards.read(1).call, 8)
    assert int(to_array(answers.get(timeout=60).outputs[0])[0]) == 8
    assert answers.empty()


def test_closing_ends_what_is_open_and_refuses_what_comes(shards: Shards):
    answers: queue.Queue[CalledAnswer] = queue.Queue()
    shards.calls.start([Route(1, 1)], CALL, answers.put)
    shards.calls.close()
    assert answers.get(timeout=60).error_kind == "NotReady"
    with pytest.raises(NotReady, match="being closed"):
        shards.calls.start([Route(1, 1)], CALL, answers.put)


def test_a_description_that_fits_no_frame_is_refused(shards: Shards):
    with pytest.raises(TooLarge, match="too large"):
        shards.calls.start([Route(1, 1)], ModelCall("x" * (1 << 20)), lambda answer: None)


def test_an_answer_that_cannot_be_read_fails_the_calls(shards: Shards):
    answers: queue.Queue[CalledAnswer] = queue.Queue()
    shards.calls.start([Route(1, 1)], CALL, answers.put)
    shards.ends[1].send(b"\xc1")
    assert answers.get(timeout=60).error_kind == "BackendFailed"


def test_all_shards_hear_for_how_long_calls_were_open():
    shards = Shards(1, 2, hang_s=0.01)
    shards.calls.start([Route(1, 1)], CALL, lambda answer: None)
    assert isinstance(shards.read(1), frames.CallModel)
    first, second = shards.read(1), shards.read(1)
    assert isinstance(first, frames.Waited) and isinstance(second, frames.Waited)
    assert 0.001 <= first.total_s < second.total_s
    assert shards.read(2) == first
    shards.close()


def test_time_counts_once_however_many_calls_are_open():
    clock = WaitClock()
    clock.opened(1.0)
    clock.opened(2.0)
    assert clock.total_s(2.5) == 1.5
    clock.ended(3.0)
    clock.ended(4.0)
    assert clock.total_s(9.0) == 3.0
    clock.opened(10.0)
    assert clock.total_s(10.5) == 3.5


def test_without_a_call_there_is_no_thread(shards: Shards):
    before = threading.active_count()
    other = Shards(3)
    other.calls.begin([Route(3, 1)])
    assert threading.active_count() == before
    other.calls.detach(3)
    with pytest.raises(NotReady):
        other.calls.start([Route(3, 1)], CALL, lambda answer: None)
    other.close()
    shards.calls.start([Route(1, 1)], CALL, lambda answer: None)
    wait_until(lambda: threading.active_count() == before + 1)


@pytest.mark.parametrize(
    "changed",
    [
        {"parameters": {"config": {"max_batch_size": 4}}},
        {"parameters": {"n": 1 << 70}},
        {"model_version": 3},
        {"model_name": "\ud800"},
        {"outputs": (5,)},
    ],
)
def test_a_call_that_the_shard_could_not_read_is_refused(shards: Shards, changed: dict):
    """Seen: the shard dropped it, and the model waited for ever."""
    shards.calls.begin([Route(1, 7)])
    with pytest.raises(InvalidRequest, match="the call cannot be sent: "):
        find_line().start(replace(CALL, **changed), print)
    # The next one goes through.
    find_line().start(CALL, print)
    assert shards.read(1).model_name == "other"
