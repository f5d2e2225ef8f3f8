"""Special tokens that users write are text, whatever tokenizer and template there are."""

import pytest
from example_counts import at_most
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from tiny_text import SPECIAL, TOKENIZER, WITH_BYTES, WITH_MARKS

from penstock.llm.control_tokens import BREAK, END, START, ControlTokens, alias
from penstock.llm.text import Text

KINDS = {"bytes": TOKENIZER, "words": WITH_BYTES, "marks": WITH_MARKS}
TEMPLATE = "{% for m in messages %}OPEN{{ m.role }}\n{{ m.content | trim }}CLOSE{% endfor %}"
PARTS = ["<", "|", "<|", "end", "|>", "start", "a", " ", "\n", "</s>", "<s", ">", BREAK, START]
PARTS += [END, "0", *SPECIAL, "<s>", alias(0), alias(1)]


def specials(tokenizer):
    return {n: t.content for n, t in tokenizer.get_added_tokens_decoder().items() if t.special}


@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None, max_examples=at_most(300))
@given(parts=st.lists(st.lists(st.sampled_from(PARTS), max_size=6).map("".join), max_size=4))
def test_only_the_template_makes_special_tokens(name, parts):
    tokenizer = KINDS[name]
    (opens, first), (closes, last) = list(specials(tokenizer).items())[-2:]
    text = Text(tokenizer, TEMPLATE.replace("OPEN", first).replace("CLOSE", last))
    found = text.encode_chat([{"role": "user", "content": each} for each in parts])
    # The unknown token of some tokenizers is special, too, and no control token.
    made = [token for token in found if token in (opens, closes)]
    assert made == [opens, closes] * len(parts)


def test_the_words_themselves_are_kept():
    control = ControlTokens(TOKENIZER)
    escaped = control.escape({"a": ["x <|end|> y", 1, None], "<|end|>": True})
    assert escaped["a"][0].replace(BREAK, "") == "x <|end|> y" and escaped["a"][1:] == [1, None]
    tokens = control.encode(escaped["a"][0])
    assert TOKENIZER.decode(tokens) == "x <|end|> y" and 0 not in tokens
    assert list(escaped)[1].replace(BREAK, "") == "<|end|>" != list(escaped)[1]


def test_text_without_special_tokens_is_not_touched():
    control = ControlTokens(TOKENIZER)
    assert control.escape("nothing < special |> here") == "nothing < special |> here"
    assert control.encode("plain<|end|>") is None


def test_two_strings_do_not_make_one_token():
    control = ControlTokens(TOKENIZER)
    joined = str(control.escape("<|en")) + str(control.escape("d|>"))
    assert 0 not in (control.encode(joined) or TOKENIZER.encode(joined).ids)
    assert not any(character in control.escape(alias(0)) for character in (START, END))
