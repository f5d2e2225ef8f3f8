"""Decides what becomes of a rollout, second by second: wait, give the candidate more traffic,
promote it, or roll it back. Pure: counts and time are arguments.

Every decision comes with one sentence with numbers. Without traffic nothing is decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.operate.rollout_checks import NOTHING, CheckText, ShareCheck, Totals
from penstock.operate.rollout_measures import (
    BeyondQuantile,
    CostlySeconds,
    Measure,
    RolloutReading,
    disagreements,
    failures,
    lateness,
)
from penstock.operate.rollout_promise import LatencyPromise, RolloutPromise
from penstock.operate.rollout_state import RolloutCheck, RolloutPlan
from penstock.serving.split_counts import LATENCY, LENGTH, TPOT, TTFT

# Probability that a candidate that keeps its promise is ever rolled back, over all its checks.
ALPHA = 0.01
# Without an SLO, a value is slow if it exceeds the stable version's quantile with this share above
# it, and at most SLOW_ALLOWED may be slow.
SLOW, SLOW_ALLOWED = 0.05, 0.1
# Share of generated texts that may be longer than half of the stable version's, or shorter.
LENGTH_ALLOWED = 0.65
# In most seconds a row of the candidate must not compute longer than allowed.
COSTLY_ALLOWED = 0.5
# A candidate that is not ready for so long is rolled back, as is one whose workers have died so
# much more often than the stable version's.
NOT_READY_S, MAX_DEATHS = 5.0, 2
# Seconds without a request after which the state says so.
QUIET_S = 10.0

Action = Literal["wait", "step", "promote", "roll back"]


@dataclass(frozen=True, slots=True)
class RolloutVerdict:
    action: Action
    reason: str
    checks: tuple[RolloutCheck, ...]


@dataclass(slots=True, eq=False)
class WatchedCheck:
    check: ShareCheck
    measure: Measure
    last: Totals = NOTHING

    def add(self, reading: RolloutReading) -> None:
        totals = self.measure(reading)
        self.check.add(totals.since(self.last))
        self.last = totals


class RolloutJudge:
    """`step` is the index of the current share in the plan's steps; -1: a shadow."""

    def __init__(self, plan: RolloutPlan, promise: RolloutPromise, now: float) -> None:
        self._plan = plan
        self.step = -1 if plan.mode == "shadow" else 0
        self._cost = None if promise.max_cost is None else CostlySeconds(promise.max_cost)
        self._watched = self._make_checks(promise)
        self._step_began = self._heard_at = now
        self._num_heard = 0
        self._not_ready_since: float | None = None
        self._quiet_text = ""
        self._ready = RolloutCheck("ready", "open", "not looked at yet")

    @property
    def share(self) -> float:
        """Share of the requests that the candidate is to answer."""
        return 0.0 if self.step < 0 else self._plan.steps[self.step]

    def tick(self, reading: RolloutReading, now: float) -> RolloutVerdict:
        """Decide by all that was counted until now; call it about once a second."""
        self._note_traffic(reading, now)
        self._ready = self._check_ready(reading, now)
        for each in self._watched:
            each.add(reading)
        checks = (self._ready, *(each.check.report() for each in self._watched))
        broken = [each for each in checks if each.state == "broken"]
        if broken:
            reason = "; ".join(f"{each.name}: {each.text}" for each in broken)
            return RolloutVerdict("roll back", reason, checks)
        if self._quiet_text:
            return RolloutVerdict("wait", self._quiet_text, checks)
        return self._advance(checks, now)

    def _advance(self, checks: tuple[RolloutCheck, ...], now: float) -> RolloutVerdict:
        left_s = self._step_began + self._plan.step_s - now
        waiting = [each.check.report() for each in self._watched if not each.check.allows_more]
        if waiting:
            reason = f"waiting for {waiting[0].name}: {waiting[0].text}"
            return RolloutVerdict("wait", reason, checks)
        if left_s > 0:
            reason = f"all checks hold; this step lasts {left_s:.0f} s longer"
            return RolloutVerdict("wait", reason, checks)
        steps, following = self._plan.steps, self.step + 1
        if not steps:
            reason = "all checks hold; promote it, or start a canary, when you like"
            return RolloutVerdict("wait", reason, checks)
        told = "; ".join(f"{each.check.text.name}: {_short(each.check)}" for each in self._watched)
        if following == len(steps) or steps[following] >= 1:
            return RolloutVerdict("promote", f"all checks hold ({told})", checks)
        self.step, self._step_began = following, now
        for each in self._watched:
            each.check.begin_step()
        return RolloutVerdict("step", f"all checks hold ({told})", checks)

    def _note_traffic(self, reading: RolloutReading, now: float) -> None:
        counts = reading.counts
        num_heard = counts.candidate.num_requests + counts.num_compared
        if num_heard > self._num_heard:
            self._num_heard, self._heard_at = num_heard, now
        quiet_s = now - self._heard_at
        self._quiet_text = ""
        if quiet_s >= QUIET_S:
            self._quiet_text = (
                f"no request has reached the candidate for {quiet_s:.0f} s, so nothing is decided"
            )

    def _check_ready(self, reading: RolloutReading, now: float) -> RolloutCheck:
        num_deaths = reading.candidate_deaths - reading.stable_deaths
        fallbacks = reading.counts.num_fallbacks
        answered = f"; the stable version answered {fallbacks:,} of its requests"
        told = answered if fallbacks else ""
        if num_deaths > MAX_DEATHS:
            died = f"workers died {reading.candidate_deaths} times, those of the stable version "
            text = f"{died}{reading.stable_deaths} times{told}"
            return RolloutCheck("ready", "broken", text, float(num_deaths), float(MAX_DEATHS))
        if reading.is_ready:
            self._not_ready_since = None
            return RolloutCheck("ready", "holds", f"the candidate is ready{told}")
        since = now if self._not_ready_since is None else self._not_ready_since
        self._not_ready_since = since
        why = f" ({reading.reason})" if reading.reason else ""
        text = f"the candidate has not been ready for {now - since:.0f} s{why}{told}"
        return RolloutCheck("ready", "broken" if now - since >= NOT_READY_S else "open", text)

    @property
    def cost_ratio(self) -> float | None:
        """Compute time of a row over the stable version's."""
        return None if self._cost is None else self._cost.ratio

    # The checks.

    def _make_checks(self, promise: RolloutPromise) -> list[WatchedCheck]:
        specs: list[tuple[CheckText, float, Measure]] = []
        for index, each in enumerate(promise.latencies):
            specs.append(_latency_spec(each, index, promise.source))
        measured = {each.metric for each in promise.latencies}
        wanted = (TTFT, TPOT) if promise.is_text else (LATENCY,)
        for metric in wanted if not measured else ():
            specs.append(_slow_spec(metric))
        text = CheckText("errors", "requests", "failed")
        specs.append((text, promise.max_failed, failures))
        if promise.max_disagreeing is not None:
            source = f" by {promise.agreement_source}" if promise.agreement_source else ""
            events = "texts" if promise.is_text else "rows"
            text = CheckText("agreement", events, "disagree", source)
            specs.append((text, promise.max_disagreeing, disagreements))
        if promise.is_text:
            for is_above in (True, False):
                specs.append(_length_spec(is_above))
        if self._cost is not None:
            allowed = f" ({promise.max_cost:.3g} x {promise.cost_source})"
            text = CheckText("cost", "seconds", "were too costly", allowed, is_required=False)
            specs.append((text, COSTLY_ALLOWED, self._cost))
        alpha = ALPHA / len(specs)
        return [
            WatchedCheck(ShareCheck(text, limit, alpha), measure) for text, limit, measure in specs
        ]


