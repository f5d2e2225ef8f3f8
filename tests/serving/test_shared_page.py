"""The page of shards and workers: blocks apart, hints bounded, never a torn value or a crash."""

import math
import os
import random
import struct
from dataclasses import replace

import pytest
from example_counts import at_most
from hypothesis import given, settings
from hypothesis import strategies as st
from page_hammer import VALUES, hammer
from simulated_shards import ShardedLoad, simulate_shards

from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import ConfigError
from penstock.serving.elsewhere import ShardLoad
from penstock.serving.shared_page import (
    HELD_CELLS,
    LINE,
    MAX_COUNT,
    MAX_WORK_S,
    QUEUE_CELLS,
    PageBlocks,
    PageElsewhere,
    PageLayout,
    SharedPage,
    slots_of_workers,
)
from penstock.serving.shares import Queued

LAYOUT = PageLayout(num_shards=3, max_models=2, max_slots=4)


def load(*rows: int, due: float = 1.0, arrivals_per_s: float = 0.0) -> ShardLoad:
    queued = Queued(rows, due=due, head_rows=2, arrivals_per_s=arrivals_per_s, target_size=7)
    return ShardLoad(queued, [2 * each for each in rows], [0.5 * each for each in rows])


class TestLayout:
    def test_blocks_of_two_writers_never_share_a_line(self) -> None:
        layout = LAYOUT
        begins = [
            *(layout.shard_at(shard) for shard in range(3)),
            *(layout.queue_at(model, shard) for model in range(2) for shard in range(3)),
            *(layout.slot_at(model, slot) for model in range(2) for slot in range(4)),
            layout.num_cells,
        ]
        assert len(begins) == len(set(begins))
        assert all(begin % LINE == 0 for begin in begins)
        assert layout.held_at(0, 0) + HELD_CELLS == layout.queue_at(0, 1)

    def test_another_process_opens_it_by_its_descriptor(self) -> None:
        page, fd = SharedPage.create(LAYOUT)
        other = SharedPage.open(fd)
        page.show_queue(1, 2, load(5), 0.5)
        assert other.layout == LAYOUT
        assert other.read_queue(1, 2, 0.5).num_rows == 5
        with pytest.raises(OSError):
            os.ftruncate(fd, 8)
        os.close(fd)

    def test_a_page_of_another_layout_is_refused(self) -> None:
        page, fd = SharedPage.create(LAYOUT)
        page.cells[1] = 99.0
        with pytest.raises(ConfigError, match=r"has \d+ cells; \d+ were expected"):
            SharedPage.open(fd)
        page.cells[0] = math.nan
        with pytest.raises(ConfigError, match="not of version 1"):
            SharedPage.open(fd)
        os.close(fd)

    def test_a_model_with_too_many_slots_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="5 slots; the shared page has room for 1 to 4"):
            PageElsewhere(SharedPage.in_memory(LAYOUT), 0, 0, 5)

    def test_only_the_blocks_of_the_dead_are_cleared(self) -> None:
        page = SharedPage.in_memory(LAYOUT)
        for shard in range(3):
            page.beat(shard, 9.0, 1.0, 10)
            for model in range(2):
                page.show_queue(model, shard, load(5), 0.0)
        for slot in range(4):
            page.show_batch(0, slot, 1.0, 2.0, 8)
        page.clear_shard(1)
        page.clear_slot(0, 3)
        assert [page.read_queue(0, shard, 0.0).num_rows for shard in range(3)] == [5, 0, 5]
        assert page.cells[LAYOUT.shard_at(1)] == 0.0 and page.cells[LAYOUT.shard_at(2)] == 9.0
        assert [page.is_idle(0, slot) for slot in range(4)] == [False, False, False, True]
        page.clear_model(0)
        assert page.read_queue(0, 0, 0.0).num_rows == 0
        assert page.read_queue(1, 0, 0.0).num_rows == 5


