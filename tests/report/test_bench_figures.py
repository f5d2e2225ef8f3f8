"""What is drawn is what was measured."""

import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from benchmark import made_runs
from benchmark.made_runs import Server

from penstock import units
from penstock.benchmark import stats, summary
from penstock.benchmark.exchange import TimingSample
from penstock.benchmark.pacer import Closed, Flat, Open
from penstock.benchmark.results import BenchRun, SystemSample
from penstock.report import bench_figures, figures, scales
from penstock.report.plots import Plot


def drawn(run: BenchRun) -> dict[str, list[Any]]:
    """The plots of the run, and those of each level."""
    found = [summary.figures_of(run, level) for level in run.levels]
    whole = {name: [plot] for name, plot in bench_figures.run_plots(run, found).items()}
    for level in run.levels:
        for name, plot in bench_figures.level_plots(run, level).items():
            whole.setdefault(name, []).append(plot)
    return whole


def traces(plot: Plot) -> dict[str, Any]:
    return {mark.name: mark for mark in plot.marks}


def limits(plot: Plot) -> list[str]:
    return [limit.text for limit in plot.limits]


def lengths(bars: Any) -> list[float]:
    return [high - low for low, high in zip(bars.lows, bars.highs, strict=True)]


def test_each_level_has_its_figures_and_the_run_has_one() -> None:
    found = drawn(made_runs.sweep("p99 < 20ms"))
    assert {name: len(figures) for name, figures in found.items()} == {
        "curve": 1,
        "cdf": 1,
        "breakdown": 1,
        "over_time": 7,
        "samples": 7,
        "utilisation": 7,
        "streams": 7,
    }
    missing = {name for name, figures in found.items() if None in figures}
    assert missing == {"streams"}


def test_nothing_to_draw() -> None:
    assert [figure for figures in drawn(made_runs.empty()).values() for figure in figures] == [
        None,
        None,
        None,
    ]
    run = made_runs.run([made_runs.level(Closed(1), Server(fail_share=1.0))])
    run.levels[0].system, run.levels[0].server = [], None
    found = drawn(run)
    assert found["curve"] == found["cdf"] == found["breakdown"] == found["utilisation"] == [None]
    assert found["over_time"] != [None]


def test_the_curve_goes_from_low_load_to_high_and_marks_the_knee() -> None:
    run = made_runs.sweep("p99 < 20ms")
    (figure,) = drawn(run)["curve"]
    found = traces(figure)
    figures = [summary.figures_of(run, level) for level in run.levels]
    assert list(found["p99"].x) == [each.throughput.value for each in figures]
    assert list(found["p50"].y) == [each.latency["p50"].value * 1e3 for each in figures]
    assert list(found["p99"].labels) == ["1", "2", "4", "8", "16", "32", "64"]
    assert list(found["p99"].highs) == [each.latency["p99"].high * 1e3 for each in figures]
    assert list(found["knee"].x) == [figures[2].throughput.value]
    assert limits(figure) == ["SLO: p99 < 20ms"]
    assert [note.text for note in figure.notes] == ["knee: concurrency 4.30"]
    assert "concurrency 16" in found["p99"].texts[4] and "p99 19.4 ms" in found["p99"].texts[4]


def test_a_search_is_drawn_in_the_order_of_its_rates() -> None:
    (figure,) = drawn(made_runs.max_rate())["curve"]
    assert list(traces(figure)["p99"].labels) == ["200", "400", "800", "850", "900", "1100"]


def test_one_level_is_no_curve() -> None:
    assert drawn(made_runs.open_loop())["curve"] == [None]


def test_the_distribution_rises_and_ends_where_requests_end() -> None:
    run = made_runs.open_loop()
    (figure,) = drawn(run)["cdf"]
    (trace,) = figure.marks
    assert list(trace.x) == sorted(trace.x) and list(trace.y) == sorted(trace.y)
    whole = stats.histogram(run.levels[0].windows)
    place = next(i for i, text in enumerate(trace.texts) if text.startswith("p99:"))
    assert trace.x[place] == whole.percentile(99) * 1e3
    assert trace.y[place] == pytest.approx(2.0)
    # 3911 requests say nothing of one in 10000.
    assert trace.texts[-1].startswith("p99.97:")
    assert limits(figure) == ["SLO: p99 < 20ms"]


def test_each_further_nine_has_the_same_room() -> None:
    places = [bench_figures.nines(percent) for percent in (0.0, 90.0, 99.0, 99.9)]
    assert places == pytest.approx([0, 1, 2, 3])


def test_bars_stack_up_to_the_mean_latency() -> None:
    run = made_runs.open_loop(800.0)
    (figure,) = drawn(run)["breakdown"]
    total = sum(lengths(bars)[0] for bars in figure.marks)
    mean_s = summary.figures_of(run, run.levels[0]).mean_s
    assert total == pytest.approx(mean_s * 1e3, rel=0.01)
    assert figure.y.title == "mean, ms"
    assert "queue: for an instance" in traces(figure)


