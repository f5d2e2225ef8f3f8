"""A rollout in a terminal."""

from penstock.api.shown import to_text
from penstock.operate.rollout_state import RolloutCheck, RolloutState
from penstock.report.rollout_tables import show_rollout

CHECKS = (
    RolloutCheck("ready", "holds", "the candidate is ready"),
    RolloutCheck(
        "p99 < 20ms", "broken", "3 of 10 requests\x1b[2J were late", 0.3, 0.01, 812.0, 400
    ),
)
STATE = RolloutState("m", "1", "2", "canary", 0.05, 0, (0.05, 0.5, 1.0), 0.0, checks=CHECKS)


def test_a_running_rollout_has_its_share_and_checks() -> None:
    text = to_text(show_rollout(STATE))
    assert "m: canary of version 2 beside 1: running" in text
    assert "share of the requests: 5 %; steps: 5 %, 50 %, 100 %" in text
    row = next(line for line in text.splitlines() if line.startswith("p99 < 20ms"))
    assert row.split()[3:] == ["broken", "30", "%", "1", "%", "812", "of", "400"]
    assert "\x1b" not in text


def test_an_ended_rollout_says_why() -> None:
    state = RolloutState(
        *("m", "1", "2", "shadow", 0.0, -1, (), 0.0), decision="rolled back", reason="it was slow"
    )
    assert to_text(show_rollout(state)).splitlines()[:2] == [
        "m: shadow of version 2 beside 1: rolled back",
        "it was slow",
    ]
