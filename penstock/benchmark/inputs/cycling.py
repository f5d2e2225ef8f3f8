"""In which order examples come. Pure: a number of examples and a seed give the same order, always.

All processes of a run go through one endless order, each taking its own requests of it: together
they use every example equally often, and no example twice before all others had their turn.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.types import Array

# Positions that are worked out at a time, at least.
CHUNK = 4096


def rounds(num_examples: int, seed: int) -> Iterator[Array]:
    """Endless: all examples in another order each time round. Where two rounds meet, no example
    follows itself (unless it is the only one)."""
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
    """Endless: the examples of each request of process `index`. Request k of all processes has the
    k-th `batch_size` examples of the order; process i has the requests i, i + n, i + 2 n, …"""
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
