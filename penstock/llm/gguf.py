"""Read GGUF files (version 2 and 3), llama.cpp's format, with tokenizer and chat template. The
file is memory-mapped; tensors are unpacked on request.

Formats: F32, F16, BF16, Q4_0, Q4_1, Q8_0, Q4_K and Q6_K, which cover Q4_K_M files. Anything invalid
is a ConfigError that says what and where.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from penstock.errors import ConfigError
from penstock.serving.padding import bf16_floats
from penstock.types import Array

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
# Least size of an entry, so that counts larger than the file are refused.
MIN_ENTRY_BYTES = 12
# Nesting limit of lists; no model needs more.
MAX_DEPTH = 2
STRING, LIST = 8, 9
SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip

Value = int | float | bool | str | list["Value"]


@dataclass(frozen=True, slots=True)
class Format:
    """Tensor format with blocks of `num_values` values in `num_bytes` bytes."""

    name: str
    num_values: int
    num_bytes: int
    # From [blocks, bytes] to [blocks, values].
    unpack: Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of the file; its shape has the order of numpy and torch."""

    name: str
    shape: tuple[int, ...]
    format: Format
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.format.num_values * self.format.num_bytes


class GgufFile:
    """A GGUF file, open until `close` or the end of a `with`; arrays read from it stay valid."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ConfigError([f"{path.name}: cannot be read: {error}"]) from None
        try:
            self.metadata, self.tensors = self._read()
        except ConfigError:
            self.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._data.close()

    def tensor(self, name: str) -> Array:
        """Return the values of a tensor in FP32."""
        entry = self.tensors[name]
        num_rows = math.prod(entry.shape[:-1]) if len(entry.shape) > 1 else entry.shape[0]
        return self.rows(name, 0, num_rows).reshape(entry.shape)

    def rows(self, name: str, start: int, num_rows: int) -> Array:
        """Return some rows of a tensor, which has values alone, or rows of them, in FP32. The rows
        of several matrices are counted on."""
        entry = self.tensors[name]
        if len(entry.shape) == 1:
            return self._unpack(entry, 0, entry.num_bytes)[start : start + num_rows]
        row_bytes = entry.num_bytes // math.prod(entry.shape[:-1])
        begin = start * row_bytes
        values = self._unpack(entry, begin, begin + num_rows * row_bytes)
        return values.reshape(num_rows, entry.shape[-1])

    def _unpack(self, entry: TensorEntry, begin: int, end: int) -> Array:
        form = entry.format
        raw = np.frombuffer(self._data[entry.offset + begin : entry.offset + end], np.uint8)
        return form.unpack(raw.reshape(-1, form.num_bytes)).reshape(-1)

    def _read(self) -> tuple[dict[str, Value], dict[str, TensorEntry]]:
        reader = _GgufReader(self._data, self.path.name)
        if bytes(self._data[:4]) != MAGIC:
            raise reader.problem(f"not a GGUF file: it begins with {bytes(self._data[:4])!r}")
        reader.at = 4
        version = reader.number("<I")
        if version not in VERSIONS:
            raise reader.problem(f"GGUF version {version}; expected one of {list(VERSIONS)}")
        num_tensors, num_values = reader.count("tensors"), reader.count("values")
        metadata: dict[str, Value] = {}
        for _ in range(num_values):
            key = reader.text("a key")
            metadata[key] = reader.value(reader.number("<I"), key)
        entries = [reader.entry() for _ in range(num_tensors)]
        alignment = metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise reader.problem(f"{ALIGNMENT}: {alignment!r}; expected a positive number")
        start = -(-reader.at // alignment) * alignment
        tensors = {each.name: replace(each, offset=start + each.offset) for each in entries}
        if len(tensors) != len(entries):
            raise reader.problem("two tensors have the same name")
        for each in tensors.values():
            if each.offset + each.num_bytes > len(self._data):
                raise reader.problem(f"tensor '{each.name}' ends behind the file: it was cut off")
        return metadata, tensors


class _GgufReader:
    def __init__(self, data: mmap.mmap, label: str) -> None:
        self._data = data
        self._label = label
        self.at = 0

    def problem(self, text: str) -> ConfigError:
        return ConfigError([f"{self._label}: {text}"])

    def number(self, form: str) -> int:
        try:
            found: tuple[int] = struct.unpack_from(form, self._data, self.at)
        except struct.error:
            raise self.problem(f"it ends at byte {len(self._data)}, in its head") from None
        self.at += struct.calcsize(form)
        return found[0]

    def count(self, of: str) -> int:
        """Read a count, and check that the file can hold as many entries."""
        count = self.number("<Q")
        if count * MIN_ENTRY_BYTES > len(self._data):
            raise self.problem(f"{count} {of} do not fit a file of {len(self._data)} bytes")
        return count

    def text(self, what: str) -> str:
        length = self.number("<Q")
        if length > len(self._data) - self.at:
            raise self.problem(f"{what} at byte {self.at} ends behind the file")
        self.at += length
        try:
            return self._data[self.at - length : self.at].decode()
        except UnicodeDecodeError:
            raise self.problem(f"{what} at byte {self.at - length} is not UTF-8") from None

    def value(self, kind: int, key: str, depth: int = 0) -> Value:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text(key)
        if kind != LIST or depth == MAX_DEPTH:
            raise self.problem(f"{key}: a value of kind {kind}, which GGUF does not have")
        inner, count = self.number("<I"), self.number("<Q")
        if inner in SCALARS:
            return self._numbers(SCALARS[inner], count, key)
        if count > len(self._data):
            raise self.problem(f"{key}: a list of {count} ends behind the file")
        return [self.value(inner, key, depth + 1) for _ in range(count)]

    def entry(self) -> TensorEntry:
        """Read the entry of a tensor, whose offset begins where the entries end."""
        name = self.text("a tensor's name")
        num_dimensions = self.number("<I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self.problem(f"tensor '{name}': {num_dimensions} dimensions; expected 1 to 4")
        dimensions = [self.number("<Q") for _ in range(num_dimensions)]
        kind, offset = self.number("<I"), self.number("<Q")
        form = FORMATS.get(kind)
        if form is None:
            known = ", ".join(each.name for each in FORMATS.values())
            raise self.problem(f"tensor '{name}': format {kind} is not read here; expected {known}")
        if dimensions[0] % form.num_values:
            rows = f"rows of {dimensions[0]} are not in {form.name}'s blocks"
            raise self.problem(f"tensor '{name}': {rows}")
        return TensorEntry(name, tuple(reversed(dimensions)), form, offset)

    def _numbers(self, form: str, count: int, key: str) -> list[Value]:
        size = struct.calcsize(form) * count
        if size > len(self._data) - self.at:
            raise self.problem(f"{key}: a list of {count} ends behind the file")
        self.at += size
        found = np.frombuffer(self._data[self.at - size : self.at], np.dtype(form))
        values: list[Value] = found.tolist()
        return values


# Unpacking of blocks. A half is the scale of its block.


def _half(blocks: Array, at: int) -> Array:
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Array) -> Array:
    """Return the lower nibbles, then the upper ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bf16(blocks: Array) -> Array:
    return bf16_floats(np.ascontiguousarray(blocks).view(np.uint16))


