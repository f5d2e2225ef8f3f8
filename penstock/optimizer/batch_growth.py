"""Batch sizes to time on a GPU, one after the other: they grow until rows get no cheaper or memory
runs out, and are halved after that. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# The largest size that is tried, however much memory there is.
LARGEST = 4096
# Beyond the planned sizes, a size is doubled only if the last growth made a row this much cheaper.
MIN_GAIN = 0.05


@dataclass(slots=True)
class BatchGrowth:
    """Says which size comes next, by what became of those before."""

    # Sizes that are tried in any case, and the largest that the model accepts; None: any.
    planned: Sequence[int]
    most: int | None = None
    seconds: dict[int, float] = field(default_factory=dict)
    # The smallest size that ran out of memory; 0: none did.
    ran_out_at: int = 0

    def next(self) -> int | None:
        """Return the next size; None: there is none."""
        largest = max(self.seconds, default=0)
        if self.ran_out_at:
            half = self.ran_out_at // 2
            return half if half > largest else None
        left = [size for size in self.planned if size > largest]
        if left:
            return min(left)
        size = min(2 * largest, LARGEST, self.most or LARGEST)
        return size if size > largest and self._is_growing else None

    def worked(self, size: int, seconds: float) -> None:
        self.seconds[size] = seconds

    def ran_out(self, size: int) -> None:
        """Memory ran out; halves of this size are tried next."""
        self.ran_out_at = size

    @property
    def _is_growing(self) -> bool:
        """Whether the last growth made rows cheaper."""
        if len(self.seconds) < 2:
            return False
        before, last = sorted(self.seconds)[-2:]
        row_s = self.seconds[last] / last
        return row_s < (1 - MIN_GAIN) * self.seconds[before] / before
