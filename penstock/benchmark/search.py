"""Which load to measure next. Pure: the caller asks `next` for a load until it returns None, and
passes the windows of each back to `add`.

`KneeSearch` looks for the concurrency beyond which only latency grows, `MaxRateSearch` for the
highest arrival rate that keeps an SLO.
"""

from __future__ import annotations

import math
from statistics import fmean

import msgspec

from penstock.benchmark.pacer import Closed, Flat, Load, Open
from penstock.benchmark.stats import Interval, Window, Windows, mean_interval, throughput_interval
from penstock.benchmark.steadiness import is_growing
from penstock.benchmark.verdicts import Verdicts, judge, of_each_request
from penstock.errors import ConfigError
from penstock.slo import Latency, Slo

MAX_CONCURRENCY = 1024
# No generator sends more; a search that gets here found no limit.
MAX_RATE = 1e6
# Throughput that grew by less over two doublings has reached its plateau.
MIN_GAIN = 0.05
PRECISION = 0.03
# The search gives up below this share of the first rate.
MIN_RATE_SHARE = 1 / 1024
# A rate with an uncertain verdict is measured once more, but only once.
MAX_TRIES = 2


class Knee(msgspec.Struct):
    """The point where two asymptotes meet: linear growth of throughput with concurrency, and its
    plateau. `concurrency` = plateau x latency at concurrency 1."""

    concurrency: float
    throughput: float
    alone_s: float
    # Index of the level measured nearest to it.
    level: int
    # Why it is only a lower bound; otherwise empty.
    reason: str = ""


class MaxRate(msgspec.Struct):
    """The highest arrival rate that keeps the SLO. NaN in `rate.low`: no rate clearly kept it; NaN
    in `rate.high`: none clearly missed it."""

    rate: Interval
    slo: str
    # Why an end is missing; otherwise empty.
    reason: str = ""


class KneeSearch:
    """Doubles the concurrency up to the plateau, then measures next to the knee."""

    def __init__(self, max_concurrency: int = MAX_CONCURRENCY) -> None:
        self._max_concurrency = max_concurrency
        # In measuring order.
        self._tried: list[int] = []
        self._throughputs: dict[int, float] = {}
        self._alone_s = math.nan
        self._is_through = False

    def next(self) -> Closed | None:
        if self._is_through:
            return None
        if not self._tried:
            return Closed(1)
        if not self._is_level() and self._highest < self._max_concurrency:
            return Closed(min(2 * self._highest, self._max_concurrency))
        near = self._near_knee()
        return Closed(near) if near is not None and near not in self._throughputs else None

    def add(self, load: Load, windows: Windows) -> None:
        assert isinstance(load, Closed)
        # Measuring next to the knee moves it a little; the search does not follow.
        self._is_through = bool(self._tried) and load.concurrency < self._highest
        self._tried.append(load.concurrency)
        self._throughputs[load.concurrency] = throughput_interval(windows).value
        if load.concurrency == 1:
            self._alone_s = mean_interval(windows).value

    @property
    def knee(self) -> Knee | None:
        """None before the first measurement, and if nothing was answered."""
        near = self._near_knee()
        if near is None:
            return None
        nearest = min(self._tried, key=lambda tried: (abs(tried - near), tried))
        level, plateau = self._tried.index(nearest), self._plateau()
        still = f"throughput still grew at concurrency {self._highest}"
        reason = "" if self._is_level() else still
        return Knee(plateau * self._alone_s, plateau, self._alone_s, level, reason)

    @property
    def _highest(self) -> int:
        return max(self._tried)

    def _is_level(self) -> bool:
        """Whether the last two doublings gained less than MIN_GAIN."""
        before = [tried for tried in self._tried if 4 * tried <= self._highest]
        if not before:
            return False
        last = max(self._throughputs[tried] for tried in self._tried if tried > max(before))
        return last <= self._throughputs[max(before)] * (1 + MIN_GAIN)

    def _plateau(self) -> float:
        """Return the mean of all throughputs close to the highest."""
        best = max(self._throughputs.values())
        level = [each for each in self._throughputs.values() if each >= best / (1 + MIN_GAIN)]
        return fmean(level)

    def _near_knee(self) -> int | None:
        if not self._tried or not self._plateau() * self._alone_s > 0:
            return None
        return min(max(1, round(self._plateau() * self._alone_s)), self._highest)


