"""From logits to tokens: what is likely, what is left out, and that neighbours do not matter."""

import math
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from penstock.llm.logits import SamplingRow, cut  # noqa: E402
from penstock.llm.sampling import gumbel, sample  # noqa: E402
from penstock.sampling_params import SamplingParams  # noqa: E402

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])


def drawn(params: SamplingParams, num: int = 4000, logits=LOGITS) -> Counter:
    """How often each token comes, over as many positions."""
    rows = [SamplingRow(params, position) for position in range(num)]
    return Counter(sample(logits.expand(num, -1), rows).tokens.tolist())


def likely(logits=LOGITS, temperature=1.0) -> list[float]:
    return (logits / temperature).softmax(0).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_they_are_likely(temperature):
    found = drawn(SamplingParams(temperature=temperature, seed=3), 20_000)
    for token, wanted in enumerate(likely(temperature=temperature)):
        deviation = math.sqrt(wanted * (1 - wanted) / 20_000)
        assert abs(found[token] / 20_000 - wanted) < 5 * deviation


@pytest.mark.slow
def test_noise_is_evenly_spread_over_many_tokens():
    """Of 50,000 that are all as likely none comes often, and neighbours have nothing in common."""
    rows = [SamplingRow(SamplingParams(seed=9), position) for position in range(400)]
    tokens = sample(torch.zeros(400, 50_000), rows).tokens
    assert tokens.unique().numel() > 390
    noise = gumbel(rows[:2], 50_000, torch.device("cpu"))
    correlation = torch.corrcoef(noise)[0, 1]
    shifted = torch.corrcoef(torch.stack([noise[0][1:], noise[0][:-1]]))[0, 1]
    assert abs(correlation) < 0.03 and abs(shifted) < 0.03
    assert noise.isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-38, 9e-6])
def test_greedy_takes_the_most_likely(temperature):
    assert drawn(SamplingParams(temperature=temperature), 5) == {0: 5}


def test_what_is_banned_is_not_drawn():
    rows = [
        SamplingRow(SamplingParams(temperature=0.0), 1, banned=(0, 1)),
        SamplingRow(SamplingParams(temperature=0.0), 1),
    ]
    assert sample(LOGITS.expand(2, -1), rows).tokens.tolist() == [2, 0]


def test_a_seed_draws_the_same_whoever_else_is_there():
    torch.manual_seed(0)
    logits = torch.randn(6, 100)
    rows = [SamplingRow(SamplingParams(seed=number, top_p=0.9), 7) for number in range(6)]
    together = sample(logits, rows).tokens
    for place, row in enumerate(rows):
        assert sample(logits[place : place + 1], [row]).tokens[0] == together[place]
    greedy = [SamplingRow(SamplingParams(temperature=0.0), 7), *rows[1:]]
    assert sample(logits, greedy).tokens[1:].tolist() == together[1:].tolist()


def test_other_seeds_and_positions_draw_others():
    logits = torch.zeros(1, 10_000)
    found = {
        int(sample(logits, [SamplingRow(SamplingParams(seed=seed), position)]).tokens[0])
        for seed in (1, 2, 1 << 40, -5)
        for position in (1, 2, 3)
    }
    assert len(found) == 12


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(top_k=2), {0, 1}),
        (SamplingParams(top_k=1), {0}),
        # 0.64, 0.23, 0.09, ...: the first alone is not enough.
        (SamplingParams(top_p=0.7), {0, 1}),
        (SamplingParams(top_p=0.6), {0}),
        (SamplingParams(top_p=0.0), {0}),
        (SamplingParams(min_p=0.3), {0, 1}),
        (SamplingParams(min_p=1.0), {0}),
        (SamplingParams(top_k=3, top_p=0.7), {0, 1}),
        # Of what is left by the number: 0.73 of the first two are enough.
        (SamplingParams(top_k=2, top_p=0.72), {0}),
        (SamplingParams(top_k=1 << 40), {0, 1, 2, 3, 4}),
        (SamplingParams(temperature=100.0, top_k=4), {0, 1, 2, 3}),
    ],
)
def test_what_is_left_out_never_comes(sampling, expected):
    assert set(drawn(sampling)) == expected


