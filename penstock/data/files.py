"""Reads data files of any format into arrays by name, or rows. Fits nothing to a model.

.npz and .npy hold arrays whose first axis counts examples; .jsonl, .json, .csv and .parquet hold
rows; .txt holds one prompt per line.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from penstock.errors import ConfigError
from penstock.types import Array

if TYPE_CHECKING:
    import pyarrow

ARRAY_SUFFIXES = (".npz", ".npy")
ROW_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
MAX_PROBLEMS = 10
# Exceptions of numpy and zipfile for broken files.
UNREADABLE = (
    *(OSError, ValueError, TypeError, OverflowError, EOFError, RuntimeError, SyntaxError),
    *(MemoryError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FileRows:
    """Rows of a file and their places: `word` and a number, "line 3"."""

    rows: Sequence[Row]
    numbers: Sequence[int]
    word: str

    def place(self, index: int) -> str:
        return f"{self.word} {self.numbers[index]}"


def digest(paths: Sequence[Path]) -> str:
    """Return the sha256 of a file; of several, the sha256 over their names and digests."""
    if len(paths) == 1:
        try:
            with paths[0].open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ConfigError([f"{paths[0]}: cannot be read: {error.strerror}"]) from None
    lines = [f"{path.name} {digest([path])}\n" for path in paths]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_arrays(path: Path) -> dict[str, Array]:
    """Return arrays by name; the array of an .npy file is named ""."""
    try:
        with warnings.catch_warnings():
            # A warning about files from Python 2 needs no action.
            warnings.simplefilter("ignore", UserWarning)
            arrays = _loaded(path)
    except UNREADABLE as error:
        raise ConfigError([f"{path}: cannot be read: {_explained(error)}"]) from None
    scalars = [name for name, array in arrays.items() if array.ndim == 0]
    places = [f"{path}, array '{name}'" if name else str(path) for name in scalars]
    expected = "expected an array whose first axis counts examples, got one value"
    problems = [f"{place}: {expected}" for place in places]
    if len({len(array) for array in arrays.values() if array.ndim}) > 1:
        counts = ", ".join(f"'{name}' {len(a)}" for name, a in arrays.items() if a.ndim)
        problems.append(f"{path}: arrays have different numbers of examples: {counts}")
    if not problems and not any(len(array) for array in arrays.values()):
        problems.append(f"{path}: has no examples")
    if problems:
        raise ConfigError(problems)
    return arrays


def _loaded(path: Path) -> dict[str, Array]:
    if path.suffix == ".npy":
        # Memory-mapped: it may be larger than memory.
        return {"": np.asarray(np.lib.format.open_memmap(path, mode="r"))}
    with path.open("rb") as file:
        loaded = np.load(file, allow_pickle=False)
        return {"": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)


def read_rows(path: Path, as_arrays: bool = False) -> FileRows:
    """Read all rows. `as_arrays`: lists of numbers may come as arrays where that is cheaper."""
    try:
        if path.suffix == ".parquet":
            rows = _parquet(path, as_arrays)
        else:
            readers = {".jsonl": read_json_lines, ".json": _json, ".txt": _text_lines, ".csv": _csv}
            rows = readers[path.suffix](path)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {_explained(error)}"]) from None
    if not rows.rows:
        raise ConfigError([f"{path}: has no examples"])
    return rows


def _text_lines(path: Path) -> FileRows:
    """Read one prompt per line; empty lines are skipped."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not UTF-8: {error.reason}"]) from None
    found = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    rows = [{"prompt": text} for _, text in found]
    return FileRows(rows, [number for number, _ in found], "line")


def _csv(path: Path) -> FileRows:
    """Read a table whose first line names the columns. A column of numbers becomes numbers."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            found = [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError([f"{path}: not a CSV file in UTF-8: {error}"]) from None
    ragged = [number for number, row in found if None in row or None in row.values()]
    if ragged:
        problem = "more or fewer values than there are columns"
        raise ConfigError([f"{path}, line {ragged[0]}: {problem}"])
    names = list(found[0][1]) if found else []
    columns = {name: _numeric([row[name] for _, row in found]) for name in names}
    rows = [{name: columns[name][n] for name in names} for n in range(len(found))]
    return FileRows(rows, [number for number, _ in found], "line")


def _numeric(texts: Sequence[str]) -> Sequence[float | str]:
    """Return whole numbers, or numbers, if all texts are; else the texts."""
    for kind in (int, float):
        try:
            return [kind(text) for text in texts]
        except ValueError:
            continue
    return texts


def _explained(error: Exception) -> str:
    if "allow_pickle" in str(error) or "Python objects" in str(error):
        return "it is no .npy or .npz file, or holds Python objects, which are never loaded"
    return getattr(error, "strerror", None) or str(error)


def read_json_lines(path: Path) -> FileRows:
    """Read one JSON object per line; empty lines are skipped."""
    rows: list[Row] = []
    numbers: list[int] = []
    problems: list[str] = []
    decoder = msgspec.json.Decoder(Row)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                rows.append(decoder.decode(line.removeprefix(codecs.BOM_UTF8)))
                numbers.append(number)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                problems.append(f"{path}, line {number}: expected a JSON object: {error}")
                if len(problems) >= MAX_PROBLEMS:
                    break
    if problems:
        raise ConfigError(problems)
    return FileRows(rows, numbers, "line")


def _json(path: Path) -> FileRows:
    """Read a list of objects, or perf_analyzer's {"data": list of objects}."""
    try:
        document = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: is not JSON: {error}"]) from None
    rows = document.get("data") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise ConfigError([f'{path}: expected a list of objects, or {{"data": list of objects}}'])
    problems: list[str] = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            sequence = "a list; sequences of requests are not supported"
            got = sequence if isinstance(row, list) else type(row).__name__
            problems.append(f"{path}, example {number}: expected an object, got {got}")
    if problems:
        raise ConfigError(problems[:MAX_PROBLEMS])
    return FileRows([_payload(row) for row in rows], range(1, len(rows) + 1), "example")


def _payload(row: Row) -> Row:
    """Unwrap GenAI-Perf's {"payload": [body]}."""
    payload = row.get("payload")
    if len(row) == 1 and isinstance(payload, list) and payload and isinstance(payload[0], dict):
        return payload[0]
    return row


def _parquet(path: Path, as_arrays: bool) -> FileRows:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        needed = "Parquet files need pyarrow: pip install 'penstock[data]'"
        raise ConfigError([f"{path}: {needed}"]) from None
    try:
        with path.open("rb") as file:
            table = pyarrow.parquet.read_table(file)
    except pyarrow.ArrowException as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from None
    if as_arrays:
        columns = [_values(column.combine_chunks()) for column in table.columns]
    else:
        columns = [column.to_pylist() for column in table.columns]
    names = table.column_names
    rows = [
        {name: value for name, value in zip(names, values, strict=True) if value is not None}
        for values in zip(*columns, strict=True)
    ]
    return FileRows(rows, range(1, len(rows) + 1), "row")


def _values(column: pyarrow.Array) -> Sequence[object]:
    """Return a column's values: each list of numbers as a view, anything else as Python values."""
    from pyarrow import types

    kind = column.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if is_list and not column.null_count and not column.flatten().null_count:
        kind = kind.value_type
        if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
            ends = np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))
            return np.split(column.flatten().to_numpy(zero_copy_only=False), ends[:-1])
    return list(column.to_pylist())
