"""What becomes of a search: the choice stands by its proof, or another is proven."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_optimizations import machine
from served_builds import a_config

from penstock.benchmark.stats import Interval
from penstock.optimizer.candidates import Build, Candidate, Step
from penstock.optimizer.conclusion import conclude
from penstock.optimizer.facts import Facts
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import Optimization, Served, Try, Verdict
from penstock.optimizer.search import Contender, Finalist, Findings
from penstock.slo import parse

SLO = "p99 < 50ms at 200/s"


def near(value: float) -> Interval:
    return Interval(value, value * 0.99, value * 1.01)


def served(goodput: float) -> Served:
    """In time for so many; all of them keep the SLO."""
    p99_s = 0.02 if goodput == 1.0 else 0.2
    outcome = "kept" if goodput == 1.0 else "missed"
    verdict = Verdict("p99 < 50ms", outcome, near(p99_s), 0.05, "s")
    throughput = near(200 * goodput)
    return Served(
        "200/s", near(0.01), near(p99_s), throughput, goodput, [verdict], 100, 0, {}, 1.0, 0
    )


def finalist(name: str, goodput: float) -> Finalist:
    candidate = Candidate((Step(name),)) if name else Candidate()
    build = Build(candidate, Path("m"), a_config())
    contender = Contender(build, Facts("null"), {}, [((), 100.0)], is_lossy=False)
    return Finalist(contender, build, served(goodput))


class MadeLab:
    """Proofs turn out as they are told to."""

    def __init__(self, proofs: dict[str, float]) -> None:
        self.plan = Plan("m.onnx", "m", "out", slo=parse(SLO))
        self.machine = machine()
        self.subject = SimpleNamespace(text="", digest="")
        self.examples = None
        self.notes: list[str] = []
        self.data_text = ""
        self.journal = SimpleNamespace(path=Path("work/journal.jsonl"))
        self.original = Build(Candidate(), Path("m"), a_config())
        self.rows = [{}] * 7
        self.proofs = proofs
        self.proven: list[str] = []

    def prove(self, builds: Sequence[Build], left_s: float | None) -> list[Served]:
        name = builds[-1].candidate.steps[-1].pass_name if builds[-1].candidate.steps else ""
        self.proven.append(name)
        return [served(0.1), served(self.proofs[name])]

    def clipped(self, build: Build) -> dict[str, float]:
        return {}


def concluded(lab: MadeLab, *finalists: Finalist) -> Optimization:
    original = finalist("", 0.1)
    findings = Findings(finalists=[*finalists, original], contenders=[original.contender])
    findings.original = original.served
    findings.tries = [Try(Candidate(), "baseline", "kept", "")]
    search = SimpleNamespace(findings=findings, prove=lambda: None, left_s=None)
    return conclude(lab, search, "command", "today")  # type: ignore[arg-type]


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


def test_another_that_kept_the_slo_is_proven_when_the_first_misses() -> None:
    lab = MadeLab({"first": 0.7, "second": 1.0})
    found = concluded(lab, finalist("first", 1.0), finalist("second", 1.0))
    assert (chosen(found), found.outcome) == ("second", "kept")
    assert any("proven once more" in note for note in found.notes)


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
