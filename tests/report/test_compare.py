"""Runs side by side: faster, slower, or no difference shown; and whether they can be compared."""

import io
import re

import pytest
from benchmark import made_runs
from benchmark.made_runs import Server
from rich.console import Console

from penstock.benchmark import comparison
from penstock.benchmark.comparison import Named, Pair
from penstock.benchmark.pacer import Closed, Flat, Open
from penstock.benchmark.results import BenchRun
from penstock.report import compare

LOADS = (Closed(1), Closed(8))


def measured(median_s: float = 0.004, seed: int = 0) -> BenchRun:
    server = Server(median_s=median_s)
    return made_runs.run([made_runs.level(load, server, seed=seed) for load in LOADS])


def brief(seed: int) -> BenchRun:
    loads = (Closed(2), Open(Flat(600.0)))
    levels = [made_runs.level(load, span_s=3.0, seed=2 * seed + i) for i, load in enumerate(loads)]
    return made_runs.run(levels)


def pair(base: BenchRun, other: BenchRun) -> Pair:
    return comparison.pair_of(Named("a.json", base), Named("b.json", other))


def shown(*runs: BenchRun) -> str:
    out = io.StringIO()
    named = [Named(f"{name}.json", run) for name, run in zip("abc", runs, strict=False)]
    Console(file=out, width=80).print(compare.shown(named))
    return out.getvalue()


def own_part(*runs: BenchRun) -> str:
    text = compare.page([Named(f"{n}.json", run) for n, run in zip("abc", runs, strict=False)])
    return re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL)


def test_a_terminal_shows_all_on_80_columns() -> None:
    other = measured(0.005, seed=1)
    other.target.model_digest = "sha256:other"
    text = shown(measured(), other)
    lines = text.splitlines()
    assert lines[0] == "b.json against a.json: slower at 2 of 2 loads (p99)"
    assert lines[1] == "warning: not the same: model files: sha256:9f2e against sha256:other"
    assert max(map(len, lines)) <= 80 and "…" not in text
    assert text.count("concurrency 8 ") == 1
    assert lines[-2].startswith("a.json: No SLO was given: ")
    assert lines[-1].startswith("b.json: No SLO was given: ")


def test_three_runs_are_two_comparisons_with_the_first() -> None:
    text = shown(measured(), measured(seed=1), measured(0.005, seed=2))
    assert "b.json: no difference to a.json shown (p99)" in text
    assert "c.json against a.json: slower at 2 of 2 loads (p99)" in text


@pytest.mark.parametrize(
    ("median_s", "style"), [(0.005, "missed"), (0.003, "kept"), (0.004, "plain")]
)
def test_the_page_says_it_in_its_first_line(median_s: float, style: str) -> None:
    text = own_part(measured(), measured(median_s, seed=1))
    found = re.search(r"<main>\s*<h1 class=\"verdict (\w+)\">(.*?)</h1>", text, re.DOTALL)
    assert found is not None and found[1] == style
    assert found[2].startswith("b.json")


def test_the_page_lays_the_distributions_over_each_other() -> None:
    text = own_part(measured(), measured(0.005, seed=1), made_runs.open_loop())
    assert "</i>a.json</li>" in text and "</i>b.json</li>" in text
    assert "no level of one has a level of the same load" in text
    assert text.count("<option ") == 2


def test_names_cannot_become_code() -> None:
    evil = "</script><img src=x>"
    run = measured()
    text = compare.page([Named(evil, run), Named("b", run)])
    assert "<img src=x>" not in text
