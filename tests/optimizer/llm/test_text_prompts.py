"""Prompts of a data file: what is sent, and what the model sees of it."""

import json

import pytest

pytest.importorskip("tokenizers")

from tiny_text import TOKENIZER

from penstock.data import InputSpec, RequestForm, open_source
from penstock.errors import ConfigError
from penstock.llm.text import Text
from penstock.optimizer.llm.text_prompts import (
    NUM_NEW,
    NUM_SENT,
    numbered,
    read_prompts,
    write_load,
)

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
PLAIN, CHAT = Text(TOKENIZER), Text(TOKENIZER, TEMPLATE)


def a_file(folder, *rows, name="p.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_model_with_a_template_is_asked_in_chats(tmp_path):
    rows = [{"prompt": "the cat"}, {"messages": [{"role": "user", "content": "a mat"}]}]
    found = read_prompts(a_file(tmp_path, *rows), CHAT, 200)
    assert found.is_chat and "asked as chats" in found.text
    assert found.asked[0].fields == {"messages": [{"role": "user", "content": "the cat"}]}
    assert CHAT.vocabulary.decode(found.asked[0].tokens) == "user: the cat "


def test_one_without_is_asked_to_continue(tmp_path):
    found = read_prompts(a_file(tmp_path, {"prompt": "the cat", "max_tokens": 7}), PLAIN, 200)
    assert not found.is_chat and found.asked[0].fields == {"prompt": "the cat"}
    assert found.asked[0].max_tokens == found.longest_answer == 7
    assert found.asked[0].tokens == PLAIN.encode("the cat")


def test_plain_texts_are_prompts_too(tmp_path):
    (tmp_path / "p.txt").write_text("the cat\n\n  a mat \n")
    found = read_prompts(str(tmp_path / "p.txt"), PLAIN, 200)
    assert [each.fields["prompt"] for each in found.asked] == ["the cat", "a mat"]
    assert found.longest_answer == NUM_NEW


def test_what_the_model_cannot_hold_is_left_out_and_told(tmp_path):
    rows = [{"prompt": "the " * 50, "max_tokens": 4}, {"prompt": "the", "max_tokens": 4}]
    found = read_prompts(a_file(tmp_path, *rows), PLAIN, 20)
    assert len(found.asked) == 1 and "1 were too long" in found.text
    with pytest.raises(ConfigError, match="no prompt leaves room for its answer within 3 tokens"):
        read_prompts(a_file(tmp_path, *rows), PLAIN, 3)


def test_what_is_sent_fits_with_its_number(tmp_path):
    path = a_file(tmp_path, *({"prompt": "the " * num, "max_tokens": 4} for num in range(1, 60)))
    found = read_prompts(path, PLAIN, 64)
    assert 0 < len(found.asked) < 59
    for level in (0, 400):
        write_load(found, tmp_path / "load.jsonl", level)
        for line in (tmp_path / "load.jsonl").read_text().splitlines():
            assert len(PLAIN.encode(json.loads(line)["prompt"])) + 4 <= 64


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("p.jsonl", "", "has no examples"),
        ("p.jsonl", '{"text": "a"}', "expected 'prompt', 'messages' or 'conversations'"),
        ("p.npz", "", "prompts are read from files that end in"),
        ("p.csv", "", "has no examples"),
        ("p.xlsx", "", "expected a file that ends in"),
    ],
)
def test_files_without_prompts_are_refused(tmp_path, name, content, problem):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=problem):
        read_prompts(str(tmp_path / name), PLAIN, 200)


def test_the_load_has_no_prompt_twice(tmp_path):
    found = read_prompts(a_file(tmp_path, {"prompt": "the cat"}, {"prompt": "a mat"}), PLAIN, 200)
    write_load(found, tmp_path / "load.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "load.jsonl").read_text().splitlines()]
    assert len(rows) == NUM_SENT == len({row["prompt"] for row in rows})
    assert [row["prompt"] for row in rows[:3]] == ["the cat", "a mat", "(1) the cat"]
    assert {row["max_tokens"] for row in rows} == {NUM_NEW}
    source = open_source(
        InputSpec(path=str(tmp_path / "load.jsonl")), RequestForm(kind="prompt"), 0, 1
    )
    assert source.origin.num_examples == NUM_SENT


def test_two_levels_have_no_prompt_in_common(tmp_path):
    found = read_prompts(a_file(tmp_path, {"prompt": "the cat"}, {"prompt": "a mat"}), PLAIN, 200)
    sent = []
    for level in range(3):
        write_load(found, tmp_path / "load.jsonl", level)
        sent += (tmp_path / "load.jsonl").read_text().splitlines()
    assert len(sent) == 3 * NUM_SENT == len(set(sent))


def test_of_a_chat_the_first_word_of_the_user_is_changed():
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "why"}]
    assert numbered({"messages": messages}, 3)["messages"] == [
        messages[0],
        {"role": "user", "content": "(3) why"},
    ]
    assert messages[1]["content"] == "why"
