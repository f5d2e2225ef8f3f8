"""`--model-memory`: sizes and shares."""

import pytest

from penstock.api.memory_options import DEFAULT, read_model_memory
from penstock.config import ModelMemoryLimit


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("8GiB", 8 << 30),
        (" 512 MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("100000B", 100_000),
        ("60%", 6_000),
        ("100%", 10_000),
    ],
)
def test_a_limit_is_a_size_or_a_share_of_the_device(text: str, limit: int):
    found, problems = read_model_memory(text)
    assert (found.of(10_000), problems) == (limit, [])


def test_the_default_is_that_of_the_settings():
    assert read_model_memory(DEFAULT) == (ModelMemoryLimit(), [])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("lots", "expected a size or a share of each device's memory, for example 8GiB or 60%"),
        ("", "expected a size or a share"),
        ("8", "expected a size or a share"),
        ("-1GiB", "expected a size or a share"),
        ("1e9B", "expected a size or a share"),
        ("nan%", "expected a size or a share"),
        ("0%", "expected a share above 0% and up to 100%"),
        ("130%", "expected a share above 0% and up to 100%"),
        ("0GiB", "expected a size above 0"),
        ("99999999TiB", "expected a size above 0 and up to 1024 TiB"),
    ],
)
def test_other_texts_are_refused_with_what_is_accepted(text: str, problem: str):
    [found] = read_model_memory(text)[1]
    assert found.startswith(f"--model-memory {text}: ") and problem in found
