"""Responses of a decoupled model, from its worker to a shard on strings."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from decoupled import DECOUPLED, Told, values
from shard_doubles import SPILL_BYTES, FakeShard, WorkerAlone
from waiting import wait_until

from penstock.errors import BackendFailed
from penstock.serving import worker_load
from penstock.types import Tensor, to_array
from penstock.wire import frames


class Shard:
    """A fake shard that keeps what the worker has told it."""

    def __init__(self, fake: FakeShard) -> None:
        self.fake = fake
        self.told: list[frames.Responded] = []
        self.num_done = 0

    def ask(self, *arrays: np.ndarray) -> None:
        """Send a batch, and wait until the model has it."""
        expected = self.num_done + 1
        self.fake.spill(arrays)
        wait_until(lambda: self.read().num_done == expected)

    def read(self) -> "Shard":
        for frame in self.fake.receive():
            if isinstance(frame, frames.Responded):
                self.told.append(frame)
            else:
                assert isinstance(frame, frames.Done), frame
                self.num_done += 1
        return self

    def wait(self, number: int) -> list[frames.Responded]:
        """Wait for so many responses in all."""
        wait_until(lambda: len(self.read().told) >= number)
        return self.told

    def outputs(self, frame: frames.Responded) -> dict[str, list[object]]:
        view = self.fake.spills[1].view
        return {
            each.name: to_array(
                Tensor(
                    each.name,
                    each.datatype,
                    each.shape,
                    view[each.offset : each.offset + each.nbytes],
                )
            ).tolist()
            for each in frame.outputs
        }


@pytest.fixture
def shard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shard]:
    monkeypatch.setattr(worker_load, "backend", lambda name: Told)
    Told.seen = []
    worker = WorkerAlone(DECOUPLED, in_thread=True)
    yield Shard(worker.attach())
    Told.seen = []
    worker.close()


ROW = np.array([[1, 2]], np.int64)


def test_a_batch_is_done_before_its_responses_which_leave_one_by_one(shard):
    shard.ask(ROW, ROW + 10)
    assert not shard.told
    (first, to_first), (second, to_second) = Told.seen
    assert (first.tolist(), second.tolist()) == ([[1, 2]], [[11, 12]])
    to_second.send({**values(5), "z": np.array([[b"text"]], object)}, is_final=False)
    to_first.send(values(6, 7), is_final=True, parameters={"n": 1})
    to_second.send(None, is_final=True)
    told = shard.wait(3)
    assert [(each.index, each.is_final, each.is_empty) for each in told] == [
        (1, False, False), (0, True, False), (1, True, True),
    ]  # fmt: skip
    assert shard.outputs(told[0]) == {"y": [[5]], "z": [[b"text"]]}
    assert shard.outputs(told[1]) == {"y": [[6, 7]]}
    assert (told[1].parameters, told[0].batch) == ({"n": 1}, 1)


def test_the_model_keeps_inputs_of_its_own(shard):
    shard.ask(ROW)
    shard.fake.spills[0].view[:16] = bytes(16)
    ((given, responder),) = Told.seen
    assert given.tolist() == [[1, 2]] and given.flags.writeable
    responder.send(None, is_final=True)


def test_nothing_follows_the_final_response(shard):
    shard.ask(ROW)
    ((_, responder),) = Told.seen
    responder.send(values(1), is_final=True)
    with pytest.raises(BackendFailed, match="final response of this request was sent before"):
        responder.send(values(2), is_final=False)
    assert len(shard.wait(1)) == 1


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"q": np.zeros((1, 1))}, "no output 'q'"),
        ({"y": np.zeros((1, 1), np.float32)}, "numpy float32, expected int64"),
        ({"y": np.zeros(1, np.int64)}, "shape [1], expected [-1, -1]"),
        (values(*range(SPILL_BYTES)), "does not fit the spill segment"),
    ],
)
def test_a_wrong_response_is_an_error_for_model_and_client(shard, wrong, text):
    shard.ask(ROW)
    ((_, responder),) = Told.seen
    responder.send(values(1), is_final=False)
    with pytest.raises(BackendFailed) as caught:
        responder.send(wrong, is_final=False)
    assert text in str(caught.value)
    told = shard.wait(2)
    assert told[1].is_final and text in told[1].error
    # What the model still sends is dropped.
    responder.send(values(2), is_final=False)
    responder.send(None, is_final=True)
    shard.ask(ROW)
    assert len(shard.read().told) == 2


def test_a_request_that_the_model_drops_has_failed(shard):
    shard.ask(ROW)
    assert Told.drop(0)() is None
    (told,) = shard.wait(1)
    assert told.is_final and "dropped the request" in told.error


def test_an_exception_fails_each_request_without_a_final_response(shard):
    shard.ask(ROW, np.array([[-1, 0]], np.int64))
    told = shard.wait(2)
    assert sorted(each.index for each in told) == [0, 1]
    assert all("raised by the model" in each.error and each.is_final for each in told)
    shard.ask(ROW)
    assert len(Told.seen) == 1
    Told.seen[0][1].send(None, is_final=True)


def test_a_cancelled_request_is_told_to_the_model(shard):
    shard.ask(ROW, ROW)
    first, second = (responder for _, responder in Told.seen)
    shard.fake.send(frames.CancelRequest(1, 1))
    shard.fake.send(frames.CancelRequest(7, 0))
    wait_until(lambda: second.is_cancelled)
    assert not first.is_cancelled
    for responder in (first, second):
        responder.send(values(1), is_final=True)
    # Nobody reads what is sent after that.
    told = {each.index: len(each.outputs) for each in shard.wait(2)}
    assert told == {0: 1, 1: 0}


def test_a_response_waits_for_memory(shard):
    shard.ask(ROW)
    ((_, responder),) = Told.seen
    half = values(*range(SPILL_BYTES // 8 // 2 + 8))
    responder.send(half, is_final=False)
    sending = threading.Thread(target=responder.send, args=(half,), kwargs={"is_final": True})
    sending.start()
    (first,) = shard.wait(1)
    assert sending.is_alive() and not first.is_final
    shard.fake.send(frames.Release((first.outputs[0].offset,)))
    assert shard.wait(2)[1].is_final
    sending.join()


def test_a_shard_that_dies_cancels_its_requests(shard):
    shard.ask(ROW)
    ((_, responder),) = Told.seen
    shard.fake.close()
    wait_until(lambda: responder.is_cancelled)
    responder.send(values(1), is_final=False)
    responder.send(None, is_final=True)
