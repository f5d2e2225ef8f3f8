"""One score per example from its answers: by labels, by an evaluator, or by agreement with the
original."""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, Set, ValuesView
from dataclasses import dataclass
from functools import partial

import numpy as np

from penstock.errors import ConfigError, describe_error
from penstock.optimizer import user_code
from penstock.optimizer.examples import Examples
from penstock.optimizer.numerics import Answers, agreements, cosines, score_outputs
from penstock.optimizer.plan import Plan
from penstock.types import Array

# Usual names of outputs with class scores, to choose among several.
SCORE_NAMES = ("logits", "scores", "probabilities", "probs", "score")

# Arguments: answers, the indices of their examples, and the original's answers to them.
Score = Callable[[Answers, tuple[int, ...], Answers], Array]
# Returns a class number or a value per answer; NaN if it has none.
Predict = Callable[[Answers], Array]


@dataclass(frozen=True, slots=True)
class Scorer:
    """The score of a run, chosen once from the plan and the data."""

    metric: str
    # There are neither labels nor an evaluator: the original's answers are the ground truth.
    is_agreement: bool
    # As the report shows it: "top1 of output 'logits' by labels".
    text: str
    compute: Score
    # Converts answers to the form of the labels; None if nothing is compared with labels.
    predict: Predict | None = None
    # The outputs that the score reads; those of an evaluator are known only after its first call.
    reads: Set[str] = frozenset()

    def score(self, answers: Answers, indices: tuple[int, ...], original: Answers) -> Array:
        """Return one number for each example of `indices`; NaN: cannot be scored."""
        assert len(answers) == len(indices) == len(original), "answers of other examples"
        if not indices:
            return np.empty(0)
        return self.compute(answers, indices, original)


def make_scorer(plan: Plan, examples: Examples, original: Answers) -> Scorer:
    """Choose the scorer. `original`: some answers of the original, to classify its outputs.
    ConfigError if the plan's metric does not fit the data."""
    asked = "" if plan.accuracy is None else plan.accuracy.metric
    if plan.evaluator:
        return _by_evaluator(plan.evaluator, asked or "score", examples.labels)
    if asked == "agreement" or (examples.labels is None and not asked):
        return _by_agreement(original)
    if examples.labels is None:
        needed = "needs labels or an evaluator; expected them, or 'agreement'"
        raise ConfigError([f"accuracy: '{asked}' {needed}"])
    metric = asked or ("mae" if examples.labels.dtype.kind == "f" else "top1")
    if metric == "mae":
        return _by_values(examples.labels, original)
    match = re.fullmatch(r"top([1-9][0-9]*)", metric)
    if match is None:
        expected = "expected top1, top5, mae, or an evaluator for it"
        raise ConfigError([f"accuracy: '{metric}' is not known; {expected}"])
    return _by_classes(int(match[1]), examples, original)


class _Recorded(dict[str, Array]):
    """An answer that records which outputs an evaluator reads."""

    def __init__(self, answer: Mapping[str, Array], reads: set[str]) -> None:
        super().__init__(answer)
        self._reads = reads

    def __getitem__(self, name: str) -> Array:
        self._reads.add(name)
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        # Overriding `__iter__` makes dict(answer) and **answer read item by item.
        return super().__iter__()

    def get(self, name: str, default: Array | None = None) -> Array | None:  # type: ignore[override]
        self._reads.add(name)
        return super().get(name, default)

    def values(self) -> ValuesView[Array]:  # type: ignore[override]
        self._reads.update(self.keys())
        return super().values()

    def items(self) -> ItemsView[str, Array]:  # type: ignore[override]
        self._reads.update(self.keys())
        return super().items()


def _by_evaluator(path: str, metric: str, labels: Array | None) -> Scorer:
    evaluate = user_code.find(path, "evaluator").call
    reads: set[str] = set()

    def compute(answers: Answers, indices: tuple[int, ...], original: Answers) -> Array:
        outputs = [_Recorded(answer, reads) for answer in answers]
        right = None if labels is None else labels[list(indices)]
        try:
            scores = np.asarray(evaluate(outputs, right), np.float64)
        except Exception as error:  # A user's function may raise anything.
            raise ConfigError([f"evaluator '{path}': failed: {describe_error(error)}"]) from error
        if scores.shape != (len(answers),):
            expected = f"expected {len(answers):,} scores, one per example"
            raise ConfigError([f"evaluator '{path}': {expected}, got shape {list(scores.shape)}"])
        return scores

    return Scorer(metric, False, f"{metric} by {path}", compute, reads=reads)


def _by_agreement(original: Answers) -> Scorer:
    names = score_outputs(original)

    def same_class(answers: Answers, indices: tuple[int, ...], truth: Answers) -> Array:
        scores = agreements(truth, answers, names)
        scores[[not _is_scorable(answer, names) for answer in answers]] = np.nan
        return scores

    def same_direction(answers: Answers, indices: tuple[int, ...], truth: Answers) -> Array:
        """Return cosines; 0 if strings or integers, which have no direction, are not equal."""
        scores = cosines(truth, answers)
        pairs = zip(truth, answers, strict=True)
        scores[[not _has_same_others(one, other) for one, other in pairs]] = 0.0
        return scores

    if names:
        text = f"top-1 agreement with the original in {listed(names)}"
        return Scorer("agreement", True, text, same_class)
    has_floats = any(array.dtype.kind == "f" for each in original[:1] for array in each.values())
    text = "cosine with the original's answers" if has_floats else "the original's answers again"
    return Scorer("agreement", True, text, same_direction)


