"""`--rate-limit-resource`, written from Triton's documentation of it."""

import pytest

from penstock.api.rate_options import EXECUTION_COUNT, OFF, read_resources
from penstock.serving.rate_pool import ResourceKey


def test_a_count_is_of_each_device_or_of_one_and_the_last_one_counts():
    found, problems = read_resources(EXECUTION_COUNT, ["R1:2", "R2:3:1", "R1:4"])
    assert found == {ResourceKey("R1", ""): 4, ResourceKey("R2", "cuda:1"): 3}
    assert not problems


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("R1", "expected NAME:COUNT or NAME:COUNT:DEVICE, for example R1:4:0"),
        (":4", "expected NAME:COUNT"),
        ("R1:4:0:1", "expected NAME:COUNT"),
        ("R1:four", "expected numbers"),
        ("R1:-1", "expected numbers"),
        ("R1:4:cpu", "expected numbers"),
        ("R1:0", "count 0; expected 1 to"),
        ("R1:99999999999", "expected 1 to"),
    ],
)
def test_other_texts_are_refused_with_what_is_accepted(text: str, problem: str):
    [found] = read_resources(EXECUTION_COUNT, [text])[1]
    assert found.startswith(f"--rate-limit-resource {text}: ") and problem in found


def test_resources_need_the_limiter():
    [found] = read_resources(OFF, ["R1:4"])[1]
    assert "needs --rate-limit execution_count" in found
    assert read_resources(OFF, []) == ({}, [])