def test_bars_of_very_different_height_are_shares() -> None:
    (figure,) = drawn(made_runs.max_rate())["breakdown"]
    assert figure.y.title == "share, %"
    for index in range(6):
        total = sum(lengths(bars)[index] for bars in figure.marks)
        assert total == pytest.approx(100, abs=0.5)


def test_two_levels_of_one_load_are_two_bars() -> None:
    run = made_runs.run([made_runs.level(Closed(8), seed=seed) for seed in (1, 2)])
    (figure,) = drawn(run)["breakdown"]
    assert all(bars.places == (0.0, 1.0) for bars in figure.marks)


def test_typical_and_slow_requests_are_told_apart() -> None:
    level = made_runs.level(Closed(1))
    # 95 requests of 10 ms that compute, 5 of 110 ms that wait.
    level.samples = [
        TimingSample(0.010, {"compute_infer": 0.008, "total": 0.009}) for _ in range(95)
    ] + [
        TimingSample(0.110, {"compute_infer": 0.008, "queue_instance": 0.1, "total": 0.109})
        for _ in range(5)
    ]
    (figure,) = drawn(made_runs.run([level]))["samples"]
    found = traces(figure)
    assert lengths(found["compute infer"]) == pytest.approx([8.0, 8.0])
    assert lengths(found["queue: for an instance"]) == pytest.approx([0.0, 100.0])
    assert lengths(found["server overhead"]) == pytest.approx([1.0, 1.0])
    assert lengths(found["network and client"]) == pytest.approx([1.0, 1.0])


def test_few_samples_are_not_drawn() -> None:
    level = made_runs.level(Closed(1))
    level.samples = level.samples[: bench_figures.MIN_SAMPLES - 1]
    assert drawn(made_runs.run([level]))["samples"] == [None]


def test_a_stall_is_seen_over_time() -> None:
    server = Server(stall_at_s=4.0, stall_s=1.0)
    run = made_runs.run([made_runs.level(Open(Flat(200.0)), server)])
    (figure,) = drawn(run)["over_time"]
    tail = traces(figure)["p99"]
    slow = [x for x, y in zip(tail.x, tail.y, strict=True) if y > 100]
    assert slow and min(slow) > 3.5 and max(slow) < 7.0
    assert "failed requests" not in traces(figure)


def test_values_that_hardly_differ_have_ticks_in_sight() -> None:
    run = made_runs.open_loop(400.0, "p99 < 2s")
    for window in run.levels[0].windows:
        window.metrics["latency"] = stats.DurationHistogram({})
        window.metrics["latency"].add(np.array([0.1265, 0.1271]))
    plot = drawn(run)["over_time"][0]
    values = [y for mark in plot.marks for y in mark.y] + [limit.at * 1.08 for limit in plot.limits]
    found = scales.scale(plot.y, values, 0.0, 300.0)
    assert found.low <= 126.5 and found.high > 2000
    assert len(scales.ticks(plot.y, found)) >= 2
    assert "SLO: p99 &lt; 2s" in figures.draw(plot)


def test_failures_are_bars_over_time() -> None:
    run = made_runs.partial()
    (figure,) = drawn(run)["over_time"]
    bars = traces(figure)["failed requests"]
    assert sum(bars.highs) == summary.figures_of(run, run.levels[0]).num_failed
    assert bars.is_right and figure.right is not None


def test_gpus_and_memory_are_drawn_with_the_cpu() -> None:
    run = made_runs.open_loop()
    run.levels[0].system = [SystemSample(0.5, 30.0, 2**31, gpu_percent=[80.0, 10.0])]
    (figure,) = drawn(run)["utilisation"]
    found = traces(figure)
    assert list(found) == ["CPU", "GPU 0", "GPU 1", "memory"]
    assert found["memory"].y == (2.0,) and found["GPU 0"].y == (80.0,)
    assert found["memory"].is_right and found["memory"].texts == ("2.00 GiB",)


def test_streams_have_three_distributions_and_their_limit() -> None:
    figure = drawn(made_runs.streams())["streams"][1]
    assert list(traces(figure)) == ["TTFT", "ITL", "TPOT"]
    assert limits(figure) == ["SLO: p99 ttft < 200ms"]
    # The limit on the first token is none on the whole answer.
    assert limits(drawn(made_runs.streams())["cdf"][0]) == []


@pytest.mark.parametrize("make", [made_runs.sweep, made_runs.streams, made_runs.partial])
def test_every_plot_is_well_formed_without_words_for_missing_numbers(make: Any) -> None:
    for listed in drawn(make()).values():
        for plot in filter(None, listed):
            text = figures.draw(plot)
            assert ElementTree.fromstring(text).tag == "svg"
            coordinates = " ".join(re.findall(r' (?:d|x|y|cx|cy|r|width|height)="([^"]*)"', text))
            assert "nan" not in coordinates and "inf" not in coordinates


def test_the_extremes_of_a_run_are_in_the_plot() -> None:
    run = made_runs.sweep("p99 < 20ms")
    (plot,) = drawn(run)["cdf"]
    text = figures.draw(plot)
    for level in run.levels:
        row = summary.figures_of(run, level)
        assert f"{row.label} p99: {units.duration(row.latency['p99'].value)}" in text
