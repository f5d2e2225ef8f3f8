"""What the page draws."""

import math
from typing import Any

import pytest
from optimizer import made_optimizations as made

from penstock.optimizer.results import MemberTime, Optimization, Phase
from penstock.report import figures, optimize_figures, plots
from penstock.report.optimize_figures import (
    front_of,
    points_of,
)
from penstock.report.plots import Bars


def figure(name: str, optimization: Optimization) -> Any:
    found = optimize_figures.plots_of(optimization)[name]
    assert found is not None
    return found


def bars(name: str, optimization: Optimization) -> Any:
    """The bars of a waterfall, without the lines between them."""
    (found,) = [mark for mark in figure(name, optimization).marks if isinstance(mark, Bars)]
    return found


def lengths(found: Any) -> list[float]:
    return [high - low for low, high in zip(found.lows, found.highs, strict=True)]


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
    found = optimize_figures.plots_of(made.MAKERS[name]())
    assert {key for key, each in found.items() if each is None} == missing


def test_nothing_is_drawn_of_nothing() -> None:
    assert set(optimize_figures.plots_of(made.nothing()).values()) == {None}


def test_a_waterfall_goes_from_each_value_to_the_next() -> None:
    trace = bars("rate_steps", made.kept())
    assert trace.lows == (0.0, 98.0, 137.0, 168.0, 0.0)
    assert lengths(trace) == [98.0, 39.0, 31.0, 87.0, 304.0]
    assert trace.outlined == (False, True, True, True, False)
    assert trace.texts[1] == "onnx-export: 137/s (predicted)"


def test_a_step_that_makes_it_worse_has_the_other_colour() -> None:
    found = made.kept()
    found.phases[2] = Phase("transformer-fusion", 0.08, 110.0, 0.912, 1.0, False)
    for name in ("rate_steps", "latency_steps", "cost_steps"):
        colours = bars(name, found).colours
        assert colours[2] == plots.RED and colours[1] == plots.GREEN


def test_an_overloaded_original_does_not_make_the_others_too_small_to_see() -> None:
    found = made.kept()
    drawn = figure("latency_steps", found)
    top = drawn.y.high
    assert 61.0 < top < 80.0
    assert bars("latency_steps", found).highs[0] == top
    assert drawn.notes[0].text == "410 ms ↑"
    assert [(limit.at, limit.text) for limit in drawn.limits] == [(20.0, "SLO: 20.0 ms")]
    found.phases[0].p99_s = math.inf
    drawn = figure("latency_steps", found)
    assert drawn.notes[0].text == "infinite ↑"
    assert all(map(math.isfinite, bars("latency_steps", found).highs))


def test_steps_of_one_name_are_two_bars() -> None:
    found = made.kept()
    found.phases[2].label = "int8-static(calibrator=entropy)"
    names = figure("rate_steps", found).x.categories
    assert names[2:] == ("int8-\nstatic", "int8-\nstatic 2", "as served")


def test_a_step_of_which_nothing_is_known_has_no_bar() -> None:
    found = made.kept()
    trace = bars("latency_steps", found)
    names = figure("latency_steps", found).x.categories
    assert len(found.phases) == 5 and "int8-\nstatic" not in names
    assert len(names) == len(trace.highs) == len(trace.outlined) == 4
    assert lengths(trace)[2] == pytest.approx(61.0 - 34.0)


def test_a_measured_p99_with_a_predicted_rate_is_outlined_where_it_is_predicted() -> None:
    found = made.kept()
    found.phases[0].is_rate_predicted = True
    names = ("rate_steps", "cost_steps", "latency_steps")
    outlined = {name: bars(name, found).outlined[0] for name in names}
    assert outlined == {"rate_steps": True, "cost_steps": True, "latency_steps": False}


def test_merged_steps_are_named_with_each_other() -> None:
    found = made.kept()
    found.phases[2].label = "onnx-graph(level=all) → transformer-fusion(heads=12)"
    names = figure("rate_steps", found).x.categories
    assert names[2] == "onnx-graph →\ntransformer-\nfusion"


