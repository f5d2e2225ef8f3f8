"""Answers within a number of bytes: the last used stay."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from penstock.serving.answer_store import (
    AnswerStore,
    StoredAnswer,
    StoredTensor,
    copy_answer,
    needed_bytes,
)
from penstock.types import Response, Tensor


def answer(size: int) -> StoredAnswer:
    return StoredAnswer((StoredTensor("y", "UINT8", (size,), bytes(size)),))


OVERHEAD = answer(0).num_bytes
MAX_BYTES = 4 * (OVERHEAD + 100)


def test_an_answer_is_found_until_others_need_its_bytes():
    store = AnswerStore(MAX_BYTES)
    for key in (b"a", b"b", b"c", b"d"):
        assert store.put(key, answer(100))
    assert store.get(b"a") is not None  # Now b is the one that was not used for the longest time.
    store.put(b"e", answer(100))
    assert [store.get(key) is not None for key in (b"a", b"b", b"c", b"d", b"e")] == [
        True, False, True, True, True,
    ]  # fmt: skip


def test_an_answer_that_is_larger_than_the_store_leaves_the_others():
    store = AnswerStore(MAX_BYTES)
    store.put(b"a", answer(100))
    assert not store.put(b"b", answer(MAX_BYTES))
    assert store.get(b"a") is not None and store.get(b"b") is None


Steps = st.lists(
    st.tuples(st.sampled_from("gp"), st.integers(0, 6), st.integers(0, MAX_BYTES)), max_size=60
)


@given(Steps)
def test_it_does_what_a_list_of_the_last_used_would(steps):
    store = AnswerStore(MAX_BYTES)
    last: list[tuple[bytes, StoredAnswer]] = []
    for kind, number, size in steps:
        key = b"%d" % number
        known = next((each for each in last if each[0] == key), None)
        if kind == "g":
            assert store.get(key) is (known and known[1])
            if known is not None:
                last.remove(known)
                last.append(known)
        else:
            made = answer(size)
            is_kept = store.put(key, made)
            assert is_kept == (made.num_bytes <= MAX_BYTES)
            if is_kept:
                last = [each for each in last if each[0] != key] + [(key, made)]
                while sum(each.num_bytes for _, each in last) > MAX_BYTES:
                    del last[0]
        assert store.num_bytes == sum(each.num_bytes for _, each in last) <= MAX_BYTES
        assert len(store) == len(last)


def test_the_copy_is_the_bytes_of_that_moment():
    row = bytearray(b"abcd")
    response = Response("m", "1", [Tensor("y", "UINT8", (4,), memoryview(row))], {"p": 1})
    stored = copy_answer(response)
    row[:] = b"wxyz"
    [tensor] = stored.tensors_copied()
    assert (bytes(tensor.data), tensor.shape, stored.parameters) == (b"abcd", (4,), {"p": 1})
    assert needed_bytes(response.outputs) <= stored.num_bytes


def test_the_bytes_that_are_counted_are_at_least_those_that_python_takes():
    stored = copy_answer(Response("m", "1", [Tensor("y" * 20, "UINT8", (1, 4), b"abcd")]))
    [tensor] = stored.tensors
    parts = (stored, stored.tensors, tensor, tensor.name, tensor.shape, *tensor.shape, tensor.data)
    # A digest, and a place in a dictionary that keeps an order.
    place = sys.getsizeof(bytes(32)) + 150
    assert sum(map(sys.getsizeof, parts)) + place <= stored.num_bytes