class TestBlocks:
    def test_a_block_is_used_again_last_and_clean(self) -> None:
        blocks = PageBlocks(PageLayout(num_shards=1, max_models=2, max_slots=4))
        assert blocks.take([4]) == (0,)
        blocks.page.show_queue(0, 0, load(5), 0.0)
        blocks.page.show_batch(0, 3, 1.0, 2.0, 8)
        blocks.give_back((0,))
        # A writer that has not ended yet.
        blocks.page.show_queue(0, 0, load(7), 0.0)
        assert blocks.take([1, 1]) == (1, 0)
        assert blocks.page.read_queue(0, 0, 0.0).num_rows == 0
        assert blocks.page.is_idle(0, 3)
        blocks.close()

    def test_too_much_is_refused_and_takes_nothing(self) -> None:
        blocks = PageBlocks(PageLayout(num_shards=1, max_models=2, max_slots=4))
        with pytest.raises(ConfigError, match="has 5 instances; with --shards, 4 are possible"):
            blocks.take([1, 5])
        with pytest.raises(ConfigError, match="0 models .* are loaded; with --shards, 2 are"):
            blocks.take([1, 1, 1])
        assert blocks.take([4, 4]) == (0, 1)
        blocks.close()

    def test_a_dead_shard_shows_nothing_of_any_loaded_model(self) -> None:
        blocks = PageBlocks(PageLayout(num_shards=2, max_models=3, max_slots=4))
        for block in blocks.take([1, 1]):
            for shard in range(2):
                blocks.page.show_queue(block, shard, load(5), 0.0)
        blocks.lose_shard(1)
        shown = [blocks.page.read_queue(b, s, 0.0).num_rows for b in (0, 1) for s in (0, 1)]
        assert shown == [5, 0, 5, 0]
        blocks.close()


def test_each_worker_has_as_many_slots_as_it_runs_batches() -> None:
    config = ModelConfig("m", "1", "null", "", (), (), max_batch_size=8, batching=BatchPolicy(8))
    assert slots_of_workers(config) == [range(1)]
    assert slots_of_workers(replace(config, num_instances=3)) == [
        range(1),
        range(1, 2),
        range(2, 3),
    ]
    spread = ("cuda:0", "cuda:1", "cuda:0")
    on_gpus = replace(config, backend="pytorch", device="cuda", num_instances=3, spread=spread)
    assert slots_of_workers(on_gpus) == [range(2), range(2, 3)]


class TestElsewhere:
    def test_an_arrival_is_seen_before_it_is_published(self) -> None:
        page = SharedPage.in_memory(LAYOUT)
        mine, other = (PageElsewhere(page, 0, shard, 4) for shard in range(2))
        other.arrived(0, 1, 4, 7.0)
        other.arrived(0, 2, 6, None)
        there = mine.look(5.0)
        assert (there.num_requests, there.sizes) == ([2.0], [6.0])
        assert page.read_queue(0, 1, 5.0).due == 7.0
        other.publish(load(0), 5.0)
        assert mine.look(5.0, is_fresh=True).num_requests == [0.0]

    def test_levels_that_are_shown_together_are_not_overwritten_by_one(self) -> None:
        page = SharedPage.in_memory(LAYOUT)
        mine, other = (PageElsewhere(page, 0, shard, 4, policy_levels=5) for shard in range(2))
        other.publish(load(0, 0, 0, 4, 5), 0.0)
        other.arrived(4, 11, 6, None)
        other.arrived(2, 3, 3, None)
        assert mine.look(0.0).sizes == [0, 0, 3, 12]

    def test_a_worker_is_idle_if_one_of_its_slots_is(self) -> None:
        page = SharedPage.in_memory(LAYOUT)
        mine = PageElsewhere(page, 1, 0, 4)
        workers = range(2), range(2, 4)
        assert [mine.has_idle(slots) for slots in workers] == [True, True]
        for slot in range(3):
            page.show_batch(1, slot, 1.0, 2.0, 8)
        assert [mine.has_idle(slots) for slots in workers] == [False, True]
        page.show_missing(1, 3)
        assert [mine.has_idle(slots) for slots in workers] == [False, False]
        assert mine.look(1.5).ends == [2.0, 2.0, 2.0], "nothing runs in a slot that is missing"
        page.show_idle(1, 0)
        assert [mine.has_idle(slots) for slots in workers] == [True, False]

    def test_the_other_shards_are_added_up(self) -> None:
        page = SharedPage.in_memory(LAYOUT)
        mine = PageElsewhere(page, 0, 1, 4, policy_levels=2)
        for shard in range(3):
            other = PageElsewhere(page, 0, shard, 4, policy_levels=2)
            other.publish(load(shard + 1, 10, arrivals_per_s=100.0), 5.0)
        page.show_batch(0, 2, 4.0, 6.0, 8)
        page.show_batch(0, 0, 4.0, 5.5, 8)
        there = mine.look(5.0)
        assert (there.sizes, there.num_requests) == ([4.0, 24.0], [8.0, 48.0])
        assert there.work_s == [2.0, 12.0]
        assert there.ends == [5.5, 6.0]
        assert there.arrivals_per_s == pytest.approx(200.0)
        # A shard that receives nothing more shows an old rate.
        assert mine.look(5.1).arrivals_per_s == pytest.approx(200.0 / math.e)

    def test_levels_beyond_the_last_count_as_the_last(self) -> None:
        page = SharedPage.in_memory(LAYOUT)
        PageElsewhere(page, 0, 0, 4, policy_levels=6).publish(load(1, 2, 3, 4, 5, 6), 0.0)
        assert PageElsewhere(page, 0, 1, 4, policy_levels=6).look(0.0).sizes == [1, 3, 6, 21]

    def test_a_worker_reads_a_queue(self) -> None:
        page = SharedPage.in_memory(LAYOUT)
        page.show_queue(0, 0, load(3, due=7.0, arrivals_per_s=50.0), 5.0)
        queued = page.read_queue(0, 0, 5.0)
        assert queued == Queued((3, 0, 0, 0), (), 7.0, 2, 0, None, 50.0, 7)

    @settings(max_examples=at_most(300))
    @given(
        data=st.binary(min_size=8 * QUEUE_CELLS, max_size=8 * QUEUE_CELLS), now=st.floats(0, 1e6)
    )
    def test_random_bits_are_bounded(self, data: bytes, now: float) -> None:
        page = SharedPage.in_memory(LAYOUT)
        values = struct.unpack(f"{QUEUE_CELLS}d", data)
        for at in (LAYOUT.queue_at(0, 0), LAYOUT.slot_at(0, 0)):
            for index, value in enumerate(values):
                page.cells[at + index] = value
        queued = page.read_queue(0, 0, now)
        assert 0 <= queued.num_rows <= 4 * MAX_COUNT and queued.head_rows >= 1
        assert abs(queued.due - now) <= MAX_WORK_S
        there = PageElsewhere(page, 0, 1, 4).look(now)
        assert 0 <= there.sizes[-1] <= MAX_COUNT and 0 <= there.work_s[-1] <= MAX_WORK_S
        assert 0 <= there.arrivals_per_s <= MAX_COUNT
        assert all(abs(end - now) <= MAX_WORK_S for end in there.ends)


