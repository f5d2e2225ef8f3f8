"""Options of a promotion: what a rollout needs, and what contradicts it."""

import pytest

from penstock.api.repo_options import PromoteOptions
from penstock.errors import CommandLineError
from penstock.wire.version_rows import PromoteBody


def test_options_are_the_fields_of_the_request() -> None:
    assert PromoteOptions().body("2") == PromoteBody("2")
    options = PromoteOptions(
        force="f", reason="r", canary="5 %", steps="10%, 50%,99.5%", header="X-Canary"
    )
    body = PromoteBody("2", "f", "r", "5 %", steps="10%, 50%,99.5%", header="X-Canary")
    assert options.body("2") == body
    assert options.rollout_flags == ["--canary", "--steps", "--header"]
    assert PromoteOptions(shadow=True).body("2") == PromoteBody("2", shadow=True)
    assert PromoteOptions(force="f", reason="r").rollout_flags == []
    both = PromoteOptions(canary="5%", shadow=True, header="A", hash_header="B", step_s=5.0)
    expected = PromoteBody("2", "", "", "5%", True, "", "A", "B", step_s=5.0)
    assert both.body("2") == expected


@pytest.mark.parametrize("share", ["5", "x", "%", "-5%", "0%", "100.1%", "5%%", "5%,6%", "1e1%"])
def test_a_share_is_a_percentage(share: str) -> None:
    with pytest.raises(CommandLineError, match="is not a share such as 5%"):
        PromoteOptions(canary=share).body("2")


@pytest.mark.parametrize("steps", ["5%,", ",", "5%,5%", "50%,5%", "fast"])
def test_steps_are_growing_shares(steps: str) -> None:
    with pytest.raises(CommandLineError, match="--steps"):
        PromoteOptions(canary="1%", steps=steps).body("2")


@pytest.mark.parametrize("steps", ["3%", "3%,25%"])
def test_steps_do_not_begin_below_the_canarys_share(steps: str) -> None:
    with pytest.raises(CommandLineError, match="begins below --canary 5%; give larger shares"):
        PromoteOptions(canary="5%", steps=steps).body("2")
    assert PromoteOptions(canary="5%", steps="5%,25%").body("2").steps == "5%,25%"


def test_every_problem_is_told_at_once() -> None:
    options = PromoteOptions(steps="x", agreement="y", header="a")
    with pytest.raises(CommandLineError) as caught:
        options.body("2")
    assert len(caught.value.problems) == 3
