"""Recordings of served requests, as `penstock serve --record` writes them: segment files of one
model, merged by arrival time. Tensors are read from the files when they are used.

A record that was cut off, as by a crash, is skipped with the rest of its segment.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from penstock.data.files import FileRows, Row
from penstock.errors import ConfigError
from penstock.serving.padding import bf16_floats
from penstock.types import DATATYPES, Array, Tensor, from_array, num_elements, to_array
from penstock.units import count, quoted
from penstock.wire.recording import (
    OK,
    SUFFIX,
    RecordedRequest,
    RecordedTensor,
    SegmentHeader,
    decode_header,
    decode_records,
)

# Errors of requests that were no fault of theirs: they can be sent again.
REPLAYABLE = (OK, "Overloaded", "QuotaExceeded", "DeadlineExceeded", "NotReady", "Cancelled")


@dataclass(frozen=True, slots=True)
class RecordedEntry:
    """One record, and where the bytes of its tensors are."""

    record: RecordedRequest
    _view: memoryview
    _place: int

    def inputs(self) -> dict[str, Array]:
        """Return the inputs as they were sent; redacted ones as zeros."""
        return dict(self._read(self.record.inputs, self._place))

    def outputs(self) -> dict[str, Array]:
        """Return the answer, without redacted outputs."""
        return {each.name: to_array(each) for each in self.answer()}

    def answer(self) -> list[Tensor]:
        """Return the answer as tensors, without redacted outputs; of a language model, its text if
        the same request always gives the same."""
        record, found = self.record, list[Tensor]()
        place = self._place + sum(each.nbytes for each in record.inputs)
        for each in record.outputs:
            if not each.is_redacted:
                data = self._view[place : place + each.nbytes]
                found.append(Tensor(each.name, each.datatype, each.shape, data))
            place += each.nbytes
        is_greedy = record.parameters.get("temperature") == 0
        if record.texts is not None and len(record.texts) == 1 and is_greedy:
            found.append(text_tensor(record.texts[0]))
        return found

    def _read(self, tensors: Sequence[RecordedTensor], place: int) -> Iterator[tuple[str, Array]]:
        for each in tensors:
            if each.is_redacted:
                yield each.name, _blank(each)
                continue
            data = self._view[place : place + each.nbytes]
            yield each.name, to_array(Tensor(each.name, each.datatype, each.shape, data))
            place += each.nbytes


@dataclass(frozen=True, slots=True)
class Recording:
    """The records of one model in the order of their arrival."""

    path: Path
    files: Sequence[Path]
    entries: Sequence[RecordedEntry]
    headers: Sequence[SegmentHeader] = ()
    # Segments whose last record is not complete.
    num_cut: int = 0

    @property
    def is_text(self) -> bool:
        """Whether it is of a language model."""
        return any(each.record.asked or each.record.texts for each in self.entries)

    @property
    def span(self) -> tuple[datetime, datetime]:
        """When the first and the last request arrived."""
        first, last = self.entries[0].record.arrived, self.entries[-1].record.arrived
        return datetime.fromtimestamp(first, UTC), datetime.fromtimestamp(last, UTC)

    @property
    def share(self) -> float:
        """The share of the requests that was recorded; of several, the smallest."""
        return min((each.share for each in self.headers), default=1.0)

    @property
    def text(self) -> str:
        """The recording in the report: its time span, and the share of the traffic."""
        first, last = self.span
        end = f"{last:%H:%M:%S}" if first.date() == last.date() else f"{last:%Y-%m-%d %H:%M:%S}"
        text = f"recorded {first:%Y-%m-%d %H:%M:%S} to {end} UTC"
        return text if self.share >= 1 else f"{text}, {self.share:.3g} of the requests"

    @property
    def redacted(self) -> list[str]:
        """The names of redacted inputs."""
        tensors = (each for entry in self.entries for each in entry.record.inputs)
        return sorted({each.name for each in tensors if each.is_redacted})

    def answered(self) -> list[RecordedEntry]:
        return [each for each in self.entries if each.record.status == OK]

    def replayable(self) -> list[RecordedEntry]:
        """The requests that can be sent again: not those that were refused as invalid."""
        entries = [each for each in self.entries if each.record.status in REPLAYABLE]
        return [each for each in entries if each.record.inputs or each.record.asked]


def text_tensor(text: str) -> Tensor:
    """Return the text of an answer as the tensor that it is in the model's signature."""
    return from_array("text_output", "BYTES", np.array([text.encode()], np.object_))


def is_recording(path: Path) -> bool:
    """Whether this is a segment, or a folder of segments, of one model or of several."""
    return path.suffix == SUFFIX or (path.is_dir() and bool(_folders(path)))


