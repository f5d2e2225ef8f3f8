"""Values of configurations, and what is told of those that make no sense."""

import pytest

from penstock.errors import ConfigError
from penstock.llm.models.reader import Reader


def test_all_problems_are_told_together():
    reader = Reader({"a": 0, "b": "x", "c": True}, "here")
    reader.whole("a")
    reader.real("b")
    reader.whole("c")
    reader.flag("d", False)
    reader.whole("e")
    with pytest.raises(ConfigError) as error:
        reader.check()
    assert error.value.problems == (
        "here: a is 0; expected a positive number",
        "here: b is 'x'; expected a positive number",
        "here: c is True; expected a positive number",
        "here: e is missing; expected a positive number",
    )


def test_values_that_are_not_served_are_refused():
    reader = Reader({"a": 1, "b": None, "c": 3}, "here")
    reader.accept({"a": 1, "b": 2, "c": 2, "d": 5})
    assert reader.problems == ["here: c is 3; expected 2"]


def test_lists_of_names():
    reader = Reader({"a": ["x", "y"], "b": ["x", "z"], "c": "x"}, "here")
    assert reader.names("a", 2, ("x", "y")) == ["x", "y"] and reader.names("d", 2, ("x",)) == []
    assert not reader.problems
    reader.names("b", 2, ("x", "y"))
    reader.names("a", 3, ("x", "y"))
    reader.names("c", 1, ("x", "y"))
    assert reader.problems == [
        "here: b has 'z'; expected x or y",
        "here: a is ['x', 'y']; expected a list of 3 names",
        "here: c is 'x'; expected a list of 1 names",
    ]
