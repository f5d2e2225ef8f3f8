"""Rows and extents never overlap, come back whole, and are bounded."""

import random
from typing import NamedTuple

from example_counts import at_most
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.serving.slab import ALIGNMENT, Extents, Layout, Segment, Slab, SlabPool


@settings(deadline=None, max_examples=at_most(200))
@given(st.integers(0, 2**32))
def test_extents_never_overlap_and_coalesce_when_released(seed):
    chance = random.Random(seed)
    extents = Extents(64 * ALIGNMENT)
    held: dict[int, int] = {}
    for _ in range(200):
        if held and chance.random() < 0.5:
            offset = chance.choice(list(held))
            del held[offset]
            extents.release(offset)
            continue
        size = chance.randrange(0, 9 * ALIGNMENT)
        offset = extents.allocate(size)
        if offset is None:
            continue
        assert offset % ALIGNMENT == 0 and offset + size <= extents.capacity
        for other, length in held.items():
            assert offset + max(size, 1) <= other or other + max(length, 1) <= offset
        held[offset] = size
    for offset in held:
        extents.release(offset)
    assert extents.num_held == 0
    assert extents.free_bytes == extents.capacity
    assert extents.allocate(extents.capacity) == 0


def test_extents_say_no_when_nothing_fits():
    extents = Extents(4 * ALIGNMENT)
    assert extents.allocate(5 * ALIGNMENT) is None
    assert extents.allocate(4 * ALIGNMENT) == 0
    assert extents.allocate(1) is None


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=6), st.integers(1, 64))
def test_layout_columns_are_aligned_and_disjoint(row_bytes, capacity):
    layout = Layout.of(row_bytes, capacity)
    end = 0
    for offset, size in zip(layout.offsets, layout.row_bytes, strict=True):
        assert offset % ALIGNMENT == 0 and offset >= end
        end = offset + size * capacity
    assert layout.nbytes >= end


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=6),
    st.integers(64, 100_000),
    st.integers(1, 64),
)
def test_fitting_gives_the_largest_layout_that_fits(row_bytes, nbytes, max_rows):
    layout = Layout.fitting(row_bytes, nbytes, max_rows)
    if layout is None:
        assert Layout.of(row_bytes, 1).nbytes > nbytes
        return
    assert layout.nbytes <= nbytes and 1 <= layout.capacity <= max_rows
    if layout.capacity < max_rows:
        assert Layout.of(row_bytes, layout.capacity + 1).nbytes > nbytes


LAYOUT = Layout.of([16], 4)


def pool(max_slabs: int = 2) -> SlabPool:
    return SlabPool(LAYOUT.nbytes, max_slabs)


class Rows(NamedTuple):
    slab: Slab
    row: int
    count: int


def take(slabs: SlabPool, shape: str, count: int, is_needed: bool = False) -> Rows | None:
    slab = slabs.place(shape, LAYOUT, count, is_needed=is_needed)
    return None if slab is None else Rows(slab, slab.next_row - count, count)


def test_requests_that_arrive_together_are_adjacent():
    slabs = pool()
    places = [take(slabs, "a", count) for count in (1, 2, 1)]
    assert [(p.slab.id, p.row, p.count) for p in places] == [(0, 0, 1), (0, 1, 2), (0, 3, 1)]
    slabs.close()


def test_after_a_dispatch_the_next_request_starts_a_fresh_slab():
    slabs = pool()
    first = take(slabs, "a", 1)
    slabs.dispatched(first.slab, first.count)
    second = take(slabs, "a", 1)
    assert (second.slab is first.slab, second.row) == (False, 0)
    slabs.close()


def test_with_no_other_slab_the_rest_of_the_open_one_is_used():
    slabs = pool(max_slabs=1)
    first = take(slabs, "a", 1)
    slabs.dispatched(first.slab, first.count)
    second = take(slabs, "a", 1)
    assert (second.slab is first.slab, second.row) == (True, 1)
    slabs.close()


def test_full_slabs_refuse_unless_the_rows_are_needed_to_dispatch():
    slabs = pool(max_slabs=1)
    take(slabs, "a", 4)
    assert take(slabs, "a", 1) is None
    assert take(slabs, "b", 1) is None
    needed = take(slabs, "b", 1, is_needed=True)
    slabs.dispatched(needed.slab, needed.count)
    assert take(slabs, "b", 1) is None, "the extra slab takes no further requests"
    slabs.release(needed.slab, needed.count)
    assert slabs.num_in_use == 1
    slabs.close()


def test_few_slabs_have_reserved_rows_at_a_time():
    slabs = pool(max_slabs=8)
    reserved = [slabs.reserve("a", LAYOUT, 1) for _ in range(9)]
    assert [slab.id for slab in reserved[:8]] == [0] * 4 + [1] * 4
    assert reserved[8] is None, "a third slab would be more than a quarter of them"
    assert take(slabs, "a", 1).slab.id == 2, "complete requests are placed as ever"
    assert slabs.reserve("a", LAYOUT, 1) is None
    for slab in reserved[:4]:
        slabs.received(slab, 1)
    assert slabs.reserve("a", LAYOUT, 1).id == 2
    slabs.close()


def test_reserved_rows_keep_their_slab_open():
    slabs = pool()
    first = slabs.reserve("a", LAYOUT, 1)
    second = take(slabs, "a", 1)
    slabs.dispatched(second.slab, second.count)
    third = take(slabs, "a", 1)
    assert first is second.slab is third.slab and third.row == 2
    slabs.close()


def test_rows_may_come_back_after_the_pool_is_closed():
    slabs = pool(max_slabs=8)
    slab = slabs.reserve("a", LAYOUT, 1)
    view = slab.seg.view[:16]
    slabs.close()
    view[:] = b"still writable .."[:16]
    slabs.received(slab, 1)
    slabs.release(slab, 1, was_dispatched=False)


@settings(deadline=None, max_examples=at_most(200))
@given(st.integers(0, 2**32))
def test_law_rows_are_exclusive_and_all_come_back(seed):
    chance = random.Random(seed)
    slabs = pool(max_slabs=3)
    waiting, running = [], []
    for _ in range(150):
        match chance.randrange(4):
            case 0 | 1:
                place = take(slabs, chance.choice("abcd"), chance.randint(1, 4))
                if place is not None:
                    waiting.append(place)
            case 2 if waiting:
                place = waiting.pop(chance.randrange(len(waiting)))
                if chance.random() < 0.3:
                    slabs.release(place.slab, place.count, was_dispatched=False)
                else:
                    slabs.dispatched(place.slab, place.count)
                    running.append(place)
            case 3 if running:
                place = running.pop(chance.randrange(len(running)))
                slabs.release(place.slab, place.count)
        taken: set[tuple[int, int]] = set()
        for place in waiting + running:
            for row in range(place.row, place.row + place.count):
                assert row < LAYOUT.capacity and (place.slab.id, row) not in taken
                taken.add((place.slab.id, row))
        assert slabs.num_in_use <= 3
    for place in waiting:
        slabs.release(place.slab, place.count, was_dispatched=False)
    for place in running:
        slabs.release(place.slab, place.count)
    assert slabs.num_in_use == 0
    slabs.close()


def test_a_segment_is_shared_through_its_descriptor():
    import os

    ours = Segment(4096)
    theirs = Segment(4096, os.dup(ours.fd))
    ours.view[10:15] = b"hello"
    assert bytes(theirs.view[10:15]) == b"hello"
    ours.close()
    theirs.close()
