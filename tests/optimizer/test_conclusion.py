"""What becomes of a search: the choice stands by its proof, or another is proven."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from made_evaluators import made_record
from made_optimizations import machine
from served_builds import a_config

from penstock.benchmark.stats import Interval
from penstock.errors import BackendFailed
from penstock.optimizer import outcomes
from penstock.optimizer.accuracy import Judgement
from penstock.optimizer.candidates import Build, Candidate, Step
from penstock.optimizer.conclusion import TensorConclusion
from penstock.optimizer.facts import Facts
from penstock.optimizer.findings import Contender, Finalist, Findings
from penstock.optimizer.first_line import (
    exit_code,
    headline,
)
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import Optimization, ServedMeasurement, TermVerdict, Try
from penstock.optimizer.time_plan import CutOff
from penstock.slo import parse
from penstock.system.exit_codes import ExitCode

SLO = "p99 < 50ms at 200/s"


def near(value: float) -> Interval:
    return Interval(value, value * 0.99, value * 1.01)


def served(goodput: float) -> ServedMeasurement:
    """In time for so many; all of them keep the SLO."""
    p99_s = 0.02 if goodput == 1.0 else 0.2
    outcome = "kept" if goodput == 1.0 else "missed"
    verdict = TermVerdict("p99 < 50ms", outcome, near(p99_s), 0.05, "s")
    throughput = near(200 * goodput)
    return ServedMeasurement(
        "200/s", near(0.01), near(p99_s), throughput, goodput, [verdict], 100, 0, {}, 1.0, 0
    )


def judgement(*, is_passed: bool) -> Judgement:
    loss = 0.0 if is_passed else 0.7
    text = "passed" if is_passed else "lost too much"
    return Judgement(
        "score", 0.8, 0.8 - loss, loss, loss, 0.01, 100, 0, 0, "", 0.05, is_passed, text=text
    )


def finalist(name: str, goodput: float) -> Finalist:
    candidate = Candidate((Step(name),)) if name else Candidate()
    build = Build(candidate, Path("m"), a_config())
    contender = Contender(build, Facts("null"), {}, [((), 100.0)], is_lossy=False)
    return Finalist(contender, build, served(goodput))


class MadeLab:
    """Proofs turn out as they are told to."""

    def __init__(self, proofs: dict[str, float | None], original: float = 0.1) -> None:
        # It is all of its parts.
        self.run = self.gate = self.measurements = self.data = self
        self.plan = Plan("m.onnx", "m", "out", slo=parse(SLO))
        self.machine = machine()
        self.subject = SimpleNamespace(text="", digest="")
        self.examples: object | None = None
        self.notes: list[str] = []
        self.unchecked: list[str] = []
        # By the name of the step: what the held-out part says of it.
        self.held_out: dict[str, Judgement] = {}
        self.judged: list[str] = []
        # By the name of the step: how the server's answers differ from the judged ones.
        self.served_problems: dict[str, str] = {}
        self.budget = "score drop <= 1 %"
        self.samples = SimpleNamespace(text="")
        self.ensemble = None
        self.journal = SimpleNamespace(path=Path("work/journal.jsonl"))
        self.original = Build(Candidate(), Path("m"), a_config())
        self.rows = [{}] * 7
        self.proofs = proofs
        self.of_original = original
        self.proven: list[str] = []
        self.clipped_shares: dict[str, float] = {}

    def prove(
        self, builds: Sequence[Build], left_s: float | None, attempt: int
    ) -> list[ServedMeasurement]:
        name = builds[-1].candidate.steps[-1].pass_name if builds[-1].candidate.steps else ""
        self.proven.append(name)
        goodput = self.proofs[name]
        if goodput is None:
            raise BackendFailed("the server did not start")
        return [served(self.of_original), served(goodput)][-len(builds) :]

    def judge(self, build: Build, part: str, alpha: float) -> Judgement:
        name = build.candidate.steps[-1].pass_name if build.candidate.steps else ""
        self.judged.append(f"{name} {part}")
        return self.held_out.get(name, judgement(is_passed=True))

    def check_served(self, build: Build, *, is_lossy: bool) -> str:
        return self.served_problems.get(build.candidate.steps[-1].pass_name, "")

    def judge_lossless(self, build: Build, part: str, alpha: float) -> Judgement:
        return self.judge(build, f"{part}, lossless", alpha)

    def clipped(self, build: Build) -> dict[str, float]:
        return self.clipped_shares


class MadeSearch:
    def __init__(self, lab: MadeLab, findings: Findings, left_s: Sequence[float]) -> None:
        self.findings = findings
        self.budget = self.progress = self
        self._lab = lab
        self._left_s = left_s
        self.to_save: list[str] = []

    def begin_proof(self, candidate: Candidate, to_save: str = "") -> None:
        self.to_save.append(to_save)

    def has_time_to_prove(self, num_builds: int) -> bool:
        return self.left_s > 20

    @property
    def left_s(self) -> float:
        """After as many proofs as there were."""
        return self._left_s[min(len(self._lab.proven), len(self._left_s) - 1)]


def concluded(
    lab: MadeLab,
    *finalists: Finalist,
    left_s: Sequence[float] = (math.inf,),
    said: list[str] | None = None,
) -> Optimization:
    """`left_s` after each number of proofs; the last one stays. `said` collects what an
    interruption would save."""
    original = finalist("", 0.1)
    findings = Findings(finalists=[*finalists, original], contenders=[original.contender])
    findings.original = original.served
    findings.tries = [Try(Candidate(), "baseline", "kept", "", served=original.served)]
    findings.tries += [
        Try(each.build.candidate, "batching", "equal", "", served=each.served) for each in finalists
    ]
    search = MadeSearch(lab, findings, left_s)
    search.to_save = [] if said is None else said
    found = made_record(lab, findings)
    TensorConclusion(lab, search, found).conclude()  # type: ignore[arg-type]
    return found


def chosen(found: Optimization) -> str:
    assert found.chosen is not None
    return found.chosen.steps[-1].pass_name if found.chosen.steps else ""


def test_a_proof_that_confirms_the_choice_is_the_end() -> None:
    lab = MadeLab({"first": 1.0})
    found = concluded(lab, finalist("first", 1.0), finalist("second", 1.0))
    assert (chosen(found), lab.proven, found.outcome) == ("first", ["first"], "kept")


def test_a_version_that_accepts_fewer_sizes_says_so() -> None:
    lab = MadeLab({"shape-folding": 1.0})
    found = concluded(lab, finalist("shape-folding", 1.0))
    assert not any("accepts only" in note for note in found.notes)
    narrowed = finalist("shape-folding", 1.0)
    step = Step("shape-folding", {"accepts image": "3x32x32"})
    narrowed.build = replace(narrowed.build, candidate=Candidate((step,)))
    found = concluded(lab, narrowed)
    assert found.notes[-1] == (
        "the version accepts only 'image' 3x32x32: the 7 rows of the data all have this size, and "
        "the server refuses any other"
    )


def test_a_share_that_would_be_shown_as_zero_is_no_warning() -> None:
    lab = MadeLab({"first": 1.0})
    lab.clipped_shares = {"a": 2e-5, "b": 2e-4}
    found = concluded(lab, finalist("first", 1.0))
    (note,) = [each for each in found.notes if "calibrated range" in each]
    assert note == "input 'b': 0.02% of held-out values lie outside of the calibrated range"


def test_another_that_kept_the_slo_is_proven_when_the_first_misses() -> None:
    lab = MadeLab({"first": 0.7, "second": 1.0})
    found = concluded(lab, finalist("first", 1.0), finalist("second", 1.0))
    assert (chosen(found), found.outcome) == ("second", "kept")
    assert any("second was proven too" in note for note in found.notes)


def test_another_that_was_nearer_is_proven_too() -> None:
    lab = MadeLab({"first": 0.7, "second": 0.96})
    found = concluded(lab, finalist("first", 0.99), finalist("second", 0.97))
    assert lab.proven == ["first", "second"]
    assert (chosen(found), found.outcome) == ("second", "missed")


@pytest.mark.parametrize("second", [0.3, 0.7])
def test_of_two_proofs_the_better_counts(second: float) -> None:
    lab = MadeLab({"first": 0.7, "second": second})
    found = concluded(lab, finalist("first", 0.99), finalist("second", 0.97))
    assert lab.proven == ["first", "second"]
    assert chosen(found) == "first"
    assert found.after is not None and found.after.goodput == 0.7


def test_those_that_did_no_better_are_not_proven() -> None:
    lab = MadeLab({"first": 0.7})
    found = concluded(lab, finalist("first", 0.99), finalist("second", 0.6))
    assert (lab.proven, chosen(found)) == (["first"], "first")


# Goodput in a proof; None: it fails. And the seconds that are left after none and after one.
PROOFS = (None, 0.3, 0.7, 1.0)
LEFT = ((math.inf, math.inf), (math.inf, 1.0), (1.0, 1.0))


@pytest.mark.parametrize(
    ("first", "second", "original", "left_s"),
    list(itertools.product(PROOFS, PROOFS, (0.1, 1.0), LEFT)),
)
def test_notes_say_what_the_proofs_did(
    first: float | None, second: float | None, original: float, left_s: Sequence[float]
) -> None:
    lab = MadeLab({"first": first, "second": second}, original)
    found = concluded(lab, finalist("first", 0.99), finalist("second", 0.97), left_s=left_s)
    notes = "; ".join(found.notes)
    ran = [name for name in lab.proven if lab.proofs[name] is not None]
    name = chosen(found)
    assert found.is_proven is bool(name in ran or (not name and ran))
    assert ("no time was left" in notes) is (left_s[0] == 1.0)
    if "no time was left" in notes:
        assert not lab.proven and not found.is_proven
    assert "measured in turns" not in notes or found.is_proven
    assert ("second was proven too" in notes) is ("second" in ran)
    assert ("second was ahead in the search but was not proven" in notes) is (
        "first" in ran and first != 1.0 and "second" not in ran
    )
    assert (found.outcome == "failed") is bool(found.proof_failure)
    # The chosen version was to be proven, and that failed.
    assert bool(found.proof_failure) is bool(lab.proven and not found.is_proven)
    if found.is_proven:
        assert found.after == served(lab.proofs[name] if name else original)  # type: ignore[arg-type]
    for each in found.tries:
        assert (each.outcome == "kept") is (each.candidate in (found.chosen, Candidate()))


def test_each_that_was_served_is_compared_with_the_chosen_one() -> None:
    lab = MadeLab({"first": 1.0})
    others = finalist("second", 0.92), finalist("third", 0.87)
    found = concluded(lab, finalist("first", 1.0), *others)
    assert [(each.outcome, each.reason) for each in found.tries[2:]] == [
        ("slower", "92 % in time, the chosen one 100 %"),
        ("slower", "87 % in time, the chosen one 100 %"),
    ]


def test_a_step_that_claims_to_be_lossless_is_held_to_the_held_out_part_too() -> None:
    """Its score fell from 0.8 to 0.1, as a manifest said of a version that was kept."""
    lab = MadeLab({"first": 1.0, "second": 1.0, "": 0.1})
    lab.examples = object()
    lab.held_out = {"first": judgement(is_passed=False)}
    found = concluded(lab, finalist("first", 1.0), finalist("second", 1.0))
    assert chosen(found) == "second"
    assert found.held_out is not None and found.held_out.is_passed
    assert lab.judged[:2] == ["first held out, lossless", "second held out, lossless"]
    assert any("lost too much" in note for note in found.notes)


def test_where_nothing_passes_the_original_is_kept() -> None:
    lab = MadeLab({"": 0.1})
    lab.examples = object()
    lab.held_out = dict.fromkeys(("first", "second"), judgement(is_passed=False))
    first = finalist("first", 1.0)
    found = concluded(lab, first, finalist("second", 1.0))
    assert (chosen(found), found.outcome) == ("", "missed")


def test_what_the_held_out_part_refused_is_no_longer_told_as_kept() -> None:
    lab = MadeLab({"second": 1.0})
    lab.examples = object()
    lab.held_out = {"first": judgement(is_passed=False)}
    found = concluded(lab, finalist("first", 1.0), finalist("second", 1.0))
    told = {each.candidate.key: each for each in found.tries}
    first = told[Candidate((Step("first"),)).key]
    assert (first.outcome, first.reason) == ("rejected", "held-out examples: lost too much")


# A proof that contradicts itself.


def with_rate(found: ServedMeasurement, max_rate: float) -> ServedMeasurement:
    return msgspec.structs.replace(found, max_rate=near(max_rate))


class DoubtfulLab(MadeLab):
    """Each attempt is told; its journal says what is forgotten."""

    def __init__(self, attempts: Sequence[tuple[ServedMeasurement, ServedMeasurement]]) -> None:
        super().__init__({})
        self.attempts = attempts
        self.forgotten: list[str] = []
        self.num_attempts = 0
        self.journal = SimpleNamespace(
            path=Path("work/journal.jsonl"), forget=self.forgotten.extend
        )

    def prove(
        self, builds: Sequence[Build], left_s: float | None, attempt: int
    ) -> list[ServedMeasurement]:
        assert attempt == self.num_attempts
        self.num_attempts += 1
        return list(self.attempts[attempt])


# Missed at 200/s, and kept at 900/s.
CONTRADICTION = with_rate(served(0.5), 900.0)
ORIGINAL = with_rate(served(0.1), 20.0)


def test_a_contradiction_is_measured_again() -> None:
    lab = DoubtfulLab([(ORIGINAL, CONTRADICTION), (ORIGINAL, with_rate(served(1.0), 900.0))])
    found = concluded(lab, finalist("first", 1.0))
    assert (found.outcome, lab.num_attempts) == ("kept", 2)
    assert any(note.startswith("measured again: chosen: SLO missed at") for note in found.notes)
    assert found.disturbances == [] and lab.forgotten == []


def test_a_contradiction_that_stays_is_no_verdict_and_is_not_reused() -> None:
    lab = DoubtfulLab([(ORIGINAL, CONTRADICTION)] * 2)
    found = concluded(lab, finalist("first", 1.0))
    assert found.outcome == "disturbed"
    assert found.disturbances[0].startswith("chosen: SLO missed at 200/s, but kept at 900/s")
    assert {"served", "proof", "proof with rates", "times"} <= set(lab.forgotten)


def test_an_original_that_contradicts_itself_leaves_the_verdict_and_no_gain() -> None:
    """The SLO is kept for sure; only what is claimed against the original cannot stand."""
    original = with_rate(served(0.1), 900.0)
    lab = DoubtfulLab([(original, with_rate(served(1.0), 900.0))] * 2)
    found = concluded(lab, finalist("first", 1.0))
    assert found.outcome == "kept"
    assert found.before is not None and found.before.disturbances


def test_a_prediction_far_off_is_commented() -> None:
    lab = DoubtfulLab([(ORIGINAL, with_rate(served(1.0), 900.0))])
    found = concluded(lab, finalist("first", 1.0))
    assert any("batch times predict 100/s" in note for note in found.notes)


class TestInterrupted:
    def test_during_the_proof_the_choice_is_kept_with_the_figures_of_the_search(self) -> None:
        lab = MadeLab({})

        def interrupt(
            builds: Sequence[Build], left_s: float | None, attempt: int
        ) -> list[ServedMeasurement]:
            raise KeyboardInterrupt

        lab.prove = interrupt  # type: ignore[method-assign]
        found = concluded(lab, finalist("first", 0.9), finalist("second", 0.8))
        assert (chosen(found), found.outcome) == ("first", "interrupted")
        assert found.after is not None and found.after.goodput == 0.9
        assert any("interrupted during the proof" in note for note in found.notes)

    @pytest.mark.parametrize(("name", "goodput"), [("first", 0.9), ("", 0.1)])
    def test_what_is_announced_during_the_proof_is_what_is_saved(
        self, name: str, goodput: float
    ) -> None:
        """In the second case the original does as well in the search."""
        lab = MadeLab({})
        said: list[str] = []

        def interrupt(
            builds: Sequence[Build], left_s: float | None, attempt: int
        ) -> list[ServedMeasurement]:
            raise KeyboardInterrupt

        lab.prove = interrupt  # type: ignore[method-assign]
        found = concluded(lab, finalist("first", goodput), said=said)
        assert chosen(found) == name
        assert said[-1] == (name or "original")


def test_a_build_whose_server_answers_otherwise_is_refused() -> None:
    """Right in a trial process, wrong behind the server: in a second instance, say."""
    lab = MadeLab({"second": 1.0})
    lab.examples = object()
    lab.served_problems = {"first": "output 'y': column 0 differs by 1 of its range"}
    found = concluded(lab, finalist("first", 1.0), finalist("second", 1.0))
    assert chosen(found) == "second"
    told = {each.candidate.key: each for each in found.tries}
    first = told[Candidate((Step("first"),)).key]
    assert first.outcome == "rejected" and "served answers differ" in first.reason


def test_a_way_to_serve_the_original_that_is_refused_leaves_the_original() -> None:
    lab = MadeLab({"": 0.1})
    lab.examples = object()
    lab.served_problems = {"instances": "output 'y': column 0 differs by 1 of its range"}
    one = finalist("instances", 1.0)
    one.contender = finalist("", 0.1).contender
    found = concluded(lab, one)
    assert (chosen(found), found.outcome) == ("", "missed")
    lab = MadeLab({"": 0.1})
    lab.examples = object()
    lab.held_out = {"instances": judgement(is_passed=False)}
    assert chosen(concluded(lab, one)) == ""


def test_a_proof_that_fails_is_no_kept_slo() -> None:
    lab = MadeLab({"first": None})
    found = concluded(lab, finalist("first", 1.0))
    assert (chosen(found), found.outcome) == ("first", "failed")
    assert exit_code(found) == ExitCode.FAILED
    line = headline(found)
    assert line.startswith("Proof failed: the server did not start; best candidate, not proven:")
    assert "SLO kept" not in line


def test_a_proof_that_the_budget_cuts_off_has_not_failed() -> None:
    lab = MadeLab({})

    def cut_off(
        builds: Sequence[Build], left_s: float | None, attempt: int
    ) -> list[ServedMeasurement]:
        raise CutOff("not ready after 5 s")

    lab.prove = cut_off  # type: ignore[method-assign]
    found = concluded(lab, finalist("first", 1.0))
    assert (found.outcome, found.is_proven) == ("kept", False)
    assert outcomes.NO_PROOF in found.notes


@pytest.mark.parametrize(("num_compared", "has_line"), [(5, True), (7, False), (0, False)])
def test_rows_that_a_lossless_choice_was_not_compared_on_are_counted(
    num_compared: int, has_line: bool
) -> None:
    lab = MadeLab({"first": 1.0})
    lab.examples = object()
    judged = msgspec.structs.replace(judgement(is_passed=True), num_compared=num_compared)
    lab.held_out = {"first": judged}
    found = concluded(lab, finalist("first", 1.0))
    line = "2 of 7 rows: lossless steps were compared with the original on 5"
    assert found.unchecked == ([line] if has_line else [])
