"""Prompts with the same start go to the same replica, and none is overloaded by that."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.ray.prefixes import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    SLACK,
    PrefixTable,
    hash_blocks,
    rendezvous,
)

NAMES = ["a", "b", "c", "d"]
IDLE = dict.fromkeys(NAMES, 0)


def prompt(start: str, rest: str = "") -> bytes:
    return (start * (4 * BLOCK_BYTES // len(start)) + rest).encode()


@given(st.binary(max_size=4 * BLOCK_BYTES), st.binary(max_size=BLOCK_BYTES))
def test_a_prompt_that_goes_on_has_the_same_blocks_first(start: bytes, more: bytes) -> None:
    first, longer = hash_blocks(start), hash_blocks(start + more)
    num_whole = len(start) // BLOCK_BYTES
    assert longer[:num_whole] == first[:num_whole]
    assert len(longer) == max(1, len(start + more) // BLOCK_BYTES)


def test_salts_and_other_starts_give_other_blocks() -> None:
    data = prompt("hello ")
    assert set(hash_blocks(data)).isdisjoint(hash_blocks(data, b"key"))
    assert set(hash_blocks(data)).isdisjoint(hash_blocks(b"x" + data))
    assert len(hash_blocks(b"y" * (MAX_BLOCKS + 9) * BLOCK_BYTES)) == MAX_BLOCKS
    assert hash_blocks(b"short") != hash_blocks(b"other")


def test_equal_starts_meet_whatever_router_they_come_through() -> None:
    for number in range(50):
        blocks = hash_blocks(prompt(f"subject {number} "))
        assert len({PrefixTable().rank(blocks, IDLE)[0] for _ in range(3)}) == 1


def test_new_starts_are_spread_evenly() -> None:
    table = PrefixTable()
    firsts = Counter(
        table.rank(hash_blocks(prompt(f"subject {number} ")), IDLE)[0] for number in range(2000)
    )
    assert min(firsts.values()) > 400


def test_the_replica_with_the_longest_part_is_first() -> None:
    table = PrefixTable()
    short, long = hash_blocks(prompt("one ")), hash_blocks(prompt("one ") + prompt("two "))
    table.learn(short, "a")
    table.learn(long, "b")
    assert table.rank(hash_blocks(prompt("one ") + prompt("two ", "more")), IDLE)[0] == "b"
    # The last that has computed the common part.
    assert table.rank(short, IDLE)[0] == "b"


def test_an_overloaded_replica_is_tried_last() -> None:
    table = PrefixTable()
    blocks = hash_blocks(prompt("one "))
    table.learn(blocks, "a")
    assert table.rank(blocks, {**IDLE, "a": SLACK})[0] == "a"
    busy = table.rank(blocks, {**IDLE, "a": SLACK + 1})
    assert busy[-1] == "a" and sorted(busy) == NAMES


@given(
    st.lists(st.integers(0, 3), min_size=50, max_size=300),
    st.sampled_from([1, 2, 4]),
)
def test_no_replica_gets_much_more_than_another(starts: list[int], num_replicas: int) -> None:
    """All requests run at once, which is the worst case: none ends."""
    table, loads = PrefixTable(), dict.fromkeys(NAMES[:num_replicas], 0)
    for number in starts:
        blocks = hash_blocks(prompt(f"start {number} "))
        chosen = table.rank(blocks, loads)[0]
        table.learn(blocks, chosen)
        loads[chosen] += 1
    least = min(loads.values())
    assert max(loads.values()) <= max(least + SLACK, 1.5 * least) + 1


def test_without_a_prompt_the_least_loaded_come_first_in_turns() -> None:
    table = PrefixTable()
    assert table.rank((), {**IDLE, "a": 3, "b": 2, "c": 1})[0] == "d"
    firsts = Counter(table.rank((), IDLE)[0] for _ in range(400))
    assert sorted(firsts) == NAMES and min(firsts.values()) > 50
    assert table.rank((), {}) == []


def test_replicas_that_are_gone_are_forgotten_and_the_table_is_bounded() -> None:
    table = PrefixTable(max_known=10)
    blocks = hash_blocks(prompt("one "))
    table.learn(blocks, "a")
    assert table.rank(blocks, {"b": 0, "c": 0})[0] in "bc"
    table.forget(["a"])
    assert len(table) == 0
    for number in range(20):
        table.learn(hash_blocks(prompt(f"{number} ")), "b")
    assert len(table) == 10


def test_a_replica_that_leaves_moves_only_its_own_keys() -> None:
    for key in range(200):
        before = rendezvous(key, NAMES)
        after = rendezvous(key, NAMES[:-1])
        assert [name for name in before if name != NAMES[-1]] == after