def _q8_0(blocks: Array) -> Array:
    return blocks[:, 2:].copy().view(np.int8).astype(np.float32) * _half(blocks, 0)


def _q4_k(blocks: Array) -> Array:
    """Unpack eight parts of 32 values; each has a scale and a minimum of six bits."""
    scales, least = _sixes(blocks[:, 4:16])
    # Every 32 bytes hold two parts, in the lower and the upper nibbles.
    values = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32).astype(np.float32)
    factors = _half(blocks, 0) * scales.astype(np.float32)
    offsets = _half(blocks, 2) * least.astype(np.float32)
    found: Array = values * factors[:, :, None] - offsets[:, :, None]
    return found.reshape(len(blocks), 256)


def _sixes(packed: Array) -> tuple[Array, Array]:
    """Unpack eight scales and eight minimums of six bits from twelve bytes. The first four of each
    are the low six bits of bytes 0-3 and 4-7; the last four have their lower four bits in bytes
    8-11 and their upper two in the high bits of bytes 0-7."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (last & 15) | (first >> 6 << 4)], axis=1)
    least = np.concatenate([second & 63, (last >> 4) | (second >> 6 << 4)], axis=1)
    return scales, least


def _q6_k(blocks: Array) -> Array:
    """Unpack two halves of 128 values: four bits of each in 64 bytes, two more in 32; one scale of
    eight bits for every 16 values."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    values = (low | ((high & 3) << 4).reshape(-1, 2, 128)).astype(np.float32) - 32
    scales = blocks[:, 192:208].copy().view(np.int8).astype(np.float32) * _half(blocks, 208)
    found: Array = values.reshape(-1, 16, 16) * scales[:, :, None]
    return found.reshape(len(blocks), 256)


FORMATS: Mapping[int, Format] = {
    0: Format("F32", 1, 4, lambda blocks: np.ascontiguousarray(blocks).view(np.float32)),
    1: Format("F16", 1, 2, partial(_half, at=0)),
    2: Format("Q4_0", 32, 18, lambda b: (_nibbles(b[:, 2:]) - np.float32(8)) * _half(b, 0)),
    3: Format("Q4_1", 32, 20, lambda b: _nibbles(b[:, 4:]) * _half(b, 0) + _half(b, 2)),
    8: Format("Q8_0", 32, 34, _q8_0),
    12: Format("Q4_K", 256, 144, _q4_k),
    14: Format("Q6_K", 256, 210, _q6_k),
    30: Format("BF16", 1, 2, _bf16),
}
