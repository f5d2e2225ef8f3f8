"""Folds finished requests into time windows as they come in. Pure: it reads no clock.

Memory is bounded for any run: when there are too many windows, neighbours are merged and windows
are twice as long from then on. Requests may come late and in any order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from penstock.benchmark.agreement import Agreement
from penstock.benchmark.exchange import ExchangeColumns, TimingSample, floats
from penstock.benchmark.stats import DurationHistogram, Window, add_counts, merged, tally
from penstock.slo import Slo
from penstock.types import Array

LENGTH_S = 0.25
MAX_WINDOWS = 128
MAX_SAMPLES = 5000


class Recorder:
    """Windows of one level. Requests due before `start` count only as answers that arrived."""

    def __init__(self, start: float, slo: Slo | None = None) -> None:
        self._start = start
        self._limits = slo.limits_s if slo else {}
        self._length_s = LENGTH_S
        self._windows: dict[int, Window] = {}
        self._end = float("inf")
        self._num_samples = 0
        # For reservoir sampling; a fixed seed keeps it reproducible.
        self._random = random.Random(0)
        # sent -> done of good answers, and due -> sent of all that were sent.
        self.service = DurationHistogram()
        self.lateness = DurationHistogram()
        self.samples: list[TimingSample] = []
        # Answers compared with recorded ones; None: there were none.
        self.agreement: Agreement | None = None

    def stop(self, end: float) -> None:
        """End the level: later requests and later answers do not count, but the latency of requests
        due before `end` does, whenever they are answered."""
        self._end = end

    def add(self, columns: ExchangeColumns) -> None:
        if columns.agreement is not None:
            self.agreement = self.agreement or Agreement()
            self.agreement.add(columns.agreement)
        due, sent, done = floats(columns.due), floats(columns.sent), floats(columns.done)
        failed = np.frombuffer(columns.failed, np.uint8)
        is_good = failed == 0
        is_mine = self._is_mine(due)
        self._make_room(np.concatenate([due[is_mine], done[is_good & (done < self._end)]]))
        is_arrived = is_good & (done >= self._start) & (done < self._end)
        for window, arrived in self._split(done, is_arrived):
            window.num_arrived += len(arrived)
        is_in_slo = self._is_in_slo(columns, done - due, is_good) if self._limits else is_good
        late_s = np.where(sent > 0, sent - due, 0.0)
        for window, mine in self._split(due, is_mine):
            self._add_requests(window, columns, failed[mine], done[mine] - due[mine])
            window.max_late_s = max(window.max_late_s, float(late_s[mine].max()))
            if window.num_in_slo is not None:
                window.num_in_slo += int(is_in_slo[mine].sum())
        self.service.add((done - sent)[is_mine & is_good])
        self.lateness.add((sent - due)[is_mine & (sent > 0)])
        self._add_streams(columns)
        if is_mine.all():
            self._keep(columns.samples)

    def _is_mine(self, due: Array) -> Array:
        return (due >= self._start) & (due < self._end)

    def _indices(self, times: Array) -> Array:
        return ((times - self._start) / self._length_s).astype(np.int64)

    def _split(self, times: Array, is_chosen: Array) -> Iterator[tuple[Window, Array]]:
        """Group the chosen times: yield each window with the positions of its times."""
        places = np.flatnonzero(is_chosen)
        indices = self._indices(times[places])
        order = np.argsort(indices, kind="stable")
        found, begins = np.unique(indices[order], return_index=True)
        parts = np.split(places[order], begins[1:])
        yield from zip(map(self._window, found.tolist()), parts, strict=False)

    def _window(self, index: int) -> Window:
        if index not in self._windows:
            in_slo = 0 if self._limits else None
            self._windows[index] = Window(index * self._length_s, self._length_s, num_in_slo=in_slo)
        return self._windows[index]

    def _make_room(self, times: Array) -> None:
        while len(times) and self._indices(times).max() >= MAX_WINDOWS:
            self._length_s *= 2
            halves, self._windows = self._windows, {}
            for index, window in halves.items():
                add_counts(self._window(index // 2), window)

    def _add_requests(
        self, window: Window, columns: ExchangeColumns, failed: Array, latencies: Array
    ) -> None:
        is_good = failed == 0
        window.num_due += len(failed)
        window.num_good += int(is_good.sum())
        codes, counts = np.unique(failed[~is_good], return_counts=True)
        failures = [columns.failures[code - 1] for code in codes.tolist()]
        tally(window.failures, dict(zip(failures, counts.tolist(), strict=True)))
        if is_good.any():
            _add_metric(window, "latency", latencies[is_good])

    def _add_streams(self, columns: ExchangeColumns) -> None:
        due = floats(columns.stream_due)
        ttft, tpot = floats(columns.first) - due, floats(columns.tpot)
        num_in = np.frombuffer(columns.num_input_tokens, np.int64)
        num_out = np.frombuffer(columns.num_output_tokens, np.int64)
        for window, mine in self._split(due, self._is_mine(due)):
            window.num_input_tokens += int(num_in[mine].sum())
            window.num_output_tokens += int(num_out[mine].sum())
            _add_metric(window, "ttft", ttft[mine])
            _add_metric(window, "tpot", tpot[mine])
        gap_due, gaps = floats(columns.gap_due), floats(columns.gaps)
        for window, mine in self._split(gap_due, self._is_mine(gap_due)):
            _add_metric(window, "itl", gaps[mine])

    def _is_in_slo(self, columns: ExchangeColumns, latencies: Array, is_good: Array) -> Array:
        """Mark the requests that kept every limit. A stream keeps a limit on `itl` when its longest
        gap does; an answer of one token has neither gap nor time per token, and keeps both."""
        kept = is_good & (latencies < self._limits.get("latency", np.inf))
        if self._limits.keys() <= {"latency"}:
            return kept
        due, stream_due = floats(columns.due), floats(columns.stream_due)
        is_stream_kept = floats(columns.first) - stream_due < self._limits.get("ttft", np.inf)
        is_stream_kept &= ~(floats(columns.tpot) >= self._limits.get("tpot", np.inf))
        is_long = floats(columns.gaps) >= self._limits.get("itl", np.inf)
        is_stream_kept &= ~np.isin(stream_due, floats(columns.gap_due)[is_long])
        rows = _rows_of_streams(due, np.flatnonzero(is_good), stream_due)
        # An answer without a first chunk misses every limit on streams.
        is_kept_by_stream = np.zeros(len(due), bool)
        is_kept_by_stream[rows] = is_stream_kept
        return kept & is_kept_by_stream

    def _keep(self, samples: list[TimingSample]) -> None:
        """Reservoir sampling: every sample so far is kept with the same probability."""
        for sample in samples:
            self._num_samples += 1
            if len(self.samples) < MAX_SAMPLES:
                self.samples.append(sample)
            elif (place := self._random.randrange(self._num_samples)) < MAX_SAMPLES:
                self.samples[place] = sample

    def windows(self, end: float) -> list[Window]:
        """Return copies of all windows up to `end`, including empty ones; the last ends there."""
        self._make_room(np.array([end]))
        length_s = self._length_s
        span_s = end - self._start
        num_windows = int(np.ceil(span_s / length_s - 1e-9))
        found = [self._window(index).copy() for index in range(num_windows)]
        if found:
            found[-1].length_s = min(length_s, span_s - (num_windows - 1) * length_s)
        if len(found) > 1 and found[-1].length_s < length_s / 2:
            found[-2:] = [merged(found[-2:])]
        return found


def _add_metric(window: Window, metric: str, seconds: Array) -> None:
    window.metrics.setdefault(metric, DurationHistogram()).add(seconds)


def _rows_of_streams(due: Array, good_rows: Array, stream_due: Array) -> Array:
    """Return the row of each stream: the good answers in order, but for those without chunks."""
    if len(good_rows) == len(stream_due):
        return good_rows
    rows: list[int] = []
    for row in good_rows.tolist():
        if len(rows) < len(stream_due) and due[row] == stream_due[len(rows)]:
            rows.append(row)
    return np.array(rows, np.int64)