def test_accuracy_is_shown_with_its_budget_and_room_around() -> None:
    drawn = figure("accuracy_steps", made.kept())
    assert drawn.marks[0].labels[0] == "91.2 %"
    (line,) = drawn.limits
    assert line.at == pytest.approx(90.2)
    low, high = drawn.y.low, drawn.y.high
    assert low < 90.2 and high > 91.2 and high - low > 1.0


def test_a_relative_budget_is_no_line_of_points() -> None:
    found = made.kept()
    found.accuracy_budget = "top1 drop <= 1 % relative"
    assert figure("accuracy_steps", found).limits == ()
    assert figure("pareto", found).y.title == "top1 lost, % of the original's"


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
    drawn = {mark.name: mark for mark in figure("pareto", made.kept()).marks}
    assert drawn["kept"].symbols[:2] == ("circle", "open")
    (hover,) = drawn["rejected by a gate"].texts
    assert hover.endswith("top1 may lose 4.4 points") and "calibrator=entropy" in hover
    assert drawn["chosen"].x == (304.0,)


def test_names_are_not_obeyed_as_tags() -> None:
    found = made.kept()
    found.tries[7].reason = found.phases[1].label = "<a href=x>"
    for name in ("pareto", "rate_steps"):
        text = figures.draw(figure(name, found))
        assert "<a" not in text and "&lt;a href=x&gt;" in text


def test_curves_are_before_and_after_with_the_promise() -> None:
    drawn = figure("curves", made.kept())
    assert [mark.name for mark in drawn.marks] == [
        "original p50",
        "original p99",
        "chosen p50",
        "chosen p99",
    ]
    assert [(line.axis, line.at) for line in drawn.limits] == [("y", 20.0), ("x", 200.0)]
    names = [mark.name for mark in figure("curves", made.unknown_figures()).marks]
    assert names == ["chosen p50", "chosen p99"]


def test_the_time_of_a_request_is_drawn_by_phase() -> None:
    drawn = figure("phases", made.kept())
    (queue,) = [mark for mark in drawn.marks if mark.name == "queue"]
    assert lengths(queue) == pytest.approx([123.0, 3.54])
    assert drawn.y.categories[1].startswith("chosen\n")
    found = made.kept()
    assert found.after is not None
    found.after.phases = {"compute": 0.001, "decrypt": 0.0005}
    drawn = figure("phases", found)
    assert drawn.x.title == "share, %"
    assert drawn.marks[-1].name == "decrypt"


def test_the_time_of_each_member_is_drawn_before_and_after() -> None:
    found = made.kept()
    assert "members" not in optimize_figures.plots_of(found)
    found.member = "net"
    assert optimize_figures.plots_of(found)["members"] is None
    assert found.before is not None and found.after is not None
    found.before.members = {
        "parse": MemberTime(0.001, 0.002, 1.0),
        "net": MemberTime(0.001, 0.008, 1.0),
    }
    found.after.members = {
        "parse": MemberTime(0.001, 0.002, 1.0),
        "net": MemberTime(0.0, 0.002, 1.0),
    }
    marks = {mark.name: lengths(mark) for mark in figure("members", found).marks}
    assert list(marks) == ["parse: queue", "parse: compute", "net: queue", "net: compute"]
    assert marks["net: compute"] == pytest.approx([8.0, 2.0])


def test_rates_of_a_language_model_are_drawn_against_first_tokens_and_the_others() -> None:
    found: dict[str, Any] = optimize_figures.plots_of(made.text())
    for name, limit in (("ttft_curves", 500.0), ("tpot_curves", 100.0)):
        plot = found[name]
        assert [mark.name for mark in plot.marks] == ["original", "chosen"]
        assert list(plot.marks[1].x) == [1.5, 3.0, 6.0]
        assert plot.limits[0].at == pytest.approx(limit)
        assert "SLO: p99" in plot.limits[0].text
    assert found["tpot_curves"].marks[1].y == pytest.approx([48.0, 60.0, 240.0])
    assert found["phases"] is found["curves"] is None and found["rate_steps"] is not None
    assert not {"ttft_curves", "tpot_curves"} & optimize_figures.plots_of(made.kept()).keys()