def test_what_is_left_keeps_its_shares():
    found = drawn(SamplingParams(top_k=2, seed=1), 20_000)
    first, second = likely()[:2]
    assert found[0] / 20_000 == pytest.approx(first / (first + second), abs=0.02)


def test_equal_ones_are_cut_to_the_number_asked_for():
    kept = cut(torch.zeros(1, 10), [SamplingParams(top_k=3)])
    assert kept.isfinite().sum() == 3
    assert cut(torch.zeros(1, 2), [SamplingParams(top_p=0.5)]).isfinite().sum() == 1


def test_nobody_loses_a_token_to_what_another_leaves_out():
    logits = torch.randn(2, 50_000)
    kept = cut(logits, [SamplingParams(top_k=5), SamplingParams(top_p=1.0)])
    assert kept.isfinite().sum(1).tolist() == [5, 50_000]


def test_bias_makes_tokens_likely_or_impossible():
    assert set(drawn(SamplingParams(logit_bias={4: 100.0}))) == {4}
    assert 0 not in drawn(SamplingParams(logit_bias={0: -100.0}))
    assert drawn(SamplingParams(temperature=0.0, logit_bias={3: 10.0}), 3) == {3: 3}


def row_of(logits, **options) -> int:
    prompt, generated = options.pop("prompt", ()), options.pop("generated", ())
    row = SamplingRow(SamplingParams(temperature=0.0, **options), 1, prompt, generated)
    return int(sample(torch.tensor([logits]), [row]).tokens[0])


def test_penalties():
    close = [1.0, 0.9, 0.0]
    assert row_of(close, presence_penalty=0.5, generated=[0]) == 1
    # Of what was generated, not of the prompt.
    assert row_of(close, presence_penalty=0.5, prompt=[0]) == 0
    assert row_of([1.0, 0.0], frequency_penalty=0.4, generated=[0, 0]) == 0
    assert row_of([1.0, 0.0], frequency_penalty=0.4, generated=[0, 0, 0]) == 1
    assert row_of(close, repetition_penalty=2.0, prompt=[0]) == 1
    # What is below 0 goes down too.
    assert row_of([-1.0, -1.5], repetition_penalty=2.0, generated=[0]) == 1
    # A negative one asks for more of the same.
    assert row_of(close, presence_penalty=-2.0, generated=[2]) == 2


def test_logprobs_are_of_what_the_model_says():
    sampling = SamplingParams(temperature=0.5, top_k=1, logit_bias={4: 50.0}, num_logprobs=2)
    found = sample(LOGITS[None], [SamplingRow(sampling, 3)])
    wanted = LOGITS.log_softmax(0)
    assert found.tokens.tolist() == [4]
    assert found.logprobs[0] == pytest.approx(float(wanted[4]))
    assert found.top.indices.tolist() == [[0, 1]]
    assert found.top.values[0].tolist() == pytest.approx(wanted[:2].tolist())


def test_as_many_places_as_the_one_that_wants_most():
    samplings = [SamplingParams(num_logprobs=0), SamplingParams(num_logprobs=3), SamplingParams()]
    found = sample(LOGITS.expand(3, -1), [SamplingRow(each, 1) for each in samplings])
    assert found.top.indices.shape == (3, 3)
    without_places = sample(LOGITS[None], [SamplingRow(SamplingParams(num_logprobs=0), 1)])
    assert without_places.logprobs is not None and without_places.top.indices.numel() == 0
    assert sample(LOGITS[None], [SamplingRow(SamplingParams(), 1)]).logprobs is None


def test_logits_stay_as_they_were():
    given = LOGITS.expand(2, -1).clone()
    sample(
        given,
        [
            SamplingRow(SamplingParams(logit_bias={1: 5.0}, presence_penalty=1.0), 1, (), [0]),
            SamplingRow(SamplingParams(), 1),
        ],
    )
    assert torch.equal(given, LOGITS.expand(2, -1))


def test_half_precision_is_drawn_in_full():
    row = SamplingRow(SamplingParams(seed=5), 11)
    logits = torch.randn(1, 1000)
    half = logits.to(torch.bfloat16)
    assert sample(half, [row]).tokens == sample(half.float(), [row]).tokens
