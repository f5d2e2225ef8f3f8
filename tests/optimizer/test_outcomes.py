"""What became of candidates and of the run: served ones beside the chosen one, refused ones."""

from collections.abc import Mapping

import msgspec
import pytest
from optimizer import made_optimizations as made

from penstock.errors import BackendFailed, PenstockError
from penstock.optimizer import outcomes
from penstock.optimizer.candidates import Candidate, Skip, Step
from penstock.optimizer.findings import Findings
from penstock.optimizer.results import Optimization, ServedMeasurement, Try
from penstock.optimizer.time_plan import CutOff, TookTooLong

CHOSEN = made.QUANTISED.then(made.BATCHING)
OTHER = made.FUSED.then(made.BATCHING)


def served(
    goodput: float = 1.0, p99_s: float = 0.0118, rate: float | None = None
) -> ServedMeasurement:
    found = made.served(p99_s, 300.0 if rate is None else rate, 212)
    found.max_rate = None if rate is None else found.max_rate
    return msgspec.structs.replace(found, goodput=goodput)


def served_try(candidate: Candidate, figures: ServedMeasurement) -> Try:
    return Try(candidate, "batching", "equal", "served", served=figures)


def settled(
    one: ServedMeasurement,
    chosen: ServedMeasurement,
    proofs: Mapping[str, ServedMeasurement] | None = None,
) -> tuple[str, str]:
    """Outcome and reason of another candidate."""
    tries = [served_try(OTHER, one), served_try(CHOSEN, chosen)]
    outcomes.settle_served(tries, CHOSEN, proofs or {})
    assert tries[1].outcome == "kept"
    return tries[0].outcome, tries[0].reason


class TestServed:
    @pytest.mark.parametrize(("goodput", "text"), [(0.92, "92 %"), (0.87, "87 %")])
    def test_fewer_in_time_is_no_equal(self, goodput: float, text: str) -> None:
        found = settled(served(goodput, 0.03), served(1.0))
        assert found == ("slower", f"{text} in time, the chosen one 100 %")

    def test_a_p99_that_is_not_known_is_not_shown_as_a_number(self) -> None:
        text = outcomes.against(served(0.0, 0.6), served(0.0, float("nan")))
        assert text == "p99 600 ms, the chosen one unknown (too few answers)"

    def test_an_infinite_p99_is_said_in_words(self) -> None:
        text = outcomes.against(served(0.0, 0.6), served(0.0, float("inf")))
        assert text == "p99 600 ms, the chosen one infinite (too many requests failed)"

    def test_less_than_the_noise_is_equal(self) -> None:
        outcome, reason = settled(served(p99_s=0.0119), served())
        assert outcome == "equal"
        assert reason == "p99 11.9 ms, the chosen one 11.8 ms: no difference beyond the noise"

    def test_a_higher_p99_or_a_lower_rate_is_slower(self) -> None:
        found = settled(served(p99_s=0.0180), served())
        assert found == ("slower", "p99 18 ms, the chosen one 11.8 ms")
        found = settled(served(rate=200.0), served(rate=300.0))
        assert found == ("slower", "up to 200/s, the chosen one 300/s")

    def test_the_reason_is_the_figure_that_decided(self) -> None:
        """Both miss the SLO with nearly the same share in time, so the rate decides."""
        found = settled(served(0.97, 0.03, rate=200.0), served(0.93, 0.03, rate=300.0))
        assert found == ("slower", "up to 200/s, the chosen one 300/s")

    def test_missing_the_slo_is_said(self) -> None:
        outcome, reason = settled(served(1.0, 0.03), served())
        assert (outcome, reason) == ("slower", "misses the SLO, unlike the chosen one")

    def test_proofs_are_compared_with_proofs(self) -> None:
        """In the search it was ahead; both were proven."""
        better, worse = served(1.0), served(0.7, 0.03)
        assert settled(better, worse)[0] == "equal"
        assert settled(better, worse)[1].endswith("ahead when it was tried, not proven")
        found = settled(better, worse, {OTHER.key: worse, CHOSEN.key: better})
        assert found == ("slower", "70 % in time, the chosen one 100 %")
        # Only the chosen one was proven, and did better then.
        assert settled(served(0.9, 0.03), worse, {CHOSEN.key: better})[0] == "slower"

    def test_originals_and_rejected_ones_stay_as_they_are(self) -> None:
        tries = [served_try(made.ORIGINAL, served(0.1)), served_try(OTHER, served(0.1))]
        tries[0].outcome, tries[1].outcome = "kept", "rejected"
        outcomes.settle_served([*tries, served_try(CHOSEN, served())], CHOSEN, {})
        assert [each.outcome for each in tries] == ["kept", "rejected"]

    def test_a_step_of_the_chosen_one_is_no_loser(self) -> None:
        """Its model was predicted behind another, which did worse when it was served."""
        model = Try(made.QUANTISED, "quantise", "slower", "about 2,395/s predicted")
        other = Try(made.FUSED.then(made.ENTROPY), "quantise", "slower", "about 2,000/s predicted")
        outcomes.settle_served([model, other, served_try(CHOSEN, served())], CHOSEN, {})
        assert (model.outcome, other.outcome) == ("kept", "slower")
        reason = "part of the chosen one; when it was tried: about 2,395/s predicted"
        assert model.reason == reason


