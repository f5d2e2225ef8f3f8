"""GGUF files for tests, written by hand from the format's description."""

import struct

import numpy as np


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_of(value) -> bytes:
    """With its kind before it."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Iq", 11, value)
    if isinstance(value, float):
        return struct.pack("<Id", 12, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    items = [value_of(each) for each in value]
    kind = items[0][:4] if items else struct.pack("<I", 4)
    return (
        struct.pack("<I", 9)
        + kind
        + struct.pack("<Q", len(items))
        + b"".join(each[4:] for each in items)
    )


def gguf(metadata, tensors, version=3, alignment=32) -> bytes:
    """`tensors` by name: shape as numpy has it, kind, bytes."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += text(key) + value_of(value)
    data = b""
    for name, (shape, kind, content) in tensors.items():
        data += b"\0" * (-len(data) % alignment)
        head += text(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", size) for size in reversed(shape))
        head += struct.pack("<IQ", kind, len(data))
        data += content
    return head + b"\0" * (-len(head) % alignment) + data


def floats(values) -> bytes:
    return np.asarray(values, np.float32).tobytes()
