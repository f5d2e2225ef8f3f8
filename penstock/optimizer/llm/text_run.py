"""Runs of language models: search, validate the choice on held-out prompts, and measure it in turns
with the original."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from penstock.errors import CommandLineError, PenstockError
from penstock.llm.settings import DTYPES, settings_of
from penstock.llm.text import read_text
from penstock.optimizer import disturbance, outcomes, phases
from penstock.optimizer.accuracy import Judgement, spent_alpha
from penstock.optimizer.candidates import Candidate
from penstock.optimizer.conclusion import INTERRUPTED_PROOF
from penstock.optimizer.interruption import finish
from penstock.optimizer.journal import TIMINGS, Journal
from penstock.optimizer.llm import likelihoods
from penstock.optimizer.llm.text_evaluator import HELD_OUT, TextEvaluator
from penstock.optimizer.llm.text_progress import TextProgress, is_as_good
from penstock.optimizer.llm.text_prompts import Prompts, read_prompts
from penstock.optimizer.llm.text_search import TextFinalist, TextFindings, TextSearch
from penstock.optimizer.llm.text_steps import Knob, dtype_offers, serving_offers
from penstock.optimizer.llm.text_subject import TextSubject, open_text_subject
from penstock.optimizer.llm.text_time import TextTime
from penstock.optimizer.optimize_call import OptimizeCall, RunOutcome
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import Optimization, ServedMeasurement
from penstock.optimizer.served import repriced

MIN_PROOF_S = 20.0
WITHOUT_DATA = (
    "--data is required for language models: typical prompts, in a .jsonl file of "
    '{"prompt": …} or {"messages": […]}, or a .txt file with one per line'
)
NOT_FOR_TEXT = ("data_name", "labels", "evaluator", "calibration", "preprocess", "postprocess")
FLAGS = {"evaluator": "eval"}


@dataclass(slots=True)
class TextChoice:
    finalist: TextFinalist
    held_out: Judgement | None
    # Judgements of candidates that failed on the held-out prompts, by key.
    refused: dict[str, Judgement]


@dataclass(frozen=True, slots=True)
class TextRun:
    call: OptimizeCall

    def check(self) -> None:
        """Raise CommandLineError for options that do not apply, and for missing prompts."""
        plan = self.call.plan
        problems = [
            f"--{FLAGS.get(each, each).replace('_', '-')} does not apply to language models"
            for each in NOT_FOR_TEXT
            if getattr(plan, each)
        ]
        problems += [] if plan.data else [WITHOUT_DATA]
        if problems:
            raise CommandLineError(problems)
        if plan.accuracy is not None:
            likelihoods.check_budget(plan.accuracy)

    def open(self, target: Path) -> TextSubject:
        return open_text_subject(self.call.plan.model, self.call.plan.device, target)

    def read_data(self, subject: TextSubject) -> Prompts:
        text = read_text(settings_of(subject.build.config).path)
        return read_prompts(self.call.plan.data, text, subject.max_length)

    def key(self, subject: TextSubject, data: Prompts) -> str:
        plan = replace(self.call.plan, model="", data="")
        return self.call.key(plan, subject.digest, data.digest, ",".join(DTYPES))

    def conclude(self, subject: TextSubject, data: Prompts, journal: Journal) -> RunOutcome:
        call, plan = self.call, self.call.plan
        clock, findings = TextTime(plan.budget_s, time.monotonic, call.began), TextFindings()
        progress = TextProgress(call.watch, findings, clock)
        evaluator = TextEvaluator(plan, subject, data, journal, clock, progress.tell)
        with closing(evaluator):
            self._search(evaluator, findings, clock, progress)
            progress.begin("held out", findings.best.candidate)
            choice = finish(findings, lambda: choose(evaluator, findings))
            progress.begin("proof", choice.finalist.candidate)
            found = call.record(subject, data, findings)
            found.accuracy_budget, found.form = str(evaluator.budget), "text"
            found.notes += outcomes.mark_refused(found.tries, choice.refused, datatype_of)
            _prove(evaluator, findings, choice, found, clock)
            _settle(evaluator, findings, choice, found)
            build = evaluator.build(choice.finalist.candidate)
        found.elapsed_s = clock.elapsed_s
        return RunOutcome(found, build, findings)

    def _search(
        self,
        evaluator: TextEvaluator,
        findings: TextFindings,
        clock: TextTime,
        progress: TextProgress,
    ) -> None:
        plan = self.call.plan
        settings = settings_of(evaluator.subject.build.config)
        offers, findings.skipped = dtype_offers(
            DTYPES, settings, self.call.machine, is_exhaustive=plan.is_exhaustive
        )

        def others(candidate: Candidate) -> list[Knob]:
            return serving_offers(settings_of(evaluator.build(candidate).config), plan.slo)

        search = TextSearch(evaluator, plan, findings, clock.has_time, progress.begin, clock.clock)
        search.run(offers, others)


def choose(evaluator: TextEvaluator, findings: TextFindings) -> TextChoice:
    """Return the best finalist that passes on the held-out prompts; lossless ones need no test."""
    refused: dict[str, Judgement] = {}
    for finalist in reversed(findings.kept):
        if not finalist.is_lossy:
            return TextChoice(finalist, None, refused)
        lossy = datatype_of(finalist.candidate)
        if lossy.key in refused:
            continue
        judged = evaluator.judge(lossy, HELD_OUT, spent_alpha(len(refused)))
        if judged.is_passed:
            return TextChoice(finalist, judged, refused)
        refused[lossy.key] = judged
    raise AssertionError("the original loses nothing")


def datatype_of(candidate: Candidate) -> Candidate:
    """Keep only the datatype step, which comes first: the others do not change answers."""
    return Candidate(candidate.steps[:1])


def _prove(
    evaluator: TextEvaluator,
    findings: TextFindings,
    choice: TextChoice,
    found: Optimization,
    clock: TextTime,
) -> None:
    """Measure original and choice in turns: at the SLO's load, then for the highest rate."""
    original, chosen = findings.kept[0], choice.finalist
    found.before, found.after = original.served, chosen.served
    if findings.is_interrupted:
        return
    if clock.left_s is not None and clock.left_s < MIN_PROOF_S:
        found.notes.append(outcomes.NO_PROOF)
        return
    pair = [original, chosen] if chosen.candidate.steps else [original]
    starts = [each.rate or None for each in pair]
    try:
        proven = evaluator.prove([each.candidate for each in pair], starts)
    except PenstockError as error:
        found.notes.append(f"the proof of {chosen.candidate} failed: {error}")
        found.proof_failure = str(error)
        return
    except KeyboardInterrupt:
        findings.is_interrupted = True
        found.notes.append(INTERRUPTED_PROOF)
        return
    if any(each.max_rate is None for each in proven):
        found.notes.append("the highest rates are those of the search, not of the proof")
    whole = [_with_rate(*each, evaluator.plan) for each in zip(proven, pair, strict=True)]
    found.before, found.after, found.is_proven = whole[0], whole[-1], True


