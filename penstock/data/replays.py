"""Recorded requests as a source of a load: in the order of their arrival, with their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.data.files import FileRows, digest
from penstock.data.prompts import samples_from_rows
from penstock.data.recordings import RecordedEntry, Recording, notes_of, open_recording, text_row
from penstock.data.samples import InputSpec, Origin, RequestForm, Sample, Source
from penstock.data.traces import Trace
from penstock.errors import ConfigError

CHANGED = "the recording has changed since it was opened: copy it, and replay the copy"


class ReplayPlan(msgspec.Struct, frozen=True):
    """Requests of a recording to replay: when, and whether their answers are compared."""

    trace: Trace
    has_answers: bool


def plan_replay(path: str) -> ReplayPlan:
    """Read when the requests of a recording arrived; ConfigError if none can be sent again."""
    entries = _entries(open_recording(_existing(path)))
    start = entries[0].record.arrived
    times_s = tuple(each.record.arrived - start for each in entries)
    has_answers = any(each.record.outputs or each.record.texts for each in entries)
    return ReplayPlan(Trace(times_s, name=Path(path).name), has_answers)


def open_replay(spec: InputSpec, form: RequestForm, place: tuple[int, int]) -> Source:
    """Open the requests of process i of n (`place`). ConfigError if the target does not take them,
    or if the recording is another than was planned."""
    recording = open_recording(_existing(spec.path))
    entries = _entries(recording)
    if len(entries) < spec.num_replayed:
        raise ConfigError([f"{spec.path}: {CHANGED}"])
    # A server that still records has added some.
    entries = entries[: spec.num_replayed]
    is_text = form.kind != "tensors"
    if recording.is_text != is_text:
        kind = "a language model" if recording.is_text else "a model of tensors"
        raise ConfigError([f"{spec.path}: is of {kind}; the target is another kind"])
    count = len(entries)
    text = f"{count:,} requests of {Path(spec.path).name}, in the order of their arrival"
    if skipped := len(recording.entries) - count:
        text += f"; {skipped:,} cannot be sent again"
    text = "; ".join([text, *notes_of(recording)])
    origin = Origin(text, is_random=False, num_examples=count, digest=digest(recording.files))
    if is_text:
        return ReplayedTexts(_texts(spec, form, entries), entries, origin, *place)
    return ReplayedTensors(entries, origin, *place)


@dataclass(slots=True)
class ReplayedTensors:
    """Requests with tensors, as they were sent: with all their rows."""

    entries: Sequence[RecordedEntry]
    origin: Origin
    _position: int
    _stride: int

    def next(self) -> tuple[int | None, Sample]:
        entry = self.entries[self._position % len(self.entries)]
        self._position += self._stride
        return None, Sample(entry.inputs(), reference=entry.answer())


@dataclass(slots=True)
class ReplayedTexts:
    """Requests to a language model."""

    samples: Sequence[Sample]
    entries: Sequence[RecordedEntry]
    origin: Origin
    _position: int
    _stride: int

    def next(self) -> tuple[int | None, Sample]:
        place = self._position % len(self.samples)
        self._position += self._stride
        sample = self.samples[place]
        fields, limit = sample.fields, sample.max_tokens
        return None, Sample(fields=fields, max_tokens=limit, reference=self.entries[place].answer())


def _entries(recording: Recording) -> list[RecordedEntry]:
    entries = recording.replayable()
    if recording.is_text:
        entries = [each for each in entries if text_row(each) is not None]
    if not entries:
        raise ConfigError([f"{recording.path}: no recorded request can be sent again"])
    return entries


def _texts(spec: InputSpec, form: RequestForm, entries: Sequence[RecordedEntry]) -> list[Sample]:
    rows = [row for each in entries if (row := text_row(each)) is not None]
    table = FileRows(rows, range(1, len(rows) + 1), "request")
    return samples_from_rows(form, table, Path(spec.path).name)


def _existing(path: str) -> Path:
    found = Path(path)
    if not found.exists():
        raise ConfigError([f"{path}: there is no such recording"])
    return found
