"""Length distributions: variable dimensions, prompt tokens, answer tokens. `parse` reads what a
user writes, `draw` returns integers from 1."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from penstock.errors import CommandLineError, ConfigError
from penstock.types import Array

FORMS = (
    "expected a length such as 128, uniform:LOWEST:HIGHEST, normal:MEAN:DEVIATION, "
    "lognormal:MEDIAN:P99, or list:FILE with one length a line"
)
TEXTS = {
    "fixed": "{:g}",
    "uniform": "uniform from {:g} to {:g}",
    "normal": "normal with mean {:g} and deviation {:g}",
    "lognormal": "lognormal with median {:g} and p99 {:g}",
}
# The 99th percentile of the standard normal distribution.
NORMAL_P99 = 2.3263478740408408
# No tensor and no text is longer; keeps a tail from exhausting memory.
MAX_LENGTH = 2**24
# Lengths drawn per chunk.
CHUNK = 4096


class Lengths(msgspec.Struct, frozen=True):
    """`values` depend on the kind: fixed has its length, uniform the lowest and highest, normal
    mean and deviation, lognormal median and p99, list all lengths to draw from."""

    kind: str
    values: tuple[float, ...] = ()

    def __str__(self) -> str:
        if self.kind in TEXTS:
            return TEXTS[self.kind].format(*self.values)
        return f"drawn from a list of {len(self.values):,}"


@dataclass(slots=True)
class Sizes:
    """Endless lengths of requests and their answers, with descriptions. None: not specified."""

    requests: Iterator[int] | None = None
    answers: Iterator[int] | None = None
    requests_text: str = ""
    answers_text: str = ""


def parse(text: str) -> Lengths:
    """Parse what a user wrote; CommandLineError if it is malformed, ConfigError for a bad file."""
    kind, colon, rest = text.strip().partition(":")
    if not colon and Path(kind).suffix in {".csv", ".txt", ".jsonl"}:
        kind, rest = "list", kind
    elif not colon:
        kind, rest = "fixed", kind
    if kind == "list":
        return _listed(Path(rest))
    return _checked(text, Lengths(kind, _numbers(text, rest.split(":"))))


def draw(lengths: Lengths, random: np.random.Generator, count: int) -> Array:
    """Draw `count` integers of at least 1."""
    match lengths.kind, lengths.values:
        case "fixed", (length,):
            found: Array = np.full(count, length)
        case "uniform", (lowest, highest):
            found = random.integers(int(lowest), int(highest), count, endpoint=True)
        case "normal", (mean, deviation):
            found = random.normal(mean, deviation, count)
        case "lognormal", (median, p99):
            sigma = math.log(p99 / median) / NORMAL_P99
            found = random.lognormal(math.log(median), sigma, count)
        case "list", values:
            found = random.choice(np.asarray(values), count)
        case _:
            raise ConfigError([f"lengths: unknown kind '{lengths.kind}'; {FORMS}"])
    return np.clip(np.rint(found), 1, MAX_LENGTH).astype(np.int64)


def drawn(lengths: Lengths, seed: Sequence[int]) -> Iterator[int]:
    """Yield lengths endlessly; the same for the same seed."""
    random = np.random.default_rng(seed)
    while True:
        yield from draw(lengths, random, CHUNK).tolist()


def followed(values: Sequence[int], index: int, num_processes: int) -> Iterator[int]:
    """Yield every `num_processes`-th of `values` from `index` on, wrapping around endlessly."""
    for position in itertools.count(index, num_processes):
        yield values[position % len(values)]


def _numbers(text: str, parts: list[str]) -> tuple[float, ...]:
    with suppress(ValueError):
        values = tuple(map(float, parts))
        if all(map(math.isfinite, values)):
            return values
    raise CommandLineError([f"lengths '{text}': {FORMS}"])


def _checked(text: str, lengths: Lengths) -> Lengths:
    match lengths.kind, lengths.values:
        case "fixed", (length,):
            problem = "" if _is_length(length) else "a length is a whole number from 1"
        case "uniform", (lowest, highest):
            is_fine = _is_length(lowest) and _is_length(highest) and lowest <= highest
            problem = "" if is_fine else "uniform takes whole numbers from 1, the lowest first"
        case "normal", (mean, deviation):
            is_fine = 1 <= mean <= MAX_LENGTH and deviation >= 0
            problem = "" if is_fine else "normal takes a mean from 1 and a deviation from 0"
        case "lognormal", (median, p99):
            is_fine = 1 <= median <= p99 <= MAX_LENGTH
            problem = "" if is_fine else "lognormal takes a median from 1 and a p99 that is no less"
        case _:
            problem = FORMS
    if problem:
        raise CommandLineError([f"lengths '{text}': {problem}"])
    return lengths


def _is_length(value: float) -> bool:
    return value == int(value) and 1 <= value <= MAX_LENGTH


def _listed(path: Path) -> Lengths:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"lengths: cannot read '{path}': {error}"]) from None
    values: list[float] = []
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        text = line.strip().strip(",").strip()
        # The first line of a CSV file may be a header.
        if not text or (number == 1 and path.suffix == ".csv" and not text[0].isdigit()):
            continue
        if text.isdigit() and _is_length(int(text)):
            values.append(int(text))
        else:
            problems.append(f"{path}, line {number}: expected a length from 1, got '{text[:40]}'")
    if not values and not problems:
        problems.append(f"lengths: '{path}' has none; expected one length a line")
    if problems:
        raise ConfigError(problems[:10])
    return Lengths("list", tuple(values))
