"""Which member of an ensemble is optimised."""

from dataclasses import replace
from pathlib import Path

import pytest
from ensemble_stage import ensemble, member, step

from penstock.config import Comparison
from penstock.errors import ConfigError
from penstock.optimizer import bottleneck
from penstock.optimizer.measured_ensemble import EnsembleFiles
from penstock.optimizer.results import MemberTime

FAST, SLOW = MemberTime(0.0, 0.001, 1.0), MemberTime(0.002, 0.001, 1.0)
TIMES = {"first": FAST, "second": SLOW}
FIRST = step("first", takes="IN", makes="between")
SECOND = step("second", takes="between", makes="OUT")


def files(*steps, **members):
    config = ensemble(*(steps or (FIRST, SECOND)))
    known = {"first": member("first"), "second": member("second"), **members}
    return EnsembleFiles(Path(), config, known)


def test_the_member_with_most_time_counts_its_queue() -> None:
    assert bottleneck.choose(files(), TIMES, "") == "second"
    assert bottleneck.share_text(TIMES, "second") == (
        "75 % of the members' time: 2.00 ms queue, 1.00 ms compute"
    )
    assert bottleneck.choose(files(), TIMES, "first") == "first"


def test_a_python_model_is_refused_with_what_to_do() -> None:
    found = files(second=member("second", backend="python"))
    with pytest.raises(ConfigError) as caught:
        bottleneck.choose(found, TIMES, "")
    first, second, third = caught.value.problems
    assert first.startswith("the bottleneck is 'second', a Python model")
    assert "instance_group" in first and "'first' has 25 %" in second
    assert third == "--member first optimises that member instead"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (replace(SECOND, fan_out=("between",)), "makes a request of each row"),
        (replace(SECOND, condition=(Comparison("between", ">", 0.0),)), "has a condition"),
        (replace(SECOND, version="3"), "names version 3"),
    ],
)
def test_steps_whose_inputs_are_not_captured(changed, problem) -> None:
    with pytest.raises(ConfigError, match=problem):
        bottleneck.choose(files(FIRST, changed), TIMES, "")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"backend": "ensemble"}, "an ensemble itself"),
        ({"backend": "llm"}, "a language model"),
        ({"is_decoupled": True}, "decoupled"),
    ],
)
def test_models_that_cannot_be_optimised(changes, problem) -> None:
    with pytest.raises(ConfigError, match=problem):
        bottleneck.choose(files(second=member("second", **changes)), TIMES, "")


def test_a_model_of_several_steps() -> None:
    twice = step("second", takes="IN", makes="more")
    with pytest.raises(ConfigError, match="which 2 steps run"):
        bottleneck.choose(files(FIRST, SECOND, twice), TIMES, "")


def test_a_member_of_a_member() -> None:
    inner = ensemble(step("deep", takes="IN", makes="OUT"), name="second")
    found = files(second=inner, deep=member("deep"))
    with pytest.raises(ConfigError, match="a step of the ensemble 'second'"):
        bottleneck.choose(found, {"first": FAST, "deep": SLOW}, "")


def test_an_unknown_member() -> None:
    with pytest.raises(ConfigError, match="'third' is not a member.*'first', 'second'"):
        bottleneck.choose(files(), TIMES, "third")
    with pytest.raises(ConfigError, match="no member has answered"):
        bottleneck.choose(files(), {}, "")
