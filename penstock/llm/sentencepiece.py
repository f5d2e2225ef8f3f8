"""Tokenizers of SentencePiece with BPE, as Llama 2, Mistral and Gemma have them: from a
tokenizer.model, or from the vocabulary in a GGUF file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from penstock.errors import ConfigError

# Stands for a space.
SPACE = "\u2581"
# Types of pieces, which GGUF files number alike.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BPE, KINDS = 2, {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
Field = tuple[int, int | bytes]


@dataclass(frozen=True, slots=True)
class Pieces:
    """The vocabulary: text, score and type of each token."""

    texts: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    # A space is put before every text.
    has_prefix: bool = True


def make_tokenizer(pieces: Pieces) -> Tokenizer:
    """Return a tokenizer that joins the pair with the highest score first."""
    vocabulary: dict[str, int] = {}
    for number, text in enumerate(pieces.texts):
        vocabulary.setdefault(text, number)
    unknown = [t for t, kind in zip(pieces.texts, pieces.kinds, strict=True) if kind == UNKNOWN]
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges(pieces, vocabulary),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=BYTE in pieces.kinds,
    )
    tokenizer = Tokenizer(model)
    prefix = [normalizers.Prepend(SPACE)] if pieces.has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if pieces.has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    both = list(zip(pieces.texts, pieces.kinds, strict=True))
    special = [text for text, kind in both if kind in (UNKNOWN, CONTROL)]
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special])
    own = [text for text, kind in both if kind == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in own])
    return tokenizer


def _merges(pieces: Pieces, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that are a piece together, in the order of their scores."""
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for text, score, kind in zip(pieces.texts, pieces.scores, pieces.kinds, strict=True):
        if kind != NORMAL:
            continue
        for at in range(1, len(text)):
            first, second = text[:at], text[at:]
            if first in vocabulary and second in vocabulary:
                places = vocabulary[first], vocabulary[second]
                found.append((-score, *places, (first, second)))
    return [pair for *_, pair in sorted(found)]


def read_model(path: Path) -> Pieces:
    """Read a tokenizer.model; raise ConfigError if it is invalid or of another kind."""
    texts, scores, kinds = [], [], []
    is_bpe, has_prefix = 1, 1
    # Defaults of the format.
    normalizer, charsmap, is_trimmed = b"", b"", 1
    try:
        for number, value in _fields(path.read_bytes()):
            if number == 1 and isinstance(value, bytes):
                piece = dict(_fields(value))
                texts.append(bytes(piece.get(1, b"")).decode())
                scores.append(struct.unpack("<f", bytes(piece.get(2, bytes(4))))[0])
                kinds.append(int(piece.get(3, NORMAL)))
            elif number == 2 and isinstance(value, bytes):
                is_bpe = int(dict(_fields(value)).get(3, 1))
            elif number == 3 and isinstance(value, bytes):
                told = dict(_fields(value))
                normalizer, charsmap = bytes(told.get(1, b"")), bytes(told.get(2, b""))
                has_prefix, is_trimmed = int(told.get(3, 1)), int(told.get(4, 1))
    except (OSError, ValueError, TypeError, IndexError, struct.error) as error:
        raise ConfigError([f"{path.name}: cannot be read: {error}"]) from None
    problems = []
    if is_bpe != BPE:
        problems.append(f"model type is {KINDS.get(is_bpe, is_bpe)}; expected bpe")
    if charsmap:
        problems.append(f"normalizer is {normalizer.decode(errors='replace')}; expected identity")
    if is_trimmed:
        problems.append("remove_extra_whitespaces is true; expected false")
    if problems:
        raise ConfigError([f"{path.name}: {each}" for each in problems])
    return Pieces(texts, scores, kinds, bool(has_prefix))


def _fields(data: bytes) -> Iterator[Field]:
    """Yield number and value of each field of a protobuf message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size = {FIXED64: 8, FIXED32: 4}.get(kind, 0)
        if kind == BYTES:
            size, at = _varint(data, at)
        elif not size:
            raise ValueError(f"field of kind {kind} at byte {at}")
        if at + size > len(data):
            raise ValueError("it was cut off")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends."""
    found = 0
    for place in range(10):
        byte = data[at + place]
        found |= (byte & 127) << 7 * place
        if byte < 128:
            return found, at + place + 1
    raise ValueError(f"number at byte {at} is too long")
