"""Everything the search finds out, each from the journal where it is known already.

Owns the folder of a run: builds by their key, the original's answers, the journal. Knows how to ask
trials, the gate and the server; decides nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from penstock import repository
from penstock.errors import BackendFailed, ConfigError, PenstockError
from penstock.optimizer import accuracy, numerics, passes, scores, served, trials
from penstock.optimizer.accuracy import Judgement
from penstock.optimizer.audit import Audit, audit_calibration
from penstock.optimizer.budget import Budget, default_budget
from penstock.optimizer.candidates import Build, Candidate
from penstock.optimizer.examples import Examples
from penstock.optimizer.facts import Facts
from penstock.optimizer.journal import Journal
from penstock.optimizer.machine import Machine
from penstock.optimizer.numerics import Answers, Numerics
from penstock.optimizer.passes import Workshop
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import Served
from penstock.optimizer.simulate import TimeTable
from penstock.optimizer.subject import Subject
from penstock.types import Array

# Rows on which every candidate's answers are compared with the original's, number by number.
NUM_COMPARED = 64
# Rounding of another order of operations, as a share of an output's largest value.
TOLERANCE = 1e-3

Row = Mapping[str, Array]


class Lab:
    """Of one run. `rows` are what requests are made of, examples or inputs drawn from the
    signature; `watch` hears what is being done."""

    def __init__(
        self, plan: Plan, machine: Machine, subject: Subject, journal: Journal, folder: Path
    ) -> None:
        self.plan = plan
        self.machine = machine
        self.subject = subject
        self.journal = journal
        self.examples: Examples | None = None
        self.rows: Sequence[Row] = ()
        self.watch: Callable[[str], None] = lambda doing: None
        self._folder = folder
        self._builds: dict[str, Build] = {"": subject.build}
        self._original: dict[str, Answers] = {}

    @property
    def original(self) -> Build:
        return self.subject.build

    def workshop(self) -> Workshop:
        return Workshop(self.plan, self.machine, self.examples, self._folder / "cache")

    def build(self, candidate: Candidate) -> Build:
        """The candidate's files, made if they are not there; its parents' first. BackendFailed
        when it cannot be built."""
        if not candidate.steps:
            return self.original
        known = self._builds.get(candidate.key)
        if known is not None:
            return known
        parent = self.build(candidate.parent)
        folder = self._folder / "builds" / candidate.key / self.plan.name
        self.journal.remember("build", candidate.key, bool, lambda: self._make(candidate, parent))
        if not folder.is_dir():
            # The journal outlived the files.
            self._make(candidate, parent)
        return self._open(candidate, folder)

    def _open(self, candidate: Candidate, folder: Path) -> Build:
        found = repository.read(folder)
        if found.problems:
            raise BackendFailed("; ".join(*found.problems.values()))
        build = Build(candidate, folder, found.configs[-1])
        self._builds[candidate.key] = build
        return build

    def _make(self, candidate: Candidate, parent: Build) -> bool:
        """Into a folder that nobody looks at, then renamed: half a build is none."""
        self.watch("build")
        step = candidate.steps[-1]
        home = self._folder / "builds" / candidate.key
        draft = home.with_name(f".{home.name}-{os.getpid()}")
        for old in home.parent.glob(f".{home.name}-*"):
            shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(home, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            passes.find(step.pass_name).build(parent, step, draft / self.plan.name, self.workshop())
            os.rename(draft, home)
        except OSError as error:
            raise ConfigError([f"{draft}: cannot be written: {error}"]) from None
        except PenstockError as error:
            raise BackendFailed(str(error)) from error
        except Exception as error:  # A trial may fail in any way its libraries know.
            text = str(error).strip().splitlines()
            raise BackendFailed(f"{type(error).__name__}: {text[0] if text else ''}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return True

    def facts(self, build: Build) -> Facts:
        self.watch("read back")
        return self.journal.remember(
            "facts", build.candidate.key, Facts, lambda: trials.inspect(build)
        )

    def numerics(self, build: Build, is_exact: bool) -> Numerics:
        """Against the original, on the first rows of what candidates are chosen by."""

        def compare() -> Numerics:
            rows = [self.rows[index] for index in self._compared]
            original = self._original_answers("compared", self._compared)
            found = trials.answers(build, rows)
            return numerics.compare(original, found, tolerance=TOLERANCE if is_exact else None)

        self.watch("numerics")
        return self.journal.remember("numerics", build.candidate.key, Numerics, compare)

    @property
    def _compared(self) -> tuple[int, ...]:
        if self.examples is None:
            return tuple(range(min(NUM_COMPARED, len(self.rows))))
        return self.examples.split.choice[:NUM_COMPARED]

    def judge(self, build: Build, part: str, alpha: float = accuracy.ALPHA) -> Judgement:
        """The gate, on one part of the examples: "choice" or "held out"."""
        original = self._scores(self.original, part)
        found = self._scores(build, part)
        return accuracy.judge(original, found, self.budget, alpha=alpha, part=part)

    @cached_property
    def scorer(self) -> scores.Scorer:
        assert self.examples is not None
        original = self._original_answers("compared", self._compared)
        return scores.make_scorer(self.plan, self.examples, original)

    @property
    def budget(self) -> Budget:
        return self.plan.accuracy or default_budget(self.scorer.metric)

    def _scores(self, build: Build, part: str) -> Array:
        assert self.examples is not None
        split = self.examples.split
        indices = split.choice if part == "choice" else split.held_out

        def evaluate() -> list[float]:
            self.watch(f"accuracy, {len(indices):,} examples")
            original = self._original_answers(part, indices)
            if build is self.original:
                answers = original
            else:
                answers = trials.answers(build, [self.rows[index] for index in indices])
            return [float(score) for score in self.scorer.score(answers, indices, original)]

        key = f"{build.candidate.key} {part} {self.scorer.metric}"
        return np.array(self.journal.remember("scores", key, list[float], evaluate))

    def _original_answers(self, part: str, indices: tuple[int, ...]) -> Answers:
        known = self._original.get(part)
        if known is None:
            self.watch(f"the original's answers, {len(indices):,} examples")
            known = trials.answers(self.original, [self.rows[index] for index in indices])
            self._original[part] = known
        return known

    def audit(self) -> Audit:
        assert self.examples is not None
        self.watch("audit of the data")
        labelled = None if self.scorer.is_agreement else self._scores(self.original, "choice")
        return audit_calibration(self.examples, labelled)

    def times(self, build: Build, num_instances: int, num_threads: int) -> TimeTable:
        self.watch(f"batch times, {num_instances} x {num_threads} threads")
        key = f"{build.candidate.key} {num_instances}x{num_threads}"
        return self.journal.remember(
            "times",
            key,
            TimeTable,
            lambda: trials.times(build, self.rows, num_instances, num_threads),
        )

    def serve(self, builds: Sequence[Build], purpose: str) -> list[Served]:
        """At the load of the SLO, in turns."""
        key = " ".join([purpose, *(build.candidate.key for build in builds)])
        return self.journal.remember(
            "served",
            key,
            list[Served],
            lambda: served.measure_alternately(builds, self.plan, self.rows, self.watch),
        )
