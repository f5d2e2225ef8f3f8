"""A run from its plan to a version in the repository: open model and data, search, conclude,
commit."""

from __future__ import annotations

import datetime
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from penstock.errors import ConfigError, PenstockError
from penstock.optimizer import disk, evidence, folders, passes, shapes, time_plan
from penstock.optimizer.candidates import Build, Candidate
from penstock.optimizer.conclusion import conclude
from penstock.optimizer.evaluator import Evaluator
from penstock.optimizer.examples import Examples, open_examples, signature_examples
from penstock.optimizer.findings import Findings
from penstock.optimizer.first_line import headline
from penstock.optimizer.interruption import finish
from penstock.optimizer.journal import Journal
from penstock.optimizer.machine import Machine
from penstock.optimizer.plan import Plan
from penstock.optimizer.progress import Progress
from penstock.optimizer.progress_reporter import ProgressReporter
from penstock.optimizer.results import Optimization
from penstock.optimizer.run_context import RunContext
from penstock.optimizer.search import Search
from penstock.optimizer.subject import Subject, open_subject
from penstock.optimizer.this_machine import machine_speed_s, read_machine
from penstock.optimizer.time_budget import TimeBudget
from penstock.repository import layout

# Below the repository; readers of repositories skip names that start with a dot.
WORK = ".optimize"
ORIGINAL = "original"
OPENING = ".opening-"
# Number of random inputs, enough that consecutive requests differ.
NUM_DRAWN = 256

UNPROMISED = (
    "measured in slo mode, which refuses requests that would be late; the version is without it, "
    "because the SLO was not kept: set penstock.slo in config.pbtxt to enforce it"
)

Watch = Callable[[Progress], None]


def report_path(plan: Plan) -> Path:
    """Return the default path of the report."""
    return Path(plan.out).absolute() / WORK / plan.name / "report.html"


def optimize(plan: Plan, watch: Watch, command: str) -> Optimization:
    """Run the optimisation. ConfigError before anything long begins, if the plan or its files are
    wrong."""
    began = time.monotonic()
    work = Path(plan.out).absolute() / WORK / plan.name
    machine = read_machine()
    with _opened(plan, work) as subject:
        examples = _examples(plan, subject)
        run = run_key(plan, machine, subject, examples)
        is_resumed = (work / run / ORIGINAL).is_dir()
        disk.check_room(Path(plan.out), subject.build.folder, is_resumed=is_resumed)
        with Journal(work / run, is_fresh=plan.is_fresh, speed_s=machine_speed_s()) as journal:
            subject = _placed(subject, work / run / ORIGINAL / plan.name)
            is_on_gpu = subject.build.config.uses_gpu
            findings = Findings()
            budget = TimeBudget(plan, findings, time.monotonic, began, is_on_gpu=is_on_gpu)
            progress = ProgressReporter(
                watch, findings, budget, is_on_gpu=is_on_gpu, has_data=bool(plan.data)
            )
            context = RunContext(plan, machine, subject, examples, journal, budget, progress.tell)
            with closing(Evaluator(context)) as evaluator:
                search = Search(evaluator, findings, budget, progress, passes.sequence())
                return _found(evaluator, search, command, run)


def _found(evaluator: Evaluator, search: Search, command: str, key: str) -> Optimization:
    run, budget = evaluator.run, search.budget
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    is_on_gpu = run.original.config.uses_gpu
    planned = time_plan.describe(budget.planned, run.plan, is_on_gpu=is_on_gpu)
    if planned:
        run.notes.append(planned)
        search.progress.announce(planned)
    began_check = time.monotonic()
    evaluator.inspector.check_rows()
    evaluator.data.check()
    budget.learn_judging(time.monotonic() - began_check)
    findings = search.run()
    if not findings.finalists:
        # Interrupted before the original was measured: there is nothing to keep.
        raise KeyboardInterrupt
    found = conclude(evaluator, search, command, created)
    assert found.chosen is not None
    build = without_promise(_as_committed(evaluator, found.chosen), found)
    try:
        evaluator.builder.keep_chosen(build, budget.left_s)
    except PenstockError as error:
        found.notes.append(f"each start of the version repeats the timing of its matmuls: {error}")
    except KeyboardInterrupt:
        if findings.is_interrupted:
            raise
        findings.is_interrupted = True
        found.notes.append(
            "each start of the version repeats the timing of its matmuls: interrupted"
        )
    found.elapsed_s = budget.elapsed_s
    note_resumed(found, run.journal)
    found.headline = headline(found)
    found.build_folder = str(build.folder)
    finish(findings, lambda: evidence.try_commit(build, found, key))
    return found