class TestRefused:
    def test_a_model_is_rejected_with_all_ways_to_serve_it(self) -> None:
        tries = made.tries()
        refused = made.judgement(0.03, 0.04, part="held out")
        keys = {made.QUANTISED.key: refused}
        (note,) = outcomes.mark_refused(tries, keys)
        assert note == f"{made.QUANTISED} was refused on the held-out examples: {refused.text}"
        rejected = [each for each in tries[8:] if each.outcome == "rejected"]
        assert [each.candidate.model for each in rejected] == [made.QUANTISED] * 4
        assert rejected[0].refusal is refused and rejected[0].accuracy is not None
        assert rejected[1].reason == "its model was refused on the held-out examples"
        # Others are not.
        assert tries[3].outcome == "kept"

    def test_the_gate_stands_in_the_way_only_of_what_is_faster(self) -> None:
        found = made.refused()
        assert outcomes.is_refused(found)
        found.chosen = made.FUSED
        assert outcomes.is_refused(found)
        for each in found.tries[7:9]:
            each.predicted_rate = 160.0
        assert not outcomes.is_refused(found)

    def test_one_that_passed_is_enough(self) -> None:
        found = made.refused()
        found.tries[7].accuracy = made.judgement()
        assert not outcomes.is_refused(found)
        found.tries[7].held_out = made.judgement(0.03, 0.04)
        assert outcomes.is_refused(found)

    def test_where_no_rate_keeps_the_slo_one_row_alone_decides(self) -> None:
        found = made.refused()
        for each in found.tries:
            each.predicted_rate = 0.0
        assert not outcomes.is_refused(found)
        found.tries[8].times = [made.times(0.001)]
        assert outcomes.is_refused(found)

    def test_a_language_model_is_compared_as_measured(self) -> None:
        """Refused before it was served, nobody knows how fast it is."""
        found = made.text()
        found.chosen = made.ORIGINAL
        found.tries[1].accuracy = made.judgement(0.03, 0.04)
        assert outcomes.is_refused(found)
        found.tries[1].served = None
        assert not outcomes.is_refused(found)


class TestRun:
    @pytest.mark.parametrize(
        ("make", "is_interrupted", "outcome"),
        [
            (made.kept, False, "kept"),
            (made.kept, True, "kept"),
            (made.missed, False, "missed"),
            (made.missed, True, "interrupted"),
            (made.refused, False, "refused"),
            (made.disturbed, False, "disturbed"),
            (made.disturbed, True, "interrupted"),
        ],
    )
    def test_ends_as(self, make, is_interrupted: bool, outcome: str) -> None:  # type: ignore[no-untyped-def]
        assert outcomes.outcome_of(make(), is_interrupted=is_interrupted) == outcome

    def test_what_was_cut_is_named_once(self) -> None:
        found: Optimization = made.kept()
        found.skipped = [
            Skip("fp8", "out of time", cut_by="time"),
            Skip("int8-static", "out of time", cut_by="time"),
            Skip("dtype", "out of time", Step("dtype", {"dtype": "int8"}), "time"),
            Skip("half", "interrupted", cut_by="interrupt"),
            Skip("openvino", "not installed"),
        ]
        cut = ["fp8", "other settings of int8-static", "dtype(dtype=int8)"]
        assert outcomes.untried(found, "time") == cut
        assert outcomes.untried(found, "interrupt") == ["other settings of half"]

    def test_of_a_pass_that_was_tried_only_other_settings_were_not(self) -> None:
        """Batching is not the last step of any candidate."""
        found: Optimization = made.kept()
        assert any(made.BATCHING in each.candidate.steps[:-1] for each in found.tries)
        found.skipped = [Skip("batching", "no other setting is predicted to do more")]
        assert [name for _, name in outcomes.named_skips(found)] == ["other settings of batching"]

    def test_notes_say_what_ended_the_search(self) -> None:
        assert outcomes.cut_notes(Findings()) == []
        (note,) = outcomes.cut_notes(Findings(is_out_of_time=True))
        assert "--budget" in note
        (note,) = outcomes.cut_notes(Findings(is_interrupted=True))
        assert "resume" in note

    def test_a_step_that_was_cut_off_is_noted_as_the_end_of_the_budget(self) -> None:
        cut = made.attempt(made.FUSED, "compile", "cut off", "cut off by the time budget")
        notes = outcomes.cut_notes(Findings(tries=[cut]))
        assert notes == [outcomes.BUDGET_ENDED]
        found: Optimization = made.kept()
        found.tries += [cut, cut]
        assert outcomes.unfinished(found) == [str(made.FUSED.steps[-1])]


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (BackendFailed("no such operator"), "failed", "no such operator"),
        (TookTooLong("no answer within 300 s"), "failed", "no answer within 300 s"),
        (CutOff("no answer in 5 s"), "cut off", "cut off by the time budget: no answer in 5 s"),
    ],
)
def test_only_the_budget_cuts_a_step_off(error: PenstockError, outcome: str, reason: str) -> None:
    assert outcomes.outcome_of_error(error) == (outcome, reason)
