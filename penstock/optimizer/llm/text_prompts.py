"""Prompts from a benchmark data file: sent as load, and continued to judge accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.data.datasets import existing
from penstock.data.files import ROW_SUFFIXES, digest, read_rows
from penstock.data.prompts import samples_from_rows
from penstock.data.recordings import is_recording, open_recording, text_rows
from penstock.data.samples import RequestForm
from penstock.errors import ConfigError, InvalidRequest
from penstock.llm.text import Text

# Default answer length, for rows without one.
NUM_NEW = 128
# Repeated prompts get a number in front, so that the prefix cache cannot answer them. At least this
# many are written per level.
NUM_SENT = 2048
# The longest number: prompts must leave room for it.
LONGEST_NUMBER = 999_999
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    # Request fields: `prompt`, or `messages`.
    fields: Fields
    max_tokens: int
    # The prompt as the model sees it.
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Prompts:
    asked: Sequence[Asked]
    # Sent as chat messages if the model has a chat template, else as completions.
    is_chat: bool
    digest: str
    # "200 prompts of prompts.jsonl, asked as chats, 57 tokens in the middle, answers of 128"
    text: str

    @property
    def longest_answer(self) -> int:
        return max(each.max_tokens for each in self.asked)


def read_prompts(path: str, text: Text, max_length: int) -> Prompts:
    """Read the prompts; raise ConfigError if the file is invalid. Prompts that do not fit the
    context length with their answers are left out, and the description says how many."""
    file = existing(path)
    note, files = "", [file]
    if is_recording(file):
        recording = open_recording(file)
        rows, files, note = text_rows(recording), list(recording.files), f"; {recording.text}"
    elif file.is_dir() or file.suffix not in ROW_SUFFIXES:
        listed = ", ".join(ROW_SUFFIXES)
        raise ConfigError([f"data: {file}: prompts are read from files that end in {listed}"])
    else:
        rows = read_rows(file)
    is_chat = bool(text.template)
    form = RequestForm(kind="messages" if is_chat else "prompt")
    samples = samples_from_rows(form, rows, file.name)
    room = max_length - len(text.encode(_prefix(LONGEST_NUMBER), is_whole=False))
    found: list[Asked] = []
    for sample in samples:
        fields = {name: value for name, value in sample.fields.items() if value}
        tokens = _tokens(text, fields)
        asked = Asked(fields, sample.max_tokens or NUM_NEW, tokens)
        if tokens and len(tokens) + asked.max_tokens <= room:
            found.append(asked)
    if not found:
        problem = f"no prompt leaves room for its answer within {max_length} tokens"
        raise ConfigError([f"data: {file}: {problem}"])
    described = _text(file, found, len(samples), is_chat) + note
    return Prompts(found, is_chat, digest(files), described)


def _tokens(text: Text, fields: Fields) -> list[int]:
    try:
        if "messages" in fields:
            return text.encode_chat(fields["messages"])
        return text.encode(fields["prompt"])
    except InvalidRequest as error:
        raise ConfigError([f"data: {error}"]) from None


def _text(file: Path, found: Sequence[Asked], num_read: int, is_chat: bool) -> str:
    lengths = sorted(len(each.tokens) for each in found)
    answers = sorted({each.max_tokens for each in found})
    told = f"{answers[0]}" if len(answers) == 1 else f"{answers[0]} to {answers[-1]}"
    how = "chats" if is_chat else "completions"
    left = f"; {num_read - len(found)} were too long" if num_read > len(found) else ""
    return (
        f"{len(found):,} prompts of {file.name}, asked as {how}, {lengths[len(lengths) // 2]} "
        f"tokens in the middle, answers of {told}{left}"
    )


def write_load(prompts: Prompts, path: Path, level: int = 0) -> None:
    """Write the load of one level for the benchmark. No two levels share a prompt; only the first
    round of level 0 has the prompts unchanged."""
    encoder = msgspec.json.Encoder()
    num_rounds = max(1, -(-NUM_SENT // len(prompts.asked)))
    with path.open("wb") as file:
        for number in range(level * num_rounds, (level + 1) * num_rounds):
            for asked in prompts.asked:
                fields = asked.fields if not number else numbered(asked.fields, number)
                file.write(encoder.encode({**fields, "max_tokens": asked.max_tokens}) + b"\n")


def numbered(fields: Fields, number: int) -> Fields:
    """Put a number before the first user text, so that what follows misses the prefix cache."""
    if "prompt" in fields:
        return {"prompt": f"{_prefix(number)}{fields['prompt']}"}
    messages = [dict(each) for each in fields["messages"]]
    for message in messages:
        if message["role"] == "user" and isinstance(message["content"], str):
            message["content"] = f"{_prefix(number)}{message['content']}"
            break
    return {"messages": messages}


def _prefix(number: int) -> str:
    return f"({number}) "
