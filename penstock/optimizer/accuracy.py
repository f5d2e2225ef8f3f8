"""The accuracy gate: a paired, one-sided test that rejects unless the examples prove the loss
small. Pure.

The gate judges the upper confidence bound of the loss, not the observed loss.

Binary scores (0 or 1): only pairs in which original and candidate differ count. The rates of
examples that got worse and better have exact binomial limits, which are combined into a limit of
their difference (Zou and Donner's MOVER, with the correlation of counts of one sample). By full
enumeration at the limit for 50 to 5,000 examples, 0.5 to 20 % differing, a candidate that loses
exactly the limit passes with a probability of at most alpha.

Other scores: the larger of a BCa bootstrap bound of the mean difference and Student's t bound. If
only few examples differ, also at least the bound for differences as large as the range of scores.

Outputs that the score does not read must each pass `output_checks`. A lossless step whose answers
equal the original's on all held-out examples needs no bound, but its scores must not fall either.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import msgspec
import numpy as np

from penstock.benchmark.stats import student_t
from penstock.optimizer.binomial import lower_limit, upper_limit
from penstock.optimizer.budget import ERRORS, Budget
from penstock.optimizer.numerics import Numerics
from penstock.optimizer.output_checks import OutputCheck
from penstock.types import Array

ALPHA = 0.05
# Share of the remaining alpha that each next candidate on the held-out set spends.
SPENT_SHARE = 0.75
MIN_RESAMPLES = 4_000
MAX_RESAMPLES = 20_000
# Elements that are resampled at once.
CHUNK = 1 << 21
SEED = 20_011
# With fewer examples a bootstrap says nothing about unseen ones.
MIN_BOOTSTRAP = 10
# Fewer differing examples than this do not show how large differences can be.
FEW_DIFFERING = 10
# Loss that is reported when none can be computed. JSON has no infinity.
ANY_LOSS = 1e300
# More examples than users would label.
MAX_NEEDED = 10_000_000

BINOMIAL = "exact binomial on discordant pairs"
BOOTSTRAP = "paired BCa bootstrap"
NOT_JUDGED = "not judged"
EQUAL_ANSWERS = "answers equal within rounding"


class Judgement(msgspec.Struct):
    """Comparison of original and candidate on the same examples."""

    metric: str
    original: float
    candidate: float
    # Loss (positive: the candidate is worse), and its one-sided upper bound.
    loss: float
    loss_bound: float
    limit: float
    num_examples: int
    # Examples on which the candidate was better and worse.
    num_better: int
    num_worse: int
    method: str  # "exact binomial on discordant pairs", "paired BCa bootstrap", "not judged"
    alpha: float
    is_passed: bool
    # If the bound is too wide to decide: about how many examples of this part would be enough.
    # None: it passed, the loss itself exceeds the limit, or more than MAX_NEEDED are needed.
    num_needed: int | None = None
    # "choice" or "held out".
    part: str = "choice"
    # One sentence, as the journal and the report show it.
    text: str = ""
    # Outputs that the score does not read.
    outputs: list[OutputCheck] = []
    # Rows on which a lossless step was compared with the original value by value; 0: none.
    num_compared: int = 0


def spent_alpha(attempt: int, alpha: float = ALPHA) -> float:
    """Return the alpha for candidate number `attempt`, from 0, on the held-out set: three quarters
    of what earlier attempts left, so that over any number of attempts a candidate that loses too
    much passes with a probability of at most `alpha`. The first is usually the only one."""
    return float(alpha * SPENT_SHARE * (1 - SPENT_SHARE) ** attempt)


def judge(
    original: Array,
    candidate: Array,
    budget: Budget,
    *,
    alpha: float = ALPHA,
    part: str = "choice",
    is_binary: bool | None = None,
) -> Judgement:
    """Judge a candidate by one score per example, in the same order. NaN or no scores: no pass.
    `is_binary`: scores are 0 or 1 by definition; None: inferred, in vain where all are 1."""
    if is_binary is None:
        is_binary = all(bool(((s == 0) | (s == 1)).all()) for s in (original, candidate))
    judgement = Judgement(
        metric=budget.metric,
        original=_mean(original),
        candidate=_mean(candidate),
        loss=ANY_LOSS,
        loss_bound=ANY_LOSS,
        limit=budget.limit,
        num_examples=int(original.size),
        num_better=0,
        num_worse=0,
        method=NOT_JUDGED,
        alpha=alpha,
        is_passed=False,
        part=part,
    )
    problem = _problem(original, candidate, budget, is_binary)
    if problem:
        judgement.text = f"{budget.metric}: {NOT_JUDGED}: {problem}"
        return judgement
    before, after = (np.asarray(scores, np.float64) for scores in (original, candidate))
    # From here on a positive loss is bad, whether high or low scores are better.
    losses = after - before if budget.is_lower_better else before - after
    scale = abs(float(before.mean())) if budget.is_relative else 1.0
    bound = _binomial if is_binary else _bootstrap
    judgement.method = BINOMIAL if is_binary else BOOTSTRAP
    judgement.loss_bound, num_needed = bound(losses, before, after, budget, alpha)
    judgement.loss = float(losses.mean()) / scale
    judgement.num_better, judgement.num_worse = int((losses < 0).sum()), int((losses > 0).sum())
    judgement.is_passed = judgement.loss_bound <= budget.limit
    if not judgement.is_passed and judgement.loss < budget.limit:
        judgement.num_needed = num_needed
    is_share = budget.metric not in ERRORS and _is_share(before) and _is_share(after)
    judgement.text = _text(judgement, budget, is_share)
    return judgement


def with_outputs(judgement: Judgement, checks: list[OutputCheck]) -> Judgement:
    """Add the checks of outputs that the score does not read; all of them must pass."""
    judgement = msgspec.structs.replace(judgement, outputs=checks)
    return _rejected(judgement, [each.problem for each in checks if each.problem])


def with_equality(judgement: Judgement, numerics: Numerics) -> Judgement:
    """Add a lossless step's comparison of answers on this part. Answers that differ beyond rounding
    block it. If the observed loss is below the limit and only the bound fails, for too few
    examples, equal answers are enough to pass."""
    judgement = msgspec.structs.replace(judgement, num_compared=numerics.num_examples)
    if numerics.problems or judgement.is_passed or not judgement.loss < judgement.limit:
        return _rejected(judgement, numerics.problems)
    text = f"{EQUAL_ANSWERS} on all {judgement.num_examples:,} examples ({judgement.text})"
    return msgspec.structs.replace(judgement, is_passed=True, method=EQUAL_ANSWERS, text=text)


def _rejected(judgement: Judgement, problems: list[str]) -> Judgement:
    """Return the judgement with these problems, each of which forbids to pass."""
    if not problems:
        return judgement
    text = f"{'; '.join(problems)} ({judgement.text})"
    return msgspec.structs.replace(judgement, is_passed=False, num_needed=None, text=text)


def _problem(original: Array, candidate: Array, budget: Budget, is_binary: bool) -> str:
    """Return why the scores cannot be judged; empty if they can."""
    if original.ndim != 1 or original.shape != candidate.shape:
        got = f"{list(original.shape)} and {list(candidate.shape)}"
        return f"expected one score per example from both, got shapes {got}"
    if len(original) == 0:
        return "there are no examples in this part"
    for whose, scores in (("original", original), ("candidate", candidate)):
        if scores.dtype.kind not in "biuf":
            return f"the scores of the {whose} are no numbers"
        num_bad = int((~np.isfinite(scores.astype(np.float64))).sum())
        if num_bad:
            return f"{num_bad:,} of {len(scores):,} scores of the {whose} are not finite"
    if budget.is_relative and not np.any(original.astype(np.float64).mean()):
        return "the original's mean score is 0, of which nothing is a share"
    if len(original) < MIN_BOOTSTRAP and not is_binary:
        return f"expected at least {MIN_BOOTSTRAP} examples, got {len(original)}"
    return ""


def _mean(scores: Array) -> float:
    """Return the mean of the finite scores, or 0: NaN cannot be written to a journal."""
    if scores.size == 0 or scores.dtype.kind not in "biuf":
        return 0.0
    finite = scores[np.isfinite(scores)]
    return float(finite.mean()) if finite.size else 0.0


def _is_share(scores: Array) -> bool:
    return bool(((scores >= 0) & (scores <= 1)).all())


def _binomial(
    losses: Array, before: Array, after: Array, budget: Budget, alpha: float
) -> tuple[float, int | None]:
    # The original's mean is treated as exact: its spread is small beside that of rare differences.
    scale = float(before.mean()) if budget.is_relative else 1.0
    num_examples = len(losses)
    worse, better = (float((losses == sign).mean()) for sign in (1, -1))

    def bound(size: float) -> float:
        return binary_bound(worse * size, better * size, size, alpha) / scale

    loss_bound = bound(num_examples)
    if loss_bound <= budget.limit or (worse - better) / scale >= budget.limit:
        return loss_bound, None
    enough = float(num_examples)
    while bound(enough) > budget.limit:
        enough *= 2
        if enough > MAX_NEEDED:
            return loss_bound, None
    few = enough / 2
    while enough / few > 1.005:
        middle = math.sqrt(enough * few)
        few, enough = (middle, enough) if bound(middle) > budget.limit else (few, middle)
    return loss_bound, _rounded(enough)


def binary_bound(
    num_worse: float, num_better: float, num_examples: float, alpha: float = ALPHA
) -> float:
    """Return the upper bound of (worse - better) / examples for these counts."""
    worse, better = num_worse / num_examples, num_better / num_examples
    above = upper_limit(num_worse, num_examples, alpha) - worse
    below = better - lower_limit(num_better, num_examples, alpha)
    # Examples that got worse cannot have got better: the two counts are negatively correlated.
    spread = (1 - worse) * (1 - better)
    correlation = math.sqrt(worse * better / spread) if spread > 0 else 1.0
    width = math.sqrt(above**2 + below**2 + 2 * correlation * above * below)
    return min(worse - better + width, 1.0)


def _bootstrap(
    losses: Array, before: Array, after: Array, budget: Budget, alpha: float
) -> tuple[float, int | None]:
    scores = np.concatenate([before, after])
    scale = abs(float(before.mean())) if budget.is_relative else 1.0
    span = float(scores.max() - scores.min()) / scale
    num_worse, num_better = int((losses > 0).sum()), int((losses < 0).sum())
    if budget.is_relative:
        # The mean is an estimate too: these have the ratio's mean and, to first order, its spread.
        ratio = float(losses.mean()) / scale
        losses = ratio + (losses - ratio * before * np.sign(before.mean())) / scale
    loss = float(losses.mean())
    power = 2
    if float(losses.std()) <= 1e-12 * max(abs(loss), 1e-300):
        # No spread was seen. Unseen examples may still differ, by up to the range of scores.
        loss_bound = loss + span * upper_limit(0, len(losses), alpha)
        power = 1
    else:
        error = float(losses.std(ddof=1)) / math.sqrt(len(losses))
        student_bound = loss + student_t(len(losses) - 1, 1 - 2 * alpha) * error
        loss_bound = max(bca_bound(losses, alpha), student_bound)
        if num_worse + num_better < FEW_DIFFERING:
            as_one = span * binary_bound(num_worse, num_better, len(losses), alpha)
            loss_bound = max(loss_bound, as_one)
    room = budget.limit - loss
    if loss_bound <= budget.limit or room <= 0:
        return loss_bound, None
    needed = len(losses) * ((loss_bound - loss) / room) ** power
    return loss_bound, _rounded(needed) if needed <= MAX_NEEDED else None


def bca_bound(values: Array, alpha: float = ALPHA) -> float:
    """Upper confidence bound of the mean: bootstrap, corrected for bias and acceleration."""
    mean = float(values.mean())
    means = _resampled_means(values, alpha)
    normal = NormalDist()
    # Ties are halved: with few distinct values many resamples have exactly the mean.
    share_below = float((means < mean).mean() + (means == mean).mean() / 2)
    limit = 0.5 / len(means)
    bias = normal.inv_cdf(min(max(share_below, limit), 1 - limit))
    # Proportional to the change of the mean when one value is left out (jackknife).
    around = values - mean
    acceleration = float((around**3).sum()) / (6 * float((around**2).sum()) ** 1.5)
    point = bias + normal.inv_cdf(1 - alpha)
    divisor = 1 - acceleration * point
    if divisor <= 0:
        return float(means.max())
    return float(np.quantile(means, normal.cdf(bias + point / divisor)))


def _resampled_means(values: Array, alpha: float) -> Array:
    num_resamples = int(min(MAX_RESAMPLES, max(MIN_RESAMPLES, math.ceil(50 / alpha))))
    random = np.random.default_rng(SEED)
    rows = max(1, CHUNK // len(values))
    sizes = [min(rows, num_resamples - start) for start in range(0, num_resamples, rows)]
    drawn = (random.integers(0, len(values), (size, len(values))) for size in sizes)
    return np.concatenate([values[indices].mean(axis=1) for indices in drawn])


def _rounded(number: float) -> int:
    """Round up to two significant digits."""
    unit = 10 ** max(0, math.floor(math.log10(max(number, 1))) - 1)
    return int(math.ceil(number / unit) * unit)


def _text(judgement: Judgement, budget: Budget, is_share: bool) -> str:
    def shown(score: float) -> str:
        return f"{score * 100:.4g} %" if is_share else f"{score:.4g}"

    factor = 100 if is_share or budget.is_relative else 1
    unit = " % relative" if budget.is_relative else " points" if is_share else ""
    numbers = (judgement.loss, judgement.loss_bound, judgement.limit)
    loss, bound, limit = (f"{value * factor:.3g}" for value in numbers)
    sure = f"{(1 - judgement.alpha) * 100:.4g} %"
    failed = "lost too much" if judgement.loss >= judgement.limit else "not shown"
    text = (
        f"{judgement.metric} {shown(judgement.original)} -> {shown(judgement.candidate)}: "
        f"loss {loss}{unit}, at most {bound} ({sure}), limit {limit}: "
        f"{'passed' if judgement.is_passed else failed}"
    )
    if judgement.num_needed is None:
        return text
    return f"{text}; needs about {judgement.num_needed:,} examples, has {judgement.num_examples:,}"
