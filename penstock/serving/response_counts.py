"""Statistics of responses by their number in a request (v2's `response_stats`). Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

# Responses of a request that are counted by number; later ones count as the last of these.
MAX_NUMBERED = 1024
KINDS = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")


@dataclass(slots=True)
class ResponseTimes:
    """The responses of one open request: how many it has had, and when the last of them came, or
    when its batch was sent."""

    since: float
    count: int = 0

    def next(self, now: float) -> tuple[int, float]:
        """Return the number of a response that comes now, and what it took."""
        number, took_s = min(self.count, MAX_NUMBERED - 1), now - self.since
        self.count, self.since = self.count + 1, now
        return number, took_s


@dataclass(slots=True)
class ResponseCounts:
    """For each number of a response, and each of KINDS: how many, and seconds in all."""

    by_number: dict[int, dict[str, tuple[int, float]]] = field(default_factory=dict)

    def answered(self, times: ResponseTimes, now: float, *, is_empty: bool) -> None:
        number, took_s = times.next(now)
        if is_empty:
            self._add(number, "empty_response", took_s)
            return
        for kind, each_s in (("compute_infer", took_s), ("compute_output", 0.0)):
            self._add(number, kind, each_s)
        self._add(number, "success", took_s)

    def failed(self, times: ResponseTimes, now: float) -> None:
        number, took_s = times.next(now)
        self._add(number, "compute_infer", took_s)
        self._add(number, "fail", took_s)

    def cancelled(self, times: ResponseTimes, now: float) -> None:
        """Count a response that nobody waits for."""
        number, took_s = times.next(now)
        self._add(number, "cancel", took_s)

    def statistics(self) -> dict[str, dict[str, dict[str, int]]]:
        return {
            str(number): {
                kind: {"count": count, "ns": round(seconds * 1e9)}
                for kind in KINDS
                for count, seconds in (kinds.get(kind, (0, 0.0)),)
            }
            for number, kinds in sorted(self.by_number.items())
        }

    def _add(self, number: int, kind: str, seconds: float) -> None:
        kinds = self.by_number.setdefault(number, {})
        count, total_s = kinds.get(kind, (0, 0.0))
        kinds[kind] = count + 1, total_s + seconds
