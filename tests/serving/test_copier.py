"""Large rows are copied by threads, and nobody reads them before they are there."""

import gc
import os
import threading
import time
import weakref

import numpy as np
import pytest

from penstock.serving import copier
from penstock.serving.copier import Copier
from penstock.serving.slab import Segment

SIZE = 96 * 1024


@pytest.fixture
def segment():
    segment = Segment(64 * SIZE)
    yield segment
    segment.close()


def pieces(count: int, seed: int = 0) -> list[bytes]:
    return [np.random.default_rng((seed, i)).bytes(SIZE) for i in range(count)]


@pytest.mark.parametrize("num_threads", [0, 1, 3])
@pytest.mark.parametrize("is_in_order", [True, False])
def test_what_was_asked_for_is_there_after_waiting(segment, num_threads, is_in_order):
    copying = Copier(num_threads)
    order = list(range(64)) if is_in_order else np.random.default_rng(1).permutation(64).tolist()
    for turn in range(3):
        sources = pieces(64, turn)
        for index in order:
            copying.copy(segment, index * SIZE, SIZE, sources[index])
        copying.wait()
        assert segment.view[: 64 * SIZE] == b"".join(sources)
    copying.close()


def test_rows_of_several_segments_go_to_their_own(segment):
    other = Segment(8 * SIZE)
    copying = Copier(2)
    for index, source in enumerate(pieces(8)):
        copying.copy((segment, other)[index % 2], index * SIZE, SIZE, source)
    copying.wait()
    for index, source in enumerate(pieces(8)):
        assert (segment, other)[index % 2].view[index * SIZE : (index + 1) * SIZE] == source
    copying.close()
    other.close()


@pytest.mark.parametrize(("size", "num_threads"), [(copier.MIN_BYTES - 1, 2), (SIZE, 0)])
def test_what_is_small_or_has_no_cores_is_copied_at_once(segment, size, num_threads):
    before = threading.active_count()
    copying = Copier(num_threads)
    copying.copy(segment, 0, size, bytes([7]) * size)
    assert segment.view[:size] == bytes([7]) * size
    copying.wait()
    copying.close()
    assert threading.active_count() == before


@pytest.mark.parametrize(("num_cores", "expected"), [(2, 0), (7, 0), (8, 2), (64, 2)])
def test_threads_are_for_machines_with_many_cores(monkeypatch, num_cores, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    assert copier.default_threads() == expected


def test_what_is_closed_is_done_and_its_threads_have_gone(segment):
    before = threading.active_count()
    copying = Copier(2)
    copying.copy(segment, 0, SIZE, bytes([7]) * SIZE)
    copying.close()
    assert segment.view[:SIZE] == bytes([7]) * SIZE
    copying.close()
    assert threading.active_count() == before


def test_without_threads_to_be_had_whoever_waits_copies(segment, monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    copying = Copier(2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        copying.copy(segment, 0, SIZE, bytes([7]) * SIZE)
        copying.wait()
        assert segment.view[:SIZE] == bytes([7]) * SIZE
    before = threading.active_count()
    copying.copy(segment, 0, SIZE, bytes([8]) * SIZE)
    copying.wait()
    assert threading.active_count() == before + 2
    copying.close()
    assert segment.view[:SIZE] == bytes([8]) * SIZE
    assert threading.active_count() == before


@pytest.mark.parametrize("refused", [OSError("not here"), MemoryError(), 17])
def test_what_the_kernel_does_not_write_is_copied_by_hand(segment, monkeypatch, refused):
    def write(fd, buffers, offset):
        if isinstance(refused, Exception):
            raise refused
        return refused

    monkeypatch.setattr(os, "pwritev", write)
    copying = Copier(1)
    sources = pieces(20)
    for index, source in enumerate(sources):
        copying.copy(segment, index * SIZE, SIZE, memoryview(source))
    copying.close()
    assert segment.view[: 20 * SIZE] == b"".join(sources)


@pytest.mark.parametrize("num_threads", [0, 1])
def test_sizes_that_differ_are_refused_at_once(segment, num_threads):
    copying = Copier(num_threads)
    with pytest.raises(ValueError):
        copying.copy(segment, 0, SIZE, bytes(SIZE - 1))
    copying.wait()
    copying.close()
    assert not any(segment.view[:SIZE])


def test_nothing_of_a_copy_is_kept(segment):
    copying = Copier(1)
    source = np.ones(SIZE, np.uint8)
    copying.copy(segment, 0, SIZE, source.data)
    copying.wait()
    kept = weakref.ref(source)
    del source
    gc.collect()
    assert kept() is None
    copying.close()


def test_copies_go_on_while_nobody_waits(segment):
    copying = Copier(1)
    count = -(-copier.RUN_BYTES // SIZE)
    for index in range(count):
        copying.copy(segment, index * SIZE, SIZE, bytes([7]) * SIZE)
    deadline = time.monotonic() + 30
    while segment.view[count * SIZE - 1] != 7:
        assert time.monotonic() < deadline, "nobody copies"
        time.sleep(0.001)
    copying.close()
