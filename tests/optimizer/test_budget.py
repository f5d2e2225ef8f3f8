"""The grammar of accuracy budgets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.optimizer.budget import Budget, default_budget, parse


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("top1 drop <= 0.5 %", Budget("top1", 0.005)),
        ("top5 drop<=1%", Budget("top5", 0.01)),
        ("  f1 drop <= 0.02 ", Budget("f1", 0.02)),
        ("score drop <= 1 % relative", Budget("score", 0.01, is_relative=True)),
        ("mae rise <= 0.1", Budget("mae", 0.1, is_lower_better=True)),
        ("wer rise <= 2 % relative", Budget("wer", 0.02, True, True)),
        ("recall@10 drop <= 0 %", Budget("recall@10", 0.0)),
        ("agreement drop <= 1e-3", Budget("agreement", 0.001)),
    ],
)
def test_what_is_understood(text: str, expected: Budget) -> None:
    budget = parse(text)
    assert budget == expected
    assert parse(str(budget)) == budget


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected METRIC drop <= NUMBER"),
        ("top1", "expected METRIC drop <= NUMBER"),
        ("top1 <= 0.5 %", "expected METRIC drop <= NUMBER"),
        ("top1 drop < 0.5 %", "'<' is not possible here; expected '<='"),
        ("top1 falls <= 0.5 %", "'falls' is no direction; expected drop or rise"),
        ("top1 rise <= 0.5 %", "higher top1 is better"),
        ("mae drop <= 0.5", "lower mae is better"),
        ("top1 drop <= few %", "'few' is not a number"),
        ("top1 drop <= -1 %", "'-1' is not a number"),
        ("top1 drop <= nan", "'nan' is not a number"),
        ("top1 drop <= 1 % absolute", "'absolute' is too much; expected 'relative'"),
        ("top1 drop <= 5", "allows everything; was 5 % meant?"),
        ("score drop <= 2 relative", "allows everything; was 2 % meant?"),
        ("1st drop <= 1 %", "'1st' is no name of a metric"),
    ],
)
def test_what_is_not_understood(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert words in str(caught.value)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("1st falls > few % of it")
    assert len(caught.value.problems) == 5


@given(st.sampled_from(["top1", "agreement", "f1"]), st.floats(0, 1), st.booleans())
def test_text_and_back(metric: str, limit: float, is_relative: bool) -> None:
    budget = Budget(metric, limit, is_relative)
    assert parse(str(budget)) == budget


def test_shown_as_it_was_written() -> None:
    assert str(parse("top1 drop <= 0.5 %")) == "top1 drop <= 0.5 %"
    assert str(parse("mae rise <= 0.25")) == "mae rise <= 0.25"
    assert str(parse("f1 drop <= 1% relative")) == "f1 drop <= 1 % relative"


def test_defaults_parse_too() -> None:
    shown = [str(default_budget(metric)) for metric in ("top1", "agreement", "score", "mae")]
    assert shown == [
        "top1 drop <= 1 %",
        "agreement drop <= 1 %",
        "score drop <= 1 % relative",
        "mae rise <= 1 % relative",
    ]
    assert [parse(text) for text in shown] == [
        default_budget(metric) for metric in ("top1", "agreement", "score", "mae")
    ]
