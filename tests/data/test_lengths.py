"""Lengths as a user writes them, and what is drawn from them."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from penstock.data.lengths import Lengths, draw, drawn, followed, parse
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("128", Lengths("fixed", (128,))),
        ("uniform:16:512", Lengths("uniform", (16, 512))),
        ("normal:128:30", Lengths("normal", (128, 30))),
        ("lognormal:100:900", Lengths("lognormal", (100, 900))),
    ],
)
def test_forms(text: str, lengths: Lengths) -> None:
    assert parse(text) == lengths


@pytest.mark.parametrize(
    "text",
    [
        "",
        "many",
        "0",
        "-3",
        "1.5",
        "inf",
        "uniform:5",
        "uniform:9:2",
        "uniform:1.5:3",
        "normal:0:1",
        "normal:10:-1",
        "lognormal:100:50",
        "lognormal:nan:50",
        "zipf:2:3",
        "fixed",
        "list",
        "99999999999",
    ],
)
def test_what_is_no_length_is_refused_in_words(text: str) -> None:
    with pytest.raises(ConfigError, match=r"lengths '.*': .*(expected|takes|is a whole number)"):
        parse(text)


@pytest.mark.parametrize("form", ["{}", "list:{}"])
def test_a_file_has_one_length_a_line(tmp_path: Path, form: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("tokens\n3\n\n70,\n3\n")
    assert parse(form.format(path)) == Lengths("list", (3, 70, 3))


def test_bad_lines_of_a_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("3\nlong\n0\n")
    with pytest.raises(ConfigError) as caught:
        parse(str(path))
    assert [problem.rpartition("lengths.txt")[2] for problem in caught.value.problems] == [
        ", line 2: expected a length from 1, got 'long'",
        ", line 3: expected a length from 1, got '0'",
    ]


def test_an_empty_or_absent_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    with pytest.raises(ConfigError, match="cannot read"):
        parse(f"list:{path}")
    path.write_text("\n")
    with pytest.raises(ConfigError, match="one length a line"):
        parse(f"list:{path}")


@pytest.mark.parametrize(
    ("text", "percent", "expected"),
    [
        ("128", 1, 128),
        ("128", 99, 128),
        ("uniform:1:100", 50, 50),
        ("normal:1000:100", 50, 1000),
        ("normal:1000:100", 97.725, 1200),
        ("lognormal:100:900", 50, 100),
        ("lognormal:100:900", 99, 900),
    ],
)
def test_drawn_lengths_follow_the_distribution(text: str, percent: float, expected: int) -> None:
    lengths = draw(parse(text), np.random.default_rng(1), 100_000)
    assert np.percentile(lengths, percent) == pytest.approx(expected, rel=0.05)


def test_a_uniform_length_reaches_both_ends() -> None:
    assert set(draw(parse("uniform:1:3"), np.random.default_rng(1), 100).tolist()) == {1, 2, 3}


def test_lengths_are_whole_numbers_from_one() -> None:
    lengths = draw(Lengths("normal", (1, 50)), np.random.default_rng(1), 1000)
    assert lengths.dtype.kind == "i"
    assert lengths.min() == 1


def test_a_list_is_drawn_from() -> None:
    assert set(draw(Lengths("list", (4, 9)), np.random.default_rng(1), 100).tolist()) == {4, 9}


def test_the_same_seed_gives_the_same_lengths_and_another_one_others() -> None:
    first, again, other = (
        list(islice(drawn(parse("uniform:1:1000"), seed), 5000))
        for seed in ((1, 0), (1, 0), (1, 1))
    )
    assert first == again
    assert first != other


def test_recorded_lengths_come_in_their_order_and_then_again() -> None:
    assert list(islice(followed([1, 2, 3], 0, 1), 7)) == [1, 2, 3, 1, 2, 3, 1]


def test_processes_take_recorded_lengths_in_turn() -> None:
    values = list(range(7))
    each = [list(islice(followed(values, index, 3), 7)) for index in range(3)]
    together = [length for turn in zip(*each, strict=True) for length in turn]
    assert together == values * 3


@pytest.mark.parametrize("text", ["128", "uniform:1:9", "normal:5:2", "lognormal:10:90"])
def test_lengths_say_what_they_are(text: str) -> None:
    shown = str(parse(text))
    assert all(number in shown for number in text.split(":")[1:] or [text])
