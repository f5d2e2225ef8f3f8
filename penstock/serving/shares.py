"""How the rows of one batch are divided among the shards that queue them. Pure.

A batch is formed when a worker is free. With several shards, each holds a part of the queue, so the
worker tells each how much it may give: its `BatchShare`. `Claims` decides on shares from what each
shard has `Queued`; the batchers form their part of the batch within a share.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import msgspec


class Queued(msgspec.Struct, frozen=True, gc=False):
    """What a shard has queued, by priority level (0 is the highest). A hint: it may be old."""

    rows: tuple[int, ...]
    # Tokens by level, if batches have a token budget.
    tokens: tuple[int, ...] = ()
    # Deadline of the first request in slo mode, its arrival otherwise.
    due: float = math.inf
    # Size of the first request, which is never divided.
    head_rows: int = 1
    head_tokens: int = 0
    # Geometry of the first request; None: not known.
    geometry: Hashable = None
    # Rows (or tokens, with a budget) of that geometry that arrive per second.
    arrivals_per_s: float = 0.0
    # In slo mode, the size of batches under backlog that the shard's admission counts on; 0: none.
    target_size: int = 0

    @property
    def num_rows(self) -> int:
        return sum(self.rows)

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key: the highest level first, then the earliest due."""
        return next((i for i, rows in enumerate(self.rows) if rows), len(self.rows)), self.due


class BatchShare(msgspec.Struct, frozen=True, gc=False):
    """How much a shard may give to a batch that other shards fill as well."""

    max_rows: int
    # What the others are expected to give.
    others_rows: int = 0
    # In slo mode, when the merged batch ends at the latest, as far as that can be predicted.
    ends_at: float = -math.inf
    # Drop all requests that would be late then, even those that an idle model could not answer in
    # time. The worker does not shrink the batch for them.
    drops_late: bool = False
    # Only requests of this geometry; None: any.
    geometry: Hashable = None
    # Only with a token budget.
    max_tokens: float = math.inf
    # Without an SLO: the batch need not wait for a preferred size or longer. False: it is due only
    # if this shard finds so, counting `others_rows`; its Want was for requests that ran elsewhere.
    is_due: bool = True


def split(amounts: Sequence[Sequence[int]], heads: Sequence[int], cap: int) -> list[int]:
    """Divide `cap` among queues: amounts[i] are the rows of queue i by level, heads[i] is the size
    of its first request; the queues are in the order of their `rank`.

    If everything fits, each gets its rows and an equal part of what is left, for requests that
    arrive meanwhile. Otherwise levels are served in order, and the level that does not fit in
    proportion to rows. Its oldest head fits if higher levels leave room for it, so that no queue of
    a level starves; nothing is taken from higher levels. The sum is at most `cap`, or the size of
    one request that is larger."""
    grants = [0] * len(amounts)
    left = cap
    for level in range(max(map(len, amounts), default=0)):
        wanted = [rows[level] if level < len(rows) else 0 for rows in amounts]
        if sum(wanted) > left:
            parts = _in_proportion(wanted, left)
            oldest = next((i for i, rows in enumerate(amounts) if _head_level(rows) == level), None)
            if oldest is not None and (heads[oldest] <= left or left == cap):
                _fit_oldest(parts, oldest, heads[oldest], left)
            grants = [grant + part for grant, part in zip(grants, parts, strict=True)]
            return _fit_heads(grants, [sum(rows[: level + 1]) for rows in amounts], heads, cap)
        grants = [grant + rows for grant, rows in zip(grants, wanted, strict=True)]
        left -= sum(wanted)
    if not grants:
        return grants
    each, rest = divmod(left, len(grants))
    return [grant + each + (index < rest) for index, grant in enumerate(grants)]


def _head_level(rows: Sequence[int]) -> int:
    return next((level for level, count in enumerate(rows) if count), len(rows))


def _in_proportion(wanted: Sequence[int], total: int) -> list[int]:
    """Divide by largest remainder. Invariant: 0 <= total < sum(wanted)."""
    whole = sum(wanted)
    parts = [total * each // whole for each in wanted]
    by_remainder = sorted(range(len(wanted)), key=lambda i: -(total * wanted[i] % whole))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return parts


def _fit_oldest(parts: list[int], oldest: int, head: int, cap: int) -> None:
    """Make the oldest head of a level fit, at the expense of the other parts of that level."""
    parts[oldest] = max(parts[oldest], head)
    while (excess := sum(parts) - cap) > 0:
        others = [index for index in range(len(parts)) if index != oldest and parts[index]]
        if not others:
            break
        largest = max(others, key=parts.__getitem__)
        parts[largest] -= min(excess, parts[largest])


def _fit_heads(
    grants: list[int], amounts: Sequence[int], heads: Sequence[int], cap: int
) -> list[int]:
    """Take back grants that are too small for the first request, and give what that leaves to the
    others."""
    grants = [grant if grant >= head else 0 for grant, head in zip(grants, heads, strict=True)]
    left = max(0, cap - sum(grants))
    for index, amount in enumerate(amounts):
        more = min(left, amount - grants[index])
        if more > 0 and grants[index] + more >= heads[index]:
            grants[index] += more
            left -= more
    return grants
