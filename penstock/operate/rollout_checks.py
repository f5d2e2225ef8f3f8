"""One check of a rollout: the share of a candidate's requests or rows that went wrong, second by
second, tested against a limit and against the stable version. Pure.

The hypothesis of each test: given what the stable version did in the same second, the candidate's
expected share is at most the limit or, if that is more, the share at TOLERATED times the stable
version's odds. So a disturbance of the whole machine does not count against the candidate.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from penstock.operate.rollout_state import CheckState, RolloutCheck
from penstock.operate.sequential import ExcessTest, PowerCheck, num_needed, share_interval

# Odds over the stable version's that are allowed: about twice its share, if that is small.
TOLERATED = 2.0
# Seconds of the stable version that are looked at: its own share of one second may be small by
# chance.
NUM_RECENT = 5
# A check holds when it would have found this share with this power: FOUND times the limit, or more.
FOUND, LEAST_FOUND, POWER = 5.0, 0.02, 0.9
# Seconds in which the limit itself must be kept before a check holds.
KEPT_S = 30
# The probability with which shown intervals cover the share.
CONFIDENCE = 0.95


class Totals(NamedTuple):
    """Events that went wrong, and all events, of the candidate and of the stable version."""

    wrong: float
    total: int
    stable_wrong: float = 0.0
    stable_total: int = 0

    def plus(self, other: Totals) -> Totals:
        return Totals(
            self.wrong + other.wrong,
            self.total + other.total,
            self.stable_wrong + other.stable_wrong,
            self.stable_total + other.stable_total,
        )

    def since(self, before: Totals) -> Totals:
        return Totals(
            self.wrong - before.wrong,
            self.total - before.total,
            self.stable_wrong - before.stable_wrong,
            self.stable_total - before.stable_total,
        )


NOTHING = Totals(0.0, 0)


@dataclass(frozen=True, slots=True)
class CheckText:
    """Words of a check: `37 of 410 requests were late`."""

    name: str
    # Plural nouns of events, and what is wrong with them.
    events: str
    wrong: str
    # The promise, and where it comes from.
    promise: str = ""
    # Whether a step needs it: some cannot be measured under every load.
    is_required: bool = True


class ShareCheck:
    def __init__(self, text: CheckText, limit: float, alpha: float) -> None:
        self.text = text
        self.limit = limit
        self.test = ExcessTest(alpha)
        self._found = min(max(FOUND * limit, LEAST_FOUND), (1 + limit) / 2)
        self._seen = NOTHING
        self._lately: deque[Totals] = deque(maxlen=KEPT_S)
        self._recent: deque[Totals] = deque(maxlen=NUM_RECENT)
        self._power = PowerCheck(self.test, self._found)

    def begin_step(self) -> None:
        """Bet and require the power anew: the candidate gets more load from now on."""
        self.test.invest()
        self._power = PowerCheck(self.test, self._found)

    def add(self, second: Totals) -> None:
        """Add what was counted in one second."""
        self._recent.append(second)
        self._lately.append(second)
        self._seen = self._seen.plus(second)
        if second.total <= 0:
            return
        stable = self._stable_share(second)
        allowed = max(self.limit, TOLERATED * stable / (1 + (TOLERATED - 1) * stable))
        # Late requests end seconds after those that they came with, perhaps alone.
        num_allowed = allowed * max(each.total for each in self._recent)
        self.test.add(second.wrong / num_allowed)
        self._power.add(second.total, num_allowed)

    def _stable_share(self, second: Totals) -> float:
        total = sum(each.stable_total for each in self._recent)
        recent = sum(each.stable_wrong for each in self._recent) / total if total else 0.0
        now = second.stable_wrong / second.stable_total if second.stable_total else 0.0
        return max(recent, now)

    @property
    def state(self) -> CheckState:
        if self.test.is_rejected:
            return "broken"
        is_sure = self._power.power >= POWER and self.test.e_value < 1
        return "holds" if self._is_kept and is_sure else "open"

    @property
    def allows_more(self) -> bool:
        """Whether the candidate may get more load. A check that no step needs must not have its
        limit missed lately: such a load may be too small to break it, or to measure it at all."""
        return self.state == "holds" or (not self.text.is_required and self._is_kept)

    @property
    def _is_kept(self) -> bool:
        """Whether the limit is kept lately, whatever the stable version does."""
        total = sum(each.total for each in self._lately)
        return sum(each.wrong for each in self._lately) <= self.limit * total

    @property
    def live(self) -> float | None:
        return self._seen.wrong / self._seen.total if self._seen.total else None

    def report(self) -> RolloutCheck:
        limit = round(1 / self.test.alpha, 1)
        e_value = float(f"{self.test.e_value:.3g}")
        named = self.text.name, self.state, self._describe()
        return RolloutCheck(*named, self.live, self.limit, e_value, limit)

    def _describe(self) -> str:
        text, seen = self.text, self._seen
        if not seen.total:
            return f"no {text.events} compared yet"
        low, high = share_interval(seen.wrong, seen.total, 1 - CONFIDENCE)
        told = (
            f"{_count(seen.wrong)} of {seen.total:,} {text.events} {text.wrong}: "
            f"{percent(seen.wrong / seen.total)} ({percent(low)} to {percent(high)}), "
            f"{percent(self.limit)} allowed{text.promise}"
        )
        if seen.stable_total:
            told += f"; stable version: {percent(seen.stable_wrong / seen.stable_total)}"
        return told + self._conclusion()

    def _conclusion(self) -> str:
        e_value, limit = self.test.e_value, 1 / self.test.alpha
        match self.state:
            case "broken":
                return f"; e-value {self.test.highest:.3g} reached {limit:.0f}"
            case "holds":
                return f"; {percent(self._found)} would have been found"
        wrong = sum(each.stable_wrong for each in self._recent)
        total = sum(each.stable_total for each in self._recent)
        if wrong > self.limit * total:
            return "; the stable version misses it too"
        if not self._is_kept or (e_value >= 1 and self.test.num_observations > 1):
            return f"; e-value {e_value:.3g}, broken at {limit:.0f}"
        needed = num_needed(self.limit, self._found, self.test.alpha)
        return (
            f"; {percent(self._found)} would have been found with a probability of "
            f"{percent(self._power.power)}, {percent(POWER)} is needed (at least {needed:,} "
            f"{self.text.events})"
        )


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
