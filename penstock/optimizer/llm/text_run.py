"""Runs of language models: search, validate the choice on held-out prompts, and measure it in turns
with the original."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec

from penstock.errors import CommandLineError, PenstockError
from penstock.llm.settings import DTYPES, settings_of
from penstock.llm.text import read_text
from penstock.optimizer import disturbance, outcomes, phases
from penstock.optimizer.accuracy import Judgement, spent_alpha
from penstock.optimizer.candidates import Build, Candidate
from penstock.optimizer.conclusion import (
    FinalChoice,
    note_disturbances,
    note_end,
    original_does,
    return_to_original,
    saved,
)
from penstock.optimizer.findings import Finalist, Findings
from penstock.optimizer.interruption import finish
from penstock.optimizer.journal import Journal
from penstock.optimizer.llm import likelihoods
from penstock.optimizer.llm.text_evaluator import HELD_OUT, TextEvaluator
from penstock.optimizer.llm.text_prompts import Prompts, read_prompts
from penstock.optimizer.llm.text_search import STAGES, TextSearch
from penstock.optimizer.llm.text_steps import Knob, dtype_offers, serving_offers
from penstock.optimizer.llm.text_subject import TextSubject, open_text_subject
from penstock.optimizer.llm.text_time import TextTime
from penstock.optimizer.model_run import ModelRun
from penstock.optimizer.plan import Plan
from penstock.optimizer.progress_reporter import ProgressReporter
from penstock.optimizer.results import Optimization, ServedMeasurement
from penstock.optimizer.served import repriced

WITHOUT_DATA = (
    "--data is required for language models: typical prompts, in a .jsonl file of "
    '{"prompt": …} or {"messages": […]}, or a .txt file with one per line'
)
NOT_FOR_TEXT = ("data_name", "labels", "evaluator", "calibration", "preprocess", "postprocess")
FLAGS = {"evaluator": "eval"}


class TextRun(ModelRun[TextSubject, Prompts]):
    def check(self) -> None:
        """Raise CommandLineError for options that do not apply, and for missing prompts."""
        plan = self.plan
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
        return open_text_subject(self.plan.model, self.plan.device, target)

    def read_data(self, subject: TextSubject) -> Prompts:
        text = read_text(settings_of(subject.build.config).path)
        return read_prompts(self.plan.data, text, subject.max_length)

    def key(self, subject: TextSubject, data: Prompts) -> str:
        plan = replace(self.plan, model="", data="")
        return self.digest(plan, subject.digest, data.digest, ",".join(DTYPES))

    def conclude(
        self, subject: TextSubject, data: Prompts, journal: Journal, findings: Findings
    ) -> tuple[Optimization, Build]:
        is_on_gpu = subject.build.config.uses_gpu
        budget = TextTime(self.plan, findings, time.monotonic, self.began, is_on_gpu=is_on_gpu)
        progress = ProgressReporter(self.watch, findings, budget, STAGES, judges_lossless=False)
        evaluator = TextEvaluator(self.plan, subject, data, journal, budget, progress.tell)
        with closing(evaluator):
            search = TextSearch(evaluator, self.plan, findings, budget, progress)
            self._search(evaluator, search)
            progress.begin_proof(search.best.build.candidate)
            choice = finish(findings, lambda: choose(evaluator, findings))
            found = self.record(subject, data, findings)
            found.accuracy_budget, found.form = str(evaluator.budget), "text"
            found.notes += outcomes.mark_refused(found.tries, choice.refused)
            _prove(evaluator, findings, choice, found, budget, progress)
            _settle(evaluator, findings, choice, found)
        found.elapsed_s = budget.elapsed_s
        return found, choice.finalist.build

    def _search(self, evaluator: TextEvaluator, search: TextSearch) -> None:
        plan = self.plan
        settings = settings_of(evaluator.subject.build.config)
        offers, search.findings.skipped = dtype_offers(
            DTYPES, settings, self.machine, is_exhaustive=plan.is_exhaustive
        )

        def others(candidate: Candidate) -> list[Knob]:
            return serving_offers(settings_of(evaluator.build(candidate).config), plan.slo)

        search.run(offers, others)


def choose(evaluator: TextEvaluator, findings: Findings) -> FinalChoice:
    """Return the best finalist that passes on the held-out prompts; lossless ones need no test."""
    refused: dict[str, Judgement] = {}
    for finalist in findings.finalists:
        if not finalist.contender.is_lossy:
            return FinalChoice(finalist, None, refused)
        model = finalist.build.candidate.model
        if model.key in refused:
            continue
        judged = evaluator.judge(model, HELD_OUT, spent_alpha(len(refused)))
        if judged.is_passed:
            return FinalChoice(finalist, judged, refused)
        refused[model.key] = judged
    raise AssertionError("the original loses nothing")


def _prove(
    evaluator: TextEvaluator,
    findings: Findings,
    choice: FinalChoice,
    found: Optimization,
    budget: TextTime,
    progress: ProgressReporter,
) -> None:
    """Measure original and choice in turns: at the SLO's load, then for the highest rate."""
    original, chosen = findings.finalists[-1], choice.finalist
    found.before, found.after = original.served, chosen.served
    if findings.is_interrupted:
        return
    if not budget.has_time_to_prove(2):
        found.notes.append(outcomes.NO_PROOF)
        return
    progress.begin_proof(chosen.build.candidate, str(saved(choice, found)))
    pair = [original, chosen] if chosen.build.candidate.steps else [original]
    starts = [each.contender.rate or None for each in pair]
    try:
        proven = evaluator.prove([each.build for each in pair], starts)
    except (PenstockError, KeyboardInterrupt) as error:
        findings.is_interrupted = isinstance(error, KeyboardInterrupt)
        note_end(error, chosen.build.candidate, found, is_proven=False)
        return
    if any(each.max_rate is None for each in proven):
        found.notes.append("the highest rates are those of the search, not of the proof")
    whole = [_with_rate(*each, evaluator.plan) for each in zip(proven, pair, strict=True)]
    found.before, found.after, found.is_proven = whole[0], whole[-1], True


def _settle(
    evaluator: TextEvaluator, findings: Findings, choice: FinalChoice, found: Optimization
) -> None:
    """Return to the original if it does as well, and conclude."""
    if original_does(choice, found):
        return_to_original(choice, findings, found)
        choice.held_out = None
    found.chosen, found.held_out = choice.finalist.build.candidate, choice.held_out
    if found.before is not None and found.after is not None and found.is_proven:
        slo = evaluator.plan.slo
        rate = None if slo is None or slo.rate is None else slo.rate.per_s
        original = disturbance.BuildHistory("original", found.before)
        chosen = disturbance.BuildHistory("chosen", found.after)
        choice.doubts = disturbance.doubts(chosen, original, rate)
        note_disturbances(evaluator.journal, choice, found)
    found.outcome = outcomes.outcome_of(found, is_interrupted=findings.is_interrupted)
    found.phases = phases.waterfall(found)


def _with_rate(proven: ServedMeasurement, finalist: Finalist, plan: Plan) -> ServedMeasurement:
    """Use the search's highest rate and its cost if the proof had no time to measure one."""
    if proven.max_rate is not None:
        return proven
    found = finalist.served
    proven = msgspec.structs.replace(proven, max_rate=found.max_rate, curve=found.curve)
    return repriced(proven, plan)
