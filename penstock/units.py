"""Human-readable numbers: three digits and a fitting unit. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.benchmark.stats import Interval

# Units in seconds.
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
# An unknown value.
UNKNOWN = "-"


def number(value: float) -> str:
    """Format with three significant digits; all digits before the point."""
    if math.isnan(value):
        return UNKNOWN
    if math.isinf(value):
        return "never"
    if value == 0:
        return "0"
    # Digits before the point, after rounding.
    whole = math.floor(math.log10(float(f"{abs(value):.2e}"))) + 1
    return f"{value:.{min(max(0, 3 - whole), 6)}f}"


def unit_of(durations_s: Iterable[float]) -> str:
    """Return the unit for durations of one column."""
    finite = [duration for duration in durations_s if math.isfinite(duration) and duration > 0]
    if not finite or (max(finite) >= 0.9995e-3 and min(finite) < 0.9995):
        return "ms"
    return "us" if max(finite) < 0.9995e-3 else "s"


def duration(seconds: float) -> str:
    """Format a duration: `812 us`, `12.1 ms`, `1.25 s`; "never" if infinite."""
    if not math.isfinite(seconds):
        return number(seconds)
    unit = unit_of([seconds])
    return f"{number(seconds / SECONDS[unit])} {unit}"


def in_unit(seconds: float, unit: str) -> str:
    return number(seconds / SECONDS[unit])


def range_of(interval: Interval, scale: float = 1.0) -> str:
    """Format a range: `11.8-12.6`; `> 11.8` without an upper bound; empty if unknown."""
    low, high = interval.low / scale, interval.high / scale
    if math.isfinite(high):
        return f"{number(low)}-{number(high)}" if math.isfinite(low) else f"< {number(high)}"
    return f"> {number(low)}" if 0 < low < math.inf else ""


def interval(value: Interval, scale: float = 1.0) -> str:
    """Format as `12.1 (11.8-12.6)`."""
    text = range_of(value, scale)
    return f"{number(value.value / scale)} ({text})" if text else number(value.value / scale)


def duration_interval(value: Interval) -> str:
    """Format as `12.1 ms (11.8-12.6)`: the range in the unit of the estimate."""
    if not math.isfinite(value.value):
        return duration(value.value)
    text = range_of(value, SECONDS[unit_of([value.value])])
    return f"{duration(value.value)} ({text})" if text else duration(value.value)


def size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1000:
            return f"{number(num_bytes)} {unit}"
        num_bytes /= 1024
    return f"{number(num_bytes)} TiB"


def count(amount: int, noun: str) -> str:
    """Format as `1 request`, `2 requests`."""
    return f"{amount} {noun}" if amount == 1 else f"{amount} {noun}s"


def quoted(names: Iterable[str]) -> str:
    """Format as `'a', 'b'`."""
    return ", ".join(f"'{name}'" for name in names)


def listed(words: Sequence[str]) -> str:
    """Format as `p90, p95 and p99.9`."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def share(part: float, whole: float) -> str:
    """Format as `0.02 %`, `3.1 %`; a share above 0 is never shown as 0 %."""
    if not whole:
        return UNKNOWN
    percent = 100 * part / whole
    if percent == 0 or percent >= 10:
        return f"{percent:.0f} %"
    return f"{percent:.1f} %" if percent >= 0.1 else f"{max(percent, 0.001):.3f} %"
