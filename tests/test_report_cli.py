"""`penstock report`: files in; a table, a page, a CSV file out."""

import io
from pathlib import Path

import pytest
from benchmark import made_runs
from click.testing import CliRunner
from optimizer import made_optimizations as made
from rich.console import Console

from penstock.benchmark.run_files import write_run
from penstock.cli import main
from penstock.cli.report import show
from penstock.errors import ConfigError
from penstock.optimizer import first_line
from penstock.optimizer.optimization_files import write_optimization


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def console(out: io.StringIO) -> Console:
    return Console(file=out, width=100)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "a.json"
    write_run(made_runs.open_loop(), path)
    return path


def test_one_run_is_shown_again(
    saved: Path, tmp_path: Path, console: Console, out: io.StringIO
) -> None:
    show([saved], tmp_path / "out.html", tmp_path / "out.csv", console)
    assert out.getvalue().startswith("SLO kept: p99 7.")
    assert (tmp_path / "out.html").read_text().startswith("<!DOCTYPE html>")
    assert (tmp_path / "out.csv").read_text().startswith("Request Rate,")


def test_several_runs_are_compared(
    saved: Path, tmp_path: Path, console: Console, out: io.StringIO
) -> None:
    show([saved, saved], tmp_path / "out.html", "", console)
    assert "no difference to" in out.getvalue()
    assert "Before you compare" not in (tmp_path / "out.html").read_text()


def test_all_problems_of_all_files_are_told(saved: Path, tmp_path: Path, console: Console) -> None:
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(ConfigError) as caught:
        show([saved, tmp_path / "b.json", tmp_path / "c.json"], "", "", console)
    first, second = caught.value.problems
    assert "b.json: not JSON" in first and "c.json: no such file" in second


def test_csv_holds_one_run(saved: Path, tmp_path: Path, console: Console) -> None:
    with pytest.raises(ConfigError, match="csv: holds one run; 2 were given"):
        show([saved, saved], "", tmp_path / "out.csv", console)


def test_nothing_to_report() -> None:
    done = CliRunner().invoke(main, ["report"])
    assert done.exit_code == 64 and "RUN.JSON… is required" in done.output


def test_the_report_command_shows_an_optimisation_and_writes_its_page(tmp_path: Path) -> None:
    path, page = tmp_path / "made.json", tmp_path / "made.html"
    write_optimization(made.kept(), path)
    done = CliRunner().invoke(main, ["report", str(path), "--html", str(page)])
    assert done.exit_code == 0, done.output
    words = " ".join(done.output.split())
    assert words.startswith(first_line.headline(made.kept()))
    assert "<h1" in page.read_text() and "3.1x the original" in page.read_text()


def test_an_optimisation_has_no_csv(tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    write_optimization(made.kept(), path)
    done = CliRunner().invoke(main, ["report", str(path), "--csv", str(tmp_path / "made.csv")])
    assert done.exit_code != 0
    assert f"csv: holds a bench run; {path} is an optimisation" in " ".join(done.output.split())
    assert not (tmp_path / "made.csv").exists()


def test_several_are_not_compared(tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    write_optimization(made.kept(), path)
    done = CliRunner().invoke(main, ["report", str(path), str(path)])
    assert done.exit_code != 0 and "not of a run" in " ".join(done.output.split())
