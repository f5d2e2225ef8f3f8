"""Prompts: of the asked length, none like another; and what rows of a file ask for."""

from itertools import count, repeat
from typing import Any

import pytest

from penstock.data.files import FileRows
from penstock.data.lengths import Sizes
from penstock.data.prompts import (
    DEFAULT_TOKENS,
    WORDS,
    RandomPrompts,
    own_words,
    samples_from_rows,
)
from penstock.data.samples import RequestForm
from penstock.errors import ConfigError

PROMPT, MESSAGES = RequestForm("prompt"), RequestForm("messages")


def prompts(seed: int = 0, index: int = 0, num_processes: int = 1, sizes: Sizes | None = None):
    return RandomPrompts(PROMPT, (index, num_processes), seed, sizes or Sizes())


def texts(source: RandomPrompts, number: int) -> list[list[str]]:
    return [str(source.next()[1].fields["prompt"]).split() for _ in range(number)]


def asked(form: RequestForm, *rows: dict[str, Any]) -> list[Any]:
    return samples_from_rows(form, FileRows(rows, range(1, len(rows) + 1), "line"), "f.jsonl")


def test_the_vocabulary_has_different_plain_words() -> None:
    assert len(set(WORDS)) == len(WORDS) == 401
    assert all(word.isalpha() and word.islower() and word.isascii() for word in WORDS)


def test_a_prompt_has_the_words_of_its_length() -> None:
    source = prompts(sizes=Sizes(count(1)))
    assert [len(words) for words in texts(source, 300)] == [*range(1, 301)]


def test_a_very_long_prompt() -> None:
    assert len(texts(prompts(sizes=Sizes(repeat(200_000))), 1)[0]) == 200_000


def test_without_lengths_a_prompt_has_the_default() -> None:
    assert {len(words) for words in texts(prompts(), 5)} == {DEFAULT_TOKENS}


def test_no_two_prompts_of_a_run_begin_alike() -> None:
    begins = [tuple(words[:4]) for i in range(3) for words in texts(prompts(0, i, 3), 20_000)]
    assert len(set(begins)) == len(begins)


def test_prompts_in_a_row_differ_in_their_first_word() -> None:
    first = [words[0] for words in texts(prompts(), 400)]
    assert len(set(first)) == 400


def test_numbers_in_words_do_not_repeat() -> None:
    assert len({tuple(own_words(n, 4)) for n in range(100_000)}) == 100_000


def test_seeds_give_other_prompts_and_the_same_seed_the_same() -> None:
    assert texts(prompts(1), 5) == texts(prompts(1), 5)
    assert texts(prompts(1), 5) != texts(prompts(2), 5)


def test_limits_of_answers_follow_their_lengths() -> None:
    source = prompts(sizes=Sizes(repeat(5), iter([3, 4])))
    assert [source.next()[1].max_tokens for _ in range(2)] == [3, 4]
    assert prompts().next()[1].max_tokens is None


def test_chat_gets_one_message_of_the_user() -> None:
    index, sample = RandomPrompts(MESSAGES, (0, 1), 0, Sizes(repeat(6))).next()
    assert index is None
    (message,) = sample.fields["messages"]  # type: ignore[misc]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 6


def test_the_report_is_told() -> None:
    sizes = Sizes(repeat(5), repeat(6), "five", "six")
    origin = prompts(sizes=sizes).origin
    assert origin.is_random
    assert origin.text == (
        "random words: real text may behave differently; prompt tokens (about): five; "
        "answer tokens (at most): six"
    )


def test_a_row_with_a_prompt() -> None:
    row = {"prompt": "Hello", "max_tokens": 7, "id": 3}
    (sample,) = asked(PROMPT, row)
    assert (sample.fields, sample.max_tokens) == ({"prompt": "Hello"}, 7)
    (sample,) = asked(MESSAGES, row)
    assert sample.fields == {"messages": [{"role": "user", "content": "Hello"}]}


def test_a_row_with_messages() -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    (sample,) = asked(MESSAGES, {"messages": messages})
    assert (sample.fields, sample.max_tokens) == ({"messages": messages}, None)
    (sample,) = asked(PROMPT, {"messages": messages})
    assert sample.fields == {"prompt": "Be short.\nHi"}


def test_messages_with_images_fit_chat_only() -> None:
    row = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
    assert asked(MESSAGES, row)[0].fields == row
    with pytest.raises(ConfigError, match="not text fits chat, not completions"):
        asked(PROMPT, row)


def test_of_a_conversation_what_was_asked_first() -> None:
    turns = [
        {"from": "gpt", "value": "(cut off)"},
        {"from": "human", "value": "Why?"},
        {"from": "gpt", "value": "Because."},
        {"from": "human", "value": "And then?"},
    ]
    (sample,) = asked(MESSAGES, {"conversations": turns})
    assert sample.fields == {"messages": [{"role": "user", "content": "Why?"}]}
    (sample,) = asked(PROMPT, {"conversations": [{"from": "system", "value": "Now."}, *turns]})
    assert sample.fields == {"prompt": "Now.\nWhy?"}


def test_conversations_without_a_question_are_left_out() -> None:
    rows = [{"conversations": []}, {"conversations": [{"from": "gpt", "value": "Hi"}]}]
    assert len(asked(MESSAGES, *rows, {"prompt": "Hello"})) == 1
    with pytest.raises(ConfigError, match="in none of its conversations"):
        asked(MESSAGES, *rows)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"text": "a"}, "expected 'prompt', 'messages' or 'conversations'"),
        ({"prompt": ""}, "'prompt' must be a text that is not empty"),
        ({"prompt": 3}, "'prompt' must be a text that is not empty"),
        ({"prompt": "a", "max_tokens": 0}, "'max_tokens' must be a whole number from 1, got 0"),
        ({"prompt": "a", "max_tokens": "9"}, "'max_tokens' must be a whole number from 1, got '9'"),
        ({"messages": []}, "'messages' must be a list of objects with 'role' and 'content'"),
        ({"messages": ["a"]}, "'messages' must be a list of objects with 'role' and 'content'"),
        ({"messages": [{"role": "user"}]}, "'messages' must be a list of objects with"),
        ({"conversations": "a"}, "'conversations' must be a list of objects with 'from'"),
        ({"conversations": [{"from": "human"}]}, "'conversations' must be a list of objects with"),
    ],
)
def test_rows_that_ask_for_nothing_are_named(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        asked(MESSAGES, {"prompt": "fine"}, row)
    assert caught.value.problems[0].startswith(f"f.jsonl, line 2: {problem}")


def test_a_template_gets_the_fields_it_names() -> None:
    form = RequestForm("fields", fields=("a", "b"))
    assert asked(form, {"a": 1, "b": [2], "c": 3})[0].fields == {"a": 1, "b": [2]}
    with pytest.raises(ConfigError, match="line 1: 'b' missing, which the body names"):
        asked(form, {"a": 1})
