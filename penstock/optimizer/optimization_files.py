"""Optimisations as JSON files that can be read back. Beside the data they hold a `verdict` for
other tools; it is written anew each time and ignored on reading."""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.benchmark import run_files
from penstock.errors import ConfigError
from penstock.optimizer import first_line
from penstock.optimizer.results import Optimization

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
    found = run_files.read_result(path, Optimization, FIELDS, "an optimisation", "optimize")
    found.outcome = FORMER_OUTCOMES.get(found.outcome, found.outcome)
    if found.outcome not in first_line.EXIT_CODES:
        known = ", ".join(first_line.EXIT_CODES)
        raise ConfigError([f"{path}: outcome {found.outcome!r} is not one of {known}"])
    return found
