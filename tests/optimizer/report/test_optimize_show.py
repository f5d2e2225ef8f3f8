"""A saved optimisation, shown again."""

from pathlib import Path

from click.testing import CliRunner
from optimizer import made_optimizations as made

from penstock.cli import main
from penstock.optimizer.report import first_line
from penstock.optimizer.report.optimization_files import write_optimization


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
