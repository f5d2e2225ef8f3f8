"""Scores of what two models say of the same tokens, against distributions known in full."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.optimizer import budget
from penstock.optimizer.llm.likelihoods import (
    DEFAULT,
    NUM_COMPARED,
    NUM_TOLD,
    PromptLogprobs,
    check_budget,
    divergence,
    scores,
)


def told_of(probabilities: np.ndarray, text: list[int]) -> PromptLogprobs:
    """As an engine tells it of rows of a whole vocabulary."""
    num = min(NUM_TOLD, probabilities.shape[1])
    tokens = np.argsort(-probabilities, axis=1, kind="stable")[:, :num]
    logprobs = np.log(np.take_along_axis(probabilities, tokens, 1))
    own = np.log(probabilities[np.arange(len(text)), text])
    return PromptLogprobs(
        own.astype(np.float32), tokens.astype(np.int32), logprobs.astype(np.float32)
    )


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def test_of_few_tokens_the_divergence_is_the_whole_one():
    random = np.random.default_rng(1)
    before, after = (softmax(random.normal(0, 2, (40, NUM_COMPARED))) for _ in range(2))
    expected = float((before * np.log(before / after)).sum(1).mean())
    text = [0] * 40
    assert divergence(told_of(before, text), told_of(after, text)) == pytest.approx(
        expected, rel=1e-3
    )


@given(st.integers(0, 100), st.floats(0.001, 1.0))
def test_of_many_it_is_no_more_than_the_whole_one_and_grows_with_it(seed, size):
    random = np.random.default_rng(seed)
    logits = random.normal(0, 3, (20, 400))
    before, after = softmax(logits), softmax(logits + random.normal(0, size, logits.shape))
    text = [0] * 20
    found = divergence(told_of(before, text), told_of(after, text))
    whole = float((before * np.log(before / after)).sum(1).mean())
    assert 0 <= found <= whole * 1.001 + 1e-6


def test_a_model_is_not_far_from_itself():
    told = told_of(softmax(np.random.default_rng(2).normal(0, 2, (10, 100))), [3] * 10)
    found = scores(told, told)
    assert found["kl"] == pytest.approx(0, abs=1e-6) and found["agreement"] == 1.0


def test_agreement_is_the_share_of_equal_first_choices():
    before = np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.5, 0.4, 0.1], [0.1, 0.2, 0.7]])
    after = np.array([[0.6, 0.3, 0.1], [0.1, 0.8, 0.1], [0.4, 0.5, 0.1], [0.1, 0.2, 0.7]])
    found = scores(told_of(before, [0] * 4), told_of(after, [0, 1, 0, 2]))
    assert found["agreement"] == 0.75
    expected = -sum(map(math.log, (0.6, 0.8, 0.4, 0.7))) / 4
    assert found["nll"] == pytest.approx(expected, rel=1e-5)


def test_a_token_that_the_candidate_does_not_tell_of_counts_as_its_last():
    before = PromptLogprobs(np.zeros(1), np.array([[7]]), np.log(np.array([[0.5]])))
    after = PromptLogprobs(np.zeros(1), np.array([[1, 2]]), np.log(np.array([[0.6, 0.25]])))
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert divergence(before, after) == pytest.approx(expected)


@pytest.mark.parametrize("text", [str(DEFAULT), "agreement drop <= 3 %", "nll rise <= 0.01"])
def test_budgets_that_can_be_judged(text):
    check_budget(budget.parse(text))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("top1 drop <= 1 %", "'top1' is not for language models; expected kl, agreement, nll"),
        ("kl drop <= 0.1", "expected 'kl rise <= ...'"),
        ("kl rise <= 1 % relative", "kl cannot be relative"),
    ],
)
def test_budgets_that_cannot(text, problem):
    with pytest.raises(ConfigError, match=problem):
        check_budget(budget.parse(text))