def _settle(
    evaluator: TextEvaluator, findings: TextFindings, choice: TextChoice, found: Optimization
) -> None:
    """Return to the original if it does as well, and conclude."""
    chosen = choice.finalist.candidate
    if chosen.steps and is_as_good(found.before, found.after):
        how = "measured in turns, " if found.is_proven else ""
        found.notes.append(f"{how}the original does as well as {chosen}, and is simpler")
        choice.finalist, choice.held_out = findings.kept[0], None
        found.after = found.before
    found.chosen, found.held_out = choice.finalist.candidate, choice.held_out
    _note_disturbances(evaluator, found)
    found.outcome = outcomes.outcome_of(found, is_interrupted=findings.is_interrupted)
    found.phases = phases.waterfall(found)


def _note_disturbances(evaluator: TextEvaluator, found: Optimization) -> None:
    """Withhold the verdict if the proof contradicts itself or the machine was disturbed."""
    if found.before is None or found.after is None or not found.is_proven:
        return
    slo = evaluator.plan.slo
    rate = None if slo is None or slo.rate is None else slo.rate.per_s
    original = disturbance.BuildHistory("original", found.before)
    doubts = disturbance.doubts(disturbance.BuildHistory("chosen", found.after), original, rate)
    if doubts:
        found.disturbances = [*doubts, *disturbance.disturbances([found.before, found.after])]
        evaluator.journal.forget(TIMINGS)


def _with_rate(proven: ServedMeasurement, finalist: TextFinalist, plan: Plan) -> ServedMeasurement:
    """Use the search's highest rate and its cost if the proof had no time to measure one."""
    if proven.max_rate is not None:
        return proven
    found = finalist.served
    proven = msgspec.structs.replace(proven, max_rate=found.max_rate, curve=found.curve)
    return repriced(proven, plan)
