"""The order of examples. Pure: the same number of examples and seed always give the same order.

All processes of a run share one endless order and take their own requests from it: together they
use every example equally often, and none twice before all others had their turn.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.types import Array

# Positions computed per chunk, at least.
CHUNK = 4096


def rounds(num_examples: int, seed: int) -> Iterator[Array]:
    """Yield endless permutations of all examples; none follows itself, unless it is alone."""
    random = np.random.default_rng(seed)
    last = -1
    while True:
        order: Array = random.permutation(num_examples)
        if order[0] == last and num_examples > 1:
            other = int(random.integers(1, num_examples))
            order[[0, other]] = order[[other, 0]]
        last = int(order[-1])
        yield order


def shares(
    num_examples: int, seed: int, index: int, num_processes: int, batch_size: int = 1
) -> Iterator[list[int]]:
    """Yield the examples of each request of process `index`, endlessly. Request k of the run has
    the k-th `batch_size` examples of the order; process i has requests i, i + n, i + 2 n, …"""
    stride = num_processes * batch_size
    left: list[Array] = []
    num_left = 0
    for order in rounds(num_examples, seed):
        left.append(order)
        num_left += num_examples
        if num_left < max(stride, CHUNK):
            continue
        positions = np.concatenate(left)
        num_whole = num_left - num_left % stride
        mine = positions[:num_whole].reshape(-1, num_processes, batch_size)[:, index]
        yield from mine.tolist()
        left, num_left = [positions[num_whole:]], num_left - num_whole
