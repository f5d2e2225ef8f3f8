"""What a worker shows of its slots, and when."""

from penstock.serving.claims import Offer, StartBatch
from penstock.serving.elsewhere import ShardLoad
from penstock.serving.shared_page import PageElsewhere, PageLayout, SharedPage
from penstock.serving.shares import Queued
from penstock.serving.worker_slots import WorkerSlots

BLOCK = 1


def make_page() -> SharedPage:
    return SharedPage.in_memory(PageLayout(num_shards=2, max_models=2, max_slots=4))


def batch(ends_at: float) -> StartBatch:
    return StartBatch((Offer(0, 3, "g"), Offer(1, 2, "g")), 1.0, ends_at)


def idle(page: SharedPage) -> list[int]:
    return [slot for slot in range(4) if page.is_idle(BLOCK, slot)]


def ends(page: SharedPage) -> list[float]:
    return PageElsewhere(page, BLOCK, 0, 4).look(1.0).ends


def test_a_slot_is_busy_from_the_start_of_its_batch_until_the_worker_rests():
    page = make_page()
    slots = WorkerSlots(page, BLOCK, range(1, 3), 2)
    first, second = batch(2.0), batch(3.0)
    slots.start(first)
    assert idle(page) == [0, 2, 3] and ends(page) == [2.0]
    slots.start(second)
    assert idle(page) == [0, 3] and ends(page) == [2.0, 3.0]
    slots.end(first)
    assert idle(page) == [0, 3], "what it runs next may have been claimed"
    slots.rest()
    assert idle(page) == [0, 1, 3] and ends(page) == [3.0]
    slots.start(batch(4.0))
    assert idle(page) == [0, 3] and ends(page) == [3.0, 4.0]


def test_what_a_dead_worker_left_is_replaced_and_slots_that_do_not_exist_are_never_idle():
    page = make_page()
    for slot in range(4):
        page.show_batch(BLOCK, slot, 0.0, 9.0, 1)
    slots = WorkerSlots(page, BLOCK, range(1, 4), 1)
    assert idle(page) == [1] and ends(page) == [9.0], "the first is of another worker"
    slots.start(batch(2.0))
    slots.rest()
    assert idle(page) == []


def test_it_reads_the_queues_of_its_model():
    page = make_page()
    slots = WorkerSlots(page, BLOCK, range(1), 1)
    for block in range(2):
        elsewhere = PageElsewhere(page, block, 1, 1)
        elsewhere.publish(ShardLoad(Queued((5 + block,), due=2.0), [1], [0.0]), 1.0)
    assert slots.read(1, 1.0).num_rows == 6
    assert slots.read(0, 1.0).num_rows == 0
