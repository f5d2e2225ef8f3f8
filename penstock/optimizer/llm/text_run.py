"""Runs of language models: search, validate the choice on held-out prompts, and measure it in turns
with the original."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from penstock.errors import CommandLineError
from penstock.llm.settings import DTYPES, settings_of
from penstock.llm.text_files import read_text
from penstock.optimizer.accuracy import spent_alpha
from penstock.optimizer.candidates import Build, Candidate
from penstock.optimizer.conclusion import Conclusion, FinalChoice
from penstock.optimizer.findings import Finalist, Findings
from penstock.optimizer.journal import Journal
from penstock.optimizer.llm import likelihoods
from penstock.optimizer.llm.text_evaluator import HELD_OUT, TextEvaluator
from penstock.optimizer.llm.text_prompts import Prompts, read_prompts
from penstock.optimizer.llm.text_search import (
    STAGES,
    Knob,
    TextSearch,
    dtype_offers,
    serving_offers,
)
from penstock.optimizer.llm.text_subject import TextSubject, open_text_subject
from penstock.optimizer.model_run import ModelRun
from penstock.optimizer.progress import ProgressReporter
from penstock.optimizer.results import Optimization, ServedMeasurement
from penstock.optimizer.served_figures import repriced
from penstock.optimizer.time_plan import TextTime

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
            found = self.record(subject, data, findings)
            choice = TextConclusion(evaluator, search, found).conclude()
        found.elapsed_s = budget.elapsed_s
        return found, choice.finalist.build

    def _search(self, evaluator: TextEvaluator, search: TextSearch) -> None:
        settings = settings_of(evaluator.subject.build.config)
        offers, search.findings.skipped = dtype_offers(
            DTYPES, settings, self.machine, is_exhaustive=self.plan.is_exhaustive
        )

        def others(candidate: Candidate) -> list[Knob]:
            return serving_offers(settings_of(evaluator.build(candidate).config), self.plan.slo)

        search.run(offers, others)


class TextConclusion(Conclusion):
    def __init__(self, evaluator: TextEvaluator, search: TextSearch, found: Optimization) -> None:
        state = search.findings, search.budget, search.progress
        super().__init__(evaluator.plan, evaluator.journal, *state, found, max_proofs=1)
        self._evaluator = evaluator
        # The search measures at highest rates.
        self.has_slo_load = False
        found.accuracy_budget, found.form = str(evaluator.budget), "text"

    def admit(self, finalist: Finalist) -> FinalChoice | None:
        """Lossless candidates need no test."""
        if not finalist.contender.is_lossy:
            return FinalChoice(finalist, None)
        model = finalist.build.candidate.model
        if model.key in self.refused:
            return None
        judged = self._evaluator.judge(model, HELD_OUT, spent_alpha(len(self.refused)))
        if judged.is_passed:
            return FinalChoice(finalist, judged)
        self.refused[model.key] = judged
        return None

    def measure_proof(self, finalists: Sequence[Finalist], attempt: int) -> list[ServedMeasurement]:
        """Use the search's highest rates and their costs if the proof had no time for them."""
        starts = [each.contender.rate or None for each in finalists]
        proven = self._evaluator.prove([each.build for each in finalists], starts)
        if any(each.max_rate is None for each in proven):
            self.found.notes.append("the highest rates are those of the search, not of the proof")
        for each, finalist in zip(proven, finalists, strict=True):
            if each.max_rate is None:
                each.max_rate, each.curve = finalist.served.max_rate, finalist.served.curve
        return [repriced(each, self.plan) for each in proven]
