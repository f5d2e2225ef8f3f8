"""Messages of a chat: what is taken, and how templates see it."""

import pytest

from penstock.errors import InvalidRequest
from penstock.wire.openai_messages import ROLES, read_messages

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def read_one(**message):
    (found,) = read_messages([message])
    return found


@pytest.mark.parametrize("role", ROLES)
def test_roles_of_openai_are_taken(role):
    assert read_one(role=role, content="a") == {"role": role, "content": "a"}


class TestHistoryWithTools:
    def test_an_assistant_that_called_a_tool_said_nothing(self):
        found = read_one(role="assistant", content=None, tool_calls=[CALL])
        assert found["content"] == ""
        assert found["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
        assert found["tool_calls"][0]["id"] == "c1"
        assert read_one(role="assistant", tool_calls=[CALL])["content"] == ""

    def test_the_answer_of_the_tool_keeps_its_id(self):
        message = {"role": "tool", "content": "4", "tool_call_id": "c1"}
        assert read_one(**message) == message

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [("", {}), (None, {}), ("{broken", "{broken"), ("[1]", "[1]"), ({"a": 1}, {"a": 1})],
    )
    def test_arguments_are_an_object_where_they_are_one(self, arguments, expected):
        call = {"function": {"name": "f", "arguments": arguments}}
        found = read_one(role="assistant", content=None, tool_calls=[call])
        assert found["tool_calls"][0]["function"]["arguments"] == expected

    def test_no_calls_are_none(self):
        found = read_one(role="assistant", content="a", tool_calls=None, refusal=None)
        assert "tool_calls" not in found


def test_parts_are_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    assert read_one(role="assistant", content=parts)["content"] == "ab"
    assert read_one(role="assistant", content=None, refusal="no")["content"] == "no"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "hacker", "content": "a"}, "messages[0].role: 'hacker'; expected one of"),
        ({"role": "x" * 1_000_000, "content": "a"}, "…'; expected one of"),
        ({"role": 5, "content": "a"}, "messages[0].role: a number"),
        ({"role": "user"}, "messages[0].content: null; expected text"),
        ({"role": "user", "content": {"a": 1}}, "messages[0].content: an object; expected text"),
        ({"role": "user", "content": True}, "messages[0].content: a boolean"),
        ({"role": "user", "content": [{"type": "image_url"}]},
         "messages[0].content[0]: a part of type 'image_url'; expected text"),
        ({"role": "user", "content": ["a"]}, "messages[0].content[0]: a part of type null"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]},
         "messages[0].content[0].text: a number; expected a string"),
        ({"role": "assistant", "audio": {"id": "a"}}, "messages[0].audio"),
        ({"role": "assistant", "tool_calls": {}}, "messages[0].tool_calls: an object"),
        ({"role": "assistant", "tool_calls": [1]}, "messages[0].tool_calls[0]: expected"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "expected a function"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_and_quoted_shortly(message, expected):
    with pytest.raises(InvalidRequest) as caught:
        read_messages([message])
    assert expected in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("count", [0, 5000])
def test_so_many_messages(count):
    with pytest.raises(InvalidRequest, match="expected 1 to 4096"):
        read_messages([{"role": "user", "content": "a"}] * count)
