"""A rollout in a terminal: its decision, its share, and each check with its figures."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from penstock import units
from penstock.operate.rollout_state import RolloutCheck, RolloutState
from penstock.report.tables import figure_table, section
from penstock.report.version_tables import printable

DECISION_STYLES = {"promoted": "bold green", "rolled back": "bold red", "stopped": "yellow"}
STATE_STYLES = {"holds": "green", "broken": "red"}


def show_rollout(state: RolloutState) -> RenderableType:
    what = f"{state.model}: {state.mode} of version {state.candidate} beside {state.stable}"
    parts: list[RenderableType] = [
        Text(f"{what}: {state.decision}", DECISION_STYLES.get(state.decision, "bold")),
        Text(printable(state.reason)),
    ]
    if state.decision == "running":
        parts.insert(1, Text(_steps(state)))
    if state.checks:
        table = figure_table("check", "state", "live", "allowed", "e-value", words=("state",))
        for check in state.checks:
            table.add_row(*_cells(check))
        parts += [section("Checks"), table]
        parts += [Text(printable(f"{each.name}: {each.text}"), "dim") for each in state.checks]
    return Group(*parts)


def _steps(state: RolloutState) -> str:
    steps = ", ".join(_percent(each) for each in state.steps) or "none"
    return f"share of the requests: {_percent(state.share)}; steps: {steps}"


def _cells(check: RolloutCheck) -> list[Text]:
    has_test = check.e_limit > 0
    e_value = f"{units.number(check.e_value)} of {units.number(check.e_limit)}" if has_test else ""
    return [
        Text(check.name),
        Text(check.state, STATE_STYLES.get(check.state, "dim")),
        Text("" if check.live is None or not has_test else _percent(check.live)),
        Text("" if check.promised is None or not has_test else _percent(check.promised)),
        Text(e_value),
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
