"""An optimisation that was written is the same when it is read."""

import json
from pathlib import Path

import pytest
from benchmark import made_runs
from optimizer import made_optimizations as made

from penstock.benchmark.run_files import write_run
from penstock.errors import ConfigError
from penstock.optimizer import first_line
from penstock.optimizer.optimization_files import (
    is_optimization,
    read_optimization,
    write_optimization,
)


@pytest.mark.parametrize("name", made.MAKERS)
def test_what_was_written_is_read_again(name: str, tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    optimization = made.MAKERS[name]()
    write_optimization(optimization, path)
    assert is_optimization(path)
    # NaN is no equal of itself; its words are.
    assert repr(read_optimization(path)) == repr(optimization)


def test_the_verdict_is_there_for_other_tools_and_the_file_is_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    write_optimization(made.unknown_figures(), path)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    found = json.loads(path.read_text(), parse_constant=refuse)
    assert found["verdict"] == first_line.headline(made.unknown_figures())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON: "),
        ("[1]", "JSON, but not of an optimisation; expected what penstock optimize --json writes"),
        ('{"format": 1}', "JSON, but not of an optimisation; "),
        ('{"tries": [], "outcome": "met", "machine": 1, "format": 9}', "format 9; this version"),
        (
            '{"tries": 1, "outcome": "met", "machine": 1, "format": 1}',
            "not the whole of an optimisation: ",
        ),
    ],
)
def test_what_is_no_optimisation_is_refused_in_words(
    text: str, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_optimization(path)
    assert caught.value.problems[0].startswith(f"{path}: {problem}")


def test_a_file_that_was_changed_by_hand_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    write_optimization(made.kept(), path)
    whole = path.read_text()
    # Of the whole optimisation, not of a step: indented by one.
    assert '\n "outcome": "kept"' in whole
    path.write_text(whole.replace('\n "outcome": "kept"', '\n "outcome": "fine"'))
    with pytest.raises(ConfigError, match="outcome 'fine' is not one of kept, missed, refused"):
        read_optimization(path)
    path.write_text(whole.replace(f'"slo": "{made.SLO}"', '"slo": "p98 < 1ms"'))
    with pytest.raises(ConfigError, match="slo: 'p98 < 1ms': 'p98' is not a term"):
        read_optimization(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_optimization(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_optimization(tmp_path)
    assert not is_optimization(tmp_path) and not is_optimization(tmp_path / "none.json")


def test_a_bench_run_is_no_optimisation(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_run(made_runs.open_loop(), path)
    assert not is_optimization(path)


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    write_optimization(made.kept(), path)
    path.write_text(path.read_text().replace('\n "outcome": "kept"', '\n "outcome": "met"'))
    assert read_optimization(path).outcome == "kept"