def _latency_spec(
    promise: LatencyPromise, index: int, source: str
) -> tuple[CheckText, float, Measure]:
    told = f" by {promise.text} ({source})"
    share = promise.share
    if share is None:
        # Values of one request say nothing of a mean. It is at least the median, as waits are
        # skewed, so this finds less than the mean promises, but nothing that it does not.
        share, told = 0.5, f"{told}, checked as a median"
    text = CheckText(promise.text, "requests", "were late", told)
    return text, share, lateness(promise.metric, index)


def _slow_spec(metric: str) -> tuple[CheckText, float, Measure]:
    told = f", slower than {100 * (1 - SLOW):.0f} % of the stable version's"
    text = CheckText(metric, "requests", "were slow", told)
    return text, SLOW_ALLOWED, BeyondQuantile(metric, SLOW)


def _length_spec(is_above: bool) -> tuple[CheckText, float, Measure]:
    word = "longer" if is_above else "shorter"
    told = ", compared with the median of the stable version"
    # Shares near the limit show only under a steady load, so a step does not wait for them.
    text = CheckText(f"{word} texts", "texts", f"were {word}", told, is_required=False)
    return text, LENGTH_ALLOWED, BeyondQuantile(LENGTH, 0.5, is_above=is_above)


def _short(check: ShareCheck) -> str:
    live = check.live
    told = "not measured" if live is None else f"{100 * live:.3g} %"
    return f"{told} {check.text.wrong}, {100 * check.limit:.3g} % allowed"
