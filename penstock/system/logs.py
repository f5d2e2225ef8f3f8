"""Logging of all server processes: lines of text or JSON on stderr.

Workers and shards are exec'd and read level and format from the environment. Output that a model
prints is not touched. Lines never contain tensors or keys.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
FORMATS = ("text", "json")
# Values of LogSwitches.log_format.
ISO8601 = "ISO8601"
TIME_FORMATS = ("default", ISO8601)
# Loggers with switches of their own.
ALWAYS_ON = frozenset(("penstock.audit", "penstock.requests"))
LEVEL_VARIABLE, FORMAT_VARIABLE = "PENSTOCK_LOG", "PENSTOCK_LOG_FORMAT"
TEXT = "%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s"
# Attributes of every record; the others were given as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_whom: dict[str, str] = {}
# Control characters, which a terminal would interpret.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """`level` applies to Penstock's own loggers; those of libraries log from WARNING."""

    level: str = "INFO"
    format: str = "text"


def from_environment(environment: Mapping[str, str] = os.environ) -> LogSettings:
    """Read the settings; ValueError if a variable is invalid."""
    level = environment.get(LEVEL_VARIABLE, "INFO").upper()
    form = environment.get(FORMAT_VARIABLE, "text").lower()
    if level not in LEVELS:
        raise ValueError(f"{LEVEL_VARIABLE}: '{level}' is not one of {', '.join(LEVELS)}")
    if form not in FORMATS:
        raise ValueError(f"{FORMAT_VARIABLE}: '{form}' is not one of {', '.join(FORMATS)}")
    return LogSettings(level, form)


def configure(settings: LogSettings) -> None:
    """Set up logging of this process."""
    handler = logging.StreamHandler(_Stderr())
    handler.setFormatter(JsonLines() if settings.format == "json" else TextLines(TEXT))
    handler.addFilter(_sieve)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("penstock").setLevel(settings.level)


@dataclass(frozen=True, slots=True)
class LogSwitches:
    """What can be changed while the server runs, by Triton's names: levels of Penstock's own
    loggers, and the form of times in text lines. Audit and request logs are not touched."""

    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: str = "default"

    @classmethod
    def of_level(cls, level: str) -> LogSwitches:
        """Return what a level of LEVELS means."""
        rank = LEVELS.index(level)
        return cls(rank <= 1, rank <= 2, log_verbose_level=1 if rank == 0 else 0)

    def lets_through(self, level: int) -> bool:
        if level >= logging.ERROR:
            return self.log_error
        if level >= logging.WARNING:
            return self.log_warning
        return self.log_info if level >= logging.INFO else self.log_verbose_level > 0


def present() -> LogSwitches:
    """Return what the level of this process means, which was configured and not switched."""
    level = logging.getLevelName(logging.getLogger("penstock").getEffectiveLevel())
    return LogSwitches.of_level(level if level in LEVELS else "INFO")


def switch(switches: LogSwitches) -> None:
    """Apply switches to this process, whose logging was configured."""
    _sieve.switches = switches
    passed = [each for each in LEVELS if switches.lets_through(logging.getLevelName(each))]
    level = logging.getLevelName(passed[0]) if passed else logging.CRITICAL + 1
    logging.getLogger("penstock").setLevel(level)
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, TextLines):
            handler.formatter.is_iso = switches.log_format == ISO8601


class Sieve(logging.Filter):
    """Keeps back records of levels that are switched off."""

    switches: LogSwitches | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        name = record.name
        if self.switches is None or not name.startswith("penstock") or name in ALWAYS_ON:
            return True
        return self.switches.lets_through(record.levelno)


_sieve = Sieve()


def hand_down(settings: LogSettings) -> None:
    """Set up logging of processes started from now on."""
    os.environ[LEVEL_VARIABLE] = settings.level
    os.environ[FORMAT_VARIABLE] = settings.format


def describe(model: str, version: str) -> None:
    """Add this model to every line of this process."""
    _whom.update(model=model, version=version)


class _Stderr:
    """Writes to the current sys.stderr, which a terminal display may replace."""

    def write(self, text: str) -> None:
        sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


class TextLines(logging.Formatter):
    # Whether times are those of RFC 3339, in UTC.
    is_iso = False

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        if not self.is_iso:
            return super().formatTime(record, datefmt)
        return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def format(self, record: logging.LogRecord) -> str:
        return _CONTROL.sub(lambda match: repr(match[0])[1:-1], super().format(record))


class JsonLines(logging.Formatter):
    """One object per line: ts, level, logger, msg, pid, fields of `extra`, exception."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line = {
            "ts": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "msg": record.getMessage(),
            "pid": record.process,
            **_whom,
        }
        for key, value in vars(record).items():
            if key not in _STANDARD:
                line[key] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
