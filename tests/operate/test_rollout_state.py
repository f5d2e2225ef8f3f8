"""Plans from the options of a promotion."""

import pytest

from penstock.errors import InvalidRequest
from penstock.operate.rollout_state import STEPS, RolloutPlan, make_plan


def plan(**options: object) -> RolloutPlan:
    return make_plan(options)


def test_a_canary_begins_with_its_share_and_goes_on_with_larger_ones() -> None:
    assert plan(canary="5%").steps == STEPS
    assert plan(canary="10 %").steps == (0.1, 0.25, 0.5, 1.0)
    assert plan(canary="1%", steps="2%, 50%").steps == (0.01, 0.02, 0.5, 1.0)
    assert plan(canary="5%", steps="5%,50%").steps == (0.05, 0.5, 1.0)
    assert plan(steps="20%,100%").steps == (0.2, 1.0)
    assert plan(header="X-Version").steps == STEPS
    assert plan(canary="100%").steps == (1.0,)


def test_a_shadow_stays_one_unless_it_has_steps() -> None:
    shadow = plan(shadow=True)
    assert (shadow.mode, shadow.steps) == ("shadow", ())
    both = plan(canary="50%", shadow=True)
    assert (both.mode, both.steps) == ("shadow", (0.5, 1.0))
    assert shadow.mirrored_per_s > plan(canary="5%").mirrored_per_s


def test_empty_options_are_defaults() -> None:
    made = make_plan(
        {"canary": "5%", "header": "", "hash_header": "X-User", "step_s": None, "agreement": "90%"},
        "a reason",
        "a force",
    )
    assert (made.header, made.step_s) == (RolloutPlan().header, RolloutPlan().step_s)
    assert (made.hash_header, made.agreement) == ("X-User", 0.9)
    assert (made.reason, made.force) == ("a reason", "a force")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"canary": "5"}, "canary: '5' is not a share; expected one like 5%"),
        ({"canary": "0%"}, "canary: '0%' is not a share"),
        ({"canary": "101%"}, "canary: '101%' is not a share"),
        ({"steps": "50%,5%"}, "steps: 0.5, 0.05, 1 do not rise"),
        (
            {"canary": "5%", "steps": "3%"},
            "steps: '3%' has a share below the canary's, 5%; expected larger shares",
        ),
        ({"canary": "5%", "steps": "3%,50%"}, "steps: '3%,50%' has a share below the canary's"),
        ({"canary": "5%", "steps": "50%,3%"}, "steps: '50%,3%' has a share below the canary's"),
        ({"canary": "5%", "header": "a b"}, "header: 'a b' is not the name of a header"),
        ({"canary": "5%", "step_s": -1}, "step_s: -1; expected a number above zero"),
        ({"canary": "5%", "step_s": 0}, "step_s: 0; expected a number above zero"),
        ({"mirrored_per_s": 0.0}, "mirrored_per_s: 0.0; expected a number above zero"),
        ({"canary": "5%", "agreement": "100%"}, "agreement: '100%' leaves no rounding"),
        ({"canary": "5%", "agreement": "0.9"}, "agreement: '0.9' is not a share"),
        ({"canary": "5%", "mirrored_per_s": -1.0}, "mirrored_per_s: -1.0; expected a number"),
    ],
)
def test_wrong_options_are_explained(options: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text.replace("(", r"\(")):
        make_plan(options)