class MaxRateSearch:
    """Doubles the rate until the SLO is missed (or halves it until it is kept), then bisects the
    bracket on a logarithmic scale until it is narrow.

    Only terms on latency and goodput decide, as a low rate would miss any throughput target. A rate
    at which the queue grows counts as missed, even if latency was still within its limit."""

    def __init__(
        self,
        slo: Slo,
        start: float,
        *,
        max_rate: float = MAX_RATE,
        precision: float = PRECISION,
        arrivals: str = "poisson",
        cv: float = 1.0,
    ) -> None:
        deciding = of_each_request(slo)
        if not deciding.terms:
            raise ConfigError([f"'{slo}': the highest rate needs a limit on latency or goodput"])
        self._text = str(slo)
        self._slo = deciding
        self._start = min(start, max_rate)
        self._max_rate = max_rate
        self._precision = precision
        self._arrivals, self._cv = arrivals, cv
        # All windows of a rate, of both measurements if it was measured again.
        self._windows: dict[float, list[Window]] = {}
        self._num_tries: dict[float, int] = {}
        self._verdicts: dict[float, Verdicts] = {}
        # Rates at which the queue grew in every measurement.
        self._growing: set[float] = set()
        # The rate was so low that no request was due; lower ones would tell nothing either.
        self._is_silent = False

    def next(self) -> Open | None:
        rate = self._next_rate()
        return None if rate is None else Open(Flat(rate), self._arrivals, self._cv)

    def add(self, load: Load, windows: Windows) -> None:
        assert isinstance(load, Open) and isinstance(load.profile, Flat)
        rate = load.profile.rate
        if not any(window.num_due for window in windows):
            self._is_silent = True
            return
        known = self._windows.setdefault(rate, [])
        if not is_growing(windows):
            self._growing.discard(rate)
        elif not known:
            self._growing.add(rate)
        known.extend(windows)
        self._num_tries[rate] = self._num_tries.get(rate, 0) + 1
        self._verdicts[rate] = judge(known, self._slo)

    def _next_rate(self) -> float | None:
        if self._is_silent:
            return None
        if not self._verdicts:
            return self._start
        if (doubted := self._doubted()) is not None:
            return doubted
        low, high = self._low, self._high
        if high is None:
            highest = max(self._verdicts)
            return None if highest >= self._max_rate else min(2 * highest, self._max_rate)
        if low is None:
            return None if high / 2 < self._start * MIN_RATE_SHARE else high / 2
        if high > low * (1 + self._precision):
            return math.sqrt(low * high)
        # An end of a narrow bracket may have to be measured again.
        unsure = (each for each in (high, low) if self._is_close(each))
        return next((each for each in unsure if self._num_tries[each] < MAX_TRIES), None)

    def _doubted(self) -> float | None:
        """Return a rate that missed although a higher one kept: one of the two was an accident."""
        highest = max((rate for rate in self._verdicts if self._is_kept(rate)), default=0.0)
        odd = [rate for rate in self._verdicts if rate < highest and not self._is_kept(rate)]
        return min((rate for rate in odd if self._num_tries[rate] < MAX_TRIES), default=None)

    def _is_kept(self, rate: float) -> bool:
        is_kept = all(verdict.outcome == "kept" for verdict in self._verdicts[rate])
        return is_kept and rate not in self._growing

    def _is_close(self, rate: float) -> bool:
        """Whether the verdict is uncertain: a limit lies inside its confidence interval."""
        if self._is_kept(rate):
            return any(verdict.is_close for verdict in self._verdicts[rate])
        missed = [each for each in self._verdicts[rate] if each.outcome == "missed"]
        return all(verdict.is_close for verdict in missed)

    @property
    def _high(self) -> float | None:
        """The lowest rate that missed."""
        return min((rate for rate in self._verdicts if not self._is_kept(rate)), default=None)

    @property
    def _low(self) -> float | None:
        """The highest rate that kept, below all that missed."""
        end = self._high or math.inf
        kept = (rate for rate in self._verdicts if self._is_kept(rate) and rate < end)
        return max(kept, default=None)

    @property
    def max_rate(self) -> MaxRate | None:
        """None before the first measurement."""
        if not self._verdicts:
            return None
        low, high, reason = self._low, self._high, ""
        if low is None:
            value = math.nan
            reason = f"missed even at {min(self._verdicts):.4g}/s, the lowest rate that was tried"
        elif high is None:
            value = low
            reason = f"kept even at {max(self._verdicts):.4g}/s, the highest rate that was tried"
        else:
            value = self._crossing("value", low, high, low)
        rate = Interval(value, self._surely_kept(), self._surely_missed())
        return MaxRate(rate, self._text, reason)

    def _surely_kept(self) -> float:
        """Return the rate at which the upper end of the worst latency's interval crosses its limit,
        but never one inside the bracket, where nothing was measured. NaN: no rate clearly kept."""
        end = self._high or math.inf
        sure = (rate for rate in self._verdicts if rate < end and not self._is_close(rate))
        low = max(sure, default=math.nan)
        above = min((rate for rate in self._verdicts if rate > low), default=None)
        if above is None or self._low is None:
            return low
        return min(self._low, self._crossing("high", low, above, low))

    def _surely_missed(self) -> float:
        """The same for the lower end of the interval. NaN: no rate clearly missed."""
        begin = self._low or 0.0
        missed = (rate for rate in self._verdicts if rate > begin and not self._is_kept(rate))
        high = min((rate for rate in missed if not self._is_close(rate)), default=math.nan)
        below = max((rate for rate in self._verdicts if rate < high), default=None)
        if below is None or self._high is None:
            return high
        return max(self._high, self._crossing("low", below, high, high))

    def _crossing(self, of: str, low: float, high: float, otherwise: float) -> float:
        """Interpolate where the worst latency (its value, or an end of its interval) crosses its
        limit between two rates, on logarithmic scales."""
        below, above = self._excess(of, low), self._excess(of, high)
        if not -math.inf < below < 0 <= above < math.inf:
            return otherwise
        return low * math.exp(math.log(high / low) * -below / (above - below))

    def _excess(self, of: str, rate: float) -> float:
        """Return the log of the worst latency over its limit; NaN if no latency term decided."""
        worst = -math.inf
        for verdict in self._verdicts[rate]:
            if not isinstance(verdict.term, Latency):
                if verdict.outcome == "missed" or verdict.is_close:
                    return math.nan
            elif verdict.measured is not None:
                seconds: float = getattr(verdict.measured, of)
                excess = math.log(seconds / verdict.term.limit_s) if seconds > 0 else -math.inf
                worst = max(worst, excess)
        return worst
