"""Operators under the roofs of the device."""

import pytest
from optimizer import made_optimizations as made

from penstock.optimizer.report.roofline_plot import intensity, roofline


def test_roofs_rise_with_memory_and_end_at_the_peak() -> None:
    profile = made.profile()
    figure = roofline(profile)
    assert figure is not None
    lower, higher = figure["data"][:2]
    assert (lower["name"], higher["name"]) == ("fp32: 90.0 G/s", "int8: 290 G/s")
    assert max(lower["y"]) == 90.0 and max(higher["y"]) == 290.0
    assert lower["y"][0] == pytest.approx(lower["x"][0] * 12.0)
    assert lower["x"] == sorted(lower["x"])
    # The corner itself is a point of the line.
    assert 90e9 / 1.2e10 in lower["x"]


def test_operators_are_marks_as_large_as_their_time() -> None:
    figure = roofline(made.profile())
    assert figure is not None
    marks = {trace["name"]: trace for trace in figure["data"] if trace["mode"] == "markers"}
    assert marks.keys() == {"bound by compute", "bound by memory", "bound by launch"}
    assert len(marks["bound by compute"]["x"]) == 2
    assert marks["bound by compute"]["y"][0] == pytest.approx(5.6e7 / 0.0011 / 1e9)
    sizes = marks["bound by compute"]["marker"]["size"]
    assert sizes[0] > marks["bound by memory"]["marker"]["size"][0]
    assert "/layer.0/MatMul" in marks["bound by compute"]["customdata"][0]


def test_what_is_not_known_has_no_place() -> None:
    profile = made.profile()
    assert intensity(profile.operators[-1]) is None
    profile.operators = profile.operators[-1:]
    assert roofline(profile) is None
