"""`penstock optimize` for a language model, from a plan to a version in the repository: open model
and prompts, search, validate the choice on held-out prompts, measure it in turns with the original,
and commit it."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from penstock.errors import CommandLineError, ConfigError, PenstockError
from penstock.llm.settings import DTYPES, settings_of
from penstock.llm.text import read_text
from penstock.optimizer import disk, disturbance, evidence, folders, goals, outcomes, phases
from penstock.optimizer.accuracy import Judgement, spent_alpha
from penstock.optimizer.candidates import Build, Candidate, Stage
from penstock.optimizer.conclusion import INTERRUPTED_PROOF
from penstock.optimizer.first_line import headline
from penstock.optimizer.interruption import finish
from penstock.optimizer.journal import TIMINGS, Journal
from penstock.optimizer.llm import likelihoods
from penstock.optimizer.llm.text_lab import HELD_OUT, TextLab
from penstock.optimizer.llm.text_prompts import Prompts, read_prompts
from penstock.optimizer.llm.text_search import STAGES, Finalist, Findings, TextSearch
from penstock.optimizer.llm.text_served import SEARCH_S
from penstock.optimizer.llm.text_steps import Knob, dtype_offers, serving_offers
from penstock.optimizer.llm.text_subject import TextSubject, open_text_subject
from penstock.optimizer.llm.text_trials import TIMEOUT_S
from penstock.optimizer.machine import Machine
from penstock.optimizer.plan import Plan
from penstock.optimizer.progress import Progress
from penstock.optimizer.progress_reporter import UNLESS_REFUSED
from penstock.optimizer.results import Optimization, Served
from penstock.optimizer.run import OPENING, ORIGINAL, WORK, Watch, note_resumed, sweep
from penstock.optimizer.served import repriced
from penstock.optimizer.this_machine import machine_speed_s, read_machine

# Share of the time budget for the proof; least time that is worth starting a candidate.
PROOF_SHARE, MIN_TRY_S = 0.4, 20.0
# Share of the time left for candidates that one rate search may take.
SEARCH_SHARE = 0.4
MIN_PROOF_S = 20.0
WITHOUT_DATA = (
    "--data is required for language models: typical prompts, in a .jsonl file of "
    '{"prompt": …} or {"messages": […]}, or a .txt file with one per line'
)
NOT_FOR_TEXT = ("data_name", "labels", "evaluator", "calibration", "preprocess", "postprocess")
FLAGS = {"evaluator": "eval"}


def optimize(plan: Plan, watch: Watch, command: str) -> Optimization:
    """Run the optimisation. Raise ConfigError for a wrong plan or file before anything slow."""
    check(plan)
    run = Run(plan, watch, command, time.monotonic(), read_machine())
    with _opened(plan) as subject:
        settings = settings_of(subject.build.config)
        text = read_text(settings.path)
        prompts = read_prompts(plan.data, text, subject.max_length)
        key = run_key(plan, run.machine, subject, prompts)
        is_resumed = (work_of(plan) / key / ORIGINAL).is_dir()
        disk.check_room(Path(plan.out), subject.build.folder, is_resumed=is_resumed)
        speed_s = machine_speed_s()
        with Journal(work_of(plan) / key, is_fresh=plan.is_fresh, speed_s=speed_s) as journal:
            placed = _placed(subject, work_of(plan) / key / ORIGINAL / plan.name)
            budget = plan.accuracy or likelihoods.DEFAULT
            with closing(TextLab(plan, placed, prompts, journal, budget)) as lab:
                return run.found(lab, key)


def check(plan: Plan) -> None:
    """Raise CommandLineError for options that do not apply, and for missing prompts."""
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


def work_of(plan: Plan) -> Path:
    return Path(plan.out).absolute() / WORK / plan.name


def run_key(plan: Plan, machine: Machine, subject: TextSubject, prompts: Prompts) -> str:
    """Hash of model, prompts, options, tools and machine: runs with equal keys share a journal."""
    wishes = replace(
        plan, budget_s=None, out="", price_per_hour=None, model="", data="", is_fresh=False
    )
    parts = [str(wishes), str(machine), subject.digest, prompts.digest, ",".join(DTYPES)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@contextmanager
def _opened(plan: Plan) -> Iterator[TextSubject]:
    """Open the model in a folder private to this process, until the run's key is known."""
    work = work_of(plan)
    folder = work / f"{OPENING}{os.getpid()}"
    try:
        try:
            sweep(work)
            folder.mkdir(parents=True)
            subject = open_text_subject(plan.model, plan.device, folder / plan.name)
        except OSError as error:
            raise ConfigError([f"{error.filename or work}: {error.strerror or error}"]) from None
        yield subject
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _placed(subject: TextSubject, folder: Path) -> TextSubject:
    """Put the original into the run's folder, or reuse the copy of the resumed run."""
    if not folder.is_dir():
        draft = folder.with_name(f".{folder.name}") / folder.name
        shutil.rmtree(draft.parent, ignore_errors=True)
        draft.parent.mkdir(parents=True)
        folders.write(subject.build, subject.build.config, draft)
        os.rename(draft, folder)
        draft.parent.rmdir()
    build = Build(Candidate(), folder, folders.read_config(folder))
    return replace(subject, build=build)


