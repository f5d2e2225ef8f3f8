"""The parameters of a recording: what is read, what is refused, and that they read back."""

import pytest

from penstock.config import RecordPolicy
from penstock.repository import record_settings
from penstock.types import TensorSpec

SPECS = (TensorSpec("x", "FP32", (2,)), TensorSpec("text", "BYTES", (1,)))


def read(**given: str) -> tuple[RecordPolicy | None, list[str]]:
    problems: list[str] = []
    texts = {f"penstock.{key}": text for key, text in given.items()}
    policy = record_settings.read(texts, SPECS, lambda key, text: problems.append(f"{key}: {text}"))
    return policy, problems


def test_nothing_given_is_no_policy() -> None:
    assert read(slo="p99 < 1 s") == (None, [])


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"record": "64MB"}, RecordPolicy()),
        ({"record": "2 GiB", "record_share": "1"}, RecordPolicy(2 << 30, 1.0)),
        ({"record_share": "0.5"}, RecordPolicy(share=0.5)),
        ({"record_redact": " x, BYTES,id "}, RecordPolicy(redact=("x", "BYTES", "id"))),
        ({"record": "off"}, RecordPolicy(0)),
    ],
)
def test_policies_read_and_read_back(given: dict[str, str], expected: RecordPolicy) -> None:
    assert read(**given) == (expected, [])
    written = record_settings.write(expected)
    assert record_settings.read(written, SPECS, lambda key, text: None) == expected


@pytest.mark.parametrize(
    "given, text",
    [
        ({"record": "much"}, "penstock.record: 'much' is not a size like 64MB"),
        ({"record": "1kB"}, "'1kB' is less than 64KiB"),
        ({"record_share": "0"}, "penstock.record_share: '0' is not a number above 0 up to 1"),
        ({"record_share": "1.5"}, "not a number above 0 up to 1"),
        ({"record_share": "nan"}, "not a number above 0 up to 1"),
        ({"record_redact": "z"}, "'z' is no input or output; expected x, text, id, parameters"),
    ],
)
def test_problems_name_the_parameter(given: dict[str, str], text: str) -> None:
    _, problems = read(**given)
    assert len(problems) == 1 and text in problems[0]
