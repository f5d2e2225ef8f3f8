"""Finds rows with NaN or infinity, for all readers of data, with their place. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.serving.padding import bf16_floats
from penstock.types import Array, TensorSpec

# Places that a message lists; the rest is counted.
MAX_LISTED = 3
FLOATS = ("FP16", "BF16", "FP32", "FP64")


@dataclass(frozen=True, slots=True)
class NonFinite:
    """One row of one input with values that are not finite."""

    file: str
    input: str
    # Position among the examples, and the place in the file: "row 1717", "line 3".
    index: int
    place: str
    values: str  # "NaN", "infinity" or "NaN and infinity"


def find_non_finite(
    spec: TensorSpec, column: Array | Sequence[Array | None], file: str, place: Callable[[int], str]
) -> list[NonFinite]:
    """Return the rows of a column (one array, or one array per row) that are not finite."""
    if spec.datatype not in FLOATS:
        return []
    if isinstance(column, np.ndarray):
        is_bad = ~is_finite(spec.datatype, column)
        bad = np.flatnonzero(is_bad.reshape(len(column), -1).any(axis=1)).tolist()
    else:
        rows = enumerate(column)
        bad = [i for i, row in rows if row is not None and not is_finite(spec.datatype, row).all()]
    return [
        NonFinite(file, spec.name, index, place(index), _values(spec.datatype, column[index]))
        for index in bad
    ]


def is_finite(datatype: str, array: Array) -> Array:
    """Mark the elements that are neither NaN nor infinite."""
    return np.isfinite(_floats(datatype, array))


def _floats(datatype: str, array: Array) -> Array:
    """Return the numbers; BF16 may be kept as bits."""
    is_bits = datatype == "BF16" and array.dtype == np.uint16
    return bf16_floats(array) if is_bits else array


def describe(found: Sequence[NonFinite]) -> list[str]:
    """Return one clause per file and input: `data.npz: input 'x' row 1717 has NaN`."""
    groups: dict[tuple[str, str], list[NonFinite]] = {}
    for each in found:
        groups.setdefault((each.file, each.input), []).append(each)
    places = groups.items()
    return [f"{file}: input '{name}' {_describe_rows(rows)}" for (file, name), rows in places]


def _describe_rows(rows: Sequence[NonFinite]) -> str:
    values = sorted({value for each in rows for value in each.values.split(" and ")}, key=len)
    listed = " or ".join(values)
    if len(rows) == 1:
        return f"{rows[0].place} has {rows[0].values}"
    word = rows[0].place.partition(" ")[0]
    numbers = [each.place.partition(" ")[2] for each in rows]
    shown, num_more = numbers[:MAX_LISTED], len(numbers) - MAX_LISTED
    last = f"{num_more:,} more" if num_more > 0 else shown.pop()
    return f"{word}s {', '.join(shown)} and {last} have {listed}"


def _values(datatype: str, row: Array | None) -> str:
    assert row is not None
    kinds = {"NaN": np.isnan, "infinity": np.isinf}
    row = _floats(datatype, row)
    return " and ".join(name for name, is_kind in kinds.items() if is_kind(row).any())
