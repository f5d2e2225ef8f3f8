"""What the page draws."""

import math

import pytest
from optimizer import made_optimizations as made

from penstock.optimizer.results import Optimization, Phase
from penstock.report import optimize_figures
from penstock.report.bench_figures import Figure
from penstock.report.optimize_figures import (
    front_of,
    points_of,
)


def figure(name: str, optimization: Optimization) -> Figure:
    (found,) = optimize_figures.figures_of(optimization)[name]
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("kept", set()),
        ("missed", set()),
        ("refused", {"rate_steps", "latency_steps", "accuracy_steps", "cost_steps"}),
        (
            "already-met",
            {"rate_steps", "latency_steps", "accuracy_steps", "cost_steps", "pareto"},
        ),
        ("without-data", {"accuracy_steps", "cost_steps"}),
        ("interrupted", set()),
        ("unknown-figures", set()),
    ],
)
def test_a_plot_that_would_be_empty_is_none(name: str, missing: set[str]) -> None:
    found = optimize_figures.figures_of(made.MAKERS[name]())
    assert {key for key, (each,) in found.items() if each is None} == missing


def test_nothing_is_drawn_of_nothing() -> None:
    assert set(map(repr, optimize_figures.figures_of(made.nothing()).values())) == {"[None]"}


def test_a_waterfall_goes_from_each_value_to_the_next() -> None:
    (trace,) = figure("rate_steps", made.kept())["data"]
    assert trace["base"] == [0.0, 98.0, 137.0, 168.0, 0.0]
    assert trace["y"] == [98.0, 39.0, 31.0, 87.0, 304.0]
    assert trace["marker"]["pattern"]["shape"] == ["", "/", "/", "/", ""]
    assert trace["customdata"][1] == "onnx-export: 137/s (predicted)"


def test_a_step_that_makes_it_worse_has_the_other_colour() -> None:
    found = made.kept()
    found.phases[2] = Phase("transformer-fusion", 0.08, 110.0, 0.912, 1.0, False)
    for name in ("rate_steps", "latency_steps", "cost_steps"):
        colours = figure(name, found)["data"][0]["marker"]["color"]
        assert colours[2] == optimize_figures.WORSE and colours[1] == optimize_figures.BETTER


def test_an_overloaded_original_does_not_make_the_others_too_small_to_see() -> None:
    found = made.kept()
    drawn = figure("latency_steps", found)
    top = drawn["layout"]["yaxis"]["range"][1]
    assert 61.0 < top < 80.0
    assert drawn["data"][0]["y"][0] == top
    texts = [note["text"] for note in drawn["layout"]["annotations"]]
    assert texts[0] == "410 ms ↑" and texts[-1] == "- - SLO: 20.0 ms"
    found.phases[0].p99_s = math.inf
    drawn = figure("latency_steps", found)
    assert drawn["layout"]["annotations"][0]["text"] == "never ↑"
    assert all(map(math.isfinite, drawn["data"][0]["y"]))


def test_steps_of_one_name_are_two_bars() -> None:
    found = made.kept()
    found.phases[2].label = "int8-static(calibrator=entropy)"
    (trace,) = figure("rate_steps", found)["data"]
    assert trace["x"][2:] == ["int8-<br>static", "int8-<br>static 2", "as served"]


def test_a_step_of_which_nothing_is_known_has_no_bar() -> None:
    found = made.kept()
    (trace,) = figure("latency_steps", found)["data"]
    assert len(found.phases) == 5 and "int8-<br>static" not in trace["x"]
    assert len(trace["x"]) == len(trace["y"]) == len(trace["marker"]["pattern"]["shape"]) == 4
    assert trace["y"][2] == pytest.approx(61.0 - 34.0)


def test_a_measured_p99_with_a_predicted_rate_is_hatched_where_it_is_predicted() -> None:
    found = made.kept()
    found.phases[0].is_rate_predicted = True
    shapes = {
        name: figure(name, found)["data"][0]["marker"]["pattern"]["shape"][0]
        for name in ("rate_steps", "cost_steps", "latency_steps")
    }
    assert shapes == {"rate_steps": "/", "cost_steps": "/", "latency_steps": ""}


def test_merged_steps_are_named_with_each_other() -> None:
    found = made.kept()
    found.phases[2].label = "onnx-graph(level=all) → transformer-fusion(heads=12)"
    (trace,) = figure("rate_steps", found)["data"]
    assert trace["x"][2] == "onnx-graph →<br>transformer-fusion"


