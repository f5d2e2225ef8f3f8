"""The table of a run: what passed with each number of shards, what did not, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from triton_material.scenes import Result


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    results: Mapping[int, Result]
    reason: str = ""

    @property
    def has_passed(self) -> bool:
        return all(each.has_passed for each in self.results.values())

    @property
    def fault(self) -> str:
        """What is wrong with the row: a failure without a reason, or a reason without one."""
        if not self.has_passed and not self.reason:
            notes = (each.note for each in self.results.values() if not each.has_passed)
            return next((note for note in notes if note), "failed")
        if self.has_passed and self.reason:
            return "passes: take it off the list of reasons"
        return ""


@dataclass(slots=True)
class Table:
    """Rows of one group, filled one number of shards at a time."""

    title: str
    shards: tuple[int, ...]
    reasons: Mapping[str, str]
    not_run: Mapping[str, str] = field(default_factory=dict)
    _results: dict[str, dict[int, Result]] = field(default_factory=dict)

    def add(self, num_shards: int, results: Mapping[str, Result]) -> None:
        for title, result in results.items():
            self._results.setdefault(title, {})[num_shards] = result

    def rows(self) -> list[Row]:
        return [
            Row(title, results, self.reasons.get(title, ""))
            for title, results in self._results.items()
        ]

    def lines(self) -> list[str]:
        head = " ".join(f"{number:>2} shard{'s' if number > 1 else ' '}" for number in self.shards)
        lines = ["", f"## {self.title}", "", f"{'item':<78} {head}  reason"]
        for row in self.rows():
            cells = " ".join(f"{self._cell(row, number):>9}" for number in self.shards)
            told = row.reason + ("; " if row.reason and row.fault else "") + row.fault
            lines.append(f"{row.title:<78} {cells}  {told}".rstrip())
        for title, reason in self.not_run.items():
            cells = " ".join(f"{'not run':>9}" for _ in self.shards)
            lines.append(f"{title:<78} {cells}  {reason}")
        return [*lines, "", self.summary()]

    def _cell(self, row: Row, number: int) -> str:
        if number not in row.results:
            return "-"
        return "passed" if row.results[number].has_passed else "failed"

    def summary(self) -> str:
        rows = self.rows()
        counts = []
        for number in self.shards:
            found = [row.results[number] for row in rows if number in row.results]
            passed = sum(each.has_passed for each in found)
            counts.append(f"{passed} of {len(found)} pass with {number} shard{'s'[: number > 1]}")
        listed = sum(bool(row.reason) for row in rows)
        told = f"{self.title}: {', '.join(counts)}; {listed} listed with a reason"
        return f"{told}, {len(self.not_run)} not run"

    def num_faults(self) -> int:
        return sum(bool(row.fault) for row in self.rows())
