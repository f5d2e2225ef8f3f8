"""One page that needs nothing else, and whose first line is the verdict."""

import re

import msgspec
import pytest
from benchmark import made_runs

from penstock.benchmark import summary
from penstock.benchmark.pacer import Replay
from penstock.benchmark.results import BenchRun
from penstock.report import bench

EVIL = "</script><img src=x onerror=alert(1)>"


def own_part(run: BenchRun) -> str:
    """Without style and script."""
    return re.sub(r"<(script|style).*?</\1>", "", bench.page(run), flags=re.DOTALL)


def first_line(text: str) -> str:
    found = re.search(r"<main>\s*<h1[^>]*>(.*?)</h1>", text, re.DOTALL)
    assert found is not None
    return re.sub(r"<[^>]*>", "", found[1]).replace("&lt;", "<").replace("&gt;", ">")


@pytest.mark.parametrize(
    ("run", "style", "line"),
    [
        (made_runs.open_loop(), "kept", "SLO kept: p99 7."),
        (made_runs.open_loop(slo="p99 < 1ms"), "missed", "SLO missed: p99 7."),
        (made_runs.sweep("p99 < 20ms"), "mixed", "SLO kept up to concurrency 16, then missed: "),
        (made_runs.sweep(), "plain", "No SLO was given"),
        (made_runs.empty(), "mixed", "SLO not judged: nothing was measured (partial run)"),
    ],
    ids=["kept", "missed", "partly", "none", "empty"],
)
def test_the_first_line_is_the_verdict(run: BenchRun, style: str, line: str) -> None:
    text = own_part(run)
    assert first_line(text).startswith(line)
    assert f'<h1 class="verdict {style}">' in text


def test_the_page_loads_nothing() -> None:
    text = own_part(made_runs.sweep("p99 < 20ms"))
    assert not re.search(r"""(src|href)\s*=|@import|url\(""", text)
    assert "default-src 'none'" in text


def test_names_cannot_become_code() -> None:
    run = made_runs.open_loop()
    run.target.model = run.command = run.problem = EVIL
    run.origin = msgspec.structs.replace(run.origin, text=EVIL)
    run.levels[0].load = Replay((0.0, 1.0), 1.0, EVIL)
    text = own_part(run)
    assert "<img" not in text
    assert text.count("&lt;img src=x onerror=alert(1)&gt;") >= 4


def test_every_plot_of_the_run_and_of_each_level_is_on_the_page() -> None:
    text = own_part(made_runs.sweep("p99 < 20ms"))
    names = re.findall(r'data-plot="(\w+)"', text)
    assert names[:3] == ["curve", "cdf", "breakdown"]
    assert {name: names.count(name) for name in names[3:]} == {
        "over_time": 7,
        "samples": 7,
        "utilisation": 7,
    }
    assert text.count("<div data-level=") == 7 == text.count(" hidden>") + 1


@pytest.mark.parametrize(
    ("run", "value", "detail"),
    [
        (made_runs.open_loop(), "SLO kept at 391/s", "p99 &lt; 20ms; 400/s poisson"),
        (
            made_runs.open_loop(slo="p99 < 1ms"),
            "SLO missed at 391/s",
            "p99 &lt; 1ms; 400/s poisson",
        ),
        (made_runs.sweep("p99 < 20ms"), "SLO kept at 979/s", "p99 &lt; 20ms; concurrency 8"),
        (made_runs.sweep(), "980/s", "at concurrency 64"),
        (made_runs.max_rate(), "SLO kept at 872/s", "p99 &lt; 20ms; 95 % interval 850-900/s"),
    ],
    ids=["kept", "missed", "partly", "none", "max-rate"],
)
def test_the_first_tile_says_at_which_rate_the_slo_is_kept(
    run: BenchRun, value: str, detail: str
) -> None:
    found = re.search(
        r'first \w+">.*?"value">(.*?)</div><div class="detail">(.*?)</div>', own_part(run)
    )
    assert found is not None and (found[1], found[2]) == (value, detail)


def test_key_figures_are_those_of_the_level_that_stands_for_the_run() -> None:
    def chosen(run: BenchRun) -> int | None:
        return bench.chosen_level(run, [summary.figures_of(run, each) for each in run.levels])

    assert chosen(made_runs.sweep()) == 2
    search = made_runs.max_rate()
    assert [level.load.profile.rate for level in search.levels][chosen(search) or 0] == 850.0
    run = made_runs.sweep()
    run.knee = None
    throughputs = [summary.figures_of(run, each).throughput.value for each in run.levels]
    assert chosen(run) == throughputs.index(max(throughputs))
    assert chosen(made_runs.empty()) is None


def test_every_level_has_its_row_and_its_verdict() -> None:
    text = own_part(made_runs.sweep("p99 < 20ms"))
    assert text.count('<td class="kept-text">kept</td>') == 5
    assert text.count('<td class="missed-text">missed</td>') == 2
    assert text.count("<option ") == 7
    assert '<option value="2" selected>concurrency 4</option>' in text


def test_record_findings_definitions_and_command() -> None:
    text = own_part(made_runs.partial())
    for words in (
        "sha256:9f2e",
        "Example CPU 9000, 8 cores, 32.0 GiB",
        "connecting 1.10 ms, first request 182 ms",
        "This run is partial: the server no longer answered after 10 s.",
        "From the moment a request was due",
        "<pre>penstock bench http://127.0.0.1:8000/v2/models/digits</pre>",
    ):
        assert words in text
    assert "TPOT" not in text


def test_streams_have_their_table_and_definitions() -> None:
    text = own_part(made_runs.streams())
    assert "TPOT = (last token - first token) / (output tokens - 1)" in text
    assert "<th>TTFT p99</th>" in text and "tokens out/s" in text
