"""A small SentencePiece vocabulary, as files have it, and its rule of tokens, applied by hand."""

import struct

from penstock.llm.sentencepiece import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, USER_DEFINED

WORDS = ("the", "cat", "cats", "at", "sat", "ca", "he", "hat", "on", "at the", "é")


def _vocabulary() -> list[tuple[str, float, int]]:
    found = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    found += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    found.append(("<turn>", 0.0, USER_DEFINED))
    joined = {word[:end] for word in WORDS for end in range(2, len(word) + 1)}
    joined |= {SPACE + word[:end] for word in WORDS for end in range(1, len(word) + 1)}
    joined = {each.replace(" ", SPACE) for each in joined} - {"é"}
    letters = {letter for word in (*WORDS, SPACE) for letter in word.replace(" ", SPACE)}
    # Short pieces first, so that long ones can be reached; the last scores are the lowest.
    pieces = sorted(joined, key=lambda each: (len(each), each))
    pieces += sorted(letters - joined)
    return found + [(piece, -1.0 - number, NORMAL) for number, piece in enumerate(pieces)]


VOCABULARY = _vocabulary()
TEXTS = [
    "the cat sat on the hat", "cats  at the", " he", "", "caté", "x", "the 你 cat 🙂", "a\nhat",
]  # fmt: skip


def by_hand(text: str, has_prefix: bool) -> list[int]:
    """Join the pair with the highest score, the first of several, until there is none."""
    numbers = {piece: number for number, (piece, _, _) in enumerate(VOCABULARY)}
    scores = {piece: score for piece, score, kind in VOCABULARY if kind == NORMAL}
    parts = list(((SPACE if has_prefix and text else "") + text).replace(" ", SPACE))
    while True:
        pairs = [
            (scores[a + b], -at)
            for at, (a, b) in enumerate(zip(parts, parts[1:], strict=False))
            if a + b in scores
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    found = []
    for part in parts:
        own = [part] if part in numbers else [f"<0x{byte:02X}>" for byte in part.encode()]
        found += [numbers[each] for each in own]
    return found


def _varint(value: int) -> bytes:
    found = b""
    while value > 127:
        found, value = found + bytes([value & 127 | 128]), value >> 7
    return found + bytes([value])


def _message(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def model_file(kind=2, has_prefix=True, is_trimmed=False, charsmap=b"") -> bytes:
    """A tokenizer.model."""
    data = b""
    for piece, score, type_ in VOCABULARY:
        own = _message(1, piece.encode()) + b"\x15" + struct.pack("<f", score)
        data += _message(1, own + b"\x18" + _varint(type_))
    data += _message(2, b"\x18" + _varint(kind))
    normalizer = _message(1, b"nmt_nfkc" if charsmap else b"identity") + _message(2, charsmap)
    normalizer += b"\x18" + _varint(has_prefix) + b"\x20" + _varint(is_trimmed)
    return data + _message(3, normalizer)


def gguf_metadata(has_prefix=True) -> dict:
    texts, scores, kinds = zip(*VOCABULARY, strict=True)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(texts),
        "tokenizer.ggml.scores": list(scores),
        "tokenizer.ggml.token_type": list(kinds),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": has_prefix,
    }
