"""Service-level objectives: one grammar for the command line, config.pbtxt, plans and evidence.

    p99 < 20ms, p50 ttft < 100ms, throughput >= 500/s, memory <= 2GiB at 200/s poisson

A metric may also precede its statistic: ttft p50 < 100ms.

Pure values with a parser that reports every problem and a `str` that parses back to the same. Knows
nothing of measuring.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from penstock.errors import ConfigError

STATISTICS = ("p50", "p90", "p95", "p99", "p99.9", "mean")
METRICS = ("latency", "ttft", "tpot", "itl")
ARRIVALS = ("poisson", "constant", "gamma")
# Units per second.
DURATIONS = {"s": 1.0, "ms": 1e3, "us": 1e6}
SIZES = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}
TERMS = "p50, p90, p95, p99, p99.9, mean, throughput, goodput, cost or memory"
# The comparison of each term, and an example.
FORMS = dict.fromkeys(STATISTICS, ("<", "p99 [metric] < 20ms")) | {
    "throughput": (">=", "throughput >= 500/s"),
    "goodput": (">=", "goodput >= 99 %"),
    "cost": ("<=", "cost <= 0.5 per million"),
    "memory": ("<=", "memory <= 2GiB"),
}
PER_SECOND = r"/\s*s"
# Metrics of a whole request. Intervals between tokens (itl) are not: a request has many.
REQUEST_METRICS = ("latency", "ttft", "tpot")
# An objective of 100 % leaves no error budget, which nothing could be compared with.
MAX_SHARE = 0.99999

Outcome = Literal["kept", "missed", "not measured"]


@dataclass(frozen=True, slots=True)
class Latency:
    """`p99 < 20ms`, `p50 ttft < 100ms`."""

    statistic: str
    limit_s: float
    metric: str = "latency"

    @property
    def name(self) -> str:
        return f"{self.statistic} {self.metric}"

    @property
    def is_tail(self) -> bool:
        return self.statistic not in ("p50", "mean")

    def is_kept_by(self, seconds: float) -> bool:
        return seconds < self.limit_s

    def __str__(self) -> str:
        name = self.statistic if self.metric == "latency" else self.name
        return f"{name} < {format_duration(self.limit_s)}"


@dataclass(frozen=True, slots=True)
class _Bound:
    """A limit on one figure, and how it is written."""

    limit: float
    name: ClassVar[str]
    comparison: ClassVar[str] = "<="
    unit: ClassVar[str] = ""

    def is_kept_by(self, value: float) -> bool:
        return value <= self.limit if self.comparison == "<=" else value >= self.limit

    def __str__(self) -> str:
        return f"{self.name} {self.comparison} {_number_text(self.limit)}{self.unit}"


class Throughput(_Bound):
    """`throughput >= 500/s`."""

    name, comparison, unit = "throughput", ">=", "/s"


class Goodput(_Bound):
    """`goodput >= 99 %`: the share of requests answered well and in time."""

    name, comparison, unit = "goodput", ">=", "%"


class Cost(_Bound):
    """`cost <= 0.5 per million` answers, in the currency of the given price."""

    name, unit = "cost", " per million"


class Memory(_Bound):
    """`memory <= 2GiB`."""

    name = "memory"

    def __str__(self) -> str:
        return f"memory <= {format_size(round(self.limit))}"


Term = Latency | Throughput | Goodput | Cost | Memory


@dataclass(frozen=True, slots=True)
class Objective:
    """The share of requests that must keep a limit on `metric`: 0.99 for `p99 < 20ms`. Without a
    limit, infinite, they must be answered."""

    metric: str
    share: float
    limit_s: float


@dataclass(frozen=True, slots=True)
class Rate:
    """The load at which the terms must hold. `cv`: coefficient of variation of gamma arrivals."""

    per_s: float
    arrivals: str = "poisson"
    cv: float | None = None

    def __str__(self) -> str:
        spread = "" if self.cv is None else f" {_number_text(self.cv)}"
        return f"{_number_text(self.per_s)}/s {self.arrivals}{spread}"


@dataclass(frozen=True, slots=True)
class Slo:
    """Terms that must all be kept, at a rate if one is given."""

    terms: tuple[Term, ...]
    rate: Rate | None = None

    @property
    def latency_s(self) -> float | None:
        """Latency limit of one request."""
        return self.limits_s.get("latency")

    @property
    def limits_s(self) -> dict[str, float]:
        """Limit of one request by metric: the tightest tail, or else mean or median."""
        return {metric: term.limit_s for metric, term in self._tightest.items()}

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """The objectives whose error budget can burn, one for each metric of a request. A goodput
        term is the share for all of them; a mean has no share."""
        goodput = [term.limit / 100 for term in self.terms if isinstance(term, Goodput)]
        found = []
        for metric in REQUEST_METRICS:
            term = self._tightest.get(metric)
            if term is not None and (goodput or term.statistic != "mean"):
                share = goodput[0] if goodput else round(float(term.statistic[1:]) / 100, 6)
                found.append(Objective(metric, min(share, MAX_SHARE), term.limit_s))
        if goodput and not found:
            found.append(Objective("latency", min(goodput[0], MAX_SHARE), math.inf))
        return tuple(found)

    @property
    def _tightest(self) -> dict[str, Latency]:
        terms = [term for term in self.terms if isinstance(term, Latency)]
        found: dict[str, Latency] = {}
        for term in sorted(terms, key=lambda term: (not term.is_tail, term.limit_s)):
            found.setdefault(term.metric, term)
        return found

    def __str__(self) -> str:
        text = ", ".join(map(str, self.terms))
        return text if self.rate is None else f"{text} at {self.rate}"


def cost_per_million(rate: float, price_per_hour: float) -> float:
    """Return the cost of a million answers at this rate; infinite at rate 0."""
    return price_per_hour / 3600 * 1e6 / rate if rate else math.inf


def parse(text: str) -> Slo:
    """Parse an SLO; ConfigError lists every problem."""
    problems: list[str] = []
    terms_text, at, rate_text = _split_rate(text)
    terms = list(_parse_terms(terms_text, problems))
    rate = _parse_rate(rate_text, problems) if at else None
    names = [term.name for term in terms]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"{name}: given {names.count(name)} times")
    if problems:
        raise ConfigError(problems)
    return Slo(tuple(terms), rate)


def _split_rate(text: str) -> tuple[str, bool, str]:
    """Split into terms, whether a rate is named, and the rate, which may follow any term."""
    head, at, tail = re.sub(r"\bat\b", "@", text, count=1).partition("@")
    rate, comma, more = tail.partition(",")
    return head + comma + more, bool(at), rate


def _parse_terms(text: str, problems: list[str]) -> Iterator[Term]:
    for part in text.split(","):
        words = part.strip()
        if not words:
            problems.append(f"a term is missing; expected {TERMS}")
            continue
        try:
            yield _parse_term(words)
        except ValueError as error:
            problems.append(f"'{words}': {error}")


def _parse_term(text: str) -> Term:
    match = re.fullmatch(r"([^<>=]*?)\s*([<>=]+)\s*([^<>=]*)", text)
    subject = (match[1] if match else text).split()
    if len(subject) == 2 and subject[0] in METRICS:
        # Accept "ttft p99" for "p99 ttft".
        subject.reverse()
    head = subject[0] if subject else ""
    if head not in FORMS:
        raise ValueError(f"'{head}' is not a term; expected {TERMS}")
    wanted, form = FORMS[head]
    if match is None:
        raise ValueError(f"nothing is compared; expected the form {form}")
    if match[2] != wanted:
        raise ValueError(f"'{match[2]}' is not possible here; expected '{wanted}', as in {form}")
    return _make_term(head, " ".join(subject[1:]), match[3])


def _make_term(head: str, metric: str, value: str) -> Term:
    if metric and head in STATISTICS and metric not in METRICS:
        raise ValueError(f"'{metric}' is not a metric; expected one of {', '.join(METRICS)}")
    if metric and head not in STATISTICS:
        raise ValueError(f"'{metric}' is too much after '{head}'")
    match head:
        case "throughput":
            return Throughput(_parse_with_suffix(value, PER_SECOND, "500/s"))
        case "goodput":
            percent = _parse_with_suffix(value, "%", "99 %")
            if percent > 100:
                raise ValueError(f"'{value}' is more than 100 %")
            return Goodput(percent)
        case "cost":
            return Cost(_parse_with_suffix(value, r"per\s+million", "0.5 per million"))
        case "memory":
            return Memory(parse_size(value))
    return Latency(head, parse_duration(value), metric or "latency")


def _parse_rate(text: str, problems: list[str]) -> Rate | None:
    try:
        per_s, *rest = text.split(maxsplit=1)
        words = rest[0].split() if rest else []
        return _make_rate(_parse_with_suffix(per_s, PER_SECOND, "500/s"), words)
    except ValueError as error:
        reason = str(error) if text.strip() else "a rate is missing; expected one like 200/s"
        problems.append(f"at: {reason}")
        return None


def _make_rate(per_s: float, words: list[str]) -> Rate:
    arrivals = words[0] if words else "poisson"
    if arrivals not in ARRIVALS:
        raise ValueError(f"'{arrivals}' is not known; expected one of {', '.join(ARRIVALS)}")
    if arrivals == "gamma":
        if len(words) != 2:
            raise ValueError("gamma needs one number, its coefficient of variation, as in gamma 3")
        return Rate(per_s, arrivals, _positive(words[1], "a coefficient of variation like 3"))
    if len(words) > 1:
        raise ValueError(f"'{' '.join(words[1:])}' is too much after '{arrivals}'")
    return Rate(per_s, arrivals)


def parse_duration(text: str) -> float:
    """Parse `250us`, `20ms` or `1.5 s` to seconds; ValueError says what was expected."""
    number, unit = _split_unit(text)
    if unit not in DURATIONS:
        raise ValueError(f"'{text}' is not a duration; expected one like 250us, 20ms or 1.5s")
    return _positive(number, "a duration like 20ms") / DURATIONS[unit]


def format_duration(seconds: float) -> str:
    """Return the shortest form that parses to exactly this."""
    for unit, per_s in DURATIONS.items():
        number = f"{seconds * per_s:.12g}"
        if seconds * per_s >= 1 and float(number) / per_s == seconds and "e" not in number:
            return f"{number}{unit}"
    return f"{_number_text(seconds)}s"


def parse_size(text: str) -> int:
    """Parse `512MiB` or `2 GB` to bytes; ValueError says what was expected."""
    number, unit = _split_unit(text)
    units = {name.lower(): size for name, size in SIZES.items()}
    if unit.lower() not in units:
        raise ValueError(f"'{text}' is not a size; expected one like 512MiB or 2GB")
    return max(1, round(_positive(number, "a size like 512MiB") * units[unit.lower()]))


def format_size(num_bytes: int) -> str:
    for unit, size in sorted(SIZES.items(), key=lambda item: -item[1]):
        if num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    raise AssertionError("every size is a number of bytes")


def _parse_with_suffix(text: str, suffix: str, example: str) -> float:
    match = re.fullmatch(rf"(\S*?)\s*{suffix}", text.strip())
    if match is None:
        raise ValueError(f"'{text.strip()}' does not fit; expected {example}")
    return _positive(match[1], example)


def _split_unit(text: str) -> tuple[str, str]:
    match = re.fullmatch(r"(.*?)\s*([a-zA-Z]*)", text.strip(), re.DOTALL)
    assert match is not None
    return match[1], match[2]


def _positive(text: str, example: str) -> float:
    """Parse a finite number above zero, written with ASCII digits."""
    is_plain = re.fullmatch(r"[0-9]*\.?[0-9]+([eE][+-]?[0-9]+)?", text) is not None
    number = float(text) if is_plain else 0.0
    if not 0 < number < math.inf:
        raise ValueError(f"'{text}' is not a number above zero; expected {example}")
    return number


def _number_text(number: float) -> str:
    return str(int(number)) if number == int(number) and number < 1e15 else repr(number)
