"""Optimisations as JSON files that can be read back. Beside the data they hold a `verdict` for
other tools; it is written anew each time and ignored on reading."""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock import slo as promises
from penstock.benchmark import run_files
from penstock.errors import ConfigError
from penstock.optimizer import first_line
from penstock.optimizer.results import Optimization

FORMAT = 1
EXPECTED = "expected what penstock optimize --json writes"
# Names in files of earlier versions.
FORMER_OUTCOMES = {"met": "kept"}
# Fields that together identify an optimisation among our files.
FIELDS = {"tries", "outcome", "machine", "format"}


def write_optimization(optimization: Optimization, path: Path) -> None:
    """Write the file, completely or not at all."""
    run_files.write_text(to_json(optimization), path)


def to_json(optimization: Optimization) -> str:
    plain = run_files.plain(msgspec.to_builtins(optimization, str_keys=True))
    data = {"verdict": first_line.headline(optimization), **plain}
    return msgspec.json.format(msgspec.json.encode(data), indent=1).decode() + "\n"


def is_optimization(path: Path) -> bool:
    """Return whether the file looks like an optimisation; False if it cannot be read."""
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return False
    return isinstance(found, dict) and found.keys() >= FIELDS


def read_optimization(path: Path) -> Optimization:
    """Read the file; ConfigError says why it is not an optimisation."""
    try:
        text = path.read_bytes()
        kind = msgspec.json.decode(text)
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file; {EXPECTED}"]) from None
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except msgspec.DecodeError as error:
        raise ConfigError([f"{path}: not JSON: {error}"]) from None
    if not isinstance(kind, dict) or not kind.keys() >= FIELDS:
        raise ConfigError([f"{path}: JSON, but not of an optimisation; {EXPECTED}"])
    if kind["format"] != FORMAT:
        known = f"this version of penstock reads format {FORMAT}"
        raise ConfigError([f"{path}: format {kind['format']!r}; {known}"])
    try:
        # Not strict: NaN is written as a string.
        found = msgspec.json.decode(text, type=Optimization, strict=False)
        found.outcome = FORMER_OUTCOMES.get(found.outcome, found.outcome)
        if found.slo:
            promises.parse(found.slo)
    except msgspec.ValidationError as error:
        raise ConfigError([f"{path}: not a whole optimisation: {error}"]) from None
    except ConfigError as error:
        raise ConfigError([f"{path}: slo: {problem}" for problem in error.problems]) from None
    if found.outcome not in first_line.EXIT_CODES:
        known = ", ".join(first_line.EXIT_CODES)
        raise ConfigError([f"{path}: outcome {found.outcome!r} is not one of {known}"])
    return found
