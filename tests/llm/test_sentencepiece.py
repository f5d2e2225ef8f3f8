"""Tokenizers of SentencePiece, beside its rule applied by hand."""

import pytest

pytest.importorskip("tokenizers")

import pieces

from penstock.errors import ConfigError
from penstock.llm.sentencepiece import make_tokenizer, read_model
from penstock.llm.token_reader import read_vocabulary


def tokenizer_of(folder, **changes):
    path = folder / "tokenizer.model"
    path.write_bytes(pieces.model_file(**changes))
    return make_tokenizer(read_model(path))


@pytest.mark.parametrize("has_prefix", [True, False])
@pytest.mark.parametrize("text", pieces.TEXTS)
def test_pairs_are_joined_by_their_scores_and_come_back(tmp_path, text, has_prefix):
    tokenizer = tokenizer_of(tmp_path, has_prefix=has_prefix)
    found = tokenizer.encode(text, add_special_tokens=False).ids
    assert found == pieces.by_hand(text, has_prefix)
    assert read_vocabulary(tokenizer).decode(found) == text


def test_special_and_own_tokens_are_whole(tmp_path):
    tokenizer = tokenizer_of(tmp_path, has_prefix=False)
    found = tokenizer.encode("cat</s><turn>he").tokens
    assert found == ["cat", "</s>", "<turn>", "he"]
    vocabulary = read_vocabulary(tokenizer)
    assert {0, 1, 2} == vocabulary.special


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"kind": 1}, "model type is unigram; expected bpe"),
        ({"charsmap": b"x"}, "normalizer is nmt_nfkc; expected identity"),
        ({"is_trimmed": True}, "remove_extra_whitespaces is true; expected false"),
    ],
)
def test_other_kinds_are_refused(tmp_path, changes, problem):
    with pytest.raises(ConfigError, match=problem):
        tokenizer_of(tmp_path, **changes)


@pytest.mark.parametrize("cut", [1, 5, 100, 1001])
def test_a_file_that_was_cut_off_is_told(tmp_path, cut):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(pieces.model_file()[:-cut])
    with pytest.raises(ConfigError, match=r"tokenizer\.model: "):
        read_model(path)
