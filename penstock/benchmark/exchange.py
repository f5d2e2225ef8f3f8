"""One request of a load test with its outcome, and many of them as columns.

A `TimedExchange` lives in a generator process, between its event loop and a target. Finished ones
are folded into `ExchangeColumns`, which travel to the conductor as bytes. Times are seconds of the
monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from penstock.benchmark.agreement import Agreement
from penstock.types import Array, Tensor


@dataclass(slots=True, eq=False)
class TimedExchange:
    """One request. `due` is planned, `sent` is real; its sender sets it, then calls `end` once."""

    due: float
    # The target's encoding of the input: bytes to write, a message, tensors.
    item: Any
    finish: Callable[[TimedExchange], None]
    sent: float = 0.0
    done: float = 0.0
    # A short text, identical for identical causes: failures are counted by it.
    failure: str | None = None
    # The server's own timings of this request in seconds, where it was asked for them.
    phases: Mapping[str, float] | None = None
    stream: StreamTimes | None = None
    # The recorded answer, and the one that came; the target sets it if there is a recorded one.
    expected: Sequence[Tensor] = ()
    answer: Sequence[Tensor] | None = None

    def end(self, done: float, failure: str | None) -> None:
        self.done = done
        self.failure = failure
        self.finish(self)


@dataclass(slots=True)
class StreamTimes:
    """Arrival times of the chunks of a streamed answer, and its token counts."""

    times: list[float] = field(default_factory=list)
    num_input_tokens: int = 0
    # As the server counts them, or else the number of chunks.
    num_output_tokens: int = 0


class TimingSample(msgspec.Struct, frozen=True):
    """A server's timings of one request, beside the latency that the client saw."""

    latency_s: float
    phases_s: dict[str, float]


class ExchangeColumns(msgspec.Struct):
    """Finished exchanges as columns of float64; `failed` has one byte per exchange: 0, or one plus
    an index into `failures`."""

    due: bytes
    sent: bytes
    done: bytes
    failed: bytes
    failures: list[str] = []
    # Successful streams only: due time, time of the first chunk, time per output token (NaN for one
    # token), tokens in and out (int64). Gaps between chunks, each with its stream's due time.
    stream_due: bytes = b""
    first: bytes = b""
    tpot: bytes = b""
    num_input_tokens: bytes = b""
    num_output_tokens: bytes = b""
    gap_due: bytes = b""
    gaps: bytes = b""
    samples: list[TimingSample] = []
    agreement: Agreement | None = None


def floats(column: bytes) -> Array:
    return np.frombuffer(column, np.float64)


class Collector:
    """Folds finished exchanges into columns; `take` returns them and starts over."""

    MAX_FAILURES = 254

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._due, self._sent, self._done = array("d"), array("d"), array("d")
        self._failed = bytearray()
        self._failures: list[str] = []
        self._streams: list[TimedExchange] = []
        self._samples: list[TimingSample] = []
        self._agreement: Agreement | None = None
        # Bound once: `add` runs for every request.
        self._add_due, self._add_sent = self._due.append, self._sent.append
        self._add_done, self._add_failed = self._done.append, self._failed.append

    def add(self, exchange: TimedExchange) -> None:
        self._add_due(exchange.due)
        self._add_sent(exchange.sent)
        self._add_done(exchange.done)
        if exchange.failure is not None:
            self._add_failed(self._failure(exchange.failure))
            return
        self._add_failed(0)
        if exchange.expected:
            self._agreement = self._agreement or Agreement()
            self._agreement.count(exchange.answer, exchange.expected)
        if exchange.stream is not None:
            self._streams.append(exchange)
        if exchange.phases is not None:
            latency_s = exchange.done - exchange.due
            self._samples.append(TimingSample(latency_s, dict(exchange.phases)))

    def _failure(self, text: str) -> int:
        if text not in self._failures and len(self._failures) >= self.MAX_FAILURES:
            text = "other failures"
        if text not in self._failures:
            self._failures.append(text)
        return self._failures.index(text) + 1

    def take(self) -> ExchangeColumns:
        due, sent, done = (column.tobytes() for column in (self._due, self._sent, self._done))
        failed, samples = bytes(self._failed), self._samples
        columns = ExchangeColumns(due, sent, done, failed, self._failures, samples=samples)
        columns.agreement = self._agreement
        if self._streams:
            _add_streams(columns, self._streams)
        self._clear()
        return columns


def _add_streams(columns: ExchangeColumns, exchanges: list[TimedExchange]) -> None:
    due, first, tpot, gap_due, gaps = (array("d") for _ in range(5))
    num_in, num_out = array("q"), array("q")
    for exchange in exchanges:
        stream = exchange.stream
        if stream is None or not stream.times:
            continue
        times = stream.times
        due.append(exchange.due)
        first.append(times[0])
        num_later = stream.num_output_tokens - 1
        is_known = num_later > 0 and len(times) > 1
        tpot.append((times[-1] - times[0]) / num_later if is_known else float("nan"))
        num_in.append(stream.num_input_tokens)
        num_out.append(stream.num_output_tokens)
        gaps.extend(later - earlier for earlier, later in zip(times, times[1:], strict=False))
        gap_due.extend(exchange.due for _ in times[1:])
    columns.stream_due, columns.first, columns.tpot = due.tobytes(), first.tobytes(), tpot.tobytes()
    columns.num_input_tokens, columns.num_output_tokens = num_in.tobytes(), num_out.tobytes()
    columns.gap_due, columns.gaps = gap_due.tobytes(), gaps.tobytes()