def test_accuracy_is_shown_with_its_budget_and_room_around() -> None:
    drawn = figure("accuracy_steps", made.kept())
    assert drawn["data"][0]["text"][0] == "91.2 %"
    (line,) = drawn["layout"]["shapes"]
    assert line["y0"] == pytest.approx(90.2)
    low, high = drawn["layout"]["yaxis"]["range"]
    assert low < 90.2 and high > 91.2 and high - low > 1.0


def test_a_relative_budget_is_no_line_of_points() -> None:
    found = made.kept()
    found.accuracy_budget = "top1 drop <= 1 % relative"
    assert figure("accuracy_steps", found)["layout"]["shapes"] == []
    assert figure("pareto", found)["layout"]["yaxis"]["title"] == "top1 lost, % of the original's"


def test_a_try_after_the_one_that_lost_accuracy_has_lost_it_too() -> None:
    found = made.kept()
    losses = {
        str(point.attempt.candidate): round(point.loss, 6) for point in points_of(found, "top1")
    }
    assert losses["original"] == losses[str(made.FUSED)] == 0.0
    assert losses[str(made.QUANTISED)] == losses[str(made.CHOSEN)] == 0.2
    assert str(made.FUSED.then(made.HALF)) not in losses


def test_the_front_is_what_no_allowed_one_beats() -> None:
    front = front_of(points_of(made.kept(), "top1"))
    assert [(point.rate, round(point.loss, 6)) for point in front] == [(168.0, 0.0), (304.0, 0.2)]


def test_measured_marks_are_solid_and_rejected_ones_say_why() -> None:
    drawn = {trace["name"]: trace for trace in figure("pareto", made.kept())["data"]}
    assert drawn["kept"]["marker"]["symbol"][0] == "circle"
    assert drawn["kept"]["marker"]["symbol"][1] == "circle-open"
    (hover,) = drawn["rejected by a gate"]["customdata"]
    assert hover.endswith("top1 may lose 4.4 points") and "calibrator=entropy" in hover
    assert drawn["chosen"]["x"] == [304.0]


def test_names_are_not_obeyed_as_tags() -> None:
    found = made.kept()
    found.tries[7].reason = found.phases[1].label = "<a href=x>"
    drawn = {trace["name"]: trace for trace in figure("pareto", found)["data"]}
    assert "<a" not in drawn["rejected by a gate"]["customdata"][0]
    (steps,) = figure("rate_steps", found)["data"]
    assert "<a" not in steps["x"][1] and "<a" not in steps["customdata"][1]


def test_curves_are_before_and_after_with_the_promise() -> None:
    drawn = figure("curves", made.kept())
    assert [trace["name"] for trace in drawn["data"]] == [
        "original p50",
        "original p99",
        "chosen p50",
        "chosen p99",
    ]
    lines = drawn["layout"]["shapes"]
    assert [line.get("y0") for line in lines if line.get("yref") != "paper"] == [20.0]
    assert [line.get("x0") for line in lines if line.get("yref") == "paper"] == [200.0]
    names = [trace["name"] for trace in figure("curves", made.unknown_figures())["data"]]
    assert names == ["chosen p50", "chosen p99"]


def test_the_time_of_a_request_is_drawn_by_phase() -> None:
    drawn = figure("phases", made.kept())
    queue = next(trace for trace in drawn["data"] if trace["name"] == "queue")
    assert queue["x"] == pytest.approx([123.0, 3.54])
    assert queue["y"][1].startswith("chosen<br>")
    found = made.kept()
    assert found.after is not None
    found.after.phases = {"compute": 0.001, "decrypt": 0.0005}
    drawn = figure("phases", found)
    assert drawn["layout"]["xaxis"]["title"] == "share, %"
    assert drawn["data"][-1]["name"] == "decrypt"


def test_rates_of_a_language_model_are_drawn_against_first_tokens_and_the_others() -> None:
    found = optimize_figures.figures_of(made.text())
    for name, limit in (("ttft_curves", 500.0), ("tpot_curves", 100.0)):
        figure = found[name][0]
        assert figure is not None
        assert [trace["name"] for trace in figure["data"]] == ["original", "chosen"]
        assert figure["data"][1]["x"] == [1.5, 3.0, 6.0]
        heights = [shape["y0"] for shape in figure["layout"]["shapes"]]
        assert any(height == pytest.approx(limit) for height in heights)
        assert "SLO: p99" in figure["layout"]["annotations"][0]["text"]
    assert found["tpot_curves"][0]["data"][1]["y"] == pytest.approx([48.0, 60.0, 240.0])
    assert found["phases"] == found["curves"] == [None] and found["rate_steps"][0] is not None
    assert not {"ttft_curves", "tpot_curves"} & optimize_figures.figures_of(made.kept()).keys()
