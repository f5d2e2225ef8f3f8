"""What becomes of a search: the choice stands by its proof, or another is proven."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_optimizations import machine
from served_builds import a_config

from penstock.benchmark.stats import Interval
from penstock.errors import BackendFailed
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

    def __init__(self, proofs: dict[str, float | None], original: float = 0.1) -> None:
        self.plan = Plan("m.onnx", "m", "out", slo=parse(SLO))
        self.machine = machine()
        self.subject = SimpleNamespace(text="", digest="")
        self.examples = None
        self.notes: list[str] = []
        self.data_text = ""
        self.journal = SimpleNamespace(path=Path("work/journal.jsonl"))
        self.original = Build(Candidate(), Path("m"), a_config())
        self.proofs = proofs
        self.of_original = original
        self.proven: list[str] = []

    def prove(self, builds: Sequence[Build], left_s: float | None) -> list[Served]:
        name = builds[-1].candidate.steps[-1].pass_name if builds[-1].candidate.steps else ""
        self.proven.append(name)
        goodput = self.proofs[name]
        if goodput is None:
            raise BackendFailed("the server did not start")
        return [served(self.of_original), served(goodput)][-len(builds) :]

    def clipped(self, build: Build) -> dict[str, float]:
        return {}


class MadeSearch:
    def __init__(self, lab: MadeLab, findings: Findings, left_s: Sequence[float]) -> None:
        self.findings = findings
        self._lab = lab
        self._left_s = left_s

    def prove(self) -> None:
        pass

    @property
    def left_s(self) -> float:
        """After as many proofs as there were."""
        return self._left_s[min(len(self._lab.proven), len(self._left_s) - 1)]


def concluded(
    lab: MadeLab, *finalists: Finalist, left_s: Sequence[float] = (math.inf,)
) -> Optimization:
    """`left_s` after each number of proofs; the last one stays."""
    original = finalist("", 0.1)
    findings = Findings(finalists=[*finalists, original], contenders=[original.contender])
    findings.original = original.served
    findings.tries = [Try(Candidate(), "baseline", "kept", "", served=original.served)]
    findings.tries += [
        Try(each.build.candidate, "batching", "equal", "", served=each.served) for each in finalists
    ]
    search = MadeSearch(lab, findings, left_s)
    return conclude(lab, search, "command", "today")  # type: ignore[arg-type]


def chosen(found: Optimization) -> str:
    assert found.chosen is not None
    return found.chosen.steps[-1].pass_name if found.chosen.steps else ""


def test_a_proof_that_confirms_the_choice_is_the_end() -> None:
    lab = MadeLab({"first": 1.0})
    found = concluded(lab, finalist("first", 1.0), finalist("second", 1.0))
    assert (chosen(found), lab.proven, found.outcome) == ("first", ["first"], "kept")


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
    assert ("proven once more with second" in notes) is ("second" in ran)
    assert ("second was ahead in the search, but has no proof" in notes) is (
        "first" in ran and first != 1.0 and "second" not in ran
    )
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
