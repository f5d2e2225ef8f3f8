"""A build, tried out in a process of its own: one that crashes or leaks is a result, and not the
end of the run. Loads the same Runner that the server would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.optimizer.candidates import Build
from penstock.optimizer.facts import Facts
from penstock.optimizer.simulate import TimeTable
from penstock.types import Array


def inspect(build: Build) -> Facts:
    """Load it, and read back what was built; `file_facts` and what only the loaded form knows.
    BackendFailed says why it cannot be loaded."""
    raise NotImplementedError


def answers(build: Build, rows: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
    """One per row, computed in batches of equal shapes where the model may be batched."""
    raise NotImplementedError


def times(
    build: Build, rows: Sequence[Mapping[str, Array]], num_instances: int, num_threads: int
) -> TimeTable:
    """T(b) on the rungs 1, 8 and the largest (by bucket, where the model is padded), with so many
    instances computing at once, each with so many threads."""
    raise NotImplementedError
