"""A recorded trace: arrival times, and the lengths of requests and answers.

Read from CSV with a header, from .jsonl, or from a plain list of times. Times are ISO 8601 or
numbers. Numbers are seconds, unless their column's name ends in _ms, _us or _ns, or they are so
large that they must be milliseconds, microseconds or nanoseconds since 1970. Mooncake's .jsonl,
recognised by `input_length` beside `timestamp`, is in milliseconds.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from penstock.data.files import read_json_lines
from penstock.errors import ConfigError

# Names of columns by meaning, without case and separators.
NAMES = {
    "time": ["time", "timestamp", "arrival", "arrivaltime", "arrivedat"],
    "input": ["contexttokens", "inputlength", "inputtokens", "prompttokens", "numprefilltokens"],
    "output": ["generatedtokens", "outputlength", "outputtokens"]
    + ["completiontokens", "numdecodetokens"],
}
# The number of a line, and its cells by meaning, as text or numbers.
TraceLine = tuple[int, Mapping[str, object]]
UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
# Numbers from here on count this unit since 1970; each bound is the year 1973 in its unit.
EPOCHS = ((1e17, "ns"), (1e14, "us"), (1e11, "ms"))
MAX_PROBLEMS = 10


class Trace(msgspec.Struct, frozen=True):
    """Requests in order of arrival; seconds count from the first, token counts from 1."""

    times_s: tuple[float, ...]
    input_tokens: tuple[int, ...] | None = None
    output_tokens: tuple[int, ...] | None = None
    name: str = ""
    # For the reader of the report.
    note: str = ""


def read_trace(path: str | Path) -> Trace:
    """Read a trace; ConfigError lists the lines that cannot be read."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError([f"{path}: cannot be read: {reason}"]) from None
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ConfigError([f"{path}: has no requests"])
    if path.suffix == ".jsonl":
        unit, records = _from_json(path)
    else:
        unit, records = _from_csv(path, lines)
    return _trace(path, unit, records)


def _from_json(path: Path) -> tuple[str, list[TraceLine]]:
    table = read_json_lines(path)
    first = table.rows[0]
    unit = _unit(first) or ("ms" if {"timestamp", "input_length"} <= first.keys() else "")
    meanings = {name: _meaning(name) for row in table.rows for name in row}
    records = [{meanings[name]: row[name] for name in row if meanings[name]} for row in table.rows]
    return unit, list(zip(table.numbers, records, strict=True))


def _from_csv(path: Path, lines: list[tuple[int, str]]) -> tuple[str, list[TraceLine]]:
    numbers = [number for number, _ in lines]
    try:
        # Line by line: a stray quotation mark must not swallow the lines after it.
        rows = [next(csv.reader([line])) for _, line in lines]
    except csv.Error as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from None
    header = [cell.strip() for cell in rows[0]]
    if any(_is_time(cell) for cell in header):
        if len(header) > 1:
            expected = "a header that names its columns, such as TIMESTAMP,ContextTokens"
            raise ConfigError([f"{path}: several columns need {expected}"])
        meanings, unit = ["time"], ""
    else:
        meanings, unit = [_meaning(name) for name in header], _unit(header)
        rows, numbers = rows[1:], numbers[1:]
        if "time" not in meanings:
            listed = ", ".join(header)
            expected = "expected one named time, timestamp or arrival"
            raise ConfigError([f"{path}: no column has times: it has {listed}; {expected}"])
    records: list[TraceLine] = [
        (number, {m: cell.strip() for m, cell in zip(meanings, row, strict=False) if m})
        for number, row in zip(numbers, rows, strict=True)
    ]
    return unit, records


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace(" ", "").replace("-", "")


def _named_unit(name: str) -> tuple[str, str]:
    """Split a name into the name proper and its unit."""
    for unit in UNITS:
        if name.lower().endswith(f"_{unit}"):
            return name[: -len(unit) - 1], unit
    return name, ""


def _unit(names: Mapping[str, object] | list[str]) -> str:
    units = (_named_unit(name) for name in names)
    return next((unit for name, unit in units if _plain(name) in NAMES["time"]), "")


def _meaning(name: str) -> str:
    plain = _plain(_named_unit(name)[0])
    return next((meaning for meaning, names in NAMES.items() if plain in names), "")


def _is_time(text: str) -> bool:
    try:
        _moment(text)
    except ValueError:
        return False
    return True


def _moment(value: object) -> float | datetime:
    """Parse a number or a date; ValueError when it is neither."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            date = datetime.fromisoformat(value)
            return date if date.tzinfo else date.replace(tzinfo=UTC)
    else:
        raise ValueError("no time")
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def _tokens(value: object) -> int:
    number = float(value) if isinstance(value, int | float | str) else math.nan
    if not math.isfinite(number) or number < 0 or number != int(number):
        raise ValueError("no number of tokens")
    return max(1, int(number))


def _trace(path: Path, unit: str, records: list[TraceLine]) -> Trace:
    problems: list[str] = []
    moments = list(_read(path, records, "time", problems))
    there = [name for name in ("input", "output") if records and name in records[0][1]]
    columns = {meaning: list(_read(path, records, meaning, problems)) for meaning in there}
    if not moments and not problems:
        problems.append(f"{path}: has no requests")
    if len({isinstance(moment, datetime) for moment in moments}) > 1:
        problems.append(f"{path}: some times are dates and some are numbers")
    if problems:
        raise ConfigError(problems[:MAX_PROBLEMS])
    seconds = _seconds(moments, unit)
    order = sorted(range(len(seconds)), key=seconds.__getitem__)
    is_sorted = order == list(range(len(seconds)))
    note = "" if is_sorted else "its requests were not in the order of their times and were sorted"
    tokens = {meaning: tuple(column[i] for i in order) for meaning, column in columns.items()}
    times_s = tuple(seconds[i] - seconds[order[0]] for i in order)
    return Trace(times_s, tokens.get("input"), tokens.get("output"), path.name, note)


def _read(path: Path, records: list[TraceLine], meaning: str, problems: list[str]) -> Iterator[Any]:
    for number, cells in records:
        value = cells.get(meaning)
        try:
            yield _moment(value) if meaning == "time" else _tokens(value)
        except (ValueError, OverflowError):
            expected = "a time" if meaning == "time" else f"a number of {meaning} tokens"
            shown = "nothing" if value in (None, "") else repr(value)[:40]
            problems.append(f"{path}, line {number}: expected {expected}, got {shown}")


def _seconds(moments: list[float | datetime], unit: str) -> list[float]:
    """Return seconds since the first moment, without loss of precision."""
    dates = [moment for moment in moments if isinstance(moment, datetime)]
    if dates:
        return [(date - dates[0]).total_seconds() for date in dates]
    numbers = [moment for moment in moments if not isinstance(moment, datetime)]
    if not unit:
        unit = next((name for least, name in EPOCHS if numbers[0] >= least), "s")
    return [(number - numbers[0]) * UNITS[unit] for number in numbers]
