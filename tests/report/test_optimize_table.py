"""An optimisation in a terminal."""

import io

import msgspec
import pytest
from optimizer import made_optimizations as made
from rich.console import Console

from penstock.optimizer import first_line
from penstock.optimizer.candidates import Candidate, Skip, Step
from penstock.optimizer.results import Optimization
from penstock.report.optimize_table import shown


def text_of(optimization: Optimization, width: int = 200) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(shown(optimization))
    return out.getvalue()


def rows_of(optimization: Optimization) -> list[list[str]]:
    """Cells lie apart by two spaces at least, or are figures."""
    return [line.split() for line in text_of(optimization).splitlines()]


@pytest.mark.parametrize("name", made.MAKERS)
def test_the_first_line_is_the_verdict(name: str) -> None:
    optimization = made.MAKERS[name]()
    whole = text_of(optimization, width=1000)
    assert whole.splitlines()[0].strip() == first_line.headline(optimization)


def test_notes_follow_at_once() -> None:
    line = text_of(made.without_data()).splitlines()[1]
    assert line.startswith("warning: No data was given")


def test_before_and_after_and_the_steps() -> None:
    rows = rows_of(made.kept())
    assert ["p99", "410", "ms", "(398-422)", "11.8", "ms", "(11.4-12.2)", "overloaded"] in rows
    assert ["memory", "620", "MiB", "212", "MiB", "2.9x", "less"] in rows
    assert ["original", "98.0/s", "410", "ms", "91.2", "%", "1.13"] in rows
    assert ["int8-static", "≈", "255/s", "-", "91.0", "%", "≈", "0.436"] in rows
    assert ["as", "served", "304/s", "11.8", "ms", "91.0", "%", "0.365"] in rows


def test_what_lost_and_why() -> None:
    text = text_of(made.kept())
    assert "built FP32: no MatMul is quantised" in text
    assert "0.9x the rate of the best" in text
    # What was kept is no loser.
    assert "1.5x the rate of its parent" not in text
    assert [line.split()[0] for line in text.splitlines() if "rejected" in line] == [
        "quantise",
        "int8-static(calibrator=entropy,",
    ]


def test_the_end_names_layers_version_and_the_next_step() -> None:
    found = made.kept()
    found.profiled = made.QUANTISED.key
    text = text_of(found)
    assert "kept in float  /encoder/layer.0/attention/query/MatMul, /classifier/Gemm" in text
    assert "next           encode is 20 % of a request: at most 1.2x" in text
    assert "next  " not in text_of(made.kept())
    assert "not tried      torch-compile, half(datatype=FP16)" in text
    assert "version        models/reviews/1" in text


def test_a_pass_of_the_chosen_one_was_tried() -> None:
    found = made.kept()
    found.skipped = [Skip("int8-static", "no other setting is predicted to do more")]
    assert "not tried      other settings of int8-static" in text_of(found)


def test_what_the_gate_did_not_check_follows_the_verdict() -> None:
    lines = text_of(made.disturbed()).splitlines()
    (place,) = [number for number, line in enumerate(lines) if line.startswith("not checked: ")]
    assert lines[0].startswith("No verdict: load average 3.9 on 2 cores; other processes used 45 %")
    assert lines[place].startswith("not checked: output 'embedding' is not compared")
    assert "" not in lines[:place]


def test_what_is_not_known_is_a_dash() -> None:
    rows = rows_of(made.unknown_figures())
    assert ["original", "0/s", "infinite", "-", "-"] in rows
    assert ["as", "served", "-", "26.8", "ms", "91.0", "%", "0.740"] in rows_of(
        made.served_otherwise()
    )
    assert ["original", "98.0/s", "410", "ms", "-", "-"] in rows_of(made.without_data())


def test_figures_fit_an_ordinary_terminal() -> None:
    text = text_of(made.kept(), width=80)
    assert "…" not in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_names_are_not_obeyed_as_markup() -> None:
    found = msgspec.structs.replace(made.kept(), out="[red]models[/red]")
    found.tries[2].reason = "[bold]no[/bold]"
    assert "[red]models[/red]" in text_of(found) and "[bold]no[/bold]" in text_of(found)


def test_the_chosen_is_no_loser_though_no_faster() -> None:
    assert (
        "kept=2) "
        not in text_of(made.served_otherwise())
        .partition("what lost")[2]
        .partition("kept in float")[0]
    )


def test_a_step_that_the_budget_cut_off_is_not_shown_as_failed() -> None:
    found = made.kept()
    reason = "cut off by the time budget: no answer within 5 s"
    found.tries.append(made.attempt(Candidate((Step("other"),)), "compile", "cut off", reason))
    (line,) = [each for each in text_of(found).splitlines() if reason in each]
    assert "  cut off  " in line and "failed" not in line
