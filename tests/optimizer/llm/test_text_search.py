"""The search by fake measurements: what is tried, in which order, and what is kept."""

import math
from pathlib import Path

import pytest
from served_builds import a_config

from penstock.benchmark.stats import Interval
from penstock.errors import BackendFailed
from penstock.optimizer.accuracy import Judgement
from penstock.optimizer.candidates import Build, Candidate, Step
from penstock.optimizer.findings import Findings
from penstock.optimizer.llm.text_search import STAGES, TextSearch, instead, is_lossy, rate_of
from penstock.optimizer.plan import Plan
from penstock.optimizer.progress import ProgressReporter
from penstock.optimizer.results import ServedMeasurement, TermVerdict
from penstock.optimizer.time_plan import CutOff, TextTime
from penstock.slo import parse

NAN = Interval(math.nan, math.nan, math.nan)
BF16, INT8, INT4 = (Step("dtype", {"dtype": dtype}) for dtype in ("bfloat16", "int8", "int4"))
MORE, MOST, LESS = (Step("sequences", {"max_num_seqs": size}) for size in ("32", "64", "8"))
PACE = Step("pace", {"tpot_ms": "50"})


def a_served(rate):
    return ServedMeasurement(
        "2/s poisson",
        NAN,
        NAN,
        NAN,
        1.0,
        [TermVerdict("p99 ttft < 1s", "kept" if rate else "missed", NAN, 1.0, "s")],
        10,
        0,
        {},
        math.nan,
        0,
        max_rate=Interval(rate, rate, rate) if rate else None,
    )


def judged(is_passed):
    text = "kl 0 -> 0.5: lost too much"
    return Judgement(
        "kl", 0.0, 0.5, 0.5, 0.6, 0.02, 20, 0, 20, "bootstrap", 0.05, is_passed, text=text
    )


class FakeLab:
    """Rates by what a candidate is; those that are not named are as fast as what they build on."""

    def __init__(self, rates, lossy=(), broken=()):
        self.rates, self.lossy, self.broken = rates, lossy, broken
        self.asked: list[tuple[str, float | None]] = []
        self.judgements: list[str] = []
        self.error = BackendFailed("the server did not start")

    def build(self, candidate):
        return Build(candidate, Path("m"), a_config())

    def rated(self, candidate, start):
        text = str(candidate)
        self.asked.append((text, start))
        if text in self.broken:
            raise self.error
        rate = self.rates.get(text, 0.0)
        return a_served(rate if start is None or rate >= start else 0.0)

    def judge(self, candidate):
        self.judgements.append(str(candidate))
        return judged(str(candidate) not in self.lossy)


def searched(lab, dtypes=(), knobs=(), slo="p99 ttft < 1s", has_time=lambda: True, **others):
    plan = Plan("m", "m", "out", slo=parse(slo), **others)
    findings = Findings()
    budget = TextTime(plan, findings, lambda: 0.0, 0.0, is_on_gpu=False)
    budget.has_time_to_try = has_time
    progress = ProgressReporter(lambda told: None, findings, budget, STAGES, judges_lossless=False)
    search = TextSearch(lab, plan, findings, budget, progress)
    search.run(dtypes, lambda candidate: knobs)
    return search.findings


def outcomes(findings):
    return {str(each.candidate): each.outcome for each in findings.tries}


B, I8, I4 = (f"dtype(dtype={name})" for name in ("bfloat16", "int8", "int4"))


def test_the_best_datatype_is_kept_and_the_next_must_be_ahead_of_it():
    lab = FakeLab({"original": 1.0, B: 2.0, I8: 3.0, I4: 3.1})
    found = searched(lab, [BF16, INT8, INT4])
    assert [str(each.candidate) for each in found.contenders] == ["original", B, I8]
    assert outcomes(found)[I4] == "slower"
    assert lab.asked == [
        ("original", None),
        (B, pytest.approx(1.1)),
        (I8, pytest.approx(2.2)),
        (I4, pytest.approx(3.3)),
    ]
    assert "does not keep the SLO at 3.30/s: p99 ttft < 1s missed" in found.tries[-1].reason


def test_what_loses_too_much_is_not_even_served():
    lab = FakeLab({"original": 1.0, B: 2.0, I8: 9.0}, lossy=[I8])
    found = searched(lab, [BF16, INT8])
    assert outcomes(found) == {"original": "kept", B: "kept", I8: "rejected"}
    assert "lost too much" in found.tries[-1].reason and I8 not in dict(lab.asked)


