"""Between text and tokens: a model's tokenizer, and how the messages of a chat become one text.

The tokenizer is that of `tokenizers`, from a folder's tokenizer.json or from what a GGUF file says.
Templates of chats come with models and are run in a sandbox: they see messages, and nothing else.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)

from penstock.errors import ConfigError, InvalidRequest
from penstock.llm.json_files import read_object
from penstock.llm.token_bytes import Stream, TokenBytes

TOKENIZER, SETTINGS, GENERATION = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)
TEMPLATE = "chat_template.jinja"
# What GGUF calls the way a text is cut before pairs are merged.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = "llama-bpe"
CUTS = {
    LLAMA3: rf"{WORDS}|\p{{N}}{{1,3}}|{SIGNS}",
    "qwen2": rf"{WORDS}|\p{{N}}|{SIGNS}",
}
DIGITS_APART = ("smollm",)
# Of a GGUF file's tokens: those that stand for something, and are never part of a text.
CONTROL = 3
# Parts of a text that are never cut.
OF_USERS = 4

Messages = Sequence[Mapping[str, Any]]


class Text:
    """Of one model. Safe for several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str = "",
        stop_tokens: frozenset[int] = frozenset(),
        names: Mapping[str, str] | None = None,
    ) -> None:
        """`names` are those of special tokens, as templates know them (`bos_token` and so on)."""
        # A file may say that texts are cut or filled up; here they are as long as they are.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.template = template
        self.names = dict(names or {})
        self._bytes = TokenBytes(tokenizer)
        self.stop_tokens = stop_tokens

    @property
    def has_template(self) -> bool:
        return bool(self.template)

    @property
    def num_tokens(self) -> int:
        size: int = self._tokenizer.get_vocab_size()
        return size

    @cached_property
    def longest_token(self) -> int:
        """In characters: a text that is longer than so many of it has more tokens."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def encode(self, text: str, *, is_whole: bool = True) -> list[int]:
        """`is_whole`: with what the model wants before a text; not for what a template made. Other
        threads run meanwhile."""
        # Of the library's ways this one lets go of the interpreter.
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=is_whole)
        tokens: list[int] = found.ids
        return tokens

    def decode(self, tokens: Sequence[int], *, keeps_special: bool = False) -> str:
        """Without special tokens, or with their names; bytes that are no characters are
        replaced."""
        told = [token for token in tokens if keeps_special or self._bytes.has_text(token)]
        begin = [self._bytes.of_first(token) for token in told[:1]]
        return b"".join([*begin, *map(self._bytes.of, told[1:])]).decode("utf-8", "replace")

    def token(self, token: int) -> str:
        """One by itself, as it is within a text, special ones by their names."""
        return self._bytes.of(token).decode("utf-8", "replace")

    def stream(self, prompt: Sequence[int] = ()) -> Stream:
        """Of what follows these."""
        return Stream(self._bytes, prompt)

    def chat(self, messages: Messages, options: Mapping[str, object] | None = None) -> str:
        """The text that the model continues with an answer. InvalidRequest with what the template
        does not like."""
        if not self.template:
            raise InvalidRequest("the model has no template for chats; ask for a completion")
        try:
            made: str = self._compiled.render(
                {"add_generation_prompt": True, **(options or {}), **self.names}
                | {"messages": messages}
            )
        except InvalidRequest:
            raise
        except Exception as error:  # Somebody else's code, run on what somebody else sent.
            raise InvalidRequest(f"messages: the model's template refuses them: {error}") from None
        return made

    @cached_property
    def _compiled(self) -> Any:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=_now)
        try:
            return environment.from_string(self.template)
        except TemplateError as error:
            raise InvalidRequest(f"the model's template cannot be read: {error}") from None


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def numbered() -> Text:
    """For weights that are made up: a token for each byte, and none of what such a model says."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Text(tokenizer)


# From files.


def open_text(path: Path, metadata: Mapping[str, Any]) -> Text:
    """Of a folder, or of a GGUF file with this metadata."""
    return of_gguf(metadata) if path.suffix == ".gguf" else of_folder(path)


def of_folder(folder: Path) -> Text:
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # The library raises nothing more special.
        raise ConfigError([f"{TOKENIZER}: cannot be read: {error}"]) from None
    settings = _read(folder / SETTINGS)
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


def _read(path: Path) -> dict[str, Any]:
    """Nothing where there is no such file."""
    return read_object(path) if path.is_file() else {}


def _content(value: object) -> str:
    """A token is its text, or an object with it."""
    return str(value.get("content", "")) if isinstance(value, Mapping) else str(value)


def of_gguf(metadata: Mapping[str, Any]) -> Text:
    kind = metadata.get("tokenizer.ggml.model")
    cut = str(metadata.get("tokenizer.ggml.pre", "default"))
    known = {"default", "gpt-2", *CUTS, *DIGITS_APART}
    if kind != "gpt2" or cut not in known:
        expected = ", ".join(sorted(known))
        raise ConfigError(
            [f"GGUF: tokenizer '{kind}' with '{cut}' is not read; expected gpt2 with {expected}"]
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(each.split(" ", 1)) for each in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    # Words that are tokens as they are need not be merged to be found.
    whole = cut == LLAMA3
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_cuts(cut))
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    special = [tokens[number] for number, each in enumerate(kinds) if each == CONTROL]
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special])
    own = [tokens[number] for number, each in enumerate(kinds) if each == OF_USERS]
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in own])
    names = {
        f"{name}_token": tokens[metadata[f"tokenizer.ggml.{name}_token_id"]]
        for name in ("bos", "eos")
        if f"tokenizer.ggml.{name}_token_id" in metadata
    }
    if metadata.get("tokenizer.ggml.add_bos_token", whole) and "bos_token" in names:
        begin = names["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, vocabulary[begin])]
        )
    stops = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    template = str(metadata.get("tokenizer.chat_template", ""))
    return Text(tokenizer, template, frozenset(each for each in stops if each is not None), names)


def _cuts(name: str) -> list[Any]:
    if name in CUTS:
        split = pre_tokenizers.Split(Regex(CUTS[name]), "isolated")
        return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    digits = [pre_tokenizers.Digits(individual_digits=True)] if name in DIGITS_APART else []
    return [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
