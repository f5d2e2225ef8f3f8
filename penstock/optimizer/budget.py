"""Accuracy budget: `top1 drop <= 0.5 %`. One grammar for flag, plan and evidence.

    METRIC drop <= NUMBER [%] [relative]      a score where higher is better
    METRIC rise <= NUMBER [%] [relative]      an error, where lower is better

0.5 % of a score between 0 and 1 is in percentage points; "relative" is a share of the original's
score. Pure values with a parser and a `str` that parses to the same value.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from penstock.errors import ConfigError

# Metrics that Penstock computes itself; an evaluator's score may have any other name.
SHARES = ("top1", "top5", "agreement")
ERRORS = ("mae",)
FORM = "expected METRIC drop <= NUMBER [%] [relative], as in 'top1 drop <= 0.5 %'"


@dataclass(frozen=True, slots=True)
class Budget:
    # top1, top5, mae (see scores), "agreement", or "score" for an evaluator's.
    metric: str
    # In the unit of the score: 0.005 for 0.5 % of scores between 0 and 1.
    limit: float
    is_relative: bool = False
    # False: "drop", higher is better; True: "rise", lower is better.
    is_lower_better: bool = False

    def __str__(self) -> str:
        direction = "rise" if self.is_lower_better else "drop"
        relative = " relative" if self.is_relative else ""
        percent = f"{self.limit * 100:.12g}"
        is_exact = float(percent) / 100 == self.limit and "e" not in percent
        is_share = self.is_relative or self.metric in SHARES
        limit = f"{percent} %" if is_share and is_exact else repr(self.limit)
        return f"{self.metric} {direction} <= {limit}{relative}"


def default_budget(metric: str) -> Budget:
    """Return the default limit: one point for shares, one percent relative for other metrics."""
    if metric in SHARES:
        return Budget(metric, 0.01)
    return Budget(metric, 0.01, is_relative=True, is_lower_better=metric in ERRORS)


def parse(text: str) -> Budget:
    """Parse a budget; ConfigError says what was expected."""
    form = r"([^\s<>=]+)\s+([^\s<>=]+)\s*([<>=]+)\s*([^\s%]+)\s*(%?)\s*(.*)"
    match = re.fullmatch(form, text.strip())
    if match is None:
        raise ConfigError([f"'{text}': {FORM}"])
    metric, direction, sign, number, percent, rest = match.groups()
    problems = [
        *_metric_problems(metric, direction),
        *([] if sign == "<=" else [f"'{sign}' is not possible here; expected '<='"]),
        *([] if rest in ("", "relative") else [f"'{rest}' is too much; expected 'relative'"]),
    ]
    limit = _number(number, problems)
    if percent:
        limit /= 100
    budget = Budget(metric, limit, rest == "relative", direction == "rise")
    if limit > 1 and (budget.is_relative or metric in SHARES):
        # Such a gate would pass everything.
        problems.append(f"a limit of {limit * 100:g} % allows everything; was {number} % meant?")
    if problems:
        raise ConfigError([f"'{text}': {problem}" for problem in problems])
    return budget


def _metric_problems(metric: str, direction: str) -> list[str]:
    problems = []
    if re.fullmatch(r"[A-Za-z_][\w.@-]*", metric) is None:
        problems.append(f"'{metric}' is no name of a metric; expected one like top1 or f1")
    if direction not in ("drop", "rise"):
        problems.append(f"'{direction}' is no direction; expected drop or rise")
    if metric in SHARES and direction == "rise":
        problems.append(f"higher {metric} is better; expected '{metric} drop <= ...'")
    if metric in ERRORS and direction == "drop":
        problems.append(f"lower {metric} is better; expected '{metric} rise <= ...'")
    return problems


def _number(text: str, problems: list[str]) -> float:
    is_plain = re.fullmatch(r"[0-9]*\.?[0-9]+([eE][+-]?[0-9]+)?", text) is not None
    number = float(text) if is_plain else math.inf
    if not math.isfinite(number):
        problems.append(f"'{text}' is not a number from zero; expected one like 0.5 %")
        return 0.0
    return number
