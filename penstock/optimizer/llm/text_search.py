"""Search over a language model's candidates: datatypes first, then batching, each on top of the
best so far. Decides by what the evaluator measures; knows no process and no clock."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from penstock import units
from penstock.config import CPU
from penstock.errors import PenstockError
from penstock.llm.messages import EngineSettings
from penstock.llm.settings import ON_CPUS, ON_GPUS
from penstock.optimizer import goals, outcomes
from penstock.optimizer.candidates import Candidate, Skip, Stage, Step
from penstock.optimizer.facts import Facts
from penstock.optimizer.findings import Contender, Finalist, Findings
from penstock.optimizer.llm.text_evaluator import TextEvaluator
from penstock.optimizer.machine import Machine
from penstock.optimizer.plan import Plan
from penstock.optimizer.progress import ProgressReporter
from penstock.optimizer.results import ServedMeasurement, Try
from penstock.optimizer.time_plan import TextTime
from penstock.slo import Latency, Slo

# A candidate must meet the SLO at this multiple of the best rate: less is within the noise.
AHEAD = 1.1
# The search stops once a candidate meets the SLO at this multiple of the required rate.
ROOM = 1.3
STAGES: tuple[Stage, ...] = ("baseline", "precision", "quantise", "batching")
NO_ANSWER = "keeps the SLO at no rate that was tried"
DTYPE, PACE, TOKENS, SEQUENCES = "dtype", "pace", "step-tokens", "sequences"
# Datatypes with fewer bits are quantised.
HALF = 16
# CPU instructions per datatype (one suffices); without them the CPU emulates it.
NEEDED = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "fphp"),
}
# Smaller steps spend most of their time outside matmuls; larger ones delay decoding sequences.
LEAST_TOKENS, MOST_TOKENS = 32, 32_768
LEAST_SEQUENCES, MOST_SEQUENCES = 4, 1024
# Directions to change a setting, each a ladder: a step is tried only if the previous paid.
Knob = Sequence[Sequence[Step]]


@dataclass(slots=True)
class TextSearch:
    """One search. Its contenders are the original and each candidate that became the best, in that
    order; the finalists are the same, the best first."""

    evaluator: TextEvaluator
    plan: Plan
    findings: Findings
    budget: TextTime
    progress: ProgressReporter

    def run(self, dtypes: Sequence[Step], others: Callable[[Candidate], Sequence[Knob]]) -> None:
        """Try the datatypes, then the knobs that `others` returns for the best one. Raise
        PenstockError if not even the original can be measured."""
        self._measure_original()
        try:
            # Each datatype on the original alone: a model has one datatype.
            for step in dtypes:
                if self.is_over:
                    break
                self._try(Candidate((step,)))
            for ways in others(self.best.build.candidate):
                # If one direction pays, the other does not.
                any(map(self._climb, ways))
        except KeyboardInterrupt:
            self.findings.is_interrupted = True
        self._note_left(dtypes)

    @property
    def best(self) -> Finalist:
        return self.findings.finalists[0]

    @property
    def is_over(self) -> bool:
        """Whether the result is good enough, or time is up."""
        if self.is_enough:
            return True
        if not self.budget.has_time_to_try():
            self.findings.is_out_of_time = True
        return self.findings.is_out_of_time

    @property
    def is_enough(self) -> bool:
        """Whether the best meets the required rate with headroom; never if no rate is required."""
        needed = goals.required_rate(self.plan.slo, self.plan.price_per_hour)
        is_there = needed > 0 and self.best.contender.rate >= ROOM * needed
        return is_there and not self.plan.is_exhaustive

    def _measure_original(self) -> None:
        began = self.budget.clock()
        original = Candidate()
        self.progress.begin(original)
        self.findings.original = served = self.evaluator.rated(original, None)
        rate = rate_of(served)
        reason = f"{units.number(rate)}/s keep the SLO" if rate else NO_ANSWER
        attempt = Try(original, "baseline", "kept", reason, served=served)
        attempt.seconds = self.budget.clock() - began
        self.findings.tries.append(attempt)
        self._add(original, served, rate)

    def _add(self, candidate: Candidate, served: ServedMeasurement, rate: float) -> None:
        """Add the best so far."""
        build = self.evaluator.build(candidate)
        contender = Contender(build, Facts("llm"), {}, [((), rate)], is_lossy(candidate))
        self.findings.contenders.append(contender)
        self.findings.finalists.insert(0, Finalist(contender, build, served))
        self.progress.refresh()

    def _note_left(self, dtypes: Sequence[Step]) -> None:
        """Note datatypes left untried because of time or an interruption."""
        findings = self.findings
        if findings.is_interrupted:
            skip = Skip(DTYPE, "interrupted before it was tried", cut_by="interrupt")
        elif findings.is_out_of_time:
            skip = Skip(DTYPE, "out of time before it was tried", cut_by="time")
        else:
            return
        tried = [each.candidate for each in findings.tries]
        left = [step for step in dtypes if Candidate((step,)) not in tried]
        findings.skipped += [msgspec.structs.replace(skip, step=step) for step in left]

    def _climb(self, ladder: Sequence[Step]) -> bool:
        """Try the steps in order while each one pays; return whether the first did."""
        for number, step in enumerate(ladder):
            best = self.best.build.candidate
            if self.is_over or not self._try(instead(best, step)):
                return number > 0
        return bool(ladder)

    def _try(self, candidate: Candidate) -> bool:
        """Measure a candidate; return whether it is the best now."""
        began, stage = self.budget.clock(), stage_of(candidate.steps[-1])
        self.budget.stage = stage
        self.progress.begin(candidate)
        attempt = Try(candidate, stage, "failed", "")
        try:
            is_better = self._measured(attempt)
        except PenstockError as error:
            attempt.outcome, attempt.reason = outcomes.outcome_of_error(error)
            is_better = False
        attempt.seconds = self.budget.clock() - began
        self.findings.tries.append(attempt)
        return is_better

    def _measured(self, attempt: Try) -> bool:
        candidate, best = attempt.candidate, self.best.contender
        if is_lossy(candidate) and candidate.steps[-1].pass_name == DTYPE:
            attempt.accuracy = self.evaluator.judge(candidate)
            if not attempt.accuracy.is_passed:
                attempt.outcome, attempt.reason = "rejected", attempt.accuracy.text
                return False
        start = AHEAD * best.rate if best.rate else None
        attempt.served = served = self.evaluator.rated(candidate, start)
        rate = rate_of(served)
        if not rate:
            missed = [each.term for each in served.verdicts if each.outcome == "missed"]
            why = f": {', '.join(missed)} missed" if missed else ""
            attempt.outcome, attempt.reason = "slower", NO_ANSWER
            if start is not None:
                attempt.reason = f"does not keep the SLO at {units.number(start)}/s{why}"
            return False
        if not goals.is_better(rate, best.rate):
            attempt.outcome = "equal"
            attempt.reason = f"{units.number(rate)}/s, before {units.number(best.rate)}/s"
            return False
        attempt.outcome = "kept"
        attempt.reason = f"{units.number(rate)}/s keep the SLO" + (
            f", {rate / best.rate:.2f} times {units.number(best.rate)}/s" if best.rate else ""
        )
        self._add(candidate, served, rate)
        return True


def is_lossy(candidate: Candidate) -> bool:
    """Return whether its answers may differ from the original's."""
    return any(step.pass_name == DTYPE for step in candidate.steps)


