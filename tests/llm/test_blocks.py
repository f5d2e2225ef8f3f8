"""Blocks of the KV cache: handed out, shared, found again."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.llm.blocks import BlockPool, first_key, next_key

SIZE = 4


def keys_of(tokens, salt=""):
    keys, parent = [], first_key(salt)
    for start in range(0, len(tokens) - SIZE + 1, SIZE):
        parent = next_key(parent, tokens[start : start + SIZE])
        keys.append(parent)
    return keys


def filled(pool, tokens, salt=""):
    """The blocks of a sequence whose full ones were computed."""
    blocks = pool.take(pool.num_needed(len(tokens)))
    for block, key in zip(blocks, keys_of(tokens, salt), strict=False):
        pool.name(block, key)
    return blocks


class TestKeys:
    def test_are_of_the_tokens_and_of_all_before_them(self):
        one, other = keys_of([1, 2, 3, 4, 5, 6, 7, 8]), keys_of([9, 2, 3, 4, 5, 6, 7, 8])
        assert len({*one, *other}) == 4
        assert keys_of([1, 2, 3, 4, 5]) == one[:1]

    def test_tokens_are_not_run_together(self):
        assert next_key(b"", [1, 0]) != next_key(b"", [256, 0])

    def test_of_another_salt_are_others(self):
        assert keys_of([1, 2, 3, 4], "a") != keys_of([1, 2, 3, 4], "b")


class TestSharing:
    def test_what_was_computed_is_found_while_it_is_held_and_after(self):
        pool = BlockPool(8, SIZE)
        blocks = filled(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
        keys = keys_of([1, 2, 3, 4, 5, 6, 7, 8, 10, 11])
        assert pool.find(keys) == blocks[:2]
        pool.release(blocks)
        assert pool.find(keys) == blocks[:2] and pool.num_free == 8

    def test_only_a_beginning_is_shared(self):
        pool = BlockPool(8, SIZE)
        filled(pool, [1, 2, 3, 4, 5, 6, 7, 8])
        assert pool.find(keys_of([0, 2, 3, 4, 5, 6, 7, 8])) == []

    def test_a_salt_keeps_tenants_apart(self):
        pool = BlockPool(8, SIZE)
        filled(pool, [1, 2, 3, 4], salt="one")
        assert pool.find(keys_of([1, 2, 3, 4], "other")) == []

    def test_a_shared_block_is_free_when_the_last_lets_go(self):
        pool = BlockPool(2, SIZE)
        blocks = filled(pool, [1, 2, 3, 4])
        pool.hold(blocks)
        pool.release(blocks)
        assert pool.num_free == 1
        pool.release(blocks)
        assert pool.num_free == 2

    def test_of_two_with_the_same_content_one_is_found(self):
        pool = BlockPool(4, SIZE)
        first, second = filled(pool, [1, 2, 3, 4]), filled(pool, [1, 2, 3, 4])
        assert pool.find(keys_of([1, 2, 3, 4])) == first and pool.num_cached == 1
        pool.release(second)
        assert pool.take(1) != second or pool.find(keys_of([1, 2, 3, 4])) == first

    def test_room_that_a_hit_takes_is_counted(self):
        pool = BlockPool(3, SIZE)
        blocks = filled(pool, [1, 2, 3, 4])
        assert pool.num_free_without(blocks) == 2
        pool.release(blocks)
        assert pool.num_free == 3 and pool.num_free_without(blocks) == 2


class TestOrder:
    def test_what_nobody_can_find_is_taken_first(self):
        pool = BlockPool(3, SIZE)
        known, unnamed = filled(pool, [1, 2, 3, 4]), pool.take(2)
        pool.release(known)
        pool.release(unnamed)
        assert set(pool.take(2)) == set(unnamed)

    def test_what_was_let_go_longest_ago_goes_first(self):
        pool = BlockPool(2, SIZE)
        old, new = filled(pool, [1, 2, 3, 4]), filled(pool, [5, 6, 7, 8])
        pool.release(old)
        pool.release(new)
        assert pool.take(1) == old
        assert pool.find(keys_of([5, 6, 7, 8])) == new

    def test_a_hit_makes_it_young_again(self):
        pool = BlockPool(2, SIZE)
        first, second = filled(pool, [1, 2, 3, 4]), filled(pool, [5, 6, 7, 8])
        pool.release(first)
        pool.release(second)
        pool.hold(first)
        pool.release(first)
        assert pool.take(1) == second

    def test_of_one_sequence_the_end_goes_before_the_beginning(self):
        pool = BlockPool(3, SIZE)
        blocks = filled(pool, list(range(12)))
        pool.release(blocks)
        assert [pool.take(1) for _ in range(3)] == [[each] for each in reversed(blocks)]


class TestMisuse:
    def test_more_than_there_is_is_a_bug(self):
        with pytest.raises(AssertionError):
            BlockPool(1, SIZE).take(2)

    def test_twice_released_is_a_bug(self):
        pool = BlockPool(1, SIZE)
        blocks = pool.take(1)
        pool.release(blocks)
        with pytest.raises(AssertionError):
            pool.release(blocks)


class Blocks(RuleBasedStateMachine):
    """Sequences come, share, grow and go in any order, beside a model that counts by hand."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(12, SIZE)
        self.held: list[tuple[list[int], list[int]]] = []

    # Few tokens, so that beginnings are often the same.
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), salt=st.sampled_from("ab"))
    def arrive(self, tokens, salt):
        keys = keys_of(tokens, salt)
        shared = self.pool.find(keys)
        needed = self.pool.num_needed(len(tokens)) - len(shared)
        if needed > self.pool.num_free_without(shared):
            return
        self.pool.hold(shared)
        blocks = shared + self.pool.take(needed)
        for block, key in list(zip(blocks, keys, strict=False))[len(shared) :]:
            self.pool.name(block, key)
        self.held.append((blocks, tokens))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data):
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.release(self.held.pop(index)[0])

    @invariant()
    def every_block_is_held_or_free(self):
        holders = Counter(block for blocks, _ in self.held for block in blocks)
        assert self.pool.num_free == self.pool.num_blocks - len(holders)

    @invariant()
    def nobody_shares_what_is_not_the_same(self):
        contents: dict[int, tuple[int, ...]] = {}
        for blocks, tokens in self.held:
            for number, block in enumerate(blocks):
                before = tuple(tokens[: (number + 1) * SIZE])
                assert contents.setdefault(block, before) == before


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
