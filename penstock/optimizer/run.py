"""A run from its plan to a version in the repository: open model and data, search, conclude,
commit. The same for tensors and text; see `optimize_call.ModelRun` for what differs."""

from __future__ import annotations

import datetime
import time
from dataclasses import replace
from pathlib import Path

from penstock.optimizer import disk, evidence, workspace
from penstock.optimizer.first_line import headline
from penstock.optimizer.interruption import finish
from penstock.optimizer.journal import Journal
from penstock.optimizer.llm.recognise import is_language_model
from penstock.optimizer.optimize_call import D, ModelRun, OptimizeCall, S, Watch
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import Optimization
from penstock.optimizer.this_machine import machine_speed_s, read_machine


def optimize(plan: Plan, watch: Watch, command: str) -> Optimization:
    """Run the optimisation. ConfigError before anything long begins, if the plan or its files are
    wrong."""
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    call = OptimizeCall(plan, watch, command, time.monotonic(), created, read_machine())
    if is_language_model(plan.model):
        from penstock.optimizer.llm.text_run import TextRun

        return _optimize(TextRun(call))
    from penstock.optimizer.tensor_run import TensorRun

    return _optimize(TensorRun(call))


def _optimize(run: ModelRun[S, D]) -> Optimization:
    run.check()
    plan = run.call.plan
    with workspace.open_model(plan, run.open) as subject:
        data = run.read_data(subject)
        key = run.key(subject, data)
        folder = workspace.work_folder(plan) / key
        original = folder / workspace.ORIGINAL
        is_resumed = original.is_dir()
        disk.check_room(Path(plan.out), subject.build.folder, is_resumed=is_resumed)
        with Journal(folder, is_fresh=plan.is_fresh, speed_s=machine_speed_s()) as journal:
            build = workspace.place(subject.build, original / plan.name)
            outcome = run.conclude(replace(subject, build=build), data, journal)
            found, build = outcome.found, outcome.build
            _note_resumed(found, journal)
            found.work, found.build_folder = str(folder), str(build.folder)
            found.headline = headline(found)
            finish(outcome.findings, lambda: evidence.try_commit(build, found, key))
            return found


def _note_resumed(found: Optimization, journal: Journal) -> None:
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
