"""Representative examples: what users send, what the right answers are, and which part is for what.

The parts are disjoint: `calibration` for ranges, `choice` for judging candidates, `held_out` for
the one that was chosen, and nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.types import Array


@dataclass(frozen=True, slots=True)
class Split:
    """Indices into the examples; each in a fixed order that the seed decides."""

    calibration: tuple[int, ...]
    choice: tuple[int, ...]
    held_out: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Examples:
    """`rows[i]` is what one request sends: tensors by name, without the batch dimension."""

    rows: Sequence[Mapping[str, Array]]
    # One per row: class numbers, or whatever the evaluator understands; None without labels.
    labels: Array | None
    split: Split
    # Of every byte that was read.
    digest: str
    # As the report shows it: "3,000 examples of reviews.npz, labelled".
    text: str
