"""One call of `penstock optimize`, and the parts in which kinds of models differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from penstock.optimizer import outcomes
from penstock.optimizer.candidates import Build, Skip
from penstock.optimizer.journal import Journal
from penstock.optimizer.machine import Machine
from penstock.optimizer.plan import Plan
from penstock.optimizer.progress import Progress
from penstock.optimizer.results import Optimization, Try
from penstock.optimizer.subject import Subject

Watch = Callable[[Progress], None]


class Data(Protocol):
    """The user's examples or prompts."""

    @property
    def text(self) -> str: ...

    @property
    def digest(self) -> str: ...


class SearchResults(Protocol):
    """Results that every search has."""

    tries: list[Try]
    skipped: list[Skip]
    is_interrupted: bool
    is_out_of_time: bool


S = TypeVar("S", bound=Subject)
D = TypeVar("D", bound=Data)


@dataclass(frozen=True, slots=True)
class OptimizeCall:
    plan: Plan
    watch: Watch
    command: str
    # Seconds of the monotonic clock.
    began: float
    # Date and time, ISO 8601.
    created: str
    machine: Machine

    def key(self, plan: Plan, *digests: str) -> str:
        """Return a key of plan, model, data, code, tools and machine: journals are valid for equal
        keys only."""
        # Price and time budget do not change the measurements, only their use and their number.
        plan = replace(plan, budget_s=None, out="", price_per_hour=None, is_fresh=False)
        parts = [str(plan), str(self.machine), *digests]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def record(self, subject: Subject, data: Data, findings: SearchResults) -> Optimization:
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
            notes=outcomes.cut_notes(
                findings.tries,
                is_interrupted=findings.is_interrupted,
                is_out_of_time=findings.is_out_of_time,
            ),
            tries=findings.tries,
            skipped=findings.skipped,
        )


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The end of a run, before its commit."""

    found: Optimization
    build: Build
    findings: SearchResults


class ModelRun(Protocol[S, D]):
    """A run of one kind of model: tensors or text."""

    @property
    def call(self) -> OptimizeCall: ...

    def check(self) -> None:
        """Raise ConfigError for options that do not apply."""

    def open(self, target: Path) -> S:
        """Write the original as a model folder."""

    def read_data(self, subject: S) -> D: ...

    def key(self, subject: S, data: D) -> str: ...

    def conclude(self, subject: S, data: D, journal: Journal) -> RunOutcome:
        """Search, choose and prove."""
