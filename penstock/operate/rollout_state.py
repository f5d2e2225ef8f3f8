"""A rollout as values: what the operator asked for, and how it stands. Pure.

`rollout_judge` decides, `rollouts` acts, and API and dashboard show `RolloutState` as it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock.errors import InvalidRequest

Mode = Literal["canary", "shadow"]
CheckState = Literal["open", "holds", "broken"]
Decision = Literal["running", "promoted", "rolled back", "stopped"]

STEPS = (0.05, 0.25, 0.5, 1.0)
STEP_S = 60.0
MIRRORED_PER_S = {"canary": 10.0, "shadow": 50.0}
HEADER = "Penstock-Version"
_HEADER = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """How a candidate gets its traffic. `steps` are the shares of a canary, and end with 1; a
    shadow with steps becomes a canary once its checks hold, and without steps it stays one."""

    mode: Mode = "canary"
    steps: tuple[float, ...] = STEPS
    # Shortest time of a step. Lower it only if the load has no daily pattern and no rare requests.
    step_s: float = STEP_S
    # Requests with this header get the version it names: candidate, stable, or a number.
    header: str = HEADER
    # Requests with equal values of this header get the same version; empty: each is on its own.
    hash_header: str = ""
    # Least share of rows on which both versions agree; None: from the evidence.
    agreement: float | None = None
    # Most requests that run in both versions. Lower it if the machine has no capacity to spare.
    mirrored_per_s: float = 10.0
    reason: str = ""
    # Why problems of the evidence are overridden.
    force: str = ""


@dataclass(frozen=True, slots=True)
class RolloutCheck:
    """One comparison. `live` and `promised` are shares of requests, or of rows; None: unknown yet.
    The check is broken when its e-value has reached `e_limit`."""

    name: str
    state: CheckState
    text: str
    live: float | None = None
    promised: float | None = None
    e_value: float = 1.0
    e_limit: float = 0.0


@dataclass(frozen=True, slots=True)
class RolloutState:
    model: str
    stable: str
    candidate: str
    mode: Mode
    # Share of the requests that the candidate answers.
    share: float
    # Position in `steps`; -1: a shadow answers nothing.
    step: int
    steps: tuple[float, ...]
    # Unix time.
    started: float
    decision: Decision = "running"
    # One sentence with numbers.
    reason: str = ""
    checks: tuple[RolloutCheck, ...] = ()
    # Counts behind the checks.
    figures: dict[str, float] = field(default_factory=dict)
    ended: float | None = None


def make_plan(given: Mapping[str, object], reason: str = "", force: str = "") -> RolloutPlan:
    """Return the plan of a promotion's options, named as the fields of `PromoteBody`: shares are
    texts like `5%`, and empty ones have defaults. InvalidRequest says what is wrong with them."""
    steps, canary, shadow = (
        str(given.get("steps") or ""),
        str(given.get("canary") or ""),
        bool(given.get("shadow")),
    )
    shares = [_share(text, "steps") for text in steps.split(",")] if steps.strip() else []
    if canary:
        first = _share(canary, "canary")
        # A first step may repeat the canary's share.
        if shares and min(shares) < first:
            problem = f"{steps.strip()!r} has a share below the canary's, {canary.strip()}"
            raise InvalidRequest(f"steps: {problem}; expected larger shares", "steps")
        shares = [first, *(each for each in shares or STEPS if each > first)]
    mode: Mode = "shadow" if shadow else "canary"
    if not shares and not shadow:
        shares = list(STEPS)
    if shares and shares[-1] != 1:
        shares.append(1.0)
    if shares != sorted(set(shares)):
        told = ", ".join(f"{each:.3g}" for each in shares)
        raise InvalidRequest(f"steps: {told} do not rise; expected shares like 5%,25%,50%", "steps")
    agreement = str(given.get("agreement") or "")
    plan = RolloutPlan(
        mode,
        tuple(shares),
        _number(given, "step_s", STEP_S),
        str(given.get("header") or HEADER),
        str(given.get("hash_header") or ""),
        _share(agreement, "agreement") if agreement else None,
        _number(given, "mirrored_per_s", MIRRORED_PER_S[mode]),
        reason,
        force,
    )
    _check(plan)
    return plan


def _number(given: Mapping[str, object], name: str, default: float) -> float:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InvalidRequest(f"{name}: {value!r}; expected a number above zero", name)
    return float(value)


def _check(plan: RolloutPlan) -> None:
    for name in ("header", "hash_header"):
        value = getattr(plan, name)
        if value and not _HEADER.fullmatch(value):
            text = f"{name}: {value!r} is not the name of a header; expected one like {HEADER}"
            raise InvalidRequest(text, name)
    if plan.agreement == 1:
        text = "agreement: '100%' leaves no rounding to a build; expected less, such as 99%"
        raise InvalidRequest(text, "agreement")


def _share(text: str, field_name: str) -> float:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*%\s*", text)
    share = float(match[1]) / 100 if match else 0.0
    if not 0 < share <= 1:
        problem = f"{text.strip()!r} is not a share; expected one like 5%, above 0 and up to 100%"
        raise InvalidRequest(f"{field_name}: {problem}", field_name)
    return share