def open_recording(path: Path, model: str = "") -> Recording:
    """Read a recording; of several models in a folder, that of `model`. ConfigError if there is
    none, or no request in it."""
    files = [path] if path.is_file() else _segments(path, model)
    entries: list[RecordedEntry] = []
    headers: list[SegmentHeader] = []
    num_cut = 0
    for file in files:
        view = _mapped(file)
        found = decode_header(view)
        if found is None:
            num_cut += len(view) > 0
            continue
        header, end = found
        headers.append(header)
        for record, place in decode_records(view, end):
            entries.append(RecordedEntry(record, view, place))
            end = place + sum(each.nbytes for each in (*record.inputs, *record.outputs))
        num_cut += end < len(view)
    if not entries:
        raise ConfigError([f"{path}: has no recorded requests"])
    entries.sort(key=lambda each: each.record.arrived)
    return Recording(path, files, entries, headers, num_cut)


def example_rows(recording: Recording, *, has_batch: bool, latest: int = 0) -> FileRows:
    """Return the answered requests as examples, without the batch dimension. With `latest`, that
    many different ones, counted from the end."""
    numbered = _numbered_rows(recording, has_batch)
    found = _last_different(list(numbered), latest) if latest else list(numbered)
    if not found:
        raise ConfigError([f"{recording.path}: no recorded request was answered"])
    return FileRows([row for _, row in found], [number for number, _ in found], "request")


def _numbered_rows(recording: Recording, has_batch: bool) -> Iterator[tuple[int, Row]]:
    """Yield the number of a request with each of its rows."""
    for number, entry in enumerate(recording.entries, 1):
        if entry.record.status == OK and entry.record.inputs:
            for row in _split(entry, has_batch):
                yield number, row


def _last_different(numbered: Sequence[tuple[int, Row]], latest: int) -> list[tuple[int, Row]]:
    seen: set[bytes] = set()
    kept: list[tuple[int, Row]] = []
    for number, row in reversed(numbered):
        key = _digest(row)
        if key not in seen:
            seen.add(key)
            kept.append((number, row))
        if len(kept) == latest:
            break
    return kept[::-1]


def text_rows(recording: Recording) -> FileRows:
    """Return the requests of a language model as rows of prompts or messages."""
    rows: list[Row] = []
    numbers: list[int] = []
    for number, entry in enumerate(recording.entries, 1):
        row = text_row(entry)
        if row is not None:
            rows.append(row)
            numbers.append(number)
    if not rows:
        raise ConfigError([f"{recording.path}: has no prompts; were they redacted?"])
    return FileRows(rows, numbers, "request")


def text_row(entry: RecordedEntry) -> Row | None:
    """Return what was asked, with its limit of tokens; None if it is redacted, or a prompt of
    tokens, which other models would misread."""
    asked, most = entry.record.asked, entry.record.parameters.get("max_tokens")
    if not asked or not isinstance(asked.get("prompt", ""), str):
        return None
    return {**asked, "max_tokens": most} if most else dict(asked)


def notes_of(recording: Recording) -> list[str]:
    """Return remarks for the report."""
    notes = [recording.text]
    if recording.num_cut:
        notes.append(f"{count(recording.num_cut, 'segment')} ended with an incomplete record")
    if redacted := recording.redacted:
        notes.append(f"redacted, sent as zeros: {quoted(redacted)}")
    return notes


def _split(entry: RecordedEntry, has_batch: bool) -> Iterator[dict[str, Array]]:
    arrays = {
        each.name: bf16_floats(array) if each.datatype == "BF16" else array
        for each, array in zip(entry.record.inputs, entry.inputs().values(), strict=True)
    }
    if not has_batch:
        yield arrays
        return
    counts = {len(array) for array in arrays.values() if array.ndim}
    if len(counts) == 1:
        for row in range(counts.pop()):
            yield {name: array[row, ...] for name, array in arrays.items()}


def _digest(row: Mapping[str, Array]) -> bytes:
    hashed = hashlib.blake2b(digest_size=16)
    for name, array in sorted(row.items()):
        hashed.update(f"{name} {array.shape} ".encode())
        hashed.update(str(array.tolist()).encode() if array.dtype == object else array.tobytes())
    return hashed.digest()


def _blank(tensor: RecordedTensor) -> Array:
    if tensor.datatype == "BYTES":
        blank = np.empty(num_elements(tensor.shape), np.object_)
        blank[:] = b""
        return blank.reshape(tensor.shape)
    return np.zeros(tensor.shape, DATATYPES[tensor.datatype].numpy)


def _folders(path: Path) -> list[Path]:
    """Return the folders with segments: this one, or those in it."""
    if any(path.glob(f"*{SUFFIX}")):
        return [path]
    return sorted(each for each in path.iterdir() if each.is_dir() and any(each.glob(f"*{SUFFIX}")))


def _segments(path: Path, model: str) -> list[Path]:
    folders = _folders(path)
    if len(folders) > 1:
        chosen = [each for each in folders if each.name == model]
        if not chosen:
            names = ", ".join(each.name for each in folders)
            raise ConfigError([f"{path}: has recordings of several models ({names}); name one"])
        folders = chosen
    return sorted(folders[0].glob(f"*{SUFFIX}")) if folders else []


def _mapped(file: Path) -> memoryview:
    """Map a segment. It stays readable when the server removes it; one that is gone is empty."""
    try:
        with file.open("rb") as opened:
            return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    except (FileNotFoundError, ValueError):
        # It was removed, or nothing was written yet.
        return memoryview(b"")
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read: {error.strerror}"]) from None
