"""Texts of exceptions, whatever the code that raised them does."""

import pytest

from penstock.errors import ConfigError, describe_error, error_text, printable


class Mute(Exception):
    def __init__(self, failure: BaseException) -> None:
        self._failure = failure

    def __str__(self) -> str:
        raise self._failure


def test_lone_surrogates_are_escaped_and_all_else_stays():
    assert printable("caf\udce9 café 🙂") == "caf\\udce9 café 🙂"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("not ascii: caf\udce9"), "ValueError: not ascii: caf\\udce9"),
        (ValueError(), "ValueError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "the model's code ended the process: sys.exit(3)"),
        (Mute(ZeroDivisionError()), "Mute: <no text: __str__ raised ZeroDivisionError>"),
        (Mute(SystemExit(1)), "Mute: <no text: __str__ raised SystemExit>"),
    ],
)
def test_any_exception_is_described(error, text):
    assert describe_error(error) == text
    error_text(error).encode()


def test_problems_of_a_configuration_can_be_sent():
    error = ConfigError(["a: \ud800", "b"])
    assert error.problems == ("a: \\ud800", "b")
    assert str(error) == "a: \\ud800; b"
