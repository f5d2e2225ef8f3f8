"""The shard's end of a model whose requests go to the core, without a core."""

import asyncio

import numpy as np
from doubles import RecordingSink
from shard_server import ECHO

from penstock.errors import BackendFailed, NotReady
from penstock.serving.handed_over import HandedOver
from penstock.types import Request, Tensor, from_array
from penstock.wire import frames

PIECE = frames.TensorHeader("y", "INT64", (1, 4), 32)


class Memory:
    max_parcel_bytes = max_frame_bytes = 1 << 16

    def __init__(self) -> None:
        self.freed: list[frames.Parcel] = []
        self.free = self.freed.append

    def post(self, key: object, tensors: list[Tensor], send: object) -> None:
        send(
            frames.Parcel(tuple(frames.TensorHeader(t.name, "INT64", t.shape, 32) for t in tensors))
        )

    def read(self, parcel: frames.Parcel) -> list[Tensor]:
        return [Tensor(p.name, p.datatype, p.shape, parcel.data) for p in parcel.pieces]


def answer(call: int, value: int, final: bool = True) -> frames.HandBack:
    data = np.full((1, 4), value, np.int64).tobytes()
    return frames.HandBack(
        call, frames.Parcel((PIECE,), data), final, (1, 2, 5, 0.5, 0.1, 0.2, 0.3)
    )


def request() -> Request:
    return Request(RecordingSink(), [from_array("x", "INT64", np.ones((1, 4), np.int64))], 0.0)


def test_one_request_may_get_several_answers():
    memory, sent = Memory(), []
    model, made = HandedOver(ECHO, memory, sent.append), request()
    model.submit(made)
    for value, final in ((1, False), (2, False), (3, True)):
        model.hear(answer(sent[0].call, value, final))
    values = [int(each["y"][0, 0]) for each in made.sink.outputs]
    assert (values, made.sink.num_final, made.is_done) == ([1, 2, 3], 1, True)
    assert made.timings.phases()["queue_instance"] == 0.5
    # What comes after the end is dropped, and its memory freed.
    model.hear(answer(sent[0].call, 4))
    assert (len(made.sink.answers), len(memory.freed)) == (3, 4)


def test_an_error_may_end_an_answer_that_has_begun():
    memory, sent = Memory(), []
    model, made = HandedOver(ECHO, memory, sent.append), request()
    model.submit(made)
    model.hear(answer(sent[0].call, 1, final=False))
    failed = frames.HandBack(
        sent[0].call, frames.Parcel(), error_kind="NotReady", error="why", retry_after_s=3.0
    )
    model.hear(failed)
    assert isinstance(made.sink.error, NotReady) and made.sink.error.retry_after_s == 3.0
    unknown = request()
    model.submit(unknown)
    failed.call, failed.error_kind = sent[1].call, "SomethingNew"
    model.hear(failed)
    assert isinstance(unknown.sink.error, BackendFailed)


def test_a_drain_waits_for_what_is_open():
    async def scenario():
        sent = []
        model, made = HandedOver(ECHO, Memory(), sent.append), request()
        await model.drain()
        model.submit(made)
        draining = asyncio.ensure_future(model.drain())
        await asyncio.sleep(0)
        assert not draining.done()
        model.hear(answer(sent[0].call, 1))
        await asyncio.wait_for(draining, 5)

    asyncio.run(scenario())


def test_a_cancelled_request_is_taken_back_once():
    sent = []
    model, made = HandedOver(ECHO, Memory(), sent.append), request()
    model.submit(made)
    model.cancel(made)
    model.cancel(made)
    assert sent[1:] == [frames.TakeBack(sent[0].call)]
    assert made.sink.num_final == 1
