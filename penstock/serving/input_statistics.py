"""Statistics of a model's inputs: what a version was optimised on, and how rows compare with it.

`optimizer` collects them from its data and commits them as evidence; a worker measures live rows by
the same functions. A tensor has up to two quantities: its values (of texts, their lengths in bytes)
and, if its shape is variable, the number of its elements. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.serving.padding import bf16_floats
from penstock.types import Array, TensorSpec

# Key of the statistics in a version's evidence, and of the ranges that a version was calibrated on.
KEY, CALIBRATION = "input_statistics", "calibration"
VALUE, LENGTH = "value", "length"
# Elements of one row that are looked at, evenly spaced: sorting them takes 26 us (one core of the
# build machine, 2026-11).
MAX_ELEMENTS = 16_384
# Quantiles at which distributions are compared.
NUM_EDGES = 19
# Rows that are enough to know a distribution.
MAX_ROWS = 2_000
# Values this far outside of the known range, as a share of it, are still inside.
MARGIN = 0.05


class QuantityStatistics(msgspec.Struct, frozen=True):
    """One quantity over the rows of a data set. `shares` are, at each of the `edges`, the mean over
    rows of the share of values that are not larger; `deviations` are over rows too."""

    num_rows: int
    count: int
    mean: float
    std: float
    min: float
    max: float
    # Shares of all values.
    zeros: float
    not_finite: float
    edges: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()


# By input and quantity.
InputStatistics = dict[str, dict[str, QuantityStatistics]]


@dataclass(frozen=True, slots=True)
class WatchedInput:
    """An input whose rows are measured. Elements that equal `pad` are padding, if it is not None:
    they depend on the batch."""

    spec: TensorSpec
    pad: float | None = None

    @property
    def quantities(self) -> tuple[str, ...]:
        return (VALUE, LENGTH) if -1 in self.spec.shape else (VALUE,)

    def measure(self, row: Array) -> dict[str, Array]:
        """Return the sorted values of each quantity; those that are not finite come last."""
        return self.quantify(*sample(row))

    def quantify(self, elements: Array, step: int) -> dict[str, Array]:
        """Like `measure`, for every `step`-th element of a row."""
        if elements.dtype == np.object_:
            elements = np.fromiter(map(len, elements), np.float64, elements.size)
        elif self.spec.datatype == "BF16":
            elements = bf16_floats(elements)
        if self.pad is not None:
            elements = elements[elements != self.pad]
        found = {VALUE: np.sort(elements)}
        if LENGTH in self.quantities:
            found[LENGTH] = np.array([elements.size * step], np.float64)
        return found


def sample(row: Array) -> tuple[Array, int]:
    """Copy at most MAX_ELEMENTS of a row, evenly spaced; return them and their distance."""
    flat = row.reshape(-1)
    step = max(1, -(-flat.size // MAX_ELEMENTS))
    return flat[::step].copy(), step


def watched_inputs(config: ModelConfig) -> list[WatchedInput]:
    """Return the inputs of a worker with this configuration."""
    pads = {} if config.padding is None else {a.input: a.value for a in config.padding.axes}
    return [WatchedInput(spec, pads.get(spec.name)) for spec in config.inputs]


def num_finite(values: Array) -> int:
    """Return how many of sorted values are finite."""
    is_float = values.dtype.kind == "f" and values.size > 0
    # NaN and infinity sort to the ends.
    if not is_float or (math.isfinite(values[0]) and math.isfinite(values[-1])):
        return values.size
    return int(np.isfinite(values).sum())


def shares_at(values: Array, edges: Array) -> Array:
    """Return the share of sorted values, one at least, that are not larger than each edge."""
    found: Array = np.searchsorted(values, edges, side="right") / values.size
    return found


def collect(inputs: Sequence[WatchedInput], rows: Iterable[Mapping[str, Array]]) -> InputStatistics:
    """Return the statistics of a data set, of at most MAX_ROWS rows, evenly spaced."""
    rows = list(rows)
    rows = rows[:: max(1, -(-len(rows) // MAX_ROWS))]
    found: InputStatistics = {}
    for each in inputs:
        measured: dict[str, list[Array]] = {name: [] for name in each.quantities}
        for row in rows:
            if each.spec.name in row:
                for quantity, values in each.measure(row[each.spec.name]).items():
                    measured[quantity].append(values)
        known = {name: _describe(values) for name, values in measured.items()}
        known_only = {name: value for name, value in known.items() if value is not None}
        if known_only:
            found[each.spec.name] = known_only
    return found


def _describe(rows: Sequence[Array]) -> QuantityStatistics | None:
    """Return the statistics of one quantity; None if no row has a finite value."""
    total = sum(row.size for row in rows)
    finite = [row[np.isfinite(row)] for row in rows]
    finite = [row.astype(np.float64) for row in finite if row.size]
    if not finite:
        return None
    pooled = np.concatenate(finite)
    quantiles = np.arange(1, NUM_EDGES + 1) / (NUM_EDGES + 1)
    edges = np.unique(np.quantile(pooled, quantiles, method="inverted_cdf"))
    table = np.stack([shares_at(row, edges) for row in finite])
    # The sum of the largest doubles, which stand for missing values somewhere, is not finite, and
    # JSON could not hold it.
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = np.nan_to_num([pooled.mean(), pooled.std()], nan=np.finfo(np.float64).max)
    return QuantityStatistics(
        num_rows=len(rows),
        count=total,
        mean=float(mean),
        std=float(std),
        min=float(pooled.min()),
        max=float(pooled.max()),
        zeros=float((pooled == 0).sum() / total),
        not_finite=1 - pooled.size / total,
        edges=tuple(edges.tolist()),
        shares=tuple(table.mean(axis=0).tolist()),
        deviations=tuple(table.std(axis=0).tolist()),
    )


@dataclass(frozen=True, slots=True)
class ReferenceQuantity:
    """What live rows are compared with. Values from `low` to `high` are inside of the range, which
    comes from `num_range_rows` rows. Without `statistics` only the range is known."""

    input: WatchedInput
    quantity: str
    low: float
    high: float
    num_range_rows: int
    is_calibrated: bool = False
    statistics: QuantityStatistics | None = None

    @property
    def edges(self) -> tuple[float, ...]:
        return () if self.statistics is None else self.statistics.edges

    @property
    def takes_not_finite(self) -> bool:
        return self.statistics is not None and self.statistics.not_finite > 0


def references(config: ModelConfig, evidence: Mapping[str, object]) -> list[ReferenceQuantity]:
    """Return what the evidence of a version says about the inputs of this worker. A calibrated
    range of the model's own inputs is tighter than that of all data, and goes before it."""
    statistics = _read_statistics(evidence)
    ranges, num_calibrated = _read_calibration(config, evidence)
    found: list[ReferenceQuantity] = []
    for each in watched_inputs(config):
        name = each.spec.name
        for quantity in each.quantities:
            known = statistics.get(name, {}).get(quantity)
            if quantity == VALUE and name in ranges:
                low, high = _widened(*ranges[name])
                found.append(
                    ReferenceQuantity(each, quantity, low, high, num_calibrated, True, known)
                )
            elif known is not None:
                low, high = _widened(known.min, known.max)
                found.append(
                    ReferenceQuantity(each, quantity, low, high, known.num_rows, False, known)
                )
    return found


