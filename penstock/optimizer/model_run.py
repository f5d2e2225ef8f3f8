"""A run from its plan to a version in the repository: open model and data, search, conclude,
commit. The same for tensors (`tensor_run`) and text (`llm/text_run`), which say how."""

from __future__ import annotations

import datetime
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from penstock.optimizer import evidence, outcomes, workspace
from penstock.optimizer.candidates import Build
from penstock.optimizer.findings import Findings
from penstock.optimizer.first_line import headline
from penstock.optimizer.interruption import finish
from penstock.optimizer.journal import Journal
from penstock.optimizer.machine import Machine
from penstock.optimizer.plan import Plan
from penstock.optimizer.progress import Progress
from penstock.optimizer.results import Optimization
from penstock.optimizer.subject import Subject
from penstock.optimizer.this_machine import machine_speed_s

Watch = Callable[[Progress], None]


class Data(Protocol):
    """The user's examples or prompts."""

    @property
    def text(self) -> str: ...

    @property
    def digest(self) -> str: ...


S = TypeVar("S", bound=Subject)
D = TypeVar("D", bound=Data)


@dataclass(frozen=True, slots=True)
class ModelRun(ABC, Generic[S, D]):
    """One call of `penstock optimize` for one kind of model."""

    plan: Plan
    watch: Watch
    command: str
    # Seconds of the monotonic clock.
    began: float
    # Date and time, ISO 8601.
    created: str
    machine: Machine

    def check(self) -> None:
        """Raise ConfigError for options that do not apply."""

    @abstractmethod
    def open(self, target: Path) -> S:
        """Write the original as a model folder."""

    def files(self, subject: S) -> Path:
        """Return the folder with all files of the original."""
        return subject.build.folder

    def place(self, subject: S, folder: Path) -> Build:
        """Keep the original in the run's folder; return its build there."""
        return workspace.place(subject.build, folder / self.plan.name)

    @abstractmethod
    def read_data(self, subject: S) -> D: ...

    @abstractmethod
    def key(self, subject: S, data: D) -> str:
        """Return a key of everything that measurements depend on: see `digest`."""

    @abstractmethod
    def conclude(
        self, subject: S, data: D, journal: Journal, findings: Findings
    ) -> tuple[Optimization, Build]:
        """Search, choose and prove; return the record and the build to commit."""

    def optimize(self) -> Optimization:
        self.check()
        plan = self.plan
        with workspace.open_model(plan, self.open) as subject:
            data = self.read_data(subject)
            key = self.key(subject, data)
            folder = workspace.work_folder(plan) / key
            original = folder / workspace.ORIGINAL
            files = self.files(subject)
            workspace.check_room(Path(plan.out), files, is_resumed=original.is_dir())
            findings = Findings()
            was_there = folder.exists()
            with (
                Journal(folder, is_fresh=plan.is_fresh, speed_s=machine_speed_s()) as journal,
                workspace.kept_if_useful(folder, lambda: was_there or journal.has_timings),
            ):
                subject = replace(subject, build=self.place(subject, original))
                found, build = self.conclude(subject, data, journal, findings)
                _note_resumed(found, journal)
                found.work, found.build_folder = str(folder), str(build.folder)
                found.headline = headline(found)
                finish(findings, lambda: self.commit(build, found, key))
                return found

    def commit(self, build: Build, found: Optimization, key: str) -> None:
        """Add the version to the repository, with its evidence."""
        evidence.commit(build, found, key)

    def digest(self, plan: Plan, *digests: str) -> str:
        """Return a key of plan, model, data, code, tools and machine; a journal is valid for it."""
        # Price and time budget do not change the measurements, only their use and their number.
        plan = replace(plan, budget_s=None, out="", price_per_hour=None, is_fresh=False)
        parts = [str(plan), str(self.machine), *digests]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def record(self, subject: Subject, data: Data, findings: Findings) -> Optimization:
        """Begin the record of a run whose search is over."""
        plan = self.plan
        return Optimization(
            name=plan.name,
            source=plan.model,
            source_text=subject.text,
            source_digest=subject.digest,
            slo=str(plan.slo),
            accuracy_budget="",
            data_text=data.text,
            machine=self.machine,
            created=self.created,
            command=self.command,
            out=plan.out,
            price_per_hour=plan.price_per_hour,
            live_data=plan.data if plan.from_live else "",
            notes=outcomes.cut_notes(findings),
            tries=findings.tries,
            skipped=findings.skipped,
        )


def _note_resumed(found: Optimization, journal: Journal) -> None:
    """Note what was reused from an earlier run, and what was discarded."""
    found.num_measured = journal.num_measured
    found.num_remembered = journal.num_remembered
    if journal.num_remembered and journal.oldest_at is not None:
        total = journal.num_measured + journal.num_remembered
        then = datetime.datetime.fromtimestamp(journal.oldest_at)
        day = "" if then.date() == datetime.date.today() else f"{then:%Y-%m-%d} "
        counted = f"{journal.num_remembered} of {total} measurements from {day}{then:%H:%M}"
        found.notes.append(f"resumed: {counted}; use --fresh to measure everything again")
    if journal.num_discarded:
        discarded = f"{journal.num_discarded} earlier measurements were discarded"
        found.notes.append(f"{discarded}: the machine runs at another speed now")