class Vandal:
    """Fills the page with random bits before each event."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def __call__(self, page: SharedPage) -> None:
        for at in (page.layout.queue_at(0, self._rng.randrange(3)), page.layout.slot_at(0, 0)):
            for index in range(at, at + LINE):
                kind = self._rng.random()
                if kind < 0.3:
                    page.cells[index] = self._rng.choice(
                        (math.nan, math.inf, -math.inf, 0.0, -1e300)
                    )
                elif kind < 0.6:
                    page.cells[index] = struct.unpack("d", self._rng.randbytes(8))[0]
                else:
                    page.cells[index] = self._rng.uniform(0, 100)


@pytest.mark.parametrize("slo_s", [None, 0.025])
@pytest.mark.parametrize("seed", range(3))
def test_a_page_of_random_bits_loses_no_request(slo_s: float | None, seed: int) -> None:
    """Only refusals may change. The simulation fails if a request runs twice."""
    policy = BatchPolicy(max_batch_size=8, is_dynamic=True, slo_latency_s=slo_s)
    arrivals = [index * 0.0015 for index in range(600)]
    outcomes = simulate_shards(
        ShardedLoad(
            policy,
            arrivals,
            lambda rows: 0.004 + 0.0005 * rows,
            num_shards=3,
            num_executors=1,
            claim_s=0.0001,
            seeds={rows: 0.004 + 0.0005 * rows for rows in (1, 2, 4, 8)},
            spoil=Vandal(seed),
        )
    )
    assert len(outcomes.latencies_s) + len(outcomes.refusals_s) == len(arrivals)
    assert len(outcomes.latencies_s) > 100
    assert max(outcomes.batch_rows) <= 8


def test_no_value_is_torn() -> None:
    """Short; `python tests/page_hammer.py` runs longer."""
    assert len(set(VALUES)) == 126
    num_reads, num_changes, num_torn = hammer(0.5, 1)
    assert num_torn == 0 and num_reads > 0 and num_changes > 1
