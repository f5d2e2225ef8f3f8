"""Append-only journal of findings, one line each: an interrupted run resumes from it.

The search is an ordinary program that asks the journal before it measures. A line is on disk before
its value is used, so a restarted run finds everything it has built upon; a partial last line, left
by a kill, is cut off. The folder's name identifies the model, data, tools and device. Two runs
cannot have the same journal open.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock import units
from penstock.errors import BackendFailed, ConfigError, PenstockError
from penstock.optimizer import workspace
from penstock.repository.staging import sync_folder

FILE = "journal.jsonl"
FORMAT = 1
# Kinds of findings that depend on the machine's speed and its other load.
SERVED = ("served", "served with rates", "proof", "proof with rates", "text rates", "text proof")
TIMINGS = (*SERVED, "times", "profile")
# If the machine's speed has changed by more than this, timings are discarded.
MAX_SPEED_RATIO = 1.25

T = TypeVar("T")
# One line, as decoded from JSON.
Record = dict[str, Any]


class Journal:
    """One run's findings by kind and key. `num_measured` counts findings of this process,
    `num_remembered` those reused from earlier lines."""

    def __init__(self, folder: Path, *, is_fresh: bool = False, speed_s: float = 0.0) -> None:
        """Open the journal; `is_fresh` empties it. `speed_s` is the time of the speed probe on this
        machine now: timings taken at another speed are discarded. 0: unknown, all are kept."""
        folder.mkdir(parents=True, exist_ok=True)
        self._speed_s = speed_s
        self.num_discarded = 0
        self.path = folder / FILE
        # Unbuffered: data that could not be written must not be written later.
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            problem = f"{folder}: another run is writing to it; wait for its end"
            raise ConfigError([problem]) from None
        sync_folder(folder)
        if is_fresh:
            self._file.truncate(0)
        try:
            self._known = self._read()
        except ConfigError:
            self._file.close()
            raise
        # Lines of earlier processes that this one has not used yet.
        self._earlier = set(self._known)
        self._computed: set[tuple[str, str]] = set()
        self.num_measured = 0
        self.num_remembered = 0
        # Time of the oldest reused finding, in seconds since the epoch.
        self.oldest_at: float | None = None

    @property
    def has_timings(self) -> bool:
        """Whether it has findings that took their time: a later run resumes from them."""
        return any(_plain(kind) in TIMINGS for kind, _ in self._known)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def remember(
        self,
        kind: str,
        key: str,
        type: type[T],
        compute: Callable[[], T],
        *,
        passing: tuple[type[PenstockError], ...] = (),
        is_reusable: Callable[[T], bool] = lambda value: True,
    ) -> T:
        """Return the finding of this kind and key, or compute and record it. A PenstockError is a
        finding too, and raised with the same text next time, except for the types in `passing`,
        which may not happen again and are not recorded. A value that is not reusable is used by
        this process only; the next one computes it again."""
        record = self._known.get((kind, key))
        if record is not None and "value" in record:
            known = msgspec.convert(record["value"], type, strict=False)
            if (kind, key) not in self._computed and not is_reusable(known):
                record = None
        if (kind, key) in self._earlier:
            self._earlier.remove((kind, key))
            if record is not None:
                self.num_remembered += 1
                at = record.get("at")
                if isinstance(at, int | float):
                    self.oldest_at = min(at, self.oldest_at or at)
        if record is None:
            record = self._compute(kind, key, compute, passing)
        if "failed" in record:
            raise BackendFailed(record["failed"])
        return msgspec.convert(record["value"], type, strict=False)

    def forget(self, kinds: Collection[str]) -> None:
        """Discard all findings of these kinds, for this process and later ones."""
        for kind, key in [known for known in self._known if _plain(known[0]) in kinds]:
            del self._known[kind, key]
            self._append({"kind": kind, "key": key, "forgotten": True})

    def _is_of_another_speed(self, record: Record) -> bool:
        before_s = record.get("speed_s")
        if not isinstance(before_s, float) or not before_s or not self._speed_s:
            return False
        return max(before_s / self._speed_s, self._speed_s / before_s) > MAX_SPEED_RATIO

    def count(self, kind: str, key: str, more: int = 1) -> int:
        """Count a call and return the total over all runs. Call it before something that may kill
        the process, so that the next run knows; with -1, take that back."""
        num = more + int(self._known.get((kind, key), {}).get("value", 0))
        self._known[kind, key] = record = {"kind": kind, "key": key, "value": num}
        self._append(record)
        return num

    def _compute(
        self,
        kind: str,
        key: str,
        compute: Callable[[], T],
        passing: tuple[type[PenstockError], ...],
    ) -> Record:
        began = time.monotonic()
        record: Record = {"kind": kind, "key": key}
        try:
            value = msgspec.to_builtins(compute(), str_keys=True)
        except ConfigError:
            # The user's input is wrong: there is nothing to remember.
            raise
        except PenstockError as error:
            if isinstance(error, passing):
                raise
            record["failed"] = str(error)
        else:
            record["value"] = value
        record["seconds"] = round(time.monotonic() - began, 3)
        record["at"] = round(time.time(), 3)
        if _plain(kind) in TIMINGS and self._speed_s:
            record["speed_s"] = self._speed_s
        self._append(record)
        self._computed.add((kind, key))
        self.num_measured += 1
        self._known[kind, key] = record
        return record

    def _append(self, record: Record) -> None:
        """Append a line; WriteFailed if it cannot be written. Earlier lines stay intact."""
        # NaN and infinity as Python writes them: a measurement may be unknown or infinite.
        line = json.dumps(record).encode() + b"\n"
        size = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(size)
            free = units.size(workspace.free_bytes(self.path))
            raise workspace.WriteFailed(
                f"{self.path}: cannot be written: {error.strerror or error} ({free} free); free "
                "some space and run the same command again: it resumes from this journal"
            ) from error

    def _read(self) -> dict[tuple[str, str], Record]:
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self._file.truncate(len(whole))
        known: dict[tuple[str, str], Record] = {}
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line)
                known[record["kind"], record["key"]] = record
                if record.get("forgotten"):
                    del known[record["kind"], record["key"]]
                elif self._is_of_another_speed(record):
                    del known[record["kind"], record["key"]]
                    self.num_discarded += 1
            except (ValueError, KeyError, TypeError):
                problem = f"{self.path}:{number}: not a line of a journal; move the file away"
                raise ConfigError([problem]) from None
        if not known and not whole:
            self._append({"kind": "journal", "key": "format", "value": FORMAT})
        elif known.get(("journal", "format"), {}).get("value") != FORMAT:
            raise ConfigError([f"{self.path}: written by another Penstock; move the file away"])
        return known


def _plain(kind: str) -> str:
    """Return the kind without its settings: `served` of `served, levels of 2 s`."""
    return kind.partition(",")[0]