def _widened(low: float, high: float) -> tuple[float, float]:
    margin = MARGIN * (high - low) or 1e-6 * max(abs(low), abs(high))
    return low - margin, high + margin


def _read_statistics(evidence: Mapping[str, object]) -> InputStatistics:
    try:
        return msgspec.convert(evidence.get(KEY) or {}, InputStatistics)
    except msgspec.ValidationError as error:
        raise ConfigError(f"evidence.{KEY}: {error}") from None


class _Range(msgspec.Struct):
    min: float
    max: float


class _Calibration(msgspec.Struct):
    num_examples: int
    inputs: dict[str, _Range] = {}


def _read_calibration(
    config: ModelConfig, evidence: Mapping[str, object]
) -> tuple[dict[str, tuple[float, float]], int]:
    """Return the calibrated ranges, which are of the model's own inputs, by name; none if a
    function makes those from what this worker gets."""
    given = evidence.get(CALIBRATION)
    if not given or config.preprocess is not None:
        return {}, 0
    try:
        found = msgspec.convert(given, _Calibration)
    except msgspec.ValidationError as error:
        raise ConfigError(f"evidence.{CALIBRATION}: {error}") from None
    names = {spec.name for spec in config.inputs}
    ranges = {name: (r.min, r.max) for name, r in found.inputs.items() if name in names}
    return ranges, found.num_examples