def note_resumed(found: Optimization, journal: Journal) -> None:
    """Note what was reused from an earlier run, and what was discarded."""
    found.num_measured = journal.num_measured
    found.num_remembered = journal.num_remembered
    if journal.num_remembered and journal.oldest_at is not None:
        total = journal.num_measured + journal.num_remembered
        then = datetime.datetime.fromtimestamp(journal.oldest_at)
        clock = (
            f"{then:%H:%M}" if then.date() == datetime.date.today() else f"{then:%Y-%m-%d %H:%M}"
        )
        counted = f"{journal.num_remembered} of {total} measurements from {clock}"
        found.notes.append(f"resumed: {counted}; use --fresh to measure everything again")
    if journal.num_discarded:
        discarded = f"{journal.num_discarded} earlier measurements were discarded"
        found.notes.append(f"{discarded}: the machine runs at another speed now")


def _as_committed(evaluator: Evaluator, chosen: Candidate) -> Build:
    """Return the build to commit: batching is off in its file if rows must not share a batch. Our
    server detects that itself; others follow the file."""
    build = evaluator.builder.build(chosen)
    if (
        not build.config.batching.is_dynamic
        or not evaluator.inspector.facts(build).batching_problem
    ):
        return build
    off = shapes.with_batching(build.config, {"mode": "off"}, None)
    return replace(build, config=off)


def without_promise(build: Build, found: Optimization) -> Build:
    """Drop the SLO of a version that misses it: in slo mode it would refuse requests. It is batched
    by Triton's rules instead, unless users set penstock.slo themselves."""
    if found.outcome == "kept" or build.config.batching.slo_latency_s is None:
        return build
    found.notes.append(UNPROMISED)
    batching = replace(build.config.batching, slo_latency_s=None)
    return replace(build, config=replace(build.config, slo="", batching=batching))


@contextmanager
def _opened(plan: Plan, work: Path) -> Iterator[Subject]:
    """Open the model in a temporary folder of this process, until the run's folder is known."""
    folder = work / f"{OPENING}{os.getpid()}"
    try:
        sweep(work)
        folder.mkdir(parents=True)
        subject = open_subject(plan, folder / plan.name)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError([f"{error.filename or work}: {error.strerror or error}"]) from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    try:
        yield subject
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(work: Path) -> None:
    """Remove folders of processes that were killed while opening a model."""
    for folder in work.glob(f"{OPENING}*"):
        pid = folder.name.removeprefix(OPENING)
        if not pid.isdigit() or not psutil.pid_exists(int(pid)) or int(pid) == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)


def _placed(subject: Subject, folder: Path) -> Subject:
    """Put the original into the run's folder, unless the run that this one resumes has done so."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = folder.with_name(f".{folder.name}") / folder.name
        shutil.rmtree(draft.parent, ignore_errors=True)
        folders.write(subject.build, subject.build.config, draft)
        os.rename(draft, folder)
        draft.parent.rmdir()
    config = layout.read(folder).configs[-1]
    return replace(subject, build=Build(Candidate(), folder, config))


def _examples(plan: Plan, subject: Subject) -> Examples:
    config = subject.build.config
    has_batch = config.max_batch_size > 0
    if plan.data:
        return open_examples(plan, config.inputs, has_batch, config.classes)
    return signature_examples(config.inputs, has_batch, plan.seed, NUM_DRAWN)


def run_key(plan: Plan, machine: Machine, subject: Subject, examples: Examples) -> str:
    """Return a key of model, data, plan, code, tools and machine: journals are valid for equal keys
    only."""
    # Price and time budget do not change the measurements, only their use and their number.
    wishes = replace(plan, budget_s=None, out="", price_per_hour=None, is_fresh=False)
    parts = [
        str(wishes),
        str(machine),
        subject.digest,
        examples.digest,
        *(_code_digest(each) for each in (plan.evaluator, plan.preprocess, plan.postprocess)),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _code_digest(reference: str) -> str:
    """Return the digest of the file that defines a user's function."""
    if not reference:
        return ""
    path = [*sys.path]
    try:
        sys.path.insert(0, os.getcwd())
        spec = importlib.util.find_spec(reference.partition(":")[0])
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path[:] = path
    if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
        return ""
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
