"""The order of answers, in one shard and over several that share a page."""

import asyncio
import random

import pytest
from doubles import FakeClock, RecordingSink

from penstock.errors import BackendFailed
from penstock.serving.answer_order import AnswerSequencer
from penstock.serving.replies import AnswerOrder
from penstock.serving.shared_page import OLDEST, PageElsewhere, PageLayout, SharedPage
from penstock.types import Request

LAYOUT = PageLayout(num_shards=3, max_models=1, max_slots=1)


class Ticking(FakeClock):
    """Never shows the same time twice."""

    def __call__(self) -> float:
        self.advance(1e-6)
        return super().__call__()


class OrderedShards:
    def __init__(self) -> None:
        self.clock = Ticking()
        self.page = SharedPage.in_memory(LAYOUT)
        self.elsewhere = [PageElsewhere(self.page, 0, shard, 1) for shard in range(3)]
        self.sequencers = [AnswerSequencer(self.clock, each) for each in self.elsewhere]


def test_answers_leave_in_the_order_of_arrival():
    order = AnswerSequencer(FakeClock())
    turns = [order.enter() for _ in range(4)]
    assert order.finish(turns[2], "c") == []
    assert order.finish(turns[0], "a") == ["a"]
    assert order.finish(turns[0], "again") == []
    assert order.finish(turns[2], "again") == []
    assert order.finish(turns[1], "b") == ["b", "c"]
    assert order.finish(turns[3], "d") == ["d"]
    assert not order.waits_for_others


def test_an_answer_waits_for_an_earlier_request_of_another_shard():
    first, second, third = OrderedShards().sequencers
    a, b, c = first.enter(), second.enter(), first.enter()
    d = third.enter()
    assert second.finish(b, "b") == [] and second.waits_for_others
    assert third.finish(d, "d") == []
    assert first.finish(a, "a") == ["a"]
    assert second.release() == ["b"] and not second.waits_for_others
    assert third.release() == [], "c came before it"
    assert third.release(waits=False) == ["d"]
    assert first.finish(c, "c") == ["c"]


def test_answers_of_one_batch_do_not_wait_for_each_other_in_turns():
    """Else a batch of n rows that two shards sent alternately would take n looks at the page."""
    first, second, _ = OrderedShards().sequencers
    turns = [(shard, shard.enter()) for _ in range(20) for shard in (first, second)]
    for shard, turn in turns:
        shard.finish(turn, str(turn))
    assert not first.waits_for_others
    assert second.release() == [] or not second.waits_for_others


@pytest.mark.parametrize("seed", range(20))
def test_no_answer_leaves_before_an_earlier_request_is_computed_and_all_leave(seed: int):
    chance, shards = random.Random(seed), OrderedShards()
    came: list[tuple[int, int]] = []
    computed: set[tuple[int, int]] = set()
    left: list[tuple[int, int]] = []

    def leave(answers: list) -> None:
        for answer in answers:
            earlier = came[: came.index(answer)]
            assert all(each in computed for each in earlier)
            left.append(answer)

    def step() -> None:
        shard = chance.randrange(3)
        sequencer = shards.sequencers[shard]
        waiting = [each for each in came if each[0] == shard and each not in computed]
        if chance.random() < 0.5:
            came.append((shard, sequencer.enter()))
        elif waiting and chance.random() < 0.8:
            each = chance.choice(waiting)
            computed.add(each)
            leave(sequencer.finish(each[1], each))
        else:
            leave(sequencer.release())

    for _ in range(300):
        step()
    for each in came:
        if each not in computed:
            computed.add(each)
            leave(shards.sequencers[each[0]].finish(each[1], each))
    for sequencer in shards.sequencers:
        leave(sequencer.release())
    assert sorted(left) == sorted(came)
    for shard in range(3):
        assert [each for each in left if each[0] == shard] == [
            each for each in came if each[0] == shard
        ]


def test_nobody_waits_for_a_shard_that_is_gone_nor_for_a_value_that_cannot_be():
    shards = OrderedShards()
    first, second, _ = shards.sequencers
    first.enter()
    turn = second.enter()
    assert second.finish(turn, "b") == []
    shards.page.clear_shard(0)
    assert second.release() == ["b"]
    for wrong in (float("nan"), float("inf"), -1e9, 1e300, 1e-300 - 1e9):
        shards.elsewhere[0].show_oldest(wrong)
        assert second.finish(second.enter(), "c") == ["c"]
    first.show()
    assert shards.page.cells[LAYOUT.queue_at(0, 0) + OLDEST] > 0, "what it knows replaces it"


def test_held_answers_leave_without_another_event_and_when_the_model_closes():
    async def main() -> None:
        shards = OrderedShards()
        other = shards.sequencers[0]
        order = AnswerOrder(shards.clock, shards.elsewhere[1])

        def send() -> Request:
            request = Request(RecordingSink(), [], 0.0)
            request.turn = order.enter()
            return request

        error = BackendFailed("x")
        earlier = other.enter()
        held = [send(), send()]
        for request in reversed(held):
            order.respond(request, error)
        await asyncio.sleep(0.005)
        assert not any(request.is_done for request in held)
        other.finish(earlier, "a")
        async with asyncio.timeout(60):
            while not all(request.is_done for request in held):
                await asyncio.sleep(0.001)
        other.enter()
        last = send()
        order.respond(last, error)
        assert not last.is_done
        order.close()
        assert last.is_done

    asyncio.run(main())