def test_what_cannot_be_served_is_a_finding_and_the_search_goes_on():
    found = searched(FakeLab({"original": 1.0, I8: 2.0}, broken=[B]), [BF16, INT8])
    assert outcomes(found) == {"original": "kept", B: "failed", I8: "kept"}
    assert found.tries[1].reason == "the server did not start"


def test_what_the_budget_cuts_off_has_not_failed():
    lab = FakeLab({"original": 1.0}, broken=[B])
    lab.error = CutOff("not judged within 12 s")
    found = searched(lab, [BF16])
    assert outcomes(found) == {"original": "kept", B: "cut off"}
    assert found.tries[1].reason == "cut off by the time budget: not judged within 12 s"


def test_where_the_original_keeps_nothing_any_rate_is_better():
    lab = FakeLab({B: 0.5})
    found = searched(lab, [BF16, INT8])
    assert lab.asked[1] == (B, None) and found.best.rate == 0.5
    assert found.tries[0].reason == "keeps the SLO at no rate that was tried"


class TestServing:
    def test_is_tried_on_top_of_the_best_as_long_as_it_pays(self):
        s32, s64 = f"{B} → sequences(max_num_seqs=32)", f"{B} → sequences(max_num_seqs=64)"
        lab = FakeLab({"original": 1.0, B: 2.0, s32: 3.0, s64: 3.1})
        found = searched(lab, [BF16], [[[MORE, MOST], [LESS]]])
        assert str(found.best.candidate) == s32 and outcomes(found)[s64] == "slower"
        # The other way was not tried.
        assert not any("max_num_seqs=8" in text for text, _ in lab.asked)
        # What changes no answers is not judged.
        assert lab.judgements == [B]

    def test_goes_the_other_way_where_the_first_does_not_pay(self):
        s8 = "sequences(max_num_seqs=8)"
        found = searched(FakeLab({"original": 1.0, s8: 2.0}), [], [[[MORE, MOST], [LESS]]])
        assert str(found.best.candidate) == s8
        assert "sequences(max_num_seqs=64)" not in outcomes(found)

    def test_the_second_knob_builds_on_the_first(self):
        both = "pace(tpot_ms=50) → sequences(max_num_seqs=32)"
        rates = {"original": 1.0, "pace(tpot_ms=50)": 2.0, both: 4.0}
        found = searched(FakeLab(rates), [], [[[PACE]], [[MORE]]])
        assert str(found.best.candidate) == both


class TestEnd:
    def test_what_keeps_the_slo_with_room_is_enough(self):
        lab = FakeLab({"original": 1.0, B: 2.7, I8: 9.0})
        found = searched(lab, [BF16, INT8], [[[MORE]]], slo="p99 ttft < 1s at 2/s")
        assert str(found.best.candidate) == B and I8 not in outcomes(found)

    def test_exhaustive_goes_on(self):
        lab = FakeLab({"original": 1.0, B: 2.7, I8: 9.0})
        slo = "p99 ttft < 1s at 2/s"
        found = searched(lab, [BF16, INT8], slo=slo, is_exhaustive=True)
        assert str(found.best.candidate) == I8

    def test_an_original_with_room_is_left_as_it_is(self):
        found = searched(FakeLab({"original": 2.7}), [BF16], slo="p99 ttft < 1s at 2/s")
        assert list(outcomes(found)) == ["original"] and not found.is_out_of_time

    def test_time_is_up_before_the_next_candidate(self):
        lab = FakeLab({"original": 1.0, B: 2.0})
        found = searched(lab, [BF16, INT8], has_time=lambda: len(lab.asked) < 2)
        assert list(outcomes(found)) == ["original", B] and found.is_out_of_time
        assert [(str(each.step), each.cut_by) for each in found.skipped] == [(I8, "time")]

    def test_an_interrupt_keeps_what_was_found(self):
        lab = FakeLab({"original": 1.0, B: 2.0})
        rated = lab.rated

        def interrupted(candidate, start):
            if str(candidate) == I8:
                raise KeyboardInterrupt
            return rated(candidate, start)

        lab.rated = interrupted
        found = searched(lab, [BF16, INT8, INT4])
        assert found.is_interrupted and str(found.best.candidate) == B
        left = [(str(each.step), each.cut_by) for each in found.skipped]
        assert left == [(I8, "interrupt"), (I4, "interrupt")]


def test_a_step_takes_the_place_of_another_of_its_kind():
    candidate = Candidate((BF16, MORE))
    assert instead(candidate, MOST) == Candidate((BF16, MOST))
    assert is_lossy(candidate) and not is_lossy(Candidate((MORE,)))


def test_no_rate_is_none():
    assert rate_of(a_served(0.0)) == 0.0 and rate_of(a_served(2.0)) == 2.0
