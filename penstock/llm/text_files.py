"""Tokenizer and chat template from the files of a model: a folder's tokenizer.json and settings, a
GGUF file, or, for random weights, a tokenizer of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from penstock.errors import ConfigError
from penstock.llm.gguf import GgufFile
from penstock.llm.json_files import read_object
from penstock.llm.sentencepiece import (
    CONTROL,
    USER_DEFINED,
    Pieces,
    make_tokenizer,
    read_model,
)
from penstock.llm.text import Text
from penstock.llm.token_bytes import Vocabulary, pack
from penstock.llm.token_reader import letters_of_bytes

TOKENIZER, TEMPLATE = "tokenizer.json", "chat_template.jinja"
# Older forms: of SentencePiece, and of byte-level BPE.
PIECES, WORDS_FILE, MERGES = "tokenizer.model", "vocab.json", "merges.txt"
SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"
# Patterns of GGUF's pre-tokenizers, which split a text before BPE merges.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = "llama-bpe"
CUTS = {LLAMA3: rf"{WORDS}|\p{{N}}{{1,3}}|{SIGNS}", "qwen2": rf"{WORDS}|\p{{N}}|{SIGNS}"}
DIGITS_APART = ("smollm",)
KNOWN_CUTS = {"default", "gpt-2", *CUTS, *DIGITS_APART}
# For random weights: messages one per line.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)


def read_text(path: str, *, is_made_up: bool = False, parses_special: bool = False) -> Text:
    """Read the tokenizer and chat template of a folder, a GGUF file or, for random weights, those
    beside a config.json. Raise ConfigError if they are invalid."""
    where = Path(path)
    if is_made_up:
        text = _read_made_up(where)
    elif where.suffix != ".gguf":
        text = of_folder(where)
    else:
        with GgufFile(where) as file:
            text = of_gguf(file.metadata)
    text.parses_special = parses_special
    return text


def _read_made_up(config: Path) -> Text:
    """Return the tokenizer beside a config.json, or else one of bytes. Random weights sample any
    token, so every token gets text: clients measure speed by the text they receive."""
    num_tokens = read_object(config).get("vocab_size")
    if not isinstance(num_tokens, int) or num_tokens < 1:
        raise ConfigError([f"{config.name}: vocab_size is {num_tokens!r}; expected a number"])
    has_own = (config.parent / TOKENIZER).is_file()
    text = of_folder(config.parent) if has_own else of_bytes(num_tokens)
    known = text.vocabulary
    pieces = [known.piece(n) if known.has_text(n) else b"<%d>" % n for n in range(num_tokens)]
    data, ends = pack(pieces)
    text.vocabulary = replace(known, data=data, ends=ends, first={}, special=frozenset())
    return text


def of_bytes(num_tokens: int) -> Text:
    """Return a tokenizer of bytes with `num_tokens` tokens, each of which has text."""
    letters = {letter: byte % num_tokens for letter, byte in letters_of_bytes().items()}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = Text(tokenizer, PLAIN_TEMPLATE)
    data, ends = pack([_printed(number) for number in range(num_tokens)])
    text.vocabulary = Vocabulary(data, ends, template=PLAIN_TEMPLATE)
    return text


def _printed(token: int) -> bytes:
    """Return printable ASCII as it is, and other bytes, maybe parts of characters, in hex."""
    if token >= 256:
        return b" w%d" % token
    is_shown = 32 <= token < 127 or chr(token) in "\n\t"
    return bytes([token]) if is_shown else b"<0x%02X>" % token


def of_folder(folder: Path) -> Text:
    settings = _read(folder / SETTINGS)
    tokenizer = _tokenizer(folder, settings)
    template = settings.get("chat_template", "")
    if isinstance(template, list):
        named = {each.get("name"): each.get("template", "") for each in template}
        template = named.get("default", "")
    if (folder / TEMPLATE).is_file():
        template = (folder / TEMPLATE).read_text(encoding="utf-8")
    names = {
        key: _content(value) for key, value in settings.items() if key.endswith("_token") and value
    }
    stops = _read(folder / GENERATION).get("eos_token_id") or []
    tokens = {stops} if isinstance(stops, int) else set(stops)
    if "eos_token" in names:
        end = tokenizer.token_to_id(names["eos_token"])
        tokens |= set() if end is None else {end}
    return Text(tokenizer, str(template), frozenset(tokens), names)


def _tokenizer(folder: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """Read tokenizer.json, or without one an older form."""
    if (folder / TOKENIZER).is_file() or not (
        (folder / PIECES).is_file() or (folder / WORDS_FILE).is_file()
    ):
        try:
            return Tokenizer.from_file(str(folder / TOKENIZER))
        except Exception as error:  # The library raises plain Exception.
            raise ConfigError([f"{TOKENIZER}: cannot be read: {error}"]) from None
    if has_pieces := (folder / PIECES).is_file():
        tokenizer = make_tokenizer(read_model(folder / PIECES))
    else:
        try:
            files = str(folder / WORDS_FILE), str(folder / MERGES)
            tokenizer = Tokenizer(models.BPE.from_file(*files))
        except Exception as error:  # The library raises plain Exception.
            problem = f"{WORDS_FILE}, {MERGES}: cannot be read: {error}"
            raise ConfigError([problem]) from None
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    names = {
        key: _content(value)
        for key, value in settings.items()
        if key.endswith("_token") and isinstance(value, str | Mapping)
    }
    known = [each for each in names.values() if tokenizer.token_to_id(each) is not None]
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in known])
    begin = names.get("bos_token") or ("<s>" if has_pieces else "")
    if settings.get("add_bos_token", has_pieces):
        _begin_with(tokenizer, begin)
    return tokenizer


def _begin_with(tokenizer: Tokenizer, begin: str) -> None:
    """Put a token before every text, if the tokenizer has it."""
    number = tokenizer.token_to_id(begin)
    if number is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, number)]
        )


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if there is no such file."""
    return read_object(path) if path.is_file() else {}


