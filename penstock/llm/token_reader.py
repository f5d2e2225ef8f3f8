"""Read the bytes of each token from a tokenizer, in the process that reads the model folder.

Byte-level tokenizers (GPT-2, Llama 3, Qwen) name tokens by their bytes. Others, such as those of
SentencePiece with byte fallback (Llama 2, Mistral), are asked to decode each token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from functools import cache
from typing import TYPE_CHECKING

from penstock.llm.token_bytes import Vocabulary, pack

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# How tokenizers with byte fallback write the token of a byte.
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def read_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Return the vocabulary, without what only the model's other files say."""
    numbers = tokenizer.get_vocab()
    num_tokens = max(numbers.values(), default=-1) + 1
    names = [tokenizer.id_to_token(token) for token in range(num_tokens)]
    added = tokenizer.get_added_tokens_decoder()
    special = frozenset(number for number, token in added.items() if token.special)
    first: dict[int, bytes] = {}
    if (kinds := _decoder_kinds(tokenizer)) == {"ByteLevel"}:
        pieces = _read_names(names, special)
    else:
        pieces, first = _decode_each(tokenizer, names, special, "ByteFallback" in kinds)
    longest = max(map(len, numbers), default=1)
    return Vocabulary(*pack(pieces), first, special, longest_token=longest)


def _read_names(names: Sequence[str | None], special: Collection[int]) -> list[bytes]:
    """Return the bytes of byte-level tokens. Special and added tokens are stored as plain text."""
    letters = letters_of_bytes()
    return [
        bytes(map(letters.__getitem__, name))
        if name and token not in special and letters.keys() >= set(name)
        else (name or "").encode()
        for token, name in enumerate(names)
    ]


def _decode_each(
    tokenizer: Tokenizer, names: Sequence[str | None], special: Collection[int], has_bytes: bool
) -> tuple[list[bytes], dict[int, bytes]]:
    """Return the bytes of each token within a text, and those that differ at its start."""
    words = (
        [token]
        for token, name in enumerate(names)
        if name and token not in special and not BYTE.fullmatch(name)
        if tokenizer.decode([token]).strip()
    )
    word = next(words, [])
    num_before = len(tokenizer.decode(word))
    pieces: list[bytes] = []
    first: dict[int, bytes] = {}
    for token, name in enumerate(names):
        if name is None or token in special:
            pieces.append((name or "").encode())
            continue
        if has_bytes and (match := BYTE.fullmatch(name)):
            piece = bytes([int(match[1], 16)])
        else:
            piece = str(tokenizer.decode([*word, token])[num_before:]).encode()
        pieces.append(piece)
        # A byte that is not ASCII is part of a character, so not a space.
        if len(piece) > 1 or (piece and piece.isascii()):
            alone = str(tokenizer.decode([token])).encode()
            if alone != piece:
                first[token] = alone
    return pieces, first


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    if tokenizer.decoder is None:
        return set()
    state = json.loads(tokenizer.decoder.__getstate__())
    return {each["type"] for each in state.get("decoders", [state])}


@cache
def letters_of_bytes() -> dict[str, int]:
    """Return the byte of each letter of GPT-2's byte encoding: visible characters stand for
    themselves, other bytes get characters from 256 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    shown += range(ord("®"), ord("ÿ") + 1)
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + place): byte for place, byte in enumerate(hidden)
    }
