"""The state that all parts of the evaluator share: plan, original, data, journal and time of one
run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from penstock.config import ModelConfig
from penstock.errors import CANNOT_LOAD, BackendFailed, ConfigError, PenstockError
from penstock.optimizer import folders
from penstock.optimizer.candidates import Build
from penstock.optimizer.examples import Examples
from penstock.optimizer.journal import Journal
from penstock.optimizer.machine import Machine
from penstock.optimizer.measured_ensemble import MeasuredEnsemble
from penstock.optimizer.plan import Plan
from penstock.optimizer.subject import Subject
from penstock.optimizer.time_plan import TimeBudget, TookTooLong
from penstock.types import Array

# Minimum time of a step's child process, however little time is left.
MIN_CHILD_S = 5.0

Row = Mapping[str, Array]
T = TypeVar("T")


@dataclass(slots=True)
class RunContext:
    plan: Plan
    machine: Machine
    subject: Subject
    # The user's data, or random rows drawn from the signature.
    samples: Examples
    journal: Journal
    budget: TimeBudget
    # Receives what is being done.
    tell: Callable[[str], None]
    # The ensemble whose member the model is: clients send it requests, and judge its answers.
    ensemble: MeasuredEnsemble | None = None
    notes: list[str] = field(default_factory=list)
    # Gaps in what the accuracy gate checks, one sentence each.
    unchecked: list[str] = field(default_factory=list)

    @property
    def original(self) -> Build:
        return self.subject.build

    def configure_original(self, config: ModelConfig) -> None:
        """Change the original's configuration, also on disk, where the server reads it."""
        config = folders.write_config(self.original.folder, config)
        self.subject = replace(self.subject, build=replace(self.original, config=config))

    @property
    def examples(self) -> Examples | None:
        """The user's examples; None without data."""
        return self.samples if self.plan.data else None

    @property
    def asked(self) -> Examples:
        """What clients send."""
        return self.samples if self.ensemble is None else self.ensemble.samples

    @property
    def answered(self) -> Sequence[str]:
        """The outputs that clients get."""
        seen = self.original.config if self.ensemble is None else self.ensemble.config
        return [spec.name for spec in seen.outputs]

    @property
    def served_plan(self) -> Plan:
        """The plan by which served builds are judged."""
        slo = self.plan.slo if self.ensemble is None else self.ensemble.slo
        return replace(self.plan, slo=slo)

    def served(self, build: Build) -> Build:
        """Return what a server serves: the build, or the ensemble around it."""
        return build if self.ensemble is None else self.ensemble.around(build)

    @property
    def rows(self) -> Sequence[Row]:
        return self.samples.rows

    @property
    def folder(self) -> Path:
        return self.journal.path.parent

    @property
    def passing(self) -> tuple[type[PenstockError], ...]:
        """Errors that may not happen with more time."""
        return () if self.plan.budget_s is None else (TookTooLong,)

    def deadline(self, build: Build) -> float:
        """Return the deadline of a child process that starts now."""
        left_s = self.budget.stage_left_s if build.candidate.steps else None
        return math.inf if left_s is None else time.monotonic() + max(MIN_CHILD_S, left_s)

    def required(self, build: Build, compute: Callable[[], T]) -> Callable[[], T]:
        """Wrap `compute` for the original: without it there is nothing to optimise, so its failure
        ends the run with a ConfigError and is not remembered."""

        def checked() -> T:
            try:
                return compute()
            except BackendFailed as error:
                # Data does not help a file that cannot be loaded.
                is_run = CANNOT_LOAD not in str(error)
                is_made_up = is_run and not self.plan.data
                hint = "; its inputs were made up: give data" if is_made_up else ""
                raise ConfigError([f"the original: {error}{hint}"]) from error

        return compute if build.candidate.steps else checked