def _by_classes(count: int, examples: Examples, original: Answers) -> Scorer:
    labels = examples.labels
    assert labels is not None
    used = labels[[*examples.split.choice, *examples.split.held_out]]
    if used.dtype.kind == "f" and bool((used == np.floor(used)).all()):
        used = used.astype(np.int64)
    if used.dtype.kind not in "iub":
        raise ConfigError([f"labels: top{count} needs class numbers, got {used.dtype}"])
    name, num_classes = _classes_output(original)
    if count > 1 and count >= num_classes:
        kind = f"{num_classes} classes" if num_classes else "one class number"
        raise ConfigError([f"accuracy: top{count} says nothing: output '{name}' gives {kind}"])
    highest = num_classes or int(used.max(initial=0)) + 1
    is_outside = (used < 0) | (used >= highest)
    if is_outside.any():
        there = f"those of output '{name}', which are 0 to {highest - 1}"
        raise ConfigError([f"labels: class {used[is_outside][0]} is not among {there}"])
    predict = _predictor(name, num_classes, original)

    def compute(answers: Answers, indices: tuple[int, ...], truth: Answers) -> Array:
        right = labels[list(indices)].astype(np.int64)
        if count == 1:
            found = predict(answers)
            return np.where(np.isfinite(found), found == right, np.nan)
        scores = np.stack([answer[name].ravel() for answer in answers]).astype(np.float64)
        return _is_among_best(scores, right, count)

    text = f"top{count} of output '{name}' by labels"
    return Scorer(f"top{count}", False, text, compute, predict, frozenset({name}))


def _is_among_best(scores: Array, right: Array, count: int) -> Array:
    """Return 1 where fewer than `count` classes rank before the right one; ties by number."""
    own = scores[np.arange(len(right)), right][:, None]
    is_before = (scores > own) | ((scores == own) & (np.arange(scores.shape[1]) < right[:, None]))
    found: Array = (is_before.sum(axis=1) < count).astype(np.float64)
    found[~(scores < np.inf).all(axis=1)] = np.nan
    return found


def _classes_output(original: Answers) -> tuple[str, int]:
    """Return the output that predicts the class, and how many there are; 0: it is the number."""
    if names := score_outputs(original):
        name = _chosen(names)
        return name, original[0][name].size
    if single := _single_outputs(original, "f"):
        return _chosen(single), 2
    if numbers := _single_outputs(original, "iu"):
        return _chosen(numbers), 0
    problem = "no output gives one score per class for each example"
    raise ConfigError([f"labels: {problem}; outputs are {_shapes(original)}"])


def _chosen(names: list[str]) -> str:
    named = [name for name in names if name.lower() in SCORE_NAMES] if len(names) > 1 else names
    if len(named) != 1:
        usual = "expected one of them to be called 'logits', 'scores' or 'probabilities'"
        advice = f"{usual}, or an evaluator that chooses"
        raise ConfigError([f"labels: outputs {listed(names)} could all be scores; {advice}"])
    return named[0]


def _single_outputs(answers: Answers, kinds: str) -> list[str]:
    def is_single(name: str) -> bool:
        return all(each[name].size == 1 and each[name].dtype.kind in kinds for each in answers)

    return list(filter(is_single, answers[0] if answers else ()))


def _predictor(name: str, num_classes: int, original: Answers) -> Predict:
    if not num_classes:
        return partial(_values, name)

    def best(answers: Answers) -> Array:
        found = np.array([np.argmax(answer[name]) for answer in answers], np.float64)
        found[[not _is_scorable(answer, [name]) for answer in answers]] = np.nan
        return found

    if original[0][name].size > 1:
        return best
    seen = _values(name, original)
    # One number for two classes: a probability, or a logit.
    threshold = 0.5 if ((seen >= 0) & (seen <= 1)).all() else 0.0

    def beyond(answers: Answers) -> Array:
        values = _values(name, answers)
        return np.where(np.isfinite(values), values > threshold, np.nan)

    return beyond


def _by_values(labels: Array, original: Answers) -> Scorer:
    names = _single_outputs(original, "f")
    if len(names) != 1 or labels.dtype.kind not in "iuf":
        problem = "numbers are compared with the one output that gives one float for each example"
        raise ConfigError([f"labels: {problem}; outputs are {_shapes(original)}"])
    name = names[0]

    def compute(answers: Answers, indices: tuple[int, ...], truth: Answers) -> Array:
        error: Array = np.abs(_values(name, answers) - labels[list(indices)].astype(np.float64))
        return error

    text = f"mean absolute error of output '{name}' by labels"
    predict = partial(_values, name)
    return Scorer("mae", False, text, compute, predict, frozenset({name}))


def _values(name: str, answers: Answers) -> Array:
    return np.array([float(answer[name].ravel()[0]) for answer in answers], np.float64)


def _shapes(answers: Answers) -> dict[str, list[int]]:
    return {name: list(array.shape) for name, array in answers[0].items()} if answers else {}


def _is_scorable(answer: Mapping[str, Array], names: Sequence[str]) -> bool:
    """Return whether there is no NaN or infinity, except minus infinity of masked classes."""
    return all(bool((answer[name] < np.inf).all()) for name in names)


def _has_same_others(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    """Return whether all outputs other than floats are equal."""
    names = [name for name, array in one.items() if array.dtype.kind != "f"]
    return all(np.array_equal(one[name], other[name]) for name in names)


def listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