@dataclass(slots=True)
class Choice:
    finalist: Finalist
    held_out: Judgement | None
    # Judgements of candidates that failed on the held-out prompts, by key.
    refused: dict[str, Judgement]


@dataclass(slots=True)
class Run:
    """One call of `penstock optimize`, with its clock."""

    plan: Plan
    watch: Watch
    command: str
    began: float
    machine: Machine

    def found(self, lab: TextLab, key: str) -> Optimization:
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        search = self._searched(lab)
        findings = search.findings
        choice = finish(findings, lambda: choose(lab, findings))
        lab.watch = lambda doing: self._tell("proof", choice.finalist.candidate, findings, doing)
        made = self._begun(lab, findings, created)
        made.notes += outcomes.mark_refused(made.tries, choice.refused, datatype_of)
        self._prove(lab, findings, choice, made)
        if choice.finalist.candidate.steps and _is_as_good(made.before, made.after):
            how = "measured in turns, " if made.is_proven else ""
            chosen = choice.finalist.candidate
            made.notes.append(f"{how}the original does as well as {chosen}, and is simpler")
            choice = Choice(findings.kept[0], None, choice.refused)
            made.after = made.before
        made.chosen, made.held_out = choice.finalist.candidate, choice.held_out
        self._note_disturbances(lab, made)
        made.outcome = outcomes.outcome_of(made, is_interrupted=findings.is_interrupted)
        made.phases = phases.waterfall(made)
        made.elapsed_s = self.elapsed_s
        note_resumed(made, lab.journal)
        made.headline = headline(made)
        build = lab.build(choice.finalist.candidate)
        made.build_folder = str(build.folder)
        finish(findings, lambda: evidence.try_commit(build, made, key))
        return made

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    def left_s(self) -> float | None:
        return None if self.plan.budget_s is None else self.plan.budget_s - self.elapsed_s

    def for_candidates_s(self) -> float:
        """Seconds left for candidates, without the proof's share."""
        left_s, budget_s = self.left_s(), self.plan.budget_s
        if left_s is None or budget_s is None:
            return math.inf
        return left_s - PROOF_SHARE * budget_s

    def _searched(self, lab: TextLab) -> TextSearch:
        settings = settings_of(lab.subject.build.config)
        offers, skipped = dtype_offers(
            DTYPES, settings, self.machine, is_exhaustive=self.plan.is_exhaustive
        )
        told: list[tuple[Stage, Candidate, Findings]] = []

        def begins(stage: Stage, candidate: Candidate, findings: Findings) -> None:
            told[:] = [(stage, candidate, findings)]

        def others(candidate: Candidate) -> list[Knob]:
            return serving_offers(settings_of(lab.build(candidate).config), self.plan.slo)

        lab.watch = lambda doing: self._tell(*told[0], doing)
        lab.search_s = lambda: min(SEARCH_S, max(1.0, SEARCH_SHARE * self.for_candidates_s()))
        lab.judge_s = lambda: min(TIMEOUT_S, max(1.0, self.for_candidates_s()))
        search = TextSearch(
            lab, self.plan, lambda: self.for_candidates_s() > MIN_TRY_S, begins, time.monotonic
        )
        search.findings.skipped = skipped
        search.run(offers, others)
        best = search.findings.best.candidate
        lab.watch = lambda doing: self._tell("held out", best, search.findings, doing)
        return search

    def _tell(self, stage: str, candidate: Candidate, findings: Findings, doing: str) -> None:
        best = findings.kept[-1] if findings.kept else None
        self.watch(
            Progress(
                stage=stage,
                candidate="" if stage == "proof" else str(candidate),
                doing=doing if stage != "proof" else f"original and choice in turns, {doing}",
                num_tried=len(findings.tries),
                best="" if best is None else str(best.candidate),
                best_text="" if best is None else f"{best.rate:.3g}/s",
                elapsed_s=self.elapsed_s,
                left_s=self.left_s(),
                stages=STAGES,
                to_save=_to_save(findings, candidate if stage == "proof" else None),
            )
        )

    def _begun(self, lab: TextLab, findings: Findings, created: str) -> Optimization:
        return Optimization(
            name=self.plan.name,
            source=self.plan.model,
            source_text=lab.subject.text,
            source_digest=lab.subject.digest,
            slo=str(self.plan.slo),
            accuracy_budget=str(lab.budget),
            data_text=lab.prompts.text,
            machine=self.machine,
            created=created,
            command=self.command,
            out=self.plan.out,
            price_per_hour=self.plan.price_per_hour,
            notes=outcomes.cut_notes(
                findings.tries,
                is_interrupted=findings.is_interrupted,
                is_out_of_time=findings.is_out_of_time,
            ),
            tries=findings.tries,
            skipped=findings.skipped,
            work=str(lab.journal.path.parent),
            form="text",
        )

    def _note_disturbances(self, lab: TextLab, made: Optimization) -> None:
        """Withhold the verdict if the proof contradicts itself or the machine was disturbed."""
        if made.before is None or made.after is None or not made.is_proven:
            return
        slo = self.plan.slo
        rate = None if slo is None or slo.rate is None else slo.rate.per_s
        original = disturbance.BuildHistory("original", made.before)
        doubts = disturbance.doubts(disturbance.BuildHistory("chosen", made.after), original, rate)
        if doubts:
            made.disturbances = [*doubts, *disturbance.disturbances([made.before, made.after])]
            lab.journal.forget(TIMINGS)

    def _prove(self, lab: TextLab, findings: Findings, choice: Choice, made: Optimization) -> None:
        """Measure original and choice in turns: at the SLO's load, then for the highest rate."""
        original, chosen = findings.kept[0], choice.finalist
        made.before, made.after = original.served, chosen.served
        left_s = self.left_s()
        if findings.is_interrupted:
            return
        if left_s is not None and left_s < MIN_PROOF_S:
            made.notes.append(outcomes.NO_PROOF)
            return
        pair = [original, chosen] if chosen.candidate.steps else [original]
        starts = [each.rate or None for each in pair]
        try:
            found = lab.prove([each.candidate for each in pair], starts, self.left_s)
        except PenstockError as error:
            made.notes.append(f"the proof of {chosen.candidate} failed: {error}")
            made.proof_failure = str(error)
            return
        except KeyboardInterrupt:
            findings.is_interrupted = True
            made.notes.append(INTERRUPTED_PROOF)
            return
        if any(each.max_rate is None for each in found):
            made.notes.append("the highest rates are those of the search, not of the proof")
        whole = [_with_rate(*each, self.plan) for each in zip(found, pair, strict=True)]
        made.before, made.after, made.is_proven = whole[0], whole[-1], True


