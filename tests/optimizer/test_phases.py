"""The waterfall is the chosen candidate's own chain, from the original onwards."""

import math

import pytest
from optimizer import made_optimizations as made

from penstock.optimizer.candidates import Candidate, Step
from penstock.optimizer.phases import waterfall
from penstock.optimizer.results import Optimization, Phase

AS_SERVED = f"as served: {made.BATCHING} → {made.INSTANCES}"
STEPS = (made.EXPORT, made.FUSION, made.MINMAX)


def labels(phases: list[Phase]) -> list[str]:
    return [phase.label for phase in phases]


def rates(phases: list[Phase]) -> list[float]:
    return [phase.max_rate for phase in phases]


def test_the_chain_has_the_chosen_steps_and_no_others() -> None:
    """OpenVINO, BF16 and other calibrators were tried, too."""
    phases = waterfall(made.kept())
    assert labels(phases) == ["original", *map(str, STEPS), AS_SERVED]
    assert rates(phases) == [98.0, 137.0, 168.0, 255.0, 304.0]
    assert [phase.is_rate_measured for phase in phases] == [True, False, False, False, True]
    assert [phase.accuracy for phase in phases] == [0.912, 0.912, 0.912, 0.910, 0.910]


@pytest.mark.parametrize("num_steps", range(4))
def test_the_first_bar_is_the_original_whatever_was_chosen(num_steps: int) -> None:
    found = made.kept()
    found.chosen = Candidate(STEPS[:num_steps])
    phases = waterfall(found)
    assert labels(phases) == ["original", *map(str, STEPS[:num_steps])]
    assert phases[0].is_rate_measured and phases[0].p99_s == pytest.approx(
        0.41 if num_steps else 0.0118
    )
    # The last one is what was proven.
    assert phases[-1].max_rate == 304.0 and phases[-1].is_rate_measured


def test_a_model_on_the_way_that_was_served_has_measured_figures() -> None:
    found = made.kept()
    way = made.attempt(made.FUSED.then(made.BATCHING, made.INSTANCES), "batching", "slower", "")
    worse = made.attempt(made.FUSED.then(made.BATCHING), "batching", "slower", "")
    way.served, worse.served = made.served(0.018, 180.0, 300), made.served(0.3, 90.0, 300)
    found.tries += [worse, way]
    phase = waterfall(found)[2]
    assert (phase.max_rate, phase.p99_s, phase.is_rate_measured) == (180.0, 0.018, True)


def test_other_ways_to_serve_the_chosen_model_are_no_bar() -> None:
    found = made.kept()
    way = made.attempt(made.QUANTISED.then(made.INSTANCES), "batching", "slower", "")
    way.served = made.served(0.018, 250.0, 300)
    found.tries.append(way)
    assert rates(waterfall(found))[3:] == [255.0, 304.0]


def test_a_served_run_without_a_highest_rate_has_the_predicted_one_hatched() -> None:
    found = made.kept()
    assert found.before is not None
    found.before.max_rate = None
    first = waterfall(found)[0]
    assert (first.p99_s, first.max_rate) == (0.41, 98.0)
    assert first.is_measured and first.is_rate_predicted and not first.is_rate_measured
    assert first.cost_per_million == pytest.approx(made.PRICE / 3600 * 1e6 / 98.0)


def test_a_rate_that_was_looked_for_in_vain_is_not_replaced_by_a_prediction() -> None:
    last = waterfall(made.served_otherwise())[-1]
    assert math.isnan(last.max_rate) and last.is_measured and not last.is_rate_predicted


@pytest.mark.parametrize("unknown", [0, 1])
def test_a_step_of_which_nothing_is_known_is_merged_into_the_next(unknown: int) -> None:
    found = made.kept()
    keys = [Candidate(STEPS[: place + 1]).key for place in (unknown,)]
    found.tries = [each for each in found.tries if each.candidate.key not in keys]
    phases = waterfall(found)
    merged = f"{STEPS[unknown]} → {STEPS[unknown + 1]}"
    assert labels(phases)[unknown + 1] == merged and len(phases) == 4
    assert not any(math.isnan(phase.max_rate) for phase in phases)


def test_what_was_never_served_ends_with_a_prediction() -> None:
    phases = waterfall(made.interrupted())
    assert rates(phases) == [98.0, 137.0, 168.0]
    assert [phase.is_measured for phase in phases] == [True, False, False]


def test_nothing_is_shown_of_nothing() -> None:
    assert waterfall(made.nothing()) == []


def test_the_original_alone_is_one_bar() -> None:
    (phase,) = waterfall(made.already_met())
    assert (phase.label, phase.max_rate) == ("original", 240.0)


def test_without_judged_steps_the_score_is_that_of_the_held_out_examples() -> None:
    found = made.without_data()
    assert {phase.accuracy for phase in waterfall(found)} == {None}
    found.held_out = made.judgement(part="held out")
    assert [phase.accuracy for phase in waterfall(found)] == [0.912, 0.912, 0.912, 0.910]


class TestLanguageModels:
    """Every step is served, and has a bar."""

    def test_each_step_up_to_the_choice(self) -> None:
        phases = waterfall(made.text())
        assert labels(phases) == ["original", str(made.DTYPE), str(made.PACE)]
        assert rates(phases) == [1.5, 2.6, 3.0] and all(each.is_rate_measured for each in phases)

    def test_what_keeps_the_slo_at_no_rate_has_a_bar_of_nothing(self) -> None:
        found = made.text()
        assert found.before is not None
        found.before.max_rate = None
        assert rates(waterfall(found)) == [0.0, 2.6, 3.0]

    def test_a_way_that_was_never_served_is_merged(self) -> None:
        found: Optimization = made.text()
        found.chosen = Candidate((made.DTYPE, Step("sequences"), made.PACE))
        assert labels(waterfall(found))[2] == f"sequences → {made.PACE}"
