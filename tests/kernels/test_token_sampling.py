"""Tokens from logits, interpreted, against the sampling of sorted ones."""

import os

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    pytest.skip("tests/gpu has the real kernels", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from penstock.kernels import token_sampling  # noqa: E402
from penstock.llm import sampling  # noqa: E402
from penstock.llm.logits import without  # noqa: E402

SIZE = 20_000


def distinct(num_rows: int, size: int = SIZE) -> torch.Tensor:
    """No two of a row are alike, so that it is clear who is among the first."""
    values = torch.arange(size, dtype=torch.int32) - size // 2
    values = values.to(torch.int16).view(torch.float16)
    values = values[values.isfinite() & (values.abs() < 60)]
    rows = [values[torch.randperm(len(values))] for _ in range(num_rows)]
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, 1.0, 0.0), (50, 1.0, 0.0), (100_000, 1.0, 0.0), (0, 0.9, 0.0), (0, 1e-6, 0.0),
        (40, 0.5, 0.0), (0, 1.0, 0.3), (0, 1.0, 1.0), (200, 0.95, 0.05), (0, 1.0, 0.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("temperature", [0.6, 2.0])
def test_those_that_are_left_are_those_of_a_sorted_row(top_k, top_p, min_p, temperature):
    torch.manual_seed(2)
    logits = distinct(2)
    one = torch.ones(2)
    most = torch.full((2,), top_k, dtype=torch.int32)
    lowest = token_sampling.cut(logits, temperature * one, most, top_p * one, min_p * one)
    found = logits.float() >= lowest[:, None]
    warm = logits.float() / temperature
    wanted = without(warm, most, top_p * one, min_p * one) > float("-inf")
    assert found.any(1).all()
    # Sums are rounded otherwise: one more or less of thousands.
    assert int((found != wanted).sum(1).max()) <= (0 if top_p == 1 else 1 + wanted.sum() // 500)


def test_of_a_temperature_of_zero_nothing_is_left_out():
    logits, zero = distinct(1, 100), torch.zeros(1)
    lowest = token_sampling.cut(logits, zero, torch.ones(1, dtype=torch.int32), zero, zero)
    assert float(lowest) == float("-inf")


def drawn_of(logits, temperatures, keys, lowest=None):
    rows = torch.arange(len(logits), dtype=torch.int32)
    drawn = torch.full((len(logits),), -1, dtype=torch.int32)
    last = torch.full((len(logits) + 1,), -1, dtype=torch.int32)
    if lowest is None:
        lowest = torch.full((len(logits),), float("-inf"))
    token_sampling.sample(logits, lowest, temperatures, keys, drawn, last, rows)
    assert torch.equal(last[:-1], drawn) and int(last[-1]) == -1
    return drawn


def test_without_noise_the_first_of_the_largest():
    logits = torch.zeros(3, 40_000, dtype=torch.float16)
    logits[1, [39_999, 7_000, 30_000]] = 1
    logits[2, 39_999] = 1
    zeros = torch.zeros(3)
    assert drawn_of(logits, zeros, zeros.int()).tolist() == [0, 7_000, 39_999]


def test_noise_is_that_of_the_key_alone():
    torch.manual_seed(0)
    logits = torch.randn(6, 3_000, dtype=torch.float16)
    keys = [sampling.key_of(seed, 17) for seed in (0, 1, 2**31, 2**40 + 5, 99, 12345)]
    signed = torch.tensor(keys).to(torch.int32)
    found = drawn_of(logits, torch.full((6,), 0.8), signed)
    noised = logits.float() / 0.8 + sampling.noise(torch.tensor(keys), 3_000)
    assert torch.equal(found.long(), noised.argmax(1))


def test_nothing_below_the_lowest_is_drawn():
    logits = torch.randn(4, 5_000, dtype=torch.float16)
    lowest = logits.float().topk(3, 1).values[:, -1]
    for key in range(5):
        keys = torch.arange(4, dtype=torch.int32) * 7 + key
        found = drawn_of(logits, torch.full((4,), 5.0), keys, lowest)
        assert bool((logits.gather(1, found[:, None].long())[:, 0].float() >= lowest).all())


def test_what_is_no_number_gives_some_token():
    logits = torch.full((1, 100), float("nan"), dtype=torch.float16)
    found = drawn_of(logits, torch.ones(1), torch.zeros(1, dtype=torch.int32))
    assert 0 <= int(found) < 100