def _content(value: object) -> str:
    """Return the text of a token, which is a string or an object with `content`."""
    return str(value.get("content", "")) if isinstance(value, Mapping) else str(value)


def of_gguf(metadata: Mapping[str, Any]) -> Text:
    kind = metadata.get("tokenizer.ggml.model")
    cut = str(metadata.get("tokenizer.ggml.pre", "default"))
    if kind == "llama":
        tokenizer = make_tokenizer(_pieces_of_gguf(metadata))
    elif kind == "gpt2" and cut in KNOWN_CUTS:
        tokenizer = _byte_level_of_gguf(metadata, cut)
    else:
        expected = f"expected llama, or gpt2 with {', '.join(sorted(KNOWN_CUTS))}"
        raise ConfigError([f"GGUF: tokenizer '{kind}' with '{cut}' is not read; {expected}"])
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    names = {
        f"{name}_token": tokens[metadata[f"tokenizer.ggml.{name}_token_id"]]
        for name in ("bos", "eos")
        if f"tokenizer.ggml.{name}_token_id" in metadata
    }
    begins = kind == "llama" or cut == LLAMA3
    if metadata.get("tokenizer.ggml.add_bos_token", begins) and "bos_token" in names:
        _begin_with(tokenizer, names["bos_token"])
    stops = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    template = str(metadata.get("tokenizer.chat_template", ""))
    return Text(tokenizer, template, frozenset(each for each in stops if each is not None), names)


def _pieces_of_gguf(metadata: Mapping[str, Any]) -> Pieces:
    texts: list[str] = metadata["tokenizer.ggml.tokens"]
    scores = metadata.get("tokenizer.ggml.scores", [])
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    if not len(texts) == len(scores) == len(kinds):
        problem = f"{len(texts)} tokens, {len(scores)} scores and {len(kinds)} types of tokens"
        raise ConfigError([f"GGUF: {problem}; expected as many of each"])
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    return Pieces(texts, scores, kinds, has_prefix)


def _byte_level_of_gguf(metadata: Mapping[str, Any], cut: str) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(each.split(" ", 1)) for each in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    # Llama 3: words that are in the vocabulary need no merges.
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut == LLAMA3)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_cuts(cut))
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    special = [tokens[number] for number, each in enumerate(kinds) if each == CONTROL]
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special])
    own = [tokens[number] for number, each in enumerate(kinds) if each == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in own])
    return tokenizer


def _cuts(name: str) -> list[pre_tokenizers.PreTokenizer]:
    if name in CUTS:
        split = pre_tokenizers.Split(Regex(CUTS[name]), "isolated")
        return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    digits = [pre_tokenizers.Digits(individual_digits=True)] if name in DIGITS_APART else []
    return [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
