"""The gate: its error rate at the limit, its closed states, and what it says."""

import math

import msgspec
import numpy as np
import pytest
from scipy import stats

from penstock.benchmark.stats import student_t
from penstock.optimizer.accuracy import (
    ALPHA,
    EQUAL_ANSWERS,
    Judgement,
    bca_bound,
    binary_bound,
    judge,
    spent_alpha,
    with_equality,
    with_outputs,
)
from penstock.optimizer.budget import Budget, parse
from penstock.optimizer.numerics import Numerics
from penstock.optimizer.output_checks import OutputCheck
from penstock.types import Array

TOP1 = Budget("top1", 0.005)


def pairs(num_worse: int, num_better: int, num_examples: int) -> tuple[Array, Array]:
    """Right and wrong answers with so many differences; nine of ten others are right."""
    original = (np.arange(num_examples) % 10 > 0).astype(np.float64)
    candidate = original.copy()
    candidate[np.flatnonzero(original == 1)[:num_worse]] = 0
    candidate[np.flatnonzero(original == 0)[:num_better]] = 1
    return original, candidate


def chance_to_pass(num_examples: int, differing: float, loss: float, alpha: float) -> float:
    """Of a candidate that really loses exactly the limit, over all counts that may be seen."""
    worse, better = (differing + loss) / 2, (differing - loss) / 2
    most = int(stats.binom.ppf(1 - 1e-7, num_examples, worse)) + 1
    total = 0.0
    for num_worse in range(most + 1):
        # More that got better only lower the bound: the first that passes is the edge.
        low, high = 0, num_examples - num_worse + 1
        while low < high:
            middle = (low + high) // 2
            if binary_bound(num_worse, middle, num_examples, alpha) <= loss:
                high = middle
            else:
                low = middle + 1
        rest = num_examples - num_worse
        passing = stats.binom.sf(low - 1, rest, better / (1 - worse))
        total += float(stats.binom.pmf(num_worse, num_examples, worse) * passing)
    return total


@pytest.mark.parametrize(
    ("num_examples", "differing", "loss", "alpha"),
    [
        (50, 0.05, 0.05, 0.05),
        (100, 0.05, 0.05, 0.0375),
        (100, 0.2, 0.02, 0.05),
        (300, 0.01, 0.01, 0.05),
        (400, 0.1, 0.01, 0.05),
        (1000, 0.005, 0.005, 0.0375),
        (1000, 0.03, 0.005, 0.05),
        (5000, 0.005, 0.005, 0.0375),
    ],
)
def test_right_or_wrong_a_candidate_at_the_limit_hardly_passes(
    num_examples: int, differing: float, loss: float, alpha: float
) -> None:
    assert chance_to_pass(num_examples, differing, loss, alpha) <= alpha


def test_the_bound_is_not_wider_than_it_needs_to_be() -> None:
    """A candidate without any loss passes mostly, where a normal approximation says it can."""
    random = np.random.default_rng(3)
    counts = random.multinomial(2000, [0.005, 0.005, 0.99], 200)
    passed = [binary_bound(worse, better, 2000) <= 0.005 for worse, better, _ in counts.tolist()]
    # 1.645 + z standard errors of 0.22 points are 0.5: z = 0.6, which is 72 %.
    assert 0.55 < np.mean(passed) < 0.8


def test_no_difference_is_not_no_loss() -> None:
    judgement = judge(*pairs(0, 0, 300), TOP1)
    assert judgement.loss == 0
    assert judgement.loss_bound == pytest.approx(3 / 300, rel=0.01)
    assert not judgement.is_passed
    assert judgement.num_needed == 600
    assert judge(*pairs(0, 0, 600), TOP1).is_passed