def _with_rate(proven: Served, finalist: Finalist, plan: Plan) -> Served:
    """Use the search's highest rate and its cost if the proof had no time to measure one."""
    if proven.max_rate is not None:
        return proven
    found = finalist.served
    proven = msgspec.structs.replace(proven, max_rate=found.max_rate, curve=found.curve)
    return repriced(proven, plan)


def datatype_of(candidate: Candidate) -> Candidate:
    """Keep only the datatype step, which comes first: the others do not change answers."""
    return Candidate(candidate.steps[:1])


def choose(lab: TextLab, findings: Findings) -> Choice:
    """Return the best finalist that passes on the held-out prompts; lossless ones need no test."""
    refused: dict[str, Judgement] = {}
    for finalist in reversed(findings.kept):
        if not finalist.is_lossy:
            return Choice(finalist, None, refused)
        lossy = datatype_of(finalist.candidate)
        if lossy.key in refused:
            continue
        judged = lab.judge(lossy, HELD_OUT, spent_alpha(len(refused)))
        if judged.is_passed:
            return Choice(finalist, judged, refused)
        refused[lossy.key] = judged
    raise AssertionError("the original loses nothing")


def _is_as_good(original: Served | None, chosen: Served | None) -> bool:
    """Return whether the original is no worse after all; it wins ties because it is simplest."""
    if original is None or chosen is None:
        return False
    return goals.order([original, chosen], [0, 1])[0] == 0


def _to_save(findings: Findings, chosen: Candidate | None) -> str:
    """Return what an interruption would save, by the search's figures. `chosen` is None before the
    choice is made."""
    if not findings.kept:
        return ""
    found = [each for each in findings.kept if chosen in (None, each.candidate)][-1]
    if not found.candidate.steps or _is_as_good(findings.kept[0].served, found.served):
        return str(Candidate())
    is_judged = chosen is None and found.is_lossy
    return f"{found.candidate}{UNLESS_REFUSED if is_judged else ''}"
