"""Traces of every form give the same: seconds from the first, and tokens in step with them."""

from pathlib import Path

import pytest

from penstock.data.traces import Trace, read_trace
from penstock.errors import ConfigError


def read(tmp_path: Path, text: str, name: str = "trace.csv") -> Trace:
    (tmp_path / name).write_text(text)
    return read_trace(tmp_path / name)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:51.2224670,879,0
"""


def test_azures_form(tmp_path: Path) -> None:
    trace = read(tmp_path, AZURE)
    assert trace.times_s == pytest.approx((0, 4.314579, 64.541877))
    assert trace.input_tokens == (374, 396, 879)
    # An answer has at least one token.
    assert trace.output_tokens == (44, 109, 1)
    assert trace.name == "trace.csv"
    assert trace.note == ""


def test_a_last_line_may_be_unfinished_and_a_mark_may_come_first(tmp_path: Path) -> None:
    assert read(tmp_path, "\ufeff" + AZURE.rstrip().replace("\n", "\r\n")) == read(tmp_path, AZURE)


def test_mooncakes_form_is_in_milliseconds(tmp_path: Path) -> None:
    text = (
        '{"timestamp": 0, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1]}\n'
        '{"timestamp": 3000, "input_length": 7319, "output_length": 490, "hash_ids": []}\n'
    )
    trace = read(tmp_path, text, "mooncake.jsonl")
    assert trace.times_s == (0, 3)
    assert trace.input_tokens == (6755, 7319)
    assert trace.output_tokens == (500, 490)


def test_a_plain_list_is_in_seconds(tmp_path: Path) -> None:
    assert read(tmp_path, "10\n10.5\n\n12\n", "times.txt") == Trace((0, 0.5, 2), name="times.txt")


@pytest.mark.parametrize(
    ("header", "times"),
    [
        ("time", "0 1.5 3"),
        ("Arrival", "7 8.5 10"),
        ("time_s", "0 1.5 3"),
        ("time_ms", "0 1500 3000"),
        ("arrival_time_us", "0 1500000 3000000"),
        ("timestamp", "1700000000 1700000001.5 1700000003"),
        ("timestamp", "1700000000000 1700000001500 1700000003000"),
        ("timestamp", "1700000000000000 1700000001500000 1700000003000000"),
        ("timestamp_ns", "1700000000000000000 1700000001500000000 1700000003000000000"),
        ("timestamp", "1700000000000000000 1700000001500000000 1700000003000000000"),
        ("timestamp", "2024-01-01T00:00:00Z 2024-01-01T00:00:01.5Z 2024-01-01T01:00:03+01:00"),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_units(tmp_path: Path, header: str, times: str, suffix: str) -> None:
    if suffix == "csv":
        text = "\n".join([f"id,{header}", *(f"a,{time}" for time in times.split())])
    else:
        quote = '"' if "T" in times else ""
        text = "\n".join(f'{{"{header}": {quote}{time}{quote}}}' for time in times.split())
    assert read(tmp_path, text, f"trace.{suffix}").times_s == pytest.approx((0, 1.5, 3), abs=1e-5)


def test_requests_out_of_order_are_sorted_with_their_tokens(tmp_path: Path) -> None:
    trace = read(tmp_path, "time,input_tokens\n5,50\n3,30\n4,40\n")
    assert trace.times_s == (0, 1, 2)
    assert trace.input_tokens == (30, 40, 50)
    assert trace.output_tokens is None
    assert "were sorted" in trace.note


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("", ["has no requests"]),
        ("time\n", ["has no requests"]),
        ("tokens\n1\n", ["no column has times: it has tokens; expected one named time"]),
        ("1,2\n3,4\n", ["several columns need a header"]),
        (
            "time\n1\nsoon\nnan\n",
            ["line 3: expected a time, got 'soon'", "line 4: expected a time"],
        ),
        ('time\n"1\nsoon\n', ["line 3: expected a time, got 'soon'"]),
        ("time\n1\n2024-01-01\n", ["some times are dates and some are numbers"]),
        (
            "time,input_tokens\n1,2\n2,\n3\n4,-5\n5,2.5\n",
            [
                "line 3: expected a number of input tokens, got nothing",
                "line 4: expected a number of input tokens, got nothing",
                "line 5: expected a number of input tokens, got '-5'",
                "line 6: expected a number of input tokens, got '2.5'",
            ],
        ),
    ],
)
def test_what_cannot_be_read_is_named_by_line(
    tmp_path: Path, text: str, problems: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert len(caught.value.problems) == len(problems)
    assert all(one in other for one, other in zip(problems, caught.value.problems, strict=True))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"timestamp": 1}\n{"timestamp": \n', "line 2: expected a JSON object"),
        ('{"timestamp": 1}\n{"input_length": 3}\n', "line 2: expected a time, got nothing"),
        ('{"timestamp": true}\n', "line 1: expected a time, got True"),
    ],
)
def test_lines_of_json_too(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, text, "trace.jsonl")


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "trace.csv")
