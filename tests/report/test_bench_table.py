"""What a terminal shows of a run: all of it, on 80 columns, with the verdict first."""

import io

import msgspec
import pytest
from benchmark import made_runs
from rich.console import Console

from penstock.benchmark.pacer import Closed, Replay
from penstock.benchmark.results import BenchRun, ColdStart, Knee
from penstock.report import bench_table


def shown(run: BenchRun, width: int = 80, is_terminal: bool = False) -> str:
    out = io.StringIO()
    colours = "standard" if is_terminal else "auto"
    console = Console(file=out, width=width, force_terminal=is_terminal, color_system=colours)
    console.print(bench_table.shown(run))
    return out.getvalue()


def test_the_verdict_comes_first() -> None:
    first = shown(made_runs.open_loop()).splitlines()[0]
    assert first.startswith("SLO kept: p99 7.")
    assert first.endswith("< 20 ms at 400/s poisson")
    assert shown(made_runs.open_loop(slo="")).startswith("No SLO was given: ")


@pytest.mark.parametrize(
    "run",
    [made_runs.sweep("p99 < 20ms"), made_runs.max_rate(), made_runs.streams(), made_runs.partial()],
    ids=["sweep", "max rate", "streams", "partial"],
)
def test_nothing_is_cut_or_folded_on_80_columns(run: BenchRun) -> None:
    text = shown(run)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    rows = [line for line in text.splitlines() if line.startswith(("1 ", "200 ", "10 ", "300 "))]
    assert all(len(row.split()) >= 8 for row in rows) and rows


def test_a_file_gets_no_colours_and_a_terminal_does() -> None:
    run = made_runs.partial()
    assert "\x1b[" not in shown(run)
    assert "\x1b[1;31mSLO missed" in shown(run, is_terminal=True)


def test_who_was_asked_for_what_with_what() -> None:
    run = made_runs.open_loop()
    run.batch_size = 8
    lines = shown(run, 120).splitlines()
    assert "target  v2 HTTP, binary, http://127.0.0.1:8000/v2/models/digits" in lines
    assert "model   digits/3 (penstock 0.1.0, onnxruntime)" in lines
    inputs = "450 examples of digits.npz, shuffled anew each time round, 8 rows a request"
    assert f"inputs  {inputs}" in lines
    assert "run     2026-03-01T12:00:00Z, 10.0 s measured at 1 level" in lines


def test_members_of_an_ensemble_have_a_row_for_each_level() -> None:
    run = made_runs.run([made_runs.ensemble_level(Closed(n)) for n in (1, 16)])
    text = shown(run)
    assert max(map(len, text.splitlines())) <= 80
    rows = [line.split() for line in text.splitlines()]
    found = [row[:4] for row in rows if row and row[0] in ("tokenizer", "encoder/2")]
    assert found == [
        ["tokenizer", "1", "2.00", "4.00"],
        ["encoder/2", "1", "1.00", "1.00"],
        ["tokenizer", "16", "2.00", "4.00"],
        ["encoder/2", "16", "1.00", "1.00"],
    ]
    assert "Members" not in shown(made_runs.open_loop())


def test_levels_are_rows_in_the_order_of_their_load() -> None:
    lines = shown(made_runs.max_rate()).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("poisson /s answers/s"))
    loads = [line.split()[0] for line in lines[head + 1 : head + 7]]
    assert loads == ["200", "400", "800", "850", "900", "1100"]


def test_units_adapt() -> None:
    fast = made_runs.Server(median_s=0.0001)
    run = made_runs.run([made_runs.level(made_runs.Closed(1), fast, 1.0)])
    assert "p99 us (95 % CI)" in shown(run)
    slow = made_runs.Server(median_s=3.0)
    run = made_runs.run([made_runs.level(made_runs.Closed(1), slow, 60.0)])
    assert "p99 s (95 % CI)" in shown(run)


def test_the_server_breakdown_has_a_line_per_level() -> None:
    text = shown(made_runs.sweep())
    assert "In the server, mean per request in ms (outside: network and client)" in text
    assert text.count("\nconcurrency ") == 2
    run = made_runs.sweep()
    run.levels[0].server = None
    assert [line.split() for line in shown(run).splitlines() if line.startswith("1 ")][1] == [
        "1",
        *["-"] * 7,
    ]
    assert "In the server" not in shown(made_runs.streams())


def test_streams_have_their_columns_and_the_formula() -> None:
    text = shown(made_runs.streams())
    assert "TTFT p50 p99 ms ITL p50 p99 ms TPOT p50 p99 ms tokens/s" in text
    assert "TPOT = (last token - first token) / (output tokens - 1)" in text
    assert "TPOT" not in shown(made_runs.open_loop())


def test_what_was_asked_is_answered() -> None:
    assert "Knee: concurrency 4.30, the plateau of 960/s x 4.40 ms alone" in shown(
        made_runs.sweep()
    )
    text = shown(made_runs.max_rate())
    assert "Highest rate that keeps p99 < 20ms: 872/s (850-900)" in text
    assert "Cold start: connecting 1.10 ms, first request 182 ms" in text


def test_an_answer_that_is_a_bound_says_why() -> None:
    run = made_runs.sweep()
    run.knee = Knee(64.0, 980.0, 0.0043, 6, "throughput still grew")
    assert "; throughput still grew" in shown(run, 120)
    run.cold_start = ColdStart(load_s=2.5)
    assert "Cold start: loading 2.50 s\n" in shown(run)
    run.cold_start = ColdStart()
    assert "Cold start" not in shown(run)


def test_findings_come_last_and_name_their_levels() -> None:
    run = made_runs.max_rate()
    run.max_rate = None
    for level in run.levels:
        if level.load.profile.rate in (800, 850):
            level.generator.num_waited = 3
    text = shown(run, 200)
    assert "error: 1100/s poisson: Latency grew all the time" in text
    assert "error: 800/s poisson, 850/s poisson: LIMITED BY THE GENERATOR: 3 requests" in text
    assert "warning: 4 of 6 levels: p99 is known to ±" in text
    assert text.splitlines()[-1].startswith("note: ")
    single = shown(made_runs.partial(), 200)
    assert "error: This run is partial: the server no longer answered after 10 s." in single
    assert "warning: 300/s" not in single


def test_many_levels_are_counted() -> None:
    run = made_runs.sweep()
    for level in run.levels[:5]:
        level.generator.num_waited = 3
    assert "error: 5 of 7 levels: LIMITED BY THE GENERATOR" in shown(run, 200)


def test_names_are_not_obeyed_as_markup() -> None:
    run = made_runs.open_loop()
    run.target.model = "[bold]digits"
    run.origin = msgspec.structs.replace(run.origin, text="[red]x[/red]")
    run.levels[0].load = Replay((0.0, 1.0), 1.0, "[/bold]conv.csv")
    text = shown(run, 200)
    assert "[bold]digits/3" in text and "[red]x[/red]" in text
    assert text.count("[/bold]conv.csv") >= 2


def test_an_empty_run_is_shown() -> None:
    text = shown(made_runs.empty())
    assert text.startswith("SLO not judged: nothing was measured (partial run)")
    assert "error: This run is partial: interrupted." in text