def test_what_is_needed_is_enough_if_the_rates_hold() -> None:
    original, candidate = pairs(11, 9, 1000)
    judgement = judge(original, candidate, TOP1)
    assert judgement.num_needed is not None
    times = math.ceil(judgement.num_needed / 1000)
    assert judge(np.tile(original, times), np.tile(candidate, times), TOP1).is_passed
    assert not judge(np.tile(original, times // 2), np.tile(candidate, times // 2), TOP1).is_passed
    assert judgement.text == (
        "top1 90 % -> 89.8 %: loss 0.2 points, at most 1.04 (95 %), limit 0.5: not shown; "
        "needs about 6,600 examples, has 1,000"
    )


def test_a_loss_beyond_the_limit_needs_no_more_examples() -> None:
    judgement = judge(*pairs(30, 5, 1000), TOP1)
    assert (judgement.num_worse, judgement.num_better) == (30, 5)
    assert not judgement.is_passed
    assert judgement.num_needed is None
    assert judgement.text.endswith("limit 0.5: lost too much")


def test_a_gain_passes() -> None:
    judgement = judge(*pairs(5, 40, 2000), TOP1, part="held out")
    assert judgement.is_passed
    assert judgement.loss < 0
    assert judgement.part == "held out"
    assert judgement.text.endswith(": passed")


def test_relative_limits_are_shares_of_what_the_original_reaches() -> None:
    original, candidate = pairs(20, 10, 3000)
    absolute = judge(original, candidate, Budget("top1", 0.01))
    relative = judge(original, candidate, Budget("top1", 0.01, is_relative=True))
    assert relative.loss == pytest.approx(absolute.loss / 0.9)
    assert relative.loss_bound == pytest.approx(absolute.loss_bound / 0.9)
    assert "limit 1: passed" in relative.text
    assert "% relative" in relative.text


def test_lower_may_be_better() -> None:
    random = np.random.default_rng(0)
    error = random.random(500) + 1
    budget = parse("mae rise <= 1 % relative")
    assert judge(error, error * 0.9, budget).is_passed
    worse = judge(error, error * 1.1, budget)
    assert not worse.is_passed
    assert worse.loss == pytest.approx(0.1)
    assert worse.num_worse == 500


@pytest.mark.parametrize(
    ("original", "candidate", "words"),
    [
        ([], [], "no examples"),
        ([1, 1], [1], "expected one score per example from both"),
        ([1, 0, 1], [1, math.nan, 1], "1 of 3 scores of the candidate are not finite"),
        ([math.inf, 0], [1, 1], "1 of 2 scores of the original are not finite"),
        ([[1], [0]], [[1], [0]], "expected one score per example"),
        ([0.5, 0.2], [0.5, 0.2], "expected at least 10 examples, got 2"),
    ],
)
def test_the_gate_stays_closed(original: object, candidate: object, words: str) -> None:
    judgement = judge(np.array(original, float), np.array(candidate, float), TOP1)
    assert not judgement.is_passed
    assert words in judgement.text
    # A journal keeps it.
    assert msgspec.json.decode(msgspec.json.encode(judgement), type=Judgement) == judgement


def test_nothing_is_a_share_of_zero() -> None:
    judgement = judge(np.zeros(50), np.zeros(50), parse("score drop <= 1 % relative"))
    assert not judgement.is_passed
    assert "mean score is 0" in judgement.text


def test_scores_that_are_no_numbers() -> None:
    words = np.array(["good"] * 20, dtype=object)
    assert not judge(words, words, TOP1).is_passed


@pytest.mark.parametrize("name", ["normal", "skewed to gains", "heavy tails", "rare losses"])
def test_other_scores_at_the_limit_hardly_pass(name: str) -> None:
    """A hundred examples that lose the limit on average; 5 % may pass, and chance some more."""
    random = np.random.default_rng(11)
    draw = {
        "normal": lambda: random.normal(0.02, 0.1, 100),
        "skewed to gains": lambda: 0.12 - random.exponential(0.1, 100),
        "heavy tails": lambda: 0.02 + random.standard_t(3, 100) / 10,
        "rare losses": lambda: (random.random(100) < 0.04) * random.random(100),
    }[name]
    budget = Budget("score", 0.02)
    original = random.random(100)
    passed = [judge(original, original - draw(), budget).is_passed for _ in range(100)]
    assert np.mean(passed) <= 0.11


def test_bca_is_scipys() -> None:
    values = np.random.default_rng(5).exponential(1, 80)
    theirs = stats.bootstrap(
        (values,), np.mean, confidence_level=0.9, n_resamples=20_000, method="BCa", rng=1
    )
    assert bca_bound(values, 0.05) == pytest.approx(theirs.confidence_interval.high, rel=0.02)


@pytest.mark.parametrize("probability", [0.95, 0.99, 0.999])
@pytest.mark.parametrize("degrees", [9, 15, 100, 10_000])
def test_students_quantile_is_scipys(probability: float, degrees: int) -> None:
    expected = stats.t.ppf(probability, degrees)
    assert student_t(degrees, 2 * probability - 1) == pytest.approx(expected, rel=0.01)


def test_differences_without_spread_leave_room_for_what_was_not_seen() -> None:
    scores = np.linspace(0.2, 0.8, 100)
    judgement = judge(scores, scores, Budget("score", 0.01))
    assert judgement.loss_bound == pytest.approx(0.6 * 3 / 100, rel=0.02)
    assert not judgement.is_passed
    assert judgement.num_needed == 180
    assert judge(np.tile(scores, 2), np.tile(scores, 2), Budget("score", 0.01)).is_passed


def test_shares_are_not_right_or_wrong_because_all_are_one() -> None:
    """Of one text, the places that agree: what is perfect must not fare worse than what is not."""
    agreement, ones = Budget("agreement", 0.01), np.ones(24)
    once = ones.copy()
    once[3] = 0.96
    assert judge(ones, once, agreement).is_passed
    assert not judge(ones, ones, agreement).is_passed
    perfect = judge(ones, ones, agreement, is_binary=False)
    assert perfect.is_passed and perfect.loss_bound == 0
    kl = Budget("kl", 0.02, is_lower_better=True)
    assert judge(np.zeros(24), np.zeros(24), kl, is_binary=False).is_passed
    few = judge(np.ones(9), np.ones(9), agreement, is_binary=False)
    assert not few.is_passed and "expected at least 10 examples, got 9" in few.text


def test_noisy_scores_say_how_many_are_needed() -> None:
    random = np.random.default_rng(9)
    original = random.random(50)
    judgement = judge(original, original + random.normal(0, 0.2, 50), Budget("score", 0.02))
    assert not judgement.is_passed
    assert judgement.num_needed is not None
    assert "needs about " in judgement.text
    assert judgement.num_needed > 50


def test_the_same_scores_give_the_same_judgement() -> None:
    random = np.random.default_rng(2)
    original, noise = random.random(200), random.normal(0, 0.01, 200)
    first, second = (judge(original, original + noise, TOP1) for _ in range(2))
    assert first == second


def test_what_all_held_out_candidates_get_is_alpha() -> None:
    spent = [spent_alpha(attempt) for attempt in range(40)]
    assert sum(spent) <= ALPHA
    assert spent == sorted(spent, reverse=True)
    assert spent[0] == pytest.approx(0.0375)


def equal(*problems: str) -> Numerics:
    return Numerics(50, True, True, 1e-6, 1e-6, 1.0, problems=list(problems))


RIGHT = np.ones(50)


def test_an_output_that_fails_closes_the_gate_whatever_the_score() -> None:
    passed = judge(np.ones(1000), np.ones(1000), parse("top1 drop <= 1 %"))
    fine = OutputCheck("boxes", "values", 50)
    broken = OutputCheck("embedding", "values", 50, problem="output 'embedding': median cosine 0")
    assert with_outputs(passed, [fine]).is_passed
    found = with_outputs(passed, [fine, broken])
    assert not found.is_passed
    assert found.text.startswith("output 'embedding': median cosine 0 (top1 100 %")


def test_few_examples_are_enough_for_equal_answers_of_a_lossless_step() -> None:
    shown = judge(RIGHT, RIGHT, parse("top1 drop <= 1 %"))
    assert not shown.is_passed and shown.num_needed
    found = with_equality(shown, equal())
    assert (found.is_passed, found.method) == (True, EQUAL_ANSWERS)
    assert "equal within rounding on all 50 examples" in found.text


def test_a_lossless_step_whose_answers_differ_is_refused_whatever_the_score() -> None:
    passed = judge(np.ones(1000), np.ones(1000), parse("top1 drop <= 1 %"))
    found = with_equality(passed, equal("output 'y': column 4 differs"))
    assert not found.is_passed
    assert found.text.startswith("output 'y': column 4 differs")


def test_a_lossless_step_that_loses_too_much_is_refused_whatever_its_numbers() -> None:
    worse = RIGHT.copy()
    worse[:40] = 0
    assert not with_equality(judge(RIGHT, worse, parse("top1 drop <= 1 %")), equal()).is_passed
    nothing = judge(np.array([]), np.array([]), parse("top1 drop <= 1 %"))
    assert not with_equality(nothing, equal()).is_passed
