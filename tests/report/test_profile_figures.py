"""Plots of a profile."""

from typing import Any

import pytest

from penstock.report import figures, profile_figures
from penstock.report.plots import Plot


def plot(name: str, profile) -> Any:
    found = profile_figures.plots_of(profile)[name]
    assert found is not None
    return found


def named(found: Plot, name: str) -> Any:
    (mark,) = [each for each in found.marks if each.name == name]
    return mark


def test_a_dot_lies_where_its_operator_is(profile) -> None:
    found = plot("roofline", profile)
    dots = named(found, "compute-bound")
    operator = profile.operators[0]
    assert list(dots.x) == [pytest.approx(operator.flops / operator.num_bytes)]
    assert list(dots.y) == [pytest.approx(operator.flops / 16e-3 / 1e9)]
    assert found.x.is_log and found.y.is_log


def test_roofs_are_the_measured_peaks(profile) -> None:
    found = plot("roofline", profile)
    assert named(found, "FP32 100 GFLOP/s").y == (100, 100)
    slope = named(found, "memory 10.0 GB/s")
    assert [y / x for x, y in zip(slope.x, slope.y, strict=True)] == [pytest.approx(10)] * 2


def test_what_takes_no_time_is_no_dot(profile) -> None:
    profile.operators[1].seconds = 1e-9
    found = plot("roofline", profile)
    assert sum(len(mark.x) for mark in found.marks if mark.radii) == 1


def test_names_of_operators_are_text_and_no_markup(profile) -> None:
    profile.operators[0].name = "<a href='elsewhere'>MatMul</a>"
    text = figures.draw(plot("roofline", profile))
    assert "&lt;a href=" in text and "<a" not in text


def test_bars_add_up_to_the_time(profile) -> None:
    found = plot("types", profile)
    total = sum(
        high - low for bars in found.marks for low, high in zip(bars.lows, bars.highs, strict=True)
    )
    assert total == pytest.approx(19)


def test_where_there_is_nothing_nothing_is_drawn(profile) -> None:
    profile.operators, profile.steps, profile.buckets = [], [], []
    assert list(profile_figures.plots_of(profile).values()) == [None] * 5


def test_ceilings_and_parts_of_a_request_have_their_values(profile) -> None:
    steps = plot("steps", profile)
    assert [step.name for step in profile.steps] == list(steps.y.categories)
    ends = [high for bars in steps.marks for high in bars.highs]
    assert sorted(ends) == sorted(step.ceiling for step in profile.steps)
    assert plot("buckets", profile).marks[0].labels == ["1.00 ms", "3.00 ms", "20.0 ms"]


def test_a_gpu_s_lanes_are_drawn_where_they_were(gpu) -> None:
    found = profile_figures.timeline(gpu)
    assert found is not None
    assert list(found.y.categories) == ["copies in", "kernels", "copies out"]
    kernels = named(found, "kernels")
    assert list(kernels.lows) == [pytest.approx(1.0)]
    assert list(kernels.highs) == [pytest.approx(7.0)]
    # What a kernel is called is not read as markup.
    assert "gemm&lt;128&gt;" in figures.draw(found)
