"""Check whether data is fit for calibration and labels for judging accuracy. Pure.

A range from the wrong data does not fail: it silently clips values or wastes INT8 levels. So data
that cannot be right is refused, with advice on what to provide instead.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from penstock.optimizer.binomial import at_least
from penstock.types import Array, pack_bytes

if TYPE_CHECKING:
    from penstock.optimizer.examples import Examples

Row = Mapping[str, Array]

# 10 rows miss a value of one row in twenty with a probability of 60 %, 100 rows with 0.6 %.
MIN_ROWS = 10
FEW_ROWS = 100
# Duplicates add nothing to a range; real traffic has a few.
MAX_COPIES = 0.5
MANY_COPIES = 0.1
# Probability of a false alarm, over all features together.
FALSE_ALARMS = 1e-3
# Largest distance of two distributions (0 to 1) that still counts as the same kind of data. With
# thousands of rows any two samples differ significantly; above this the difference matters.
FOREIGN = 0.35
# How far apart the ranges of two halves may be, as a share of the range.
UNSTABLE = 0.25
CHANCE_ALPHA = 0.05
MAX_ELEMENTS = 4096
# Features of one row of one input, in the order of `_row_features`.
FEATURES = ("the mean", "the deviation", "the maximum", "the minimum", "the size", "the roughness")
# Features that are compared relative to their own size; all others relative to the range of a row.
RELATIVE = ("the size", "the roughness")
# Relative difference that does not affect a range.
SLIGHT = 0.1
BRING = "bring 100 to 300 rows of what users send, prepared as they are when served"


class Audit(msgspec.Struct):
    """Problems forbid the use of the data, warnings do not. Facts are for the report."""

    problems: list[str] = []
    warnings: list[str] = []
    facts: dict[str, float] = {}

    def add(self, other: Audit) -> None:
        self.problems += other.problems
        self.warnings += other.warnings
        self.facts |= other.facts


def audit_examples(examples: Examples, predictions: Array | None, *, is_separate: bool) -> Audit:
    """Audit calibration data and labels. `predictions` are the original's answers on the choice
    part, in the form of the labels (`Scorer.predict`); None without labels."""
    split, labels = examples.split, examples.labels
    evaluation = (*split.choice, *split.held_out)
    judged = [examples.rows[index] for index in evaluation]
    rows = [examples.rows[index] for index in split.calibration]
    calibration = audit_calibration(rows, judged, is_separate=is_separate)
    _check_judged_copies(judged, calibration)
    if predictions is None or labels is None:
        return calibration
    if labels.dtype.kind == "i":
        known = labels[list(split.calibration)]
        calibration.add(audit_classes(known[known >= 0], labels[list(evaluation)]))
    calibration.add(audit_labels(predictions, labels[list(split.choice)]))
    return calibration


def audit_calibration(
    calibration: Sequence[Row], evaluation: Sequence[Row], *, is_separate: bool
) -> Audit:
    """Audit the calibration rows. `evaluation` is what candidates are judged on; if calibration has
    a data set of its own (`is_separate`), the two have to look alike."""
    audit = Audit(facts={"rows": float(len(calibration))})
    if len(calibration) < MIN_ROWS:
        missed = f"ranges of fewer than {MIN_ROWS} miss much of what is normal, and INT8 clips it"
        audit.problems.append(f"calibration has {len(calibration)} rows: {missed}; {BRING}")
        return audit
    finite = list(filter(is_finite, calibration))
    if len(finite) < len(calibration):
        # No error, as tree models take NaN for a missing value.
        count = f"{len(calibration) - len(finite):,} of {len(calibration):,} calibration rows"
        useless = "static INT8 cannot be calibrated with them"
        audit.warnings.append(f"{count} have values that are not finite: {useless}")
    calibration = finite
    if len(calibration) < MIN_ROWS:
        return audit
    _check_copies(calibration, audit)
    _check_constant(calibration, audit)
    _check_overlap(calibration, evaluation, is_separate, audit)
    if audit.problems:
        return audit
    if len(calibration) < FEW_ROWS:
        advice = f"rare values may be clipped; {FEW_ROWS} to 300 are better"
        audit.warnings.append(f"calibration has only {len(calibration)} rows: {advice}")
    _check_halves(calibration, audit)
    judged = list(filter(is_finite, evaluation))
    if is_separate and len(judged) >= MIN_ROWS:
        _check_kinship(calibration, judged, audit)
    return audit


def audit_classes(calibration: Array, evaluation: Array) -> Audit:
    """Check that calibration covers the classes of the evaluation set."""
    audit = Audit()
    wanted = set(evaluation.tolist())
    missing = sorted(wanted - set(calibration.tolist()))
    if len(wanted) < 2 or not missing or len(calibration) < MIN_ROWS:
        return audit
    audit.facts["classes missing"] = float(len(missing))
    if len(missing) >= len(wanted) - 1:
        there = f"calibration has rows of {len(wanted) - len(missing)} of {len(wanted)} classes"
        audit.problems.append(f"{there}: the others may need other ranges; {BRING}")
    elif len(wanted) <= len(calibration):
        shown = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
        lacking = f"{len(missing)} of {len(wanted)} classes ({shown})"
        audit.warnings.append(f"calibration has no row of {lacking}")
    return audit


def audit_labels(predictions: Array, labels: Array) -> Audit:
    """Check that the original beats chance on the labels. If not, labels are of other examples or
    another class order, or inputs are prepared differently: any candidate would do as well."""
    is_known = np.isfinite(predictions.astype(np.float64))
    predictions, labels = predictions[is_known], labels[is_known]
    if len(labels) == 0:
        return Audit(problems=["the original's answers to labelled examples are not finite"])
    if not (predictions == np.floor(predictions)).all():
        # Fractions are not class numbers, whatever the labels look like.
        return _audit_values(predictions, labels)
    is_right = predictions == labels
    right, guessed = float(is_right.mean()), _expected_by_chance(predictions, labels)
    likely = at_least(int(is_right.sum()), len(labels), guessed)
    audit = Audit(facts={"right": right, "by chance": guessed})
    if len(set(labels.tolist())) > 1 and likely > CHANCE_ALPHA:
        audit.problems.append(
            f"the original is right on {right * 100:.3g} % of {len(labels):,} labelled examples, "
            f"and guessing gives {guessed * 100:.3g} %: nothing can be lost that is not there. "
            "Are these the labels of these examples, is the order of the classes the model's, are "
            "inputs prepared as in training?"
        )
    return audit


def clipped_share(
    ranges: Mapping[str, tuple[float, float]], values: Mapping[str, Array]
) -> dict[str, float]:
    """Return, for each tensor, the share of held-out values outside its calibrated range."""
    found = {}
    for name, array in values.items():
        if name in ranges and array.size:
            low, high = ranges[name]
            found[name] = float(((array < low) | (array > high)).mean())
    return found


def kolmogorov_smirnov(one: Array, other: Array) -> tuple[float, float]:
    """Return the largest distance of two distributions, and its p-value."""
    distance = _distance(one, other)
    size = math.sqrt(len(one) * len(other) / (len(one) + len(other)))
    # Stephens' correction for small samples.
    scaled = (size + 0.12 + 0.11 / size) * distance
    if scaled < 0.2:
        return distance, 1.0
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return distance, min(max(math.fsum(terms), 0.0), 1.0)


def _distance(one: Array, other: Array, tolerance: float = 0.0) -> float:
    """Return the largest distance of distributions, each of which may shift by the tolerance."""
    leads = []
    for lower, upper in ((one, other), (other, one)):
        places = np.sort(lower)
        own = np.arange(1, len(places) + 1) / len(places)
        theirs = np.searchsorted(np.sort(upper), places + tolerance, "right") / len(upper)
        leads.append(float((own - theirs).max()))
    return max(leads)


def is_finite(row: Row) -> bool:
    return all(np.isfinite(each).all() for each in row.values() if each.dtype.kind == "f")


def _check_copies(rows: Sequence[Row], audit: Audit) -> None:
    share = _share_of_copies(rows)
    num_distinct = round((1 - share) * len(rows))
    audit.facts["copies"] = share
    if num_distinct < MIN_ROWS or share > MAX_COPIES:
        count = f"of {len(rows):,} calibration rows only {num_distinct:,} are distinct"
        useless = "copies add nothing to a range, and INT8 clips what they lack"
        audit.problems.append(f"{count}: {useless}; {BRING}")
    elif share > MANY_COPIES:
        audit.warnings.append(f"{share * 100:.0f} % of the calibration rows are copies of others")


def _check_judged_copies(rows: Sequence[Row], audit: Audit) -> None:
    """Warn of many duplicates: bounds assume that every example is a new one, as users send it."""
    share = audit.facts["judged copies"] = _share_of_copies(rows)
    if share > MANY_COPIES:
        audit.warnings.append(
            f"{share * 100:.0f} % of the rows that candidates are judged on are copies of others: "
            "unless users send the same as often, the loss may be larger than its bound"
        )


def _share_of_copies(rows: Sequence[Row]) -> float:
    return 1 - len({_fingerprint(row) for row in rows}) / max(1, len(rows))


def _check_constant(rows: Sequence[Row], audit: Audit) -> None:
    """Report inputs, except single numbers, whose elements are all equal in most rows."""
    names = [name for name in _names(rows, "f") if rows[0][name].size > 1]
    shares: dict[str, float] = {}
    for name in names:
        arrays = [row[name] for row in rows if name in row]
        share = float(np.mean([bool((array == array.ravel()[:1]).all()) for array in arrays]))
        if share > MAX_COPIES:
            shares[name] = share
    for name, share in shares.items():
        part = f"{share * 100:.0f} % of the calibration rows"
        text = f"input '{name}': in {part} all elements are the same"
        if len(shares) < len(names):
            audit.warnings.append(text)
            continue
        narrow = "such rows excite nothing in the model, and its ranges come out far too narrow"
        audit.problems.append(f"{text}: {narrow}; {BRING}")


def _check_overlap(
    calibration: Sequence[Row], evaluation: Sequence[Row], is_separate: bool, audit: Audit
) -> None:
    if not evaluation:
        return
    seen = {_fingerprint(row) for row in evaluation}
    share = float(np.mean([_fingerprint(row) in seen for row in calibration]))
    audit.facts["overlap"] = share
    if share > (0.0 if is_separate else MANY_COPIES):
        judged = "also among those that candidates are judged on, which flatters INT8"
        audit.warnings.append(f"{share * 100:.2g} % of the calibration rows are {judged}")


def _check_halves(rows: Sequence[Row], audit: Audit) -> None:
    """Compare the ranges of even and odd rows: if they differ, live ranges will too."""
    for name in _names(rows, "f"):
        arrays = [row[name] for row in rows if name in row]
        if len(arrays) < 2:
            continue
        halves = [[array for array in arrays[part::2] if array.size] for part in (0, 1)]
        low, other_low = (float(min(array.min() for array in half)) for half in halves)
        high, other_high = (float(max(array.max() for array in half)) for half in halves)
        width = max(high, other_high) - min(low, other_low)
        apart = max(abs(high - other_high), abs(low - other_low)) / width if width else 0.0
        audit.facts[f"apart {name}"] = apart
        if apart > UNSTABLE:
            differing = f"ranges of two halves of calibration rows differ by {apart * 100:.0f} %"
            audit.warnings.append(f"input '{name}': {differing}; more rows would settle them")


class _Feature(NamedTuple):
    """One number per row of both sets, and the difference that does not matter."""

    one: Array
    other: Array
    tolerance: float


def _check_kinship(calibration: Sequence[Row], evaluation: Sequence[Row], audit: Audit) -> None:
    """Compare features of the rows of both sets by a two-sample test. A significant difference may
    still be small: only one that is also large is refused."""
    features = _features(calibration, evaluation)
    level = FALSE_ALARMS / max(len(features), 1)
    results = {label: kolmogorov_smirnov(each.one, each.other) for label, each in features.items()}
    unlike = [label for label, (_, likely) in results.items() if likely < level]
    differing = {label: _distance(*features[label]) for label in unlike}
    audit.facts["distance"] = max(differing.values(), default=0.0)
    if not differing:
        return
    label = max(differing, key=lambda each: (differing[each], results[each][0]))
    found = features[label]
    text = (
        f"calibration is other data than what candidates are judged on: {label} is "
        f"{np.median(found.one):.3g} in the middle instead of {np.median(found.other):.3g} "
        f"(distance {results[label][0]:.2g} of 1, by chance in {results[label][1]:.1g})"
    )
    if differing[label] > FOREIGN:
        clipped = "INT8 would be scaled for values that do not come, and clip those that do"
        audit.problems.append(f"{text}: {clipped}; {BRING}")
    else:
        audit.warnings.append(text)


def _features(one: Sequence[Row], other: Sequence[Row]) -> dict[str, _Feature]:
    """Return features by label; those that are constant over both sets are left out."""
    found: dict[str, _Feature] = {}
    for name in _names(one, "fiubO"):
        rows, others = ([row[name] for row in rows if name in row] for rows in (one, other))
        if min(len(rows), len(others)) >= MIN_ROWS:
            for feature, each in _features_of(rows, others).items():
                found[f"input '{name}': {feature}"] = each
    both = {label: np.concatenate([each.one, each.other]) for label, each in found.items()}
    return {label: each for label, each in found.items() if np.ptp(both[label]) > 0}


def _features_of(rows: Sequence[Array], others: Sequence[Array]) -> dict[str, _Feature]:
    mine, theirs = (np.array([_row_features(array) for array in each]) for each in (rows, others))
    middle = np.median(theirs, axis=0)
    span = middle[FEATURES.index("the maximum")] - middle[FEATURES.index("the minimum")]
    found: dict[str, _Feature] = {}
    for column, feature in enumerate(FEATURES):
        slight = SLIGHT * abs(float(middle[column] if feature in RELATIVE else span))
        found[feature] = _Feature(mine[:, column], theirs[:, column], slight)
    if rows[0].dtype.kind != "O" and len({array.shape for array in (*rows, *others)}) == 1:
        # The rows of the average are not compared with it: a sample is closer to its own average.
        average = np.stack([_thinned(array) for array in others[::2]])
        thinned = (np.stack([_thinned(array) for array in each]) for each in (rows, others[1::2]))
        away, usual = (_distances(each, average) for each in thinned)
        found["distance from the average"] = _Feature(away, usual, SLIGHT * float(np.median(usual)))
    return found


def _row_features(array: Array) -> list[float]:
    if array.dtype.kind == "O":
        # Strings: their total length.
        total = float(sum(len(each) for each in array.ravel().tolist()))
        return [total if feature == "the size" else 0.0 for feature in FEATURES]
    if not array.size:
        return [0.0] * len(FEATURES)
    values = array.astype(np.float64)
    steps = np.abs(np.diff(values, axis=-1)) if values.ndim and values.shape[-1] > 1 else values * 0
    found = values.mean(), values.std(), values.max(), values.min(), values.size, steps.mean()
    return [float(each) for each in found]


def _thinned(array: Array) -> Array:
    flat = array.ravel()
    return flat[:: max(1, flat.size // MAX_ELEMENTS)].astype(np.float64)


def _distances(rows: Array, reference: Array) -> Array:
    """Return each row's mean distance from the reference's mean, in standard deviations."""
    spread = reference.std(axis=0)
    typical = float(spread.mean()) or 1.0
    away: Array = np.abs((rows - reference.mean(axis=0)) / (spread + 0.1 * typical)).mean(axis=1)
    return away


def _names(rows: Sequence[Row], kinds: str) -> list[str]:
    return [name for name, array in rows[0].items() if array.dtype.kind in kinds]


def _fingerprint(row: Row) -> bytes:
    hasher = hashlib.sha256()
    for name in sorted(row):
        array = row[name]
        content = pack_bytes(array) if array.dtype.kind == "O" else array.tobytes()
        hasher.update(f"{name} {array.dtype} {array.shape} {len(content)}\n".encode())
        hasher.update(content)
    return hasher.digest()


def _expected_by_chance(predictions: Array, labels: Array) -> float:
    """Return how often independent answers and labels would agree. Always answering the majority
    class is chance by this measure; skill on rare classes is not."""
    classes, counts = np.unique(labels, return_counts=True)
    answered = np.array([(predictions == each).mean() for each in classes])
    return float((answered * counts / len(labels)).sum())


def _audit_values(predictions: Array, labels: Array) -> Audit:
    error = float(np.abs(predictions - labels).mean())
    constant = float(np.abs(np.median(labels) - labels).mean())
    audit = Audit(facts={"error": error, "error of a constant": constant})
    if error >= constant:
        audit.problems.append(
            f"the original's mean absolute error on {len(labels):,} labelled examples is "
            f"{error:.3g}, and always answering the median gives {constant:.3g}: are these the "
            "labels of these examples, in the model's unit?"
        )
    return audit
