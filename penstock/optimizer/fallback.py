"""Fallback to float for a model that loses too much in INT8: find the layers to keep in float.

Each layer is quantised alone to measure its error, and layers are ranked by error avoided for time
lost. They are kept in float in this order until the accuracy gate passes; those that turn out
unnecessary are quantised again. Pure: the caller provides the functions that build, compute and
judge.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.optimizer.numerics import Answers
from penstock.optimizer.results import FallbackLayer

# Blocks and layers that cause less than this share of the worst one's error are ranked last.
MIN_SHARE = 0.01
# Least cost of a layer as a share of all time, or those that cost nothing would rank first.
MIN_COST_SHARE = 0.01
# Blocks are analysed layer by layer until they cover this share of the error, or this many layers.
# If the error is spread everywhere, single layers say little.
ERROR_COVERED = 0.95
MAX_SINGLE = 18
DEFAULT_MAX_CALLS = 24
# Rows on which quantised and original differ most are the most informative about layers.
MAX_ROWS = 32
# Layers that a refusal names.
MAX_NAMED = 5

# Returns the answers of the model with these layers in float and all others in INT8.
Evaluate = Callable[[tuple[str, ...]], Answers]
Passes = Callable[[tuple[str, ...]], bool]


@dataclass(frozen=True, slots=True)
class WeightedLayer:
    name: str
    operator: str
    # Cost of keeping it in float: seconds, or its share of all FLOP if no times are known.
    cost: float


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that are judged together."""

    name: str
    layers: tuple[WeightedLayer, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.layers)

    @property
    def cost(self) -> float:
        return sum(layer.cost for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Effect:
    """Error of the answers when only this group is quantised."""

    group: Group
    error: float


def with_costs(
    layers: Sequence[tuple[str, str, float]], seconds: Mapping[str, float] | None = None
) -> list[WeightedLayer]:
    """Make layers from (name, operator, FLOP), with costs in seconds where known."""
    total = sum(flops for _, _, flops in layers) or 1.0
    costs = {name: flops / total for name, _, flops in layers}
    # A profile of a GPU names kernels, not layers.
    if seconds and seconds.keys() & costs.keys():
        costs = dict(seconds)
    return [WeightedLayer(name, operator, costs.get(name, 0.0)) for name, operator, _ in layers]


def blocks(layers: Sequence[WeightedLayer]) -> list[Group]:
    """Group layers by name up to its first number (`encoder/layer.3/...`), else neighbours."""
    named: dict[str, list[WeightedLayer]] = {}
    for layer in layers:
        match = re.match(r"(.*?[a-zA-Z_]+s?[./_]\d+)[./]", layer.name)
        block = match[1] if match else layer.name.rpartition("/")[0] or layer.name
        named.setdefault(block, []).append(layer)
    if 1 < len(named) < len(layers):
        return [Group(name, tuple(members)) for name, members in named.items()]
    size = max(1, round(len(layers) ** 0.5))
    runs = [layers[start : start + size] for start in range(0, len(layers), size)]
    names = [" … ".join(dict.fromkeys((run[0].name, run[-1].name))) for run in runs]
    return [Group(name, tuple(run)) for name, run in zip(names, runs, strict=True)]


def output_error(original: Answers, candidate: Answers) -> float:
    """Return the mean squared difference relative to each output's mean square; infinite if an
    answer is not finite or has another shape."""
    errors: list[float] = []
    for wanted, given in zip(original, candidate, strict=True):
        for name, array in wanted.items():
            if array.dtype.kind != "f":
                continue
            other = given.get(name)
            if other is None or other.shape != array.shape or not np.isfinite(other).all():
                return float("inf")
            difference = np.square(array.astype(np.float64) - other).mean()
            errors.append(float(difference / (np.square(array.astype(np.float64)).mean() + 1e-12)))
    return float(np.mean(errors)) if errors else 0.0


def most_different(original: Answers, candidate: Answers, limit: int = MAX_ROWS) -> list[int]:
    """Return rows by how much the two differ, the largest difference first."""
    pairs = zip(original, candidate, strict=True)
    errors = [output_error([wanted], [given]) for wanted, given in pairs]
    return sorted(range(len(errors)), key=lambda row: -errors[row])[:limit]


def effects(
    groups: Sequence[Group], layers: Sequence[WeightedLayer], evaluate: Evaluate, original: Answers
) -> list[Effect]:
    """Measure each group quantised alone: so each shows its error even if several are bad."""
    found = []
    for group in groups:
        members = set(group.names)
        others = tuple(layer.name for layer in layers if layer.name not in members)
        found.append(Effect(group, output_error(original, evaluate(others))))
    return found


def rank(found: Sequence[Effect]) -> list[Effect]:
    """Sort by error avoided for time lost, highest first; groups of next to no error last."""
    worst = max((effect.error for effect in found), default=0.0)
    total = sum(effect.group.cost for effect in found) or 1.0

    def key(effect: Effect) -> tuple[bool, float]:
        is_small = effect.error < MIN_SHARE * worst
        cost = max(effect.group.cost, MIN_COST_SHARE * total)
        return is_small, -effect.error / cost

    return sorted(found, key=key)


def sensitivity(
    layers: Sequence[WeightedLayer], evaluate: Evaluate, original: Answers
) -> list[Effect]:
    """Measure blocks, then single layers of the blocks that cause nearly all of the error. Ranked:
    the single layers before the remaining blocks."""
    by_block = effects(blocks(layers), layers, evaluate, original)
    by_block.sort(key=lambda effect: -_finite(effect.error))
    total = sum(_finite(effect.error) for effect in by_block)
    covered, single, rest = 0.0, list[Group](), list[Effect]()
    for effect in by_block:
        members = effect.group.layers
        has_room = len(single) + len(members) <= MAX_SINGLE
        if not single or (covered < ERROR_COVERED * total and has_room):
            single += [Group(layer.name, (layer,)) for layer in members]
            covered += _finite(effect.error)
        else:
            rest.append(effect)
    return [*rank(effects(single, layers, evaluate, original)), *rank(rest)]


def _finite(error: float) -> float:
    return min(error, 1e12)


def find_fallback(
    ranked: Sequence[Effect], passes: Passes, max_calls: int = DEFAULT_MAX_CALLS
) -> list[Effect] | None:
    """Return the groups to keep in float; None if none of `max_calls` choices passes."""
    known: dict[frozenset[str], bool] = {}

    def ask(kept: Sequence[Effect]) -> bool:
        names = tuple(name for effect in kept for name in effect.group.names)
        key = frozenset(names)
        if key not in known and len(known) < max_calls:
            known[key] = passes(names)
        return known.get(key, False)

    # Try the first 1, 2, 4, ... of the ranking until it passes, then bisect.
    low, high = 0, min(1, len(ranked))
    while not high or not ask(ranked[:high]):
        if high >= len(ranked) or len(known) >= max_calls:
            return None
        low, high = high, min(2 * high, len(ranked))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if ask(ranked[:middle]) else (middle, high)
    # Quantise groups again, the least useful first, while the gate still passes.
    kept = list(ranked[:high])
    for effect in reversed(ranked[:high]):
        fewer = [each for each in kept if each is not effect]
        if fewer and ask(fewer):
            kept = fewer
    return kept


def most_harmful(ranked: Sequence[Effect]) -> list[FallbackLayer]:
    """Describe the layers that cause most of the error, for a refusal to name."""
    worst = sorted(ranked, key=lambda effect: -_finite(effect.error))
    return described(worst, ranked)[:MAX_NAMED]


def described(kept: Sequence[Effect], ranked: Sequence[Effect]) -> list[FallbackLayer]:
    """Describe the kept layers for the report, each with its share of the total error."""
    total = sum(_finite(effect.error) for effect in ranked) or 1.0
    found = []
    for effect in kept:
        share = _finite(effect.error) / total / len(effect.group.layers)
        found += [FallbackLayer(x.name, x.operator, share, x.cost) for x in effect.group.layers]
    return found
