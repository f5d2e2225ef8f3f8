"""The types of nested fields are those of the openai package."""

import typing

import pytest

openai = pytest.importorskip("openai")

from openai.types.responses import (  # noqa: E402
    function_tool_param,
    response_function_tool_call_param,
    response_reasoning_item_param,
    response_text_config_param,
)
from openai.types.shared_params import Reasoning  # noqa: E402

from penstock.errors import InvalidRequest  # noqa: E402
from penstock.wire import openai_nested as ours  # noqa: E402

PAIRS = [
    (ours.Reasoning, Reasoning),
    (ours.TextConfig, response_text_config_param.ResponseTextConfigParam),
    (ours.FunctionTool, function_tool_param.FunctionToolParam),
    (ours.CallItem, response_function_tool_call_param.ResponseFunctionToolCallParam),
    (ours.ReasoningItem, response_reasoning_item_param.ResponseReasoningItemParam),
]


def values(kind: object) -> set[object]:
    """Return the values of a union of literals."""
    found = {each for each in typing.get_args(kind) if isinstance(each, str)}
    return found.union(
        *(values(each) for each in typing.get_args(kind) if not isinstance(each, str))
    )


@pytest.mark.parametrize(("own", "theirs"), PAIRS, ids=lambda each: each.__name__)
def test_fields_and_their_values_are_those_of_the_package(own: type, theirs: type) -> None:
    known, hints = typing.get_type_hints(own), typing.get_type_hints(theirs)
    assert set(known) <= set(hints)
    for name, kind in known.items():
        if values(kind):
            assert values(kind) == values(hints[name]), name


def test_the_path_to_a_wrong_field_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"^text\.format\.name: Expected") as error:
        ours.check_fields({"format": {"type": "text", "name": 3}}, ours.TextConfig, "text")
    assert error.value.field == "text"
