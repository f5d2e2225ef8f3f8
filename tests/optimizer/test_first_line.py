"""The first line says what was promised, whether it is kept, and by what."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest
from optimizer import made_optimizations as made

from penstock.optimizer import outcomes, wording
from penstock.optimizer.candidates import Candidate, Skip, Step
from penstock.optimizer.first_line import (
    chosen_try,
    decisive_refusal,
    exit_code,
    headline,
)
from penstock.optimizer.results import Optimization, Outcome, Try

P99 = "p99 26.8 ms (26.0-27.6) >= 20 ms at 200/s poisson"
LOSS = "top1 91.2 % → 91.0 % (loss at most 0.6 points, limit 1 point)"
REFUSED = "Refused by the accuracy gate: all 2 candidates that it judged failed top1 drop <= 1 %;"
REFUSED += " nearest: 50 examples cannot tell: top1 may lose 5.8 points; needs about 900 examples"
MISSED = f"SLO missed by 34 %: {P99}; bottleneck: compute (71 % of a request's 11.2 ms)"
LINES = {
    "kept": "SLO kept: p99 11.8 ms (11.4-12.2) < 20 ms at 200/s poisson; 3.1x the original's"
    f" highest rate; {LOSS}",
    "missed": f"{MISSED}; 1.54x the original's highest rate; {LOSS}",
    "refused": REFUSED,
    "disturbed": "No verdict: load average 3.9 on 2 cores; other processes used 45 % of the CPU;"
    f" best candidate, not proven: {made.CHOSEN}; {P99}",
    "out-of-time": f"{REFUSED}; not tried (out of time): fp8",
    "text": "SLO kept: p99 ttft 180 ms (175-185) < 500 ms, p99 tpot 60.0 ms (58.2-61.8) < 100 ms at"
    " 2/s poisson; 2.0x the original's highest rate; kl 0 → 0.0014 (loss at most 0.0016, limit"
    " 0.02)",
    "already-met": "SLO kept by the original: p99 14.2 ms (13.8-14.6) < 20 ms at 200/s poisson; no"
    " change needed",
    "without-data": "SLO kept: p99 11.8 ms (11.4-12.2) < 20 ms at 200/s poisson; 3.1x the"
    " original's highest rate",
    "interrupted": "Interrupted after 1 min 35 s: best so far: onnx-export →"
    " transformer-fusion(heads=12); predicted 168/s, not served",
    "nothing": "Interrupted after 1 min 35 s: nothing was found",
    "unknown-figures": f"{MISSED}; up to 151/s, the original keeps it at no rate; {LOSS}",
    "served-otherwise": f"{MISSED}; {LOSS}",
}


@pytest.mark.parametrize("name", made.MAKERS)
def test_the_line_of_every_end(name: str) -> None:
    assert headline(made.MAKERS[name]()) == LINES[name]


@pytest.mark.parametrize(
    ("optimization", "code"),
    [
        (made.kept(), 0),
        (made.already_met(), 0),
        (made.missed(), 2),
        (made.refused(), 3),
        (made.disturbed(), 4),
        (made.interrupted(), 130),
    ],
    ids=["kept", "already met", "missed", "refused", "disturbed", "interrupted"],
)
def test_the_exit_code_says_the_same(optimization: Optimization, code: int) -> None:
    assert exit_code(optimization) == code


def test_a_choice_that_did_not_have_to_pass_is_no_refusal() -> None:
    """It loses nothing by its making; its held-out score is for the record."""
    found = made.refused()
    found.held_out = made.judgement(0.0, 0.02, part="held out")
    refusal = decisive_refusal(found)
    assert refusal is not None and refusal is not found.held_out
    kept = made.kept()
    assert "loss at most" in headline(kept)
    kept.held_out = found.held_out
    assert "limit" not in headline(kept)


def test_a_refusal_that_more_examples_would_lift_is_told_before_one_that_none_would() -> None:
    found = made.refused()
    hopeless = found.tries[7].accuracy
    assert hopeless is not None and found.tries[8].accuracy is not None
    assert hopeless.loss_bound < found.tries[8].accuracy.loss_bound
    assert decisive_refusal(found) is found.tries[8].accuracy
    found.tries[8].accuracy = None
    assert decisive_refusal(found) is hopeless
    found.tries[7].accuracy = None
    assert decisive_refusal(found) is None
    assert headline(found) == "Refused by the accuracy gate"


def test_without_an_slo_nothing_is_said_to_be_kept() -> None:
    found = msgspec.structs.replace(made.kept(), slo="")
    assert found.after is not None
    found.after.verdicts = []
    assert headline(found).startswith("No SLO was given: 3.1x the original's highest rate; ")


def test_a_term_that_was_not_measured_is_no_kept_one() -> None:
    found = made.missed()
    assert found.after is not None
    found.after.verdicts[0].outcome = "not measured"
    found.after.verdicts[0].measured = None
    assert headline(found).startswith("SLO missed: p99 was not measured (p99 < 20ms) at 200/s")


def test_an_interrupted_run_that_served_its_best_says_how_that_went() -> None:
    found = made.kept()
    found.outcome = "interrupted"
    line = headline(found)
    assert line.startswith("Interrupted after 6 min 52 s: best so far: onnx-export")
    assert "p99 11.8 ms (11.4-12.2) < 20 ms at 200/s poisson; 3.1x the" in line


def test_the_chosen_may_be_a_try_served_in_its_own_way() -> None:
    assert chosen_try(made.kept()) is not None
    found = made.served_otherwise()
    assert chosen_try(found) is found.tries[8]
    assert chosen_try(made.nothing()) is None
    found.tries = []
    assert chosen_try(found) is None


# Every set of outcomes.

SERVING = (made.BATCHING, made.INSTANCES)
# What may become of a lossy step. The original is predicted to reach 98/s, fused 168/s.
FATES = {
    "absent": None,
    "no hardware": Skip("", "no instructions for it"),
    "out of time": Skip("", "out of time before it was tried", cut_by="time"),
    "interrupted": Skip("", "interrupted before it was tried", cut_by="interrupt"),
    "passed": 255.0,
    "slower": 90.0,
    "refused, faster": 255.0,
    "refused, slower": 90.0,
    "refused, speed unknown": None,
    "refused on held-out examples": 255.0,
    "rejected by numerics": None,
    "failed": None,
    "cut off": None,
}
STEPS = {"half": made.HALF, "int8-static": made.MINMAX}


@dataclass(frozen=True)
class Case:
    fates: tuple[tuple[str, str], ...]
    chosen: Candidate
    is_met: bool
    is_proven: bool
    is_interrupted: bool
    is_disturbed: bool
    profiled: str

    def names(self, *fates: str) -> set[str]:
        """Passes of these fates."""
        return {name for name, fate in self.fates if fate in fates}

    @property
    def refused(self) -> set[str]:
        return {name for name, fate in self.fates if fate.startswith("refused")}

    @property
    def tried(self) -> set[str]:
        return {
            name for name, fate in self.fates if not isinstance(FATES[fate], Skip)
        } - self.names("absent")

    @property
    def is_refused(self) -> bool:
        """All that was judged was refused, and something of it is known to be faster."""
        faster = self.names("refused, faster", "refused on held-out examples")
        return bool(faster) and not self.names("passed", "slower")

    @property
    def outcome(self) -> str:
        if self.is_interrupted and not (self.is_met and self.is_proven):
            return "interrupted"
        if self.is_disturbed:
            return "disturbed"
        if self.is_met:
            return "kept"
        return "refused" if self.is_refused else "missed"


OUTCOMES: dict[str, Outcome] = {
    "failed": "failed",
    "slower": "slower",
    "passed": "kept",
    "cut off": "cut off",
}


def lossy_try(name: str, fate: str) -> Try:
    rate = FATES[fate]
    assert not isinstance(rate, Skip)
    found = made.attempt(made.FUSED.then(STEPS[name]), "quantise", "kept", fate, rate)
    if fate in ("passed", "slower", "refused on held-out examples"):
        found.accuracy = made.judgement()
    if fate == "refused on held-out examples":
        found.held_out = made.judgement(0.03, 0.04, part="held out")
    if fate.startswith("refused,"):
        found.accuracy = made.judgement(0.03, 0.04)
    found.outcome = OUTCOMES.get(fate, "rejected")
    return found


def run_of(case: Case) -> Optimization:
    found = made.kept()
    found.tries = [found.tries[0], found.tries[3]]
    found.skipped = []
    for name, fate in case.fates:
        left = FATES[fate]
        if isinstance(left, Skip):
            found.skipped.append(msgspec.structs.replace(left, pass_name=name))
        elif fate != "absent":
            found.tries.append(lossy_try(name, fate))
    found.chosen, found.is_proven, found.profiled = case.chosen, case.is_proven, case.profiled
    found.after = SERVED[case.is_met]
    found.disturbances = ["load average 3.9 on 2 cores"] if case.is_disturbed else []
    found.outcome = outcomes.outcome_of(found, is_interrupted=case.is_interrupted)
    return found


SERVED = {True: made.served(0.0118, 304.0, 212), False: made.served(0.0268, 151.0, 212)}


def cases(is_met: bool, is_proven: bool) -> Iterator[Case]:
    for both in itertools.product(FATES, FATES):
        fates = tuple(zip(STEPS, both, strict=True))
        passed = [made.FUSED.then(STEPS[name]) for name, fate in fates if fate == "passed"]
        models = [made.FUSED, *passed]
        chosen = [made.ORIGINAL, *(model.then(*SERVING) for model in models)]
        for one, is_interrupted, is_disturbed in itertools.product(
            chosen, (False, True), (False, True)
        ):
            for profiled in dict.fromkeys((made.FUSED.key, one.model.key)):
                yield Case(fates, one, is_met, is_proven, is_interrupted, is_disturbed, profiled)


HEADS = {
    "kept": "SLO kept",
    "missed": "SLO missed",
    "refused": "Refused by the accuracy gate",
    "disturbed": "No verdict: load average 3.9 on 2 cores; ",
    "interrupted": "Interrupted after ",
}


def named(line: str, head: str) -> set[str]:
    """The names that a detail of the line lists."""
    found = re.search(re.escape(head) + "([^;]*)", line)
    return set(found[1].split(", ")) if found else set()


def check(case: Case, found: Optimization, line: str) -> None:
    assert found.outcome == case.outcome
    assert line.startswith(HEADS[case.outcome])
    assert [word for word in HEADS.values() if word.strip(": ") in line] == [HEADS[case.outcome]]
    assert ("refused" in line.lower()) is (case.outcome == "refused")
    assert named(line, "not tried (out of time): ") == case.names("out of time")
    cut = [str(STEPS[name]) for name, fate in case.fates if fate == "cut off"]
    listed = f"not finished (cut off by the time budget): {', '.join(cut)}"
    assert (listed in line) is ("not finished" in line) is bool(cut)
    assert ("failed" in line) is (case.outcome == "refused")
    assert named(line, "not tried (interrupted): ") == case.names("interrupted")
    rejected = named(line, "rejected by the accuracy gate: ")
    assert rejected == (case.refused if case.outcome == "missed" else set())
    if case.outcome == "refused":
        count = len(case.refused)
        word = "the one candidate" if count == 1 else f"all {count} candidates"
        assert f"{word} that it judged failed top1 drop <= 1 %" in line
    is_unproven = not case.is_proven or case.outcome == "disturbed"
    assert ("not proven" in line) is (is_unproven and case.outcome != "refused")
    assert ("at 200/s poisson" in line) is (case.outcome != "refused")
    assert (">= 20 ms" in line) is (not case.is_met and case.outcome != "refused")


def check_next(case: Case, found: Optimization) -> None:
    step = wording.next_step(found)
    if case.profiled != case.chosen.model.key:
        assert step == ""
    elif "int8-static" in case.tried:
        assert "INT8" not in step and "encode" in step
    else:
        assert "INT8" in step


@pytest.mark.parametrize("is_met", [False, True])
@pytest.mark.parametrize("is_proven", [False, True])
def test_the_line_claims_nothing_that_the_steps_contradict(is_met: bool, is_proven: bool) -> None:
    seen = set()
    for case in cases(is_met, is_proven):
        found = run_of(case)
        check(case, found, headline(found))
        check_next(case, found)
        seen.add(found.outcome)
    kept = {"kept", "disturbed"} if is_proven else {"kept", "disturbed", "interrupted"}
    assert seen == (kept if is_met else set(HEADS) - {"kept"})


def test_a_pass_that_had_time_for_some_settings_is_not_called_untried() -> None:
    case = Case((("int8-static", "refused, faster"),), made.ORIGINAL, False, True, False, False, "")
    found = run_of(case)
    found.skipped = [Skip("int8-static", "out of time", cut_by="time")]
    assert "not tried (out of time): other settings of int8-static" in headline(found)
    found.skipped = [
        Skip(f"pass-{number}", "out of time", Step(f"pass-{number}"), "time") for number in range(7)
    ]
    assert headline(found).endswith(": pass-0, pass-1, pass-2, pass-3, 3 more")
