"""Tokenizers and templates from folders and GGUF files."""

import json

import pytest

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

import pieces  # noqa: E402
from test_text import TEMPLATE  # noqa: E402
from tiny_text import SAMPLE, SPECIAL, TOKENIZER  # noqa: E402

from penstock.errors import ConfigError  # noqa: E402
from penstock.llm.text_files import of_folder, of_gguf  # noqa: E402


def folder_of(path, settings=None, generation=None, template_file="") -> None:
    TOKENIZER.save(str(path / "tokenizer.json"))
    if settings is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    if template_file:
        (path / "chat_template.jinja").write_text(template_file)


def metadata_of(pre="gpt-2") -> dict:
    """The same tokenizer, as a GGUF file has it."""
    model = json.loads(TOKENIZER.to_str())["model"]
    tokens = sorted(model["vocab"], key=lambda token: model["vocab"][token])
    merges = [" ".join(each) if isinstance(each, list) else each for each in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
    }


class TestFolder:
    def test_all_that_lies_there_counts(self, tmp_path):
        settings = {
            "chat_template": TEMPLATE,
            "eos_token": {"content": "<|end|>"},
            "bos_token": None,
        }
        folder_of(tmp_path, settings, {"eos_token_id": [5, 7]})
        text = of_folder(tmp_path)
        assert text.stop_tokens == {0, 5, 7} and text.template
        assert text.encode("the cat") == TOKENIZER.encode("the cat").ids

    def test_a_template_may_be_a_file_or_one_of_several(self, tmp_path):
        named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
        folder_of(tmp_path, {"chat_template": named})
        assert of_folder(tmp_path).chat([]) == "d"
        folder_of(tmp_path, {"chat_template": named}, template_file="own")
        assert of_folder(tmp_path).chat([]) == "own"

    def test_a_tokenizer_is_enough(self, tmp_path):
        folder_of(tmp_path, generation={"eos_token_id": None})
        text = of_folder(tmp_path)
        assert not text.template and text.stop_tokens == frozenset()

    @pytest.mark.parametrize("begins", [None, False])
    def test_older_forms_are_read_without_it(self, tmp_path, begins):
        settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": begins}
        settings = {key: value for key, value in settings.items() if value is not None}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        (tmp_path / "tokenizer.model").write_bytes(pieces.model_file())
        text, sample = of_folder(tmp_path), "the cat"
        begin = [1] if begins is None else []
        assert text.encode(sample) == begin + pieces.by_hand(sample, True)
        assert text.stop_tokens == {2}

    @pytest.mark.parametrize("begins", [True, False])
    def test_words_and_merges(self, tmp_path, begins):
        settings = {"bos_token": "<|end|>", "eos_token": "<|end|>", "add_bos_token": begins}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        model = json.loads(TOKENIZER.to_str())["model"]
        (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
        lines = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
        (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *lines]))
        text = of_folder(tmp_path)
        for sample in SAMPLE:
            assert text.encode(sample) == [0] * begins + TOKENIZER.encode(sample).ids
        (tmp_path / "merges.txt").unlink()
        with pytest.raises(ConfigError, match=r"vocab\.json, merges\.txt: cannot be read"):
            of_folder(tmp_path)

    def test_what_is_missing_or_broken_is_named(self, tmp_path):
        with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read"):
            of_folder(tmp_path)
        folder_of(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("[]")
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json: expected an object"):
            of_folder(tmp_path)

    def test_half_of_a_surrogate_pair_in_a_file_is_told(self, tmp_path):
        folder_of(tmp_path, {"chat_template": "\ud83d\ude42"})
        assert of_folder(tmp_path).chat([]) == "\U0001f642"
        folder_of(tmp_path, {"chat_template": "\ud83d"})
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json: .*surrogates not allowed"):
            of_folder(tmp_path)


class TestGguf:
    @pytest.mark.parametrize("sample", SAMPLE)
    def test_tokens_are_the_same(self, sample):
        assert of_gguf(metadata_of()).encode(sample) == TOKENIZER.encode(sample).ids

    def test_ends_and_template_are_there(self):
        text = of_gguf(metadata_of())
        assert text.stop_tokens == {0} and text.chat([{"role": "user", "content": "a"}])
        assert text.encode("a<|end|>b")[1] == 0

    @pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2"])
    def test_digits_are_cut_as_the_file_says(self, pre):
        text = of_gguf(metadata_of(pre))
        assert text.vocabulary.decode(text.encode("in 2024 x")) == "in 2024 x"

    def test_parts_of_a_text_that_are_never_cut(self):
        metadata = metadata_of()
        metadata["tokenizer.ggml.token_type"][300] = 4
        text, whole = of_gguf(metadata), metadata["tokenizer.ggml.tokens"][300]
        plain = whole.replace("Ġ", " ")
        assert 300 in text.encode(f"x{plain}y") or plain != whole
        assert text.vocabulary.decode([300]) == plain

    @pytest.mark.parametrize(
        ("pre", "said", "has_begin"),
        [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True),
         ("llama-bpe", False, False)],
    )  # fmt: skip
    def test_a_text_begins_as_the_file_says(self, pre, said, has_begin):
        metadata = metadata_of(pre)
        if said is not None:
            metadata["tokenizer.ggml.add_bos_token"] = said
        text = of_gguf(metadata)
        assert (text.encode("a")[0] == 1) == has_begin
        assert text.encode("a", is_whole=False)[0] != 1

    def test_a_tokenizer_of_another_kind_is_refused(self):
        with pytest.raises(ConfigError, match="tokenizer 'bert' with 'default' is not read"):
            of_gguf({"tokenizer.ggml.model": "bert"})
        with pytest.raises(ConfigError, match="with 'strange' is not read"):
            of_gguf(metadata_of("strange"))

    @pytest.mark.parametrize("has_prefix", [True, False])
    def test_one_of_sentencepiece(self, has_prefix):
        metadata = pieces.gguf_metadata(has_prefix)
        text = of_gguf(metadata)
        for each in pieces.TEXTS:
            assert text.encode(each, is_whole=False) == pieces.by_hand(each, has_prefix)
            assert text.encode(each) == [1, *pieces.by_hand(each, has_prefix)]
        assert text.stop_tokens == {2}
        del metadata["tokenizer.ggml.scores"]
        with pytest.raises(ConfigError, match="0 scores and .* types of tokens; expected as many"):
            of_gguf(metadata)
