"""Large rows are copied by a thread, and nobody reads them before they are there."""

import gc
import threading
import time
import weakref

import numpy as np
import pytest

from penstock.serving.copier import Copier

SIZE = 1 << 20


def test_what_was_asked_for_is_there_after_waiting():
    copier = Copier()
    target = memoryview(bytearray(8 * SIZE))
    sources = [np.random.default_rng(i).bytes(SIZE) for i in range(8)]
    for turn in range(3):
        for index, source in enumerate(sources[turn:]):
            copier.copy(target[index * SIZE : (index + 1) * SIZE], source)
        copier.wait()
        expected = b"".join(sources[turn:])
        assert target[: len(expected)] == expected
    copier.close()


def test_waiting_for_nothing_starts_no_thread():
    before = threading.active_count()
    copier = Copier()
    copier.wait()
    copier.close()
    assert threading.active_count() == before


def test_what_is_closed_is_done_and_its_thread_has_gone():
    before = threading.active_count()
    copier = Copier()
    target = memoryview(bytearray(4 * SIZE))
    copier.copy(target, bytes([7]) * 4 * SIZE)
    copier.close()
    assert target == bytes([7]) * 4 * SIZE
    copier.close()
    assert threading.active_count() == before


def test_without_a_thread_to_be_had_whoever_waits_copies(monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    target = memoryview(bytearray(SIZE))
    copier = Copier()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        copier.copy(target, bytes([7]) * SIZE)
        copier.wait()
        assert target == bytes([7]) * SIZE
    before = threading.active_count()
    copier.copy(target, bytes([8]) * SIZE)
    assert threading.active_count() == before + 1
    copier.close()
    assert target == bytes([8]) * SIZE
    assert threading.active_count() == before


def test_sizes_that_differ_are_refused_at_once():
    copier = Copier()
    with pytest.raises(ValueError, match="3 bytes for a place of 4"):
        copier.copy(memoryview(bytearray(4)), b"abc")
    copier.wait()
    copier.close()


def test_nothing_of_a_copy_is_kept():
    copier = Copier()
    source = np.ones(SIZE, np.uint8)
    copier.copy(memoryview(bytearray(SIZE)), source.data)
    copier.wait()
    kept = weakref.ref(source)
    del source
    gc.collect()
    assert kept() is None
    copier.close()


def test_copies_go_on_while_nobody_waits():
    copier = Copier()
    target = memoryview(bytearray(SIZE))
    copier.copy(target, bytes([7]) * SIZE)
    deadline = time.monotonic() + 30
    while target[-1] != 7:
        assert time.monotonic() < deadline, "nobody copies"
        time.sleep(0.001)
    copier.close()
