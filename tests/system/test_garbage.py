"""What exists is excluded from collections, and what became garbage is not."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from penstock.system import garbage


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_what_exists_is_frozen_and_garbage_is_freed_first() -> None:
    kept, dropped = Cycle(), Cycle()
    is_gone = weakref.ref(dropped)
    del dropped
    before = gc.get_threshold()
    garbage.freeze()
    assert is_gone() is None and gc.get_freeze_count() > 0
    assert not any(each is kept for each in gc.get_objects())
    assert gc.get_threshold() == before


def test_what_was_frozen_before_can_be_freed_by_freezing_again() -> None:
    dropped = Cycle()
    is_gone = weakref.ref(dropped)
    garbage.freeze(garbage.SERVING)
    assert gc.get_threshold() == garbage.SERVING
    del dropped
    gc.collect()
    assert is_gone() is not None
    garbage.freeze()
    assert is_gone() is None and gc.get_threshold() == garbage.SERVING
