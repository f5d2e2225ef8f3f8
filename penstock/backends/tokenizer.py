"""The built-in `tokenizer` step: texts to a network's token inputs, by the batch.

Uses the folder's tokenizer.json; without one, the tokenizer that transformers makes of its
vocabulary files, without any code of the folder. Longer texts are truncated at the model's limit.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.config import OFFSETS, ModelConfig
from penstock.errors import ConfigError, InvalidRequest, first_line
from penstock.repository import pretrained
from penstock.types import DATATYPES, Array, TensorSpec

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

FILE = "tokenizer.json"
# Most bytes of one text. A longer one holds far more tokens than any model takes.
MAX_TEXT_BYTES = 1 << 20
# Limit on the characters read per token of the model's maximum length, spaces not counted. Words
# have far shorter tokens, so truncation would drop the rest anyway.
CHARS_PER_TOKEN, MIN_CHARS = 64, 4096
# Limit with spaces counted, as a multiple of the limit without them.
WITH_SPACES = 8
WORD = re.compile(r"\S+")
Row = Mapping[str, Array]


class TextTokenizer:
    """Texts to `specs`, the network's inputs; `input` names the client's input in errors."""

    def __init__(self, config: ModelConfig, specs: Sequence[TensorSpec]) -> None:
        # The batches are small and the cores are the network's.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._input = config.inputs[0].name
        self._specs = specs
        described = pretrained.read_config(config.folder)
        self.max_length = pretrained.max_length(config.folder, described)
        self._lowers_case = pretrained.lowers_case(config.folder)
        self._pad = pretrained.pad_token(described)
        self._tokenizer = _open(config.folder)
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(self.max_length)

    def tried_all(self, rows: Sequence[Row]) -> list[Row | Exception]:
        """Return the tokens of each row, without padding; InvalidRequest for texts without any."""
        texts = [self._text(row[self._input]) for row in rows]
        valid = [text for text in texts if isinstance(text, str)]
        encoded = iter(self._tokenizer.encode_batch(valid))
        return [self._row(next(encoded)) if isinstance(text, str) else text for text in texts]

    def stack(self, rows: Sequence[Row]) -> dict[str, Array]:
        """Stack rows of one request, padded to the longest."""
        longest = max(len(row[self._specs[0].name]) for row in rows)
        stacked = {}
        for spec in self._specs:
            value = self._pad if spec.name == "input_ids" else 0
            shape = (len(rows), longest, *spec.shape[1:])
            values = np.full(shape, value, DATATYPES[spec.datatype].numpy)
            for number, row in enumerate(rows):
                own = row[spec.name]
                values[number, : len(own)] = own
            stacked[spec.name] = values
        return stacked

    def num_tokens(self, row: Row) -> int:
        return len(row[self._specs[0].name])

    def names(self) -> dict[str, str]:
        return {"max_length": str(self.max_length)}

    def close(self) -> None:
        """Nothing to do."""

    def _row(self, encoded: Encoding) -> Row:
        fields = {
            "input_ids": encoded.ids,
            "attention_mask": encoded.attention_mask,
            "token_type_ids": encoded.type_ids,
            OFFSETS: encoded.offsets,
        }
        return {
            spec.name: np.array(fields[spec.name], DATATYPES[spec.datatype].numpy)
            for spec in self._specs
        }

    def _text(self, values: Array) -> str | InvalidRequest:
        """Return the one text of a row, or what is wrong with it."""
        item = values.ravel()[0]
        data = item if isinstance(item, bytes) else str(item).encode()
        where = f"input '{self._input}'"
        if len(data) > MAX_TEXT_BYTES:
            return InvalidRequest(f"{where}: {len(data)} bytes; at most {MAX_TEXT_BYTES} a text")
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            return InvalidRequest(f"{where}: not UTF-8 at byte {error.start}; expected text")
        if not text.strip():
            return InvalidRequest(f"{where}: empty; expected a text")
        text = beginning(text, max(MIN_CHARS, CHARS_PER_TOKEN * self.max_length))
        if text.isspace():
            begins = f"{len(text)} spaces at its beginning"
            return InvalidRequest(f"{where}: {begins}; strip the text")
        return text.lower() if self._lowers_case else text


def beginning(text: str, num_chars: int) -> str:
    """Return the text up to `num_chars` characters other than spaces, or WITH_SPACES times as many
    with them. Tokenizers take time for all of a text, also for what they then truncate."""
    if len(text) <= num_chars:
        return text
    text = text[: WITH_SPACES * num_chars]
    for word in WORD.finditer(text):
        end = word.start() + num_chars
        if end <= word.end():
            return text[:end]
        num_chars -= word.end() - word.start()
    return text


def _open(folder: Path) -> Tokenizer:
    try:
        if (folder / FILE).is_file():
            from tokenizers import Tokenizer

            return Tokenizer.from_file(str(folder / FILE))
        auto = importlib.import_module("transformers").AutoTokenizer
        found = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ModuleNotFoundError as error:
        what = f"the tokenizer needs the package '{error.name}', which is not installed"
        raise ConfigError(f'preprocess: {what}; pip install "penstock[hf]" brings it') from error
    except Exception as error:  # Both libraries raise many types for files they cannot read.
        raise ConfigError(f"the tokenizer cannot be loaded: {first_line(error)}") from error
    backend: Tokenizer | None = getattr(found, "backend_tokenizer", None)
    if backend is None:
        kind = type(found).__name__
        raise ConfigError(f"{kind} has no {FILE}; write one with save_pretrained()")
    return backend
