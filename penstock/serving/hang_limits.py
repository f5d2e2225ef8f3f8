"""How long a batch may take before its worker counts as hung: learned from earlier ones. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

HANG_FACTOR = 20
NUM_REMEMBERED = 128


class HangLimits:
    """HANG_FACTOR times the 99th percentile of batches of about the same size, at least `min_s`."""

    def __init__(self, min_s: float) -> None:
        self._min_s = min_s
        self._recent: dict[int, deque[float]] = {}

    def seed(self, timings: Mapping[int, float]) -> None:
        """Note the durations of warm-up batches, by rows."""
        for num_rows, duration_s in timings.items():
            self.note(num_rows, duration_s)

    def note(self, num_rows: int, duration_s: float) -> None:
        # Sizes with the same number of bits count together.
        recent = self._recent.get(num_rows.bit_length())
        if recent is None:
            recent = self._recent[num_rows.bit_length()] = deque(maxlen=NUM_REMEMBERED)
        recent.append(duration_s)

    def limit_s(self, num_rows: int) -> float:
        recent = sorted(self._recent.get(num_rows.bit_length(), ()))
        p99 = recent[int(len(recent) * 0.99)] if recent else 0.0
        return max(self._min_s, HANG_FACTOR * p99)