def instead(candidate: Candidate, step: Step) -> Candidate:
    """Return the candidate with this step in place of any other of the same kind."""
    others = (each for each in candidate.steps if each.pass_name != step.pass_name)
    return Candidate((*others, step))


def rate_of(served: ServedMeasurement) -> float:
    """Return the highest rate that meets the SLO, or 0 if none does."""
    if served.max_rate is None or math.isnan(served.max_rate.value):
        return 0.0
    return served.max_rate.value


# What may be tried.


def stage_of(step: Step) -> Stage:
    if step.pass_name != DTYPE:
        return "batching"
    return "precision" if bits_of(step.settings["dtype"]) >= HALF else "quantise"


def bits_of(dtype: str) -> int:
    """Parse the bits out of the name; 32 without a number."""
    found = re.search(r"[0-9]+", dtype)
    return int(found[0]) if found else 32


def dtype_offers(
    dtypes: Sequence[str], settings: EngineSettings, machine: Machine, *, is_exhaustive: bool
) -> tuple[list[Step], list[Skip]]:
    """Return the datatypes narrower than the original's, widest first; and those skipped because
    this device gains nothing from them."""
    offers: list[Step] = []
    skipped: list[Skip] = []
    own = bits_of(settings.dtype)
    narrower = [each for each in dtypes if each != "auto" and bits_of(each) < own]
    for dtype in sorted(narrower, key=lambda each: -bits_of(each)):
        step = Step(DTYPE, {"dtype": dtype})
        reason = _nothing_to_gain(dtype, settings.device, machine)
        if reason and not (is_exhaustive and dtype in NEEDED):
            skipped.append(Skip(DTYPE, reason, step))
        else:
            offers.append(step)
    return offers, skipped


def _nothing_to_gain(dtype: str, device: str, machine: Machine) -> str:
    if device != CPU:
        return "only CPUs multiply in it" if dtype in ON_CPUS else ""
    if dtype in ON_GPUS:
        return "only GPUs multiply in it"
    needed = NEEDED.get(dtype, ())
    if needed and not set(needed) & set(machine.isa):
        return f"this CPU has no instructions for it (one of {', '.join(needed)})"
    return ""


def tpot_limit_ms(slo: Slo) -> float | None:
    """Return the tightest limit per token after the first, whatever its statistic."""
    limits = [
        term.limit_s
        for term in slo.terms
        if isinstance(term, Latency) and term.metric in ("tpot", "itl")
    ]
    return min(limits) * 1e3 if limits else None


def serving_offers(settings: EngineSettings, slo: Slo) -> list[Knob]:
    """Return pacing, step size and sequence count as knobs. A step holds at least one token of each
    sequence, so the bounds keep the two compatible."""
    found: list[Knob] = []
    limit_ms = tpot_limit_ms(slo)
    if limit_ms is not None and settings.tpot_s is None:
        found.append([[Step(PACE, {"tpot_ms": f"{limit_ms:g}"})]])
    tokens, sequences = settings.max_tokens, settings.max_sequences
    fewest = max(LEAST_TOKENS, sequences)
    sizes = [[2 * tokens, 4 * tokens], [tokens // 2, tokens // 4]]
    found.append(_knob(TOKENS, "max_num_batched_tokens", sizes, (fewest, MOST_TOKENS)))
    # Step sizes are tuned first and may have shrunk to a quarter.
    most = min(MOST_SEQUENCES, max(sequences, tokens // 4))
    sizes = [[2 * sequences, 4 * sequences], [sequences // 2, sequences // 4]]
    found.append(_knob(SEQUENCES, "max_num_seqs", sizes, (LEAST_SEQUENCES, most)))
    return found


def _knob(name: str, setting: str, ways: Sequence[Sequence[int]], within: tuple[int, int]) -> Knob:
    return [
        [Step(name, {setting: str(value)}) for value in way if within[0] <= value <= within[1]]
        for way in ways
    ]
