"""The order of examples: everyone has a turn, nobody twice in a row, processes share it exactly."""

from collections import Counter
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from penstock.data.cycling import rounds, shares


@given(st.integers(1, 40), st.integers(0, 1000))
def test_each_round_has_every_example_once(num_examples: int, seed: int) -> None:
    for order in islice(rounds(num_examples, seed), 5):
        assert sorted(order.tolist()) == list(range(num_examples))


@given(st.integers(2, 6), st.integers(0, 1000))
def test_no_example_follows_itself(num_examples: int, seed: int) -> None:
    order = [i for order in islice(rounds(num_examples, seed), 30) for i in order.tolist()]
    assert all(one != other for one, other in zip(order, order[1:], strict=False))


def test_rounds_differ() -> None:
    orders = {tuple(order.tolist()) for order in islice(rounds(20, 0), 10)}
    assert len(orders) == 10


def test_seeds_differ() -> None:
    first, again, other = (next(rounds(20, seed)).tolist() for seed in (1, 1, 2))
    assert first == again
    assert first != other


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 7), st.integers(0, 100))
def test_processes_together_go_through_one_order(
    num_examples: int, num_processes: int, batch_size: int, seed: int
) -> None:
    num_requests = 20
    each = [
        list(islice(shares(num_examples, seed, index, num_processes, batch_size), num_requests))
        for index in range(num_processes)
    ]
    together = [i for turn in zip(*each, strict=True) for request in turn for i in request]
    num_rounds = len(together) // num_examples + 1
    one = [i for order in islice(rounds(num_examples, seed), num_rounds) for i in order.tolist()]
    assert together == one[: len(together)]


def test_long_runs_use_every_example_equally_often() -> None:
    seen = Counter(
        request[0] for index in range(3) for request in islice(shares(7, 0, index, 3), 7000)
    )
    assert set(seen.values()) == {3000}
