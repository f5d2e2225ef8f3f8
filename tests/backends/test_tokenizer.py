"""Tokens are those of the folder's own tokenizer."""

import json

import numpy as np
import pytest
import tiny_pretrained as tiny

from penstock.backends.tokenizer import CHARS_PER_TOKEN, MIN_CHARS, TextTokenizer, beginning
from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import ConfigError, InvalidRequest
from penstock.types import TensorSpec

NAMES = ("input_ids", "attention_mask", "token_type_ids")
SPECS = tuple(TensorSpec(name, "INT64", (-1,)) for name in NAMES)


def open_tokenizer(folder):
    config = ModelConfig(
        name="m",
        version="1",
        backend="preprocess",
        artifact=str(folder / "config.json"),
        inputs=(TensorSpec("TEXT", "BYTES", (1,)),),
        outputs=SPECS,
        max_batch_size=8,
        batching=BatchPolicy(8),
    )
    return TextTokenizer(config, SPECS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_classifier(tmp_path_factory.mktemp("folders") / "m")


def test_tokens_are_those_of_transformers_truncated_at_the_limit(folder):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    texts = [*tiny.SENTENCES, "the cat " * 200]
    rows = [{"TEXT": np.array([text.encode()], dtype=object)} for text in texts]
    made = open_tokenizer(folder).tried_all(rows)
    for text, row in zip(texts, made, strict=True):
        expected = theirs(text, truncation=True, return_token_type_ids=True)
        for name in NAMES:
            assert row[name].tolist() == expected[name], (text, name)
    assert len(made[-1]["input_ids"]) == tiny.SIZES["max_position_embeddings"]


def test_vocabulary_files_alone_will_do(folder, tmp_path):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "vocab.txt").write_text("\n".join(word for word, _ in words))
    text = {"TEXT": np.array([b"the cat sat"], dtype=object)}
    (one,) = open_tokenizer(folder).tried_all([text])
    (other,) = open_tokenizer(tmp_path).tried_all([text])
    assert one["input_ids"].tolist() == other["input_ids"].tolist()


def test_a_tokenizer_that_cannot_be_read_is_named(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="the tokenizer cannot be loaded"):
        open_tokenizer(tmp_path)


def test_texts_are_lowered_if_sentence_transformers_does(folder, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    texts = [{"TEXT": np.array([text], dtype=object)} for text in (b"The CAT", b"the cat")]
    one, other = open_tokenizer(tmp_path).tried_all(texts)
    assert one["input_ids"].tolist() != other["input_ids"].tolist()
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    one, other = open_tokenizer(tmp_path).tried_all(texts)
    assert one["input_ids"].tolist() == other["input_ids"].tolist()


def test_what_is_truncated_is_not_read(folder):
    tokenizer = open_tokenizer(folder)
    text = "the cat sat " * 80_000
    (cut,) = tokenizer.tried_all([{"TEXT": np.array([text.encode()], dtype=object)}])
    (short,) = tokenizer.tried_all([{"TEXT": np.array([b"the cat sat " * 100], dtype=object)}])
    for name in NAMES:
        assert cut[name].tolist() == short[name].tolist()
    limit = max(MIN_CHARS, CHARS_PER_TOKEN * tokenizer.max_length)
    assert len(beginning(text, limit)) < 2 * limit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc", "abc"),
        ("abcdefgh", "abcde"),
        ("äöü€😀x", "äöü€😀"),
        ("   \n  abc   def", "   \n  abc   de"),
        ("ab cde fgh", "ab cde"),
        ("a" + " " * 100, "a" + " " * 39),
    ],
)
def test_a_text_is_read_up_to_a_number_of_characters_without_spaces(text, expected):
    assert beginning(text, 5) == expected


def test_a_text_behind_very_many_spaces_is_refused(folder):
    rows = [{"TEXT": np.array([b" " * 500_000 + b"cat"], dtype=object)}]
    (refused,) = open_tokenizer(folder).tried_all(rows)
    assert isinstance(refused, InvalidRequest) and "spaces at its beginning" in str(refused)
