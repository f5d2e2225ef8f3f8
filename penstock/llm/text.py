"""A model's tokenizer and chat template: turns text and messages into tokens.

The tokenizer is one of `tokenizers`, from a folder's tokenizer.json or from a GGUF file. Tokenizer
and template come with the model and may loop or exhaust memory, so a server runs them in a process
of their own (`renderer_main`), never in the core. Templates run in Jinja's sandbox and see messages
only.
"""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from penstock.errors import (
    BackendFailed,
    ConfigError,
    InvalidRequest,
    PenstockError,
    TooLarge,
    error_text,
)
from penstock.llm.control_tokens import ControlTokens
from penstock.llm.gguf import GgufFile
from penstock.llm.json_files import read_object
from penstock.llm.token_bytes import Vocabulary, letters_of_bytes, pack, read_vocabulary

log = logging.getLogger("penstock.text")
TOKENIZER, TEMPLATE = "tokenizer.json", "chat_template.jinja"
SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"
# Patterns of GGUF's pre-tokenizers, which split a text before BPE merges.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = "llama-bpe"
CUTS = {LLAMA3: rf"{WORDS}|\p{{N}}{{1,3}}|{SIGNS}", "qwen2": rf"{WORDS}|\p{{N}}|{SIGNS}"}
DIGITS_APART = ("smollm",)
# GGUF token type of special tokens, which are never part of a text.
CONTROL = 3
# GGUF token type of user-defined tokens, which are never split.
OF_USERS = 4

Messages = Sequence[Mapping[str, object]]
# Length limit of the error messages that a template raises.
MAX_REASON_CHARS = 500
# For random weights: messages one per line.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)


PLAIN_MESSAGES = ({"role": "user", "content": "Hello"},)


class TemplateRefused(TemplateError):
    """Raised by a template that does not take the messages."""


@dataclass(eq=False)
class Text:
    """The tokenizer and chat template of one model. Safe for several threads."""

    tokenizer: Tokenizer
    template: str = ""
    stop_tokens: frozenset[int] = frozenset()
    # Special tokens by the names that templates use (`bos_token` and so on).
    names: Mapping[str, str] = field(default_factory=dict)
    # Special tokens within messages are special, not text.
    parses_special: bool = False

    def __post_init__(self) -> None:
        # Files may ask for truncation or padding, which serving never wants.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    @property
    def has_template(self) -> bool:
        return bool(self.template)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return replace(
            read_vocabulary(self.tokenizer),
            stop_tokens=self.stop_tokens,
            names=self.names,
            template=self.template,
        )

    def encode(self, text: str, *, is_whole: bool = True) -> list[int]:
        """Return the tokens of a text; `is_whole`: with the special tokens that the model wants
        around it. Releases the GIL."""
        # The only call of the library that releases the GIL.
        (found,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=is_whole)
        tokens: list[int] = found.ids
        return tokens

    def encode_chat(
        self,
        messages: Messages,
        options: Mapping[str, object] | None = None,
        max_chars: int | None = None,
    ) -> list[int]:
        """Return the tokens of a chat prompt. Special tokens within messages are text. Raise
        InvalidRequest if the template refuses the messages, TooLarge if it produces more than
        `max_chars` characters."""
        if self.parses_special:
            return self.encode(self.chat(messages, options, max_chars), is_whole=False)
        control = self._control
        marked = [cast("Mapping[str, object]", control.escape(message)) for message in messages]
        marked_options = cast("Mapping[str, object]", control.escape(options or {}))
        text = self.chat(marked, marked_options, max_chars)
        found = control.encode(text)
        return self.encode(text, is_whole=False) if found is None else found

    def chat(
        self,
        messages: Messages,
        options: Mapping[str, object] | None = None,
        max_chars: int | None = None,
    ) -> str:
        """Render messages with the template; raises the errors of `encode_chat`."""
        if not self.template:
            raise InvalidRequest("the model has no chat template; use /v1/completions")
        values = {"add_generation_prompt": True, **(options or {}), **self.names}
        try:
            return _join(self._compiled.generate(values | {"messages": messages}), max_chars)
        except PenstockError:
            raise
        except TemplateRefused as error:
            reason = error_text(error)[:MAX_REASON_CHARS]
            raise InvalidRequest(f"the chat template refuses the messages: {reason}") from None
        except MemoryError:
            raise BackendFailed("the chat template needs more memory than it may use") from None
        except Exception as error:  # Code of a model folder, run on data of a client.
            log.warning("the chat template cannot render messages: %s", error_text(error))
            if self._is_template_broken(max_chars):
                text = "the model's chat template has an error: it renders no messages; see the log"
                raise BackendFailed(text) from None
            raise InvalidRequest("the chat template cannot render the messages") from None

    def _is_template_broken(self, max_chars: int | None) -> bool:
        """Whether the template fails on the plainest messages too, whatever a client sends."""
        values = {"add_generation_prompt": True, **self.names, "messages": PLAIN_MESSAGES}
        try:
            _join(self._compiled.generate(values), max_chars)
        except (TemplateRefused, PenstockError):
            return False
        except Exception:  # Code of a model folder.
            return True
        return False

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self.tokenizer)

    @cached_property
    def _compiled(self) -> Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=_now)
        try:
            return environment.from_string(self.template)
        except MemoryError:
            raise
        except Exception as error:  # The compiler raises TemplateError, RecursionError and others.
            log.error("the chat template cannot be read: %s", error_text(error))
            raise BackendFailed("the model's chat template has an error; see the log") from None


def _join(parts: Iterable[str], max_chars: int | None) -> str:
    """Join parts; raise TooLarge at once if there are too many characters: a template may loop."""
    found, num_chars = [], 0
    for part in parts:
        num_chars += len(part)
        if max_chars is not None and num_chars > max_chars:
            raise TooLarge(f"the chat template makes more than {max_chars} characters of them")
        found.append(part)
    return "".join(found)


def _refuse(message: object) -> None:
    raise TemplateRefused(str(message))


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


# From files.


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
    """Return printable ASCII as it is, and other bytes, which may be part of a character, in
    hex."""
    if token >= 256:
        return b" w%d" % token
    is_shown = 32 <= token < 127 or chr(token) in "\n\t"
    return bytes([token]) if is_shown else b"<0x%02X>" % token


def of_folder(folder: Path) -> Text:
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # The library raises plain Exception.
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
    """Read a JSON object; empty if there is no such file."""
    return read_object(path) if path.is_file() else {}


def _content(value: object) -> str:
    """Return the text of a token, which is a string or an object with `content`."""
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
    # Llama 3: words that are in the vocabulary need no merges.
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


def _cuts(name: str) -> list[pre_tokenizers.PreTokenizer]:
    if name in CUTS:
        split = pre_tokenizers.Split(Regex(CUTS[name]), "isolated")
        return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    digits = [pre_tokenizers.Digits(individual_digits=True)] if name in DIGITS_APART else []
    return [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
