"""Metrics of a model's own, as `triton_python_backend_utils` offers them.

`MetricBook` holds those of one worker and returns what has changed since it was asked last; the
core adds the workers up (`serving.custom_metrics`). Any thread may change a metric.
"""

from __future__ import annotations

import math
import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from itertools import pairwise

from penstock.backends.current import Current
from penstock.backends.triton_responses import TritonModelException
from penstock.wire.frames import MetricChange

# A label with a value of its own for each request would fill the memory of every scraper.
MAX_METRICS = 1000
MAX_TEXT_CHARS = 1000
# Prefixes of the server's own metrics, and of those with Triton's names.
OWN_PREFIXES = ("penstock_", "penstock:", "nv_")
FAMILY_NAME = re.compile(r"(?!__)[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
Labels = tuple[tuple[str, str], ...]


class MetricKind(IntEnum):
    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class MetricBook:
    """The metrics of one worker. `changed` is called by the thread that changes the first one after
    `take`, and `declared` by one that declares a metric, with no lock."""

    def __init__(self, changed: Callable[[], None], declared: Callable[[], None]) -> None:
        self.lock = threading.Lock()
        self._changed = changed
        self.declared = declared
        self._has_changes = False
        # By family: its kind and description.
        self._families: dict[str, tuple[MetricKind, str]] = {}
        self._metrics: dict[tuple[str, Labels], Metric] = {}

    def declare(self, family: str, kind: MetricKind, text: str) -> str:
        """Note a family and return its first description; TritonModelException if it is of another
        kind."""
        with self.lock:
            known, first = self._families.setdefault(family, (kind, text))
        if known is not kind:
            raise TritonModelException(
                f"metric family '{family}' is a {known.name} already; it cannot be a {kind.name}"
            )
        return first

    def open(self, made: Metric) -> Metric:
        """Return the metric of these labels, which is this one if there was none."""
        with self.lock:
            key = made.family, made.labels
            if key not in self._metrics and len(self._metrics) >= MAX_METRICS:
                raise TritonModelException(f"a model has at most {MAX_METRICS} metrics")
            metric = self._metrics.setdefault(key, made)
        if metric.bounds != made.bounds:
            raise TritonModelException(
                f"metric '{made.family}' with these labels has buckets {list(metric.bounds)}"
            )
        return metric

    def note(self) -> None:
        """Say that a metric has changed; without the lock."""
        if not self._has_changes:
            self._has_changes = True
            self._changed()

    def take(self) -> list[MetricChange]:
        """Return what has changed since the last call."""
        with self.lock:
            self._has_changes = False
            changed = [metric for metric in self._metrics.values() if metric.change is not None]
            return [metric.take() for metric in changed]


BOOK: Current[MetricBook] = Current("metric_book")


class MetricFamily:
    """Metrics of one name, which differ in their labels."""

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(
        self, name: str = "", description: str = "", kind: int = MetricKind.COUNTER
    ) -> None:
        # Outside of a worker, as in `penstock profile`, nothing shows them.
        self._book = book = BOOK.get() or MetricBook(_tell_nobody, _tell_nobody)
        if not FAMILY_NAME.fullmatch(name):
            raise TritonModelException(f"metric family '{name}': not a name of Prometheus")
        if name.startswith(OWN_PREFIXES):
            text = f"names that begin with {' or '.join(OWN_PREFIXES)} are the server's own"
            raise TritonModelException(f"metric family '{name}': {text}")
        _check_text(name, str(description))
        try:
            self._kind = MetricKind(kind)
        except ValueError:
            text = f"metric family '{name}': expected COUNTER, GAUGE or HISTOGRAM, got {kind!r}"
            raise TritonModelException(text) from None
        self._name = name
        self._text = book.declare(name, self._kind, str(description)[:MAX_TEXT_CHARS])

    def Metric(
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """Return the metric with these labels. A histogram needs upper bounds of buckets."""
        made = Metric(self._book, self._kind, self._name, self._text)
        made.labels = _checked_labels(self._name, labels or {}, self._kind)
        made.bounds = _checked_bounds(self._name, buckets, self._kind)
        made.begin()
        metric = self._book.open(made)
        if metric is made:
            self._book.declared()
        return metric


class Metric:
    """One counter, gauge or histogram. Made by its family."""

    def __init__(self, book: MetricBook, kind: MetricKind, family: str, text: str) -> None:
        self._book = book
        self._kind = kind
        self._text = text
        self.family = family
        self.labels: Labels = ()
        self.bounds: tuple[float, ...] = ()
        self._value = 0.0
        # What `take` returns; None if nothing has changed.
        self.change: MetricChange | None = None

    def begin(self) -> None:
        """Show the metric although nothing was counted."""
        self._changing().is_new = True

    def take(self) -> MetricChange:
        """Return the change; the book has the lock."""
        change, self.change = self.change, None
        assert change is not None
        return change

    def increment(self, value: float) -> None:
        """Add to a counter or gauge; gauges take negative values."""
        if self._kind is MetricKind.HISTOGRAM:
            raise self._unsupported("Increment")
        value = float(value)
        if self._kind is MetricKind.COUNTER and not value >= 0:
            raise TritonModelException(
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by "
                "non-negative values."
            )
        with self._book.lock:
            self._value += value
            self._changing().value += value
        self._book.note()

    def set(self, value: float) -> None:
        """Set a gauge."""
        if self._kind is not MetricKind.GAUGE:
            raise self._unsupported("Set")
        value = float(value)
        with self._book.lock:
            self._value = value
            change = self._changing()
            change.value, change.is_set = value, True
        self._book.note()

    def observe(self, value: float) -> None:
        """Count a value in a histogram."""
        if self._kind is not MetricKind.HISTOGRAM:
            raise self._unsupported("Observe")
        value = float(value)
        with self._book.lock:
            change = self._changing()
            change.counts[bisect_left(self.bounds, value)] += 1
            change.value += value
        self._book.note()

    def value(self) -> float:
        """Return what this worker has made of a counter or gauge; other instances count for
        themselves."""
        if self._kind is MetricKind.HISTOGRAM:
            raise self._unsupported("Value")
        return self._value

    def _changing(self) -> MetricChange:
        if self.change is None:
            kind, counts = self._kind.name.lower(), [0] * (len(self.bounds) + 1)
            if self._kind is not MetricKind.HISTOGRAM:
                counts = []
            described = self.family, self._text, kind, self.labels, self.bounds
            self.change = MetricChange(*described, counts=counts)
        return self.change

    def _unsupported(self, what: str) -> TritonModelException:
        return TritonModelException(
            f"TRITONSERVER_METRIC_KIND_{self._kind.name} does not support {what}"
        )


def _tell_nobody() -> None:
    """The metrics have no core."""


def _check_text(family: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"metric '{family}': {text[:100]!a} is no Unicode text: it has half a character"
        raise TritonModelException(message) from None


def _checked_labels(family: str, labels: Mapping[str, str], kind: MetricKind) -> Labels:
    for name, value in labels.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TritonModelException(
                f"metric '{family}': label {name!r} is {value!r}; expected strings"
            )
        _check_text(family, value)
        if not LABEL_NAME.fullmatch(name) or (name == "le" and kind is MetricKind.HISTOGRAM):
            raise TritonModelException(f"metric '{family}': '{name}' cannot be a label's name")
    if sum(map(len, labels.values())) > MAX_TEXT_CHARS:
        raise TritonModelException(f"metric '{family}': labels over {MAX_TEXT_CHARS} characters")
    return tuple(sorted(labels.items()))


def _checked_bounds(
    family: str, buckets: Sequence[float] | None, kind: MetricKind
) -> tuple[float, ...]:
    if kind is not MetricKind.HISTOGRAM:
        if buckets is not None:
            raise TritonModelException(f"metric '{family}': only histograms have buckets")
        return ()
    if buckets is None:
        raise TritonModelException(f"metric '{family}': a histogram needs buckets")
    bounds = tuple(float(each) for each in buckets)
    is_finite = all(map(math.isfinite, bounds))
    if not is_finite or any(low >= high for low, high in pairwise(bounds)):
        raise TritonModelException(f"metric '{family}': buckets {list(bounds)} do not ascend")
    return bounds
