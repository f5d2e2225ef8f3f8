"""What a server with a known law does to given arrivals, computed: nothing here measures.

The `null` backend takes T(b) = a + c b for a batch of b rows. With one instance and eager batching
that decides every latency once the arrivals are known.
"""

import math
from collections.abc import Sequence

import numpy as np


def latencies(
    due: Sequence[float],
    a_s: float,
    c_s: float = 0.0,
    max_batch: int = 1,
    stalls: Sequence[tuple[float, float]] = (),
) -> np.ndarray:
    """One instance takes what waits, up to `max_batch`, whenever it is free. A stall (from, length)
    is a batch of its own that the instance takes up first."""
    found = np.zeros(len(due))
    waiting_stalls = sorted(stalls)
    free, first = 0.0, 0
    while first < len(due):
        start = max(free, due[first])
        if waiting_stalls and waiting_stalls[0][0] <= start:
            at, length_s = waiting_stalls.pop(0)
            free = max(free, at) + length_s
            continue
        last = first + 1
        while last < len(due) and last - first < max_batch and due[last] <= start:
            last += 1
        free = start + a_s + c_s * (last - first)
        found[first:last] = free - np.asarray(due[first:last])
        first = last
    return found


def percentile(values: np.ndarray, percent: float) -> float:
    ordered = np.sort(values)
    return float(ordered[math.ceil(percent / 100 * len(ordered)) - 1])


def waiting_beyond(rate: float, service_s: float, limit_s: float) -> float:
    """M/D/1: the share of requests that wait longer than `limit_s` (Erlang's formula)."""
    load = rate * service_s
    if load >= 1:
        return 1.0
    within = 0.0
    for k in range(int(limit_s / service_s) + 1):
        reach = rate * (k * service_s - limit_s)
        within += reach**k / math.factorial(k) * math.exp(-reach)
    return 1 - (1 - load) * within


def max_poisson_rate(service_s: float, latency_s: float, share: float = 0.01) -> float:
    """The rate at which `share` of all requests take longer than `latency_s`."""
    low, high = 0.0, 1 / service_s
    for _ in range(60):
        middle = (low + high) / 2
        if waiting_beyond(middle, service_s, latency_s - service_s) <= share:
            low = middle
        else:
            high = middle
    return low


def knee(a_s: float, c_s: float, max_batch: int, num_instances: int = 1) -> float:
    """Plateau x time alone."""
    plateau = num_instances * max_batch / (a_s + c_s * max_batch)
    return plateau * (a_s + c_s)
