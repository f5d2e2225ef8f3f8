"""Figures of a profile."""

import pytest

from penstock.report import profile_figures


def test_a_dot_lies_where_its_operator_is(profile) -> None:
    (figure,) = profile_figures.figures(profile)["roofline"]
    assert figure is not None
    dots = next(each for each in figure["data"] if each["name"] == "compute-bound")
    operator = profile.operators[0]
    assert dots["x"] == [pytest.approx(operator.flops / operator.num_bytes)]
    assert dots["y"] == [pytest.approx(operator.flops / 16e-3 / 1e9)]
    assert (figure["layout"]["xaxis"]["type"], figure["layout"]["yaxis"]["type"]) == ("log", "log")


def test_roofs_are_the_measured_peaks(profile) -> None:
    (figure,) = profile_figures.figures(profile)["roofline"]
    assert figure is not None
    roofs = {each["name"]: each for each in figure["data"] if each["mode"] == "lines"}
    assert roofs["FP32 100 GFLOP/s"]["y"] == [100, 100]
    slope = roofs["memory 10.0 GB/s"]
    assert [y / x for x, y in zip(slope["x"], slope["y"], strict=True)] == [pytest.approx(10)] * 2


def test_what_takes_no_time_is_no_dot(profile) -> None:
    profile.operators[1].seconds = 1e-9
    (figure,) = profile_figures.figures(profile)["roofline"]
    assert figure is not None
    assert sum(len(each["x"]) for each in figure["data"] if each["mode"] == "markers") == 1


def test_names_of_operators_are_text_and_no_markup(profile) -> None:
    profile.operators[0].name = "<a href='elsewhere'>MatMul</a>"
    (figure,) = profile_figures.figures(profile)["roofline"]
    assert figure is not None
    texts = [text for each in figure["data"] for text in each.get("text", ())]
    assert any("&lt;a href=" in text for text in texts)
    assert not any("<a" in text for text in texts)


def test_bars_add_up_to_the_time(profile) -> None:
    (figure,) = profile_figures.figures(profile)["types"]
    assert figure is not None
    assert sum(sum(each["x"]) for each in figure["data"]) == pytest.approx(19)


def test_where_there_is_nothing_nothing_is_drawn(profile) -> None:
    profile.operators, profile.steps, profile.buckets = [], [], []
    assert [each for listed in profile_figures.figures(profile).values() for each in listed] == [
        None
    ] * 5


def test_a_gpu_s_lanes_are_drawn_where_they_were(gpu) -> None:
    figure = profile_figures.timeline(gpu)
    assert figure is not None
    assert figure["layout"]["barmode"] == "overlay"
    drawn = {trace["name"]: trace for trace in figure["data"]}
    assert list(drawn) == ["copies out", "kernels", "copies in"]
    assert drawn["kernels"]["base"] == [pytest.approx(1.0)]
    assert drawn["kernels"]["x"] == [pytest.approx(6.0)]
    # What a kernel is called is not read as markup.
    assert "gemm&lt;128&gt;" in drawn["kernels"]["text"][0]
