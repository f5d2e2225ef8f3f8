"""Evaluation of candidates for the search; every result comes from the journal if already known.

Owns the folder of a run: builds by their key, calibration ranges, the journal. Calls trials, the
accuracy gate, the profiler and the server; decides nothing.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from penstock.backends import CHOICES
from penstock.config import ModelConfig
from penstock.data.non_finite import NonFinite, describe
from penstock.errors import BackendFailed, ConfigError, PenstockError
from penstock.optimizer import (
    accuracy,
    audit,
    calibration,
    disturbance,
    folders,
    influence,
    numerics,
    passes,
    scores,
    served,
    trials,
)
from penstock.optimizer.accuracy import Judgement
from penstock.optimizer.budget import Budget, default_budget
from penstock.optimizer.candidates import Build, Candidate, Step
from penstock.optimizer.columns import FLOOR
from penstock.optimizer.examples import Examples
from penstock.optimizer.facts import Facts
from penstock.optimizer.journal import Journal
from penstock.optimizer.machine import Machine
from penstock.optimizer.numerics import Answers, Numerics
from penstock.optimizer.output_checks import OutputCheck, check_outputs
from penstock.optimizer.passes import Workshop, int8_static
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import FallbackLayer, Served
from penstock.optimizer.shapes import (
    arrangements,
    num_free_cores,
    with_batching,
    with_instances,
)
from penstock.optimizer.simulate import TimeTable
from penstock.optimizer.sittings import Sitting, Spare
from penstock.optimizer.subject import Subject
from penstock.optimizer.time_budget import TimeBudget
from penstock.optimizer.time_plan import (
    MIN_SEARCH_S,
    SEARCH_S,
    CutOff,
    Limits,
    OutOfTime,
    TookTooLong,
    plan_time,
)
from penstock.optimizer.trials import TrialLimits
from penstock.profile.profiler import profile_build
from penstock.profile.results import Profile
from penstock.repository import layout
from penstock.system import devices
from penstock.types import Array

# Rows on which every candidate's answers are compared with the original's, value by value.
NUM_COMPARED = 64
# Tolerance for rounding by another order of operations, as a share of the range of a column.
TOLERANCE = 1e-3
# On a GPU the original already convolves in TF32, and another kernel rounds differently.
TF32_TOLERANCE = 5e-3
# Longest batch of slow models, whatever the SLO allows.
MAX_BATCH_S = 10.0
# Share of the remaining search time that one compilation may take; it gets at least MIN_COMPILE_S.
COMPILE_SHARE = 0.5
# The same for tuning convolutions. Its time per batch size is known, and it gains far more than any
# other step.
TUNING_SHARE = 0.8
MIN_COMPILE_S = 20.0
# Minimum time of a step's child process, however little time is left.
MIN_CHILD_S = 5.0
# A build that was started this often and never finished crashes the run.
MAX_BEGUN = 3
# Share of a time budget for comparing answers on rows outside of the held-out part.
SURVEY_SHARE = 0.02
# Time for requesting answers to held-out rows from a server.
SERVED_ANSWERS_S = 8.0
CHOICE, HELD_OUT, COMPARED = "choice", "held out", "compared"
# Maximum number of rows with NaN or infinity that the original is run on.
MAX_NON_FINITE = 64
# Share of each GPU's memory that must be free for trials while servers are kept running.
MIN_FREE = 0.75
# Passes that change only how the model is served.
OF_SERVING = ("batching", "instances")
NO_DATA = (
    "accuracy was not checked: without --data, answers are compared on random inputs only, and "
    "steps that may change answers are skipped"
)
ONLY_AGREEMENT = (
    "correctness was not checked: without labels or --eval, answers are only compared with the "
    "original's"
)

NOT_REPEATED = (
    "the model's answers differ between two runs on the same rows: {}; no candidate can be "
    "compared with such a model: turn off dropout and sampling, fix its seed, or remove its state"
)

Row = Mapping[str, Array]
T = TypeVar("T")


class Evaluation(msgspec.Struct):
    """One build on one part of the examples: a score per example, and a check per output."""

    scores: list[float]
    outputs: list[OutputCheck]
    # The outputs that the score reads.
    reads: list[str]


class KeptLayers(msgspec.Struct):
    """A step that passes the gate with some layers in float, and those layers; no step: none
    passes."""

    step: Step | None = None
    layers: list[FallbackLayer] = []


class Lab:
    """Evaluates the candidates of one run. `examples` are the user's data, or random rows drawn
    from the signature; `budget` limits builds and measurements, and `tell` receives what is being
    done."""

    def __init__(  # noqa: PLR0913
        self,
        plan: Plan,
        machine: Machine,
        subject: Subject,
        examples: Examples,
        journal: Journal,
        budget: TimeBudget,
        tell: Callable[[str], None],
    ) -> None:
        self.plan = plan
        self.machine = machine
        self.subject = subject
        self.journal = journal
        self.notes: list[str] = []
        # Gaps in what the accuracy gate checks, one sentence each.
        self.unchecked: list[str] = []
        self._time_budget = budget
        self._tell = tell
        self.time = plan_time(plan, is_on_gpu=subject.build.config.uses_gpu)
        # A small budget has time for short levels only.
        self._served_plan = replace(plan, duration_s=self.time.level_s)
        self._examples = examples
        self._folder = journal.path.parent
        self._builds: dict[str, Build] = {}
        self._facts: dict[str, Facts] = {}
        self._original: dict[str, Answers] = {}
        # The original's answers to rows outside of a part; see `_surveyed`.
        self._survey: dict[str, Answers] = {}
        self._spare = Spare()
        self._sitting: Sitting | None = None
        self._servers = served.Servers()

    def close(self) -> None:
        """Stop all processes that this run keeps on GPUs."""
        self._rise()
        self._spare.close()
        self._servers.close()

    @property
    def original(self) -> Build:
        return self.subject.build

    @property
    def examples(self) -> Examples | None:
        """The user's examples; None without data."""
        return self._examples if self.plan.data else None

    @property
    def rows(self) -> Sequence[Row]:
        return self._examples.rows

    @property
    def data_text(self) -> str:
        return self._examples.text

    # Builds.

    @cached_property
    def workshop(self) -> Workshop:
        cache = self._folder / "cache"
        cache.mkdir(exist_ok=True)
        return Workshop(
            self.plan,
            self.machine,
            self.examples,
            cache,
            self._compile_timeout_s,
            check_time=self._time_budget.check_part,
        )

    def _compile_timeout_s(self, share: float = COMPILE_SHARE) -> float | None:
        left_s = self._time_budget.stage_left_s
        return None if left_s is None else max(MIN_COMPILE_S, share * left_s)

    def build(self, candidate: Candidate) -> Build:
        """Return the candidate's files, built after its parents' if they do not exist.
        BackendFailed if it cannot be built."""
        if not candidate.steps:
            return self.original
        known = self._builds.get(candidate.key)
        if known is not None:
            return known
        parent = self.build(candidate.parent)
        home = self._folder / "builds" / candidate.key
        self.journal.remember(
            "build",
            candidate.key,
            bool,
            lambda: self._make(candidate, parent),
            passing=self._passing,
        )
        if not home.is_dir():
            # The journal knows the build, but its files are gone.
            self._make(candidate, parent)
        build = _opened(candidate, home / self.plan.name)
        self._builds[candidate.key] = build
        return build

    @property
    def _passing(self) -> tuple[type[PenstockError], ...]:
        """Errors that may not happen with more time."""
        return () if self.plan.budget_s is None else (TookTooLong,)

    def _too_long(self, text: str) -> TookTooLong:
        """Return the error for a compilation timeout: with a budget, the compiler had only a share
        of the remaining time."""
        is_cut = self._time_budget.stage_left_s is not None
        return CutOff(text) if is_cut else TookTooLong(text)

    def _ends_at(self, build: Build) -> float:
        """Return the deadline of a child process that starts now."""
        left_s = self._time_budget.stage_left_s if build.candidate.steps else None
        return math.inf if left_s is None else time.monotonic() + max(MIN_CHILD_S, left_s)

    def _make(self, candidate: Candidate, parent: Build) -> bool:
        """Build in a hidden folder, then rename: readers never see a partial build."""
        self._tell("build")
        self._rise()
        if self.journal.count("build begun", candidate.key) > MAX_BEGUN:
            raise BackendFailed(f"its build was started {MAX_BEGUN} times and never finished")
        step = candidate.steps[-1]
        made_by = passes.find(step.pass_name)
        if not made_by.is_config_only:
            self._make_room(parent.config)
        home = self._folder / "builds" / candidate.key
        draft = home.with_name(f".{home.name}")
        for old in (draft, home):
            shutil.rmtree(old, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            made_by.build(parent, step, draft / self.plan.name, self.workshop)
            made = _opened(candidate, draft / self.plan.name)
            if {"penstock.compile", "penstock.fuse"} & made.config.options.keys():
                self._tell("compile")
                self._make_room(made.config)
                is_tuned = "penstock.fuse" in made.config.options
                share = TUNING_SHARE if is_tuned else COMPILE_SHARE
                timeout_s = self._compile_timeout_s(share) or trials.LOAD_TIMEOUT_S
                take = self._spare.take if made.config.uses_gpu else None
                trials.keep_compiled(made, timeout_s, take)
            os.rename(draft, home)
        except TookTooLong as error:
            # The build ended, so a run with more time must not count this start.
            self.journal.discount("build begun", candidate.key)
            raise self._too_long(f"compiling it takes too long: {error}") from error
        except OutOfTime:
            self.journal.discount("build begun", candidate.key)
            raise
        except PenstockError as error:
            raise BackendFailed(str(error)) from error
        except (OSError, MemoryError) as error:
            # The machine's fault, not the candidate's.
            raise ConfigError([f"{home.name}: cannot be built: {error}"]) from error
        except Exception as error:  # A build may fail in any way its libraries do.
            raise BackendFailed(f"{type(error).__name__}: {_first_line(error)}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return True

    def keep_chosen(self, build: Build, left_s: float | None = None) -> None:
        """Save the fastest GEMM kernels of a packed model with the version. They are timed at load,
        which later starts then skip. Done only for the version that is kept: a load that covers all
        token counts takes as long as a measurement."""
        is_packed = build.config.uses_gpu and "penstock.pack" in build.config.options
        if not is_packed or (build.version_folder / CHOICES).exists():
            return
        self._tell("keep which products are the fastest")
        self._rise()
        left_s = None if left_s is None else max(MIN_COMPILE_S, left_s)
        trials.keep_compiled(build, left_s or trials.LOAD_TIMEOUT_S)

    def facts(self, build: Build) -> Facts:
        """Return the facts of a build. Batching problems of its parents apply to it too, whatever
        tolerance its own rounding gets."""
        self._tell("read back")
        key = build.candidate.key
        build = self._read_as(build)
        found = self.journal.remember(
            "facts",
            build.candidate.key,
            Facts,
            self._needed(build, lambda: self._inspect(build)),
            passing=self._passing,
        )
        self._facts[key] = self._facts[build.candidate.key] = found
        found.batching_problem = self._batching_problem(build.candidate)
        if build.config.padding is None and build.candidate.steps:
            found.padding_problem = found.padding_problem or self._padding_problem(build.candidate)
        return found

    def _lineage(self, candidate: Candidate) -> list[Facts]:
        """Return the known facts of a candidate and its parents, its own first."""
        num_steps = len(candidate.steps)
        keys = [Candidate(candidate.steps[:num]).key for num in range(num_steps, -1, -1)]
        return [self._facts[key] for key in keys if key in self._facts]

    def _batching_problem(self, candidate: Candidate) -> str:
        found = (each.batching_problem for each in self._lineage(candidate))
        return next(filter(None, found), "")

    def _padding_problem(self, candidate: Candidate) -> str:
        return next((each.padding_problem for each in self._lineage(candidate)[1:]), "")

    def _rules(self, build: Build) -> TrialLimits:
        """Return how rows may be batched, as far as known: both serving and judging follow it."""
        known = self._lineage(build.candidate)
        is_alone = any(each.batching_problem for each in known)
        may_pad = not (known and known[0].padding_problem)
        max_rows = 1 if is_alone else self.subject.max_rows
        is_short = self.time.is_short and not build.config.uses_gpu
        num_lengths = trials.FEW_LENGTHS if is_short else trials.MAX_LENGTHS
        return TrialLimits(max_rows, may_pad, self._ends_at(build), max_lengths=num_lengths)

    def check_rows(self) -> None:
        """Serve the original without batching or padding from the start if real rows require it.
        ConfigError if it gives different answers to the same rows."""
        facts = self.facts(self.original)
        config = self.original.config
        if facts.batching_problem:
            self.notes.append(f"the original is served without batching: {facts.batching_problem}")
            if config.batching.is_dynamic:
                self._configure_original(with_batching(config, {"mode": "off"}, None))
        elif facts.padding_problem:
            self.notes.append(f"the original is served without padding: {facts.padding_problem}")
            if config.padding is not None:
                self._configure_original(replace(config, padding=None))

    def _configure_original(self, config: ModelConfig) -> None:
        """Change the original's configuration, also on disk, where the server reads it."""
        build = self.original
        config = folders.write_config(build.folder, config)
        self.subject = replace(self.subject, build=replace(build, config=config))

    def _read_as(self, build: Build) -> Build:
        """Return the build whose facts apply to this one. On a GPU, that is the model without its
        serving steps, which has been inspected already, unless rows are padded differently."""
        candidate = self._model_of(build.candidate)
        if not build.config.uses_gpu or candidate == build.candidate:
            return build
        model = self.build(candidate)
        return model if build.config.padding in (None, model.config.padding) else build

    def _model_of(self, candidate: Candidate) -> Candidate:
        """Return the candidate without trailing steps that change only how it is served."""
        while candidate.steps and candidate.steps[-1].pass_name in OF_SERVING:
            candidate = candidate.parent
        return candidate

    def _inspect(self, build: Build) -> Facts:
        sitting = self._sat(build)
        if not self._has_own_rows(build):
            if sitting is None:
                return trials.inspect(build, self._ends_at(build))
            return sitting.inspect()
        self._tell("rows alone and in batches")
        is_lossy = any(
            passes.find(each.pass_name).changes_answers for each in build.candidate.steps
        )
        if sitting is None:
            facts = influence.inspect(
                build, self.rows, is_lossy=is_lossy, ends_at=self._ends_at(build)
            )
        else:
            facts = sitting.inspect()
            model = self._sat(_of_the_model(build))
            assert model is not None, "it is on a GPU"
            is_rounded = is_lossy or bool(facts.quantised)
            influence.add_check(facts, model.check_rows(self.rows, is_rounded=is_rounded))
        if facts.repeat_problem and not build.candidate.steps:
            raise ConfigError([NOT_REPEATED.format(facts.repeat_problem)])
        return facts

    def _has_own_rows(self, build: Build) -> bool:
        """Return whether to check with real rows: not without data, nor if only serving changes and
        padding does not."""
        candidate = self._model_of(build.candidate)
        if self.examples is None or candidate == build.candidate:
            return self.examples is not None
        return build.config.padding not in (None, self.build(candidate).config.padding)

    def _sat(self, build: Build) -> Sitting | None:
        """Return the GPU session that has the build loaded, started if needed; None on CPUs."""
        config = build.config
        if not config.uses_gpu:
            return None
        if self._sitting is None or self._sitting.build.config != config:
            self._rise()
            self._make_room(config)
            pairs = arrangements(config, self.machine.num_cores)
            alone = [pair for pair in pairs if _num_workers(config, pair) == 1]
            most = max(alone, default=pairs[0])
            self._sitting = Sitting(build, most, self._spare)
        self._sitting.ends_at = self._ends_at(build)
        return self._sitting

    def _make_room(self, config: ModelConfig) -> None:
        """Stop the kept servers if the GPUs do not have enough free memory for a trial."""
        if not config.uses_gpu:
            return
        gpus = [gpu for gpu in devices.read_gpus() if gpu.total_bytes]
        if not gpus or any(gpu.free_bytes < MIN_FREE * gpu.total_bytes for gpu in gpus):
            self._servers.close()

    def _kept(self, builds: Sequence[Build]) -> served.Servers | None:
        """Return the servers to keep running. On GPUs starting one takes as long as a measurement;
        on CPUs each measurement gets the whole machine and its memory, so None."""
        is_on_gpu = all(build.config.uses_gpu for build in builds)
        return self._servers if is_on_gpu else None

    def _rise(self) -> None:
        """Close the GPU session, which frees the GPU."""
        if self._sitting is not None:
            self._sitting.close()
            self._sitting = None

    def _settle(self) -> None:
        """Make sure that nothing else of this run is active during the next measurement."""
        self._rise()
        self._spare.settle()

    def _needed(self, build: Build, compute: Callable[[], T]) -> Callable[[], T]:
        """Wrap `compute` for the original: without it there is nothing to optimise, so its failure
        ends the run with a ConfigError and is not remembered."""

        def asked() -> T:
            try:
                return compute()
            except BackendFailed as error:
                hint = "" if self.plan.data else "; its inputs were made up: give data"
                raise ConfigError([f"the original: {error}{hint}"]) from error

        return compute if build.candidate.steps else asked

    # Answers.

    def numerics(self, build: Build, *, is_exact: bool) -> Numerics:
        """Compare with the original on the first rows of the choice part, before any
        postprocessing."""

        def compare() -> Numerics:
            original = self._model_answers
            found = self.answers(_of_the_model(build), self.compared)
            tolerance = self._tolerance if is_exact else None
            # With a postprocessing function, --outputs names the function's outputs, not the
            # model's.
            names = () if build.config.postprocess else self.plan.outputs
            return self._compared(original, found, tolerance, names)

        self._tell("numerics")
        return self.journal.remember(
            "numerics", build.candidate.key, Numerics, compare, passing=self._passing
        )

    @property
    def _tolerance(self) -> float:
        return TF32_TOLERANCE if self.original.config.uses_gpu else TOLERANCE

    def _compared(
        self, one: Answers, other: Answers, tolerance: float | None, names: Sequence[str]
    ) -> Numerics:
        """Compare answers. On GPUs relative to a column's largest value: TF32 rounds values, not
        ranges."""
        own_floor = 1.0 if self.original.config.uses_gpu else FLOOR
        return numerics.compare(one, other, tolerance=tolerance, names=names, own_floor=own_floor)

    @property
    def compared(self) -> tuple[int, ...]:
        return self._examples.split.choice[:NUM_COMPARED]

    def answers(
        self, build: Build, indices: tuple[int, ...], stop_after_s: float = math.inf
    ) -> Answers:
        """Return answers to these rows; empty ones where time ran out first. Not recorded: they are
        large and quickly recomputed."""
        rows = [self.rows[index] for index in indices]
        told = self._tell_share(indices)

        rules = replace(self._rules(build), stop_after_s=stop_after_s)

        def ask() -> Answers:
            sitting = self._sat(build)
            if sitting is None:
                return trials.answers(build, rows, told, rules)
            return sitting.answers(rows, told, rules)

        return self._needed(build, ask)()

    def original_answers(self, part: str) -> Answers:
        known = self._original.get(part)
        if known is None:
            self._tell(f"the original's answers, {part}")
            known = self._original[part] = self.answers(self.original, self._indices(part))
            if part == CHOICE:
                self._note_nan(known)
        return known

    def _note_nan(self, answers: Answers) -> None:
        """Note how many answers of the original have NaN: a candidate that answers NaN as well
        agrees with it, and no score shows that such answers are useless."""
        num_nan = sum(
            any(np.isnan(each).any() for each in answer.values() if each.dtype.kind == "f")
            for answer in answers
        )
        if num_nan:
            self.notes.append(
                f"the original answers {num_nan:,} of {len(answers):,} examples with NaN"
            )

    @cached_property
    def _model_answers(self) -> Answers:
        """The original's answers to the compared rows, without postprocessing."""
        if self.original.config.postprocess is None:
            return self.original_answers(COMPARED)
        return self.answers(_of_the_model(self.original), self.compared)

    def _indices(self, part: str) -> tuple[int, ...]:
        split = self._examples.split
        return {COMPARED: self.compared, CHOICE: split.choice, HELD_OUT: split.held_out}[part]

    def _tell_share(self, indices: tuple[int, ...]) -> Callable[[int], None] | None:
        if len(indices) <= NUM_COMPARED:
            return None
        total = f"{len(indices):,}"

        def tell(num_done: int) -> None:
            self._time_budget.check_part()
            self._tell(f"answers, {num_done:,} of {total}")

        return tell

    # Accuracy.

    def judge(self, build: Build, part: str, alpha: float = accuracy.ALPHA) -> Judgement:
        """Apply the accuracy gate on one part: the score, and every output that it does not
        read."""
        original, found = self._evaluated(self.original, part), self._evaluated(build, part)
        before, after = np.array(original.scores), np.array(found.scores)
        judgement = accuracy.judge(before, after, self.budget, alpha=alpha, part=part)
        return accuracy.with_outputs(judgement, found.outputs)

    def judge_lossless(self, build: Build, part: str, alpha: float) -> Judgement:
        """Apply the accuracy gate to a lossless step: answers are also compared value by value on
        all examples of the part, and on as many other rows as the survey has time for."""

        def compare() -> Numerics:
            self._tell(f"numerics, {part}")
            original, found = self.original_answers(part), self.answers(build, self._indices(part))
            pairs = list(zip(original, found, strict=True))
            if build.candidate.steps:
                pairs += self._surveyed(build, part)
            one, other = ([pair[place] for pair in pairs] for place in (0, 1))
            return self._compared(one, other, self._tolerance, self.plan.outputs)

        key = f"{build.candidate.key} {part}"
        equality = self.journal.remember(
            "numerics of all rows", key, Numerics, compare, passing=self._passing
        )
        return accuracy.with_equality(self.judge(build, part, alpha), equality)

    def _surveyed(self, build: Build, part: str) -> list[tuple[Row, Row]]:
        """Return answers of the original and the build to rows outside of the part."""
        left = tuple(influence.survey_order(len(self.rows), self._indices(part)))
        if not left:
            return []
        self._tell("numerics, other rows")
        if part not in self._survey:
            self._survey[part] = self.answers(self.original, left, self._survey_s)
        found = self.answers(build, left, self._survey_s)
        pairs = zip(self._survey[part], found, strict=True)
        return [(one, other) for one, other in pairs if one and other]

    @property
    def _survey_s(self) -> float:
        budget_s = self.plan.budget_s
        shortest = math.inf if budget_s is None else SURVEY_SHARE * budget_s
        return min(influence.SURVEY_S, shortest)

    def check_served(self, build: Build, *, is_lossy: bool) -> str:
        """Return why the server's answers are not those that the gate judged; empty if they are."""

        def check() -> str:
            self._tell("answers of the server")
            indices = self._indices(HELD_OUT)
            judged = self.answers(build, indices)
            rows = [self.rows[index] for index in indices]
            left_s = self._time_budget.stage_left_s
            seconds = SERVED_ANSWERS_S if left_s is None else min(SERVED_ANSWERS_S, left_s / 4)
            limits, kept = self._limits(), self._kept([build])
            found = served.answers(build, rows, seconds, limits, kept)
            if not found:
                return "the server refused every row of the held-out examples"
            pairs = [judged[place] for place, _ in found], [answer for _, answer in found]
            return self._served_difference(*pairs, is_lossy=is_lossy)

        self._settle()
        return self.journal.remember(
            "served answers", build.candidate.key, str, check, passing=(PenstockError,)
        )

    def _served_difference(self, judged: Answers, found: Answers, *, is_lossy: bool) -> str:
        """Describe differences of served answers. A server forms other batches than a trial, so
        lossy builds may differ more."""
        if is_lossy:
            checks = check_outputs(judged, found, self._checked_outputs)
            return "; ".join(each.problem for each in checks if each.problem)
        names = self.plan.outputs
        compared = self._compared(judged, found, self._tolerance, names)
        return "; ".join(compared.problems)

    @cached_property
    def scorer(self) -> scores.Scorer:
        return scores.make_scorer(self.plan, self._examples, self.original_answers(COMPARED))

    @cached_property
    def budget(self) -> Budget:
        return self.plan.accuracy or default_budget(self.scorer.metric)

    def _evaluated(self, build: Build, part: str) -> Evaluation:
        def evaluate() -> Evaluation:
            self._tell(f"accuracy, {part}")
            original, indices = self.original_answers(part), self._indices(part)
            is_original = build.candidate == self.original.candidate
            found = original if is_original else self.answers(build, indices)
            scored = self.scorer.score(found, indices, original)
            checks = check_outputs(original, found, self._checked_outputs, self.scorer.reads)
            return Evaluation([float(each) for each in scored], checks, sorted(self.scorer.reads))

        key = f"{build.candidate.key} {part} {self.budget.metric}"
        return self.journal.remember("evaluation", key, Evaluation, evaluate, passing=self._passing)

    @property
    def _checked_outputs(self) -> Sequence[str]:
        """The outputs named by --outputs, default all."""
        return self.plan.outputs or [spec.name for spec in self.original.config.outputs]

    def _check_output_names(self) -> None:
        """Raise ConfigError if --outputs names an output that the model does not have."""
        known = [spec.name for spec in self.original.config.outputs]
        unknown = [name for name in self.plan.outputs if name not in known]
        if unknown:
            listed, there = (", ".join(f"'{name}'" for name in names) for names in (unknown, known))
            raise ConfigError([f"outputs: the model has no output {listed}; it has {there}"])
        left = [name for name in known if self.plan.outputs and name not in self.plan.outputs]
        if left:
            listed = ", ".join(f"'{name}'" for name in left)
            self.unchecked.append(f"outputs {listed} were not checked: --outputs leaves them out")

    def check_data(self) -> None:
        """Check the data; ConfigError explains what would mislead calibration or the gate."""
        self._check_output_names()
        if self.examples is None:
            self.unchecked.append(NO_DATA)
            self._ask_ahead()
            return
        self._check_finite(self._examples.non_finite)
        self._tell("audit of the data")
        if self.scorer.is_agreement:
            self.unchecked.append(ONLY_AGREEMENT)
        found = self.journal.remember("audit", "", audit.Audit, self._audit)
        if found.problems:
            ways = "or omit --data; steps that need data are then skipped"
            raise ConfigError([*(f"data: {each}" for each in found.problems), ways])
        self.notes += found.warnings
        # Fail now rather than at the end if answers cannot be scored or the evaluator fails.
        evaluated = self._evaluated(self.original, CHOICE)
        scored = evaluated.scores
        if not np.isfinite(scored).any():
            where = f"eval: {self.plan.evaluator}" if self.plan.evaluator else "data"
            problem = f"not one of {len(scored)} answers of the original can be scored"
            raise ConfigError([f"{where}: {problem} by {self.scorer.metric}"])
        self._ask_ahead()
        self._note_judged(evaluated.reads)

    def _note_judged(self, names: Sequence[str]) -> None:
        """Note what is not checked in outputs that an evaluator reads: only its score judges
        them."""
        if self.plan.evaluator and names:
            listed = ", ".join(f"'{name}'" for name in names)
            self.unchecked.append(
                f"parts of {listed} that {self.plan.evaluator} does not use were not checked "
                "beyond their scale"
            )

    def _check_finite(self, found: Sequence[NonFinite]) -> None:
        """Check rows with NaN or infinity. They are an error if the original's answers are not
        finite either, as nothing can be compared with those; otherwise they count as missing
        values."""
        if not found:
            return
        self._tell("rows that are not finite")
        indices = tuple(dict.fromkeys(each.index for each in found))[:MAX_NON_FINITE]
        try:
            answers = self.answers(self.original, indices)
        except ConfigError as error:
            raise ConfigError([*describe(found), *error.problems]) from None
        unusable = {
            index
            for index, answer in zip(indices, answers, strict=True)
            if not all(
                np.isfinite(each).all() for each in answer.values() if each.dtype.kind == "f"
            )
        }
        if unusable:
            texts = describe([each for each in found if each.index in unusable])
            advice = "leave such rows out, or fill in the missing values"
            raise ConfigError(
                [f"{text}, and the model's answer is not finite either; {advice}" for text in texts]
            )
        self.notes += [f"{text}; the model answers with finite values" for text in describe(found)]

    def _ask_ahead(self) -> None:
        """On a GPU, compute everything needed of the original while it is loaded."""
        if not self.original.config.uses_gpu:
            return
        if self.examples is None:
            self.original_answers(COMPARED)
        else:
            self._evaluated(self.original, HELD_OUT)

    def _audit(self) -> audit.Audit:
        predict = self.scorer.predict
        said = None if predict is None else predict(self.original_answers(CHOICE))
        is_separate = bool(self.plan.calibration)
        parts = audit.audit_examples(self._examples, said, is_separate=is_separate)
        return audit.Audit(
            [text for part in parts for text in part.problems],
            [text for part in parts for text in part.warnings],
            {name: value for part in parts for name, value in part.facts.items()},
        )

    def fall_back(self, parent: Build, step: Step, check_time: Callable[[], None]) -> KeptLayers:
        """Find the layers that must stay in float for the gate to pass."""

        def passes_gate(other: Step) -> bool:
            check_time()
            self._tell("layers in float")
            return self.judge(self.build(parent.candidate.then(other)), CHOICE).is_passed

        def find() -> KeptLayers:
            self._tell("sensitivity of layers")
            seconds = self._float_seconds(parent)
            found = int8_static.fall_back(parent, step, self.workshop, passes_gate, seconds)
            return KeptLayers() if found is None else KeptLayers(*found)

        return self.journal.remember("fallback", parent.candidate.then(step).key, KeptLayers, find)

    def clipped(self, build: Build) -> dict[str, float]:
        """Return, for each input, the share of held-out values outside of the calibrated range;
        empty if nothing was calibrated."""
        path = build.version_folder / calibration.FILE
        if not path.is_file():
            return {}
        ranges = {
            name: (each["min"], each["max"])
            for name, each in json.loads(path.read_bytes())["inputs"].items()
        }
        rows = [self.rows[index] for index in self._examples.split.held_out]
        values = {
            name: np.concatenate([np.ravel(row[name]) for row in rows])
            for name in ranges
            if rows and name in rows[0] and rows[0][name].dtype.kind == "f"
        }
        return audit.clipped_share(ranges, values)

    def _float_seconds(self, build: Build) -> dict[str, float] | None:
        """Return the seconds of each operator; None if it cannot be profiled."""
        try:
            operators = self.profile(build).operators
        except PenstockError:
            return None
        return {operator.name: operator.seconds for operator in operators}

    # Speed.

    def times(self, build: Build, num_instances: int, num_threads: int) -> TimeTable:
        pair = num_instances, num_threads
        rules = self._rules(build)

        def measure() -> TimeTable:
            if not build.config.uses_gpu or _num_workers(build.config, pair) > 1:
                self._settle()
                self._make_room(build.config)
                return trials.times(build, self.rows, *pair, self._longest_s, rules)
            sitting = self._sat(build)
            assert sitting is not None, "it is on a GPU"
            return sitting.times(self.rows, pair, self._longest_s, rules)

        self._tell(f"batch times, {num_instances} x {num_threads} threads")
        key = f"{build.candidate.key} {num_instances}x{num_threads}"
        asked = self._needed(build, measure)
        found = self.journal.remember("times", key, TimeTable, asked, passing=self._passing)
        free = num_free_cores(pair, self.machine.num_cores)
        return msgspec.structs.replace(found, num_free_cores=free)

    @property
    def _longest_s(self) -> float:
        """Longest batch worth measuring: one that exceeds the latency limit fits no
        configuration."""
        limit_s = None if self.plan.slo is None else self.plan.slo.latency_s
        return trials.MAX_BATCH_S if limit_s is None else min(MAX_BATCH_S, 1.5 * limit_s)

    def profile(self, build: Build) -> Profile:
        def measure() -> Profile:
            self._rise()
            self._make_room(build.config)
            return profile_build(build.folder, self.rows)

        self._tell("profile")
        return self.journal.remember("profile", build.candidate.key, Profile, measure)

    def serve(self, builds: Sequence[Build]) -> list[Served]:
        """Measure at the SLO's load; several builds in turns."""

        def measure() -> list[Served]:
            kept, plan, limits = self._kept(builds), self._served_plan, self._limits()
            if len(builds) == 1:
                return [served.measure(builds[0], plan, self.rows, self._tell, kept, limits)]
            return served.measure_alternately(builds, plan, self.rows, self._tell, kept, limits)

        self._tell("start servers")
        asked = self._needed(builds[0], measure) if len(builds) == 1 else measure
        return self._served("served", builds, asked)

    def with_rates(self, builds: Sequence[Build], search_s: float) -> list[Served]:
        """Measure at the SLO's load and up to the highest rate of each, in turns."""

        def measure() -> list[Served]:
            kept, limits = self._kept(builds), replace(self._limits(), search_s=search_s)
            plan = self._served_plan
            return served.with_rates(builds, plan, self.rows, self._tell, limits, kept)

        self._tell("start servers")
        return self._served("served with rates", builds, measure)

    def prove(
        self, builds: Sequence[Build], left_s: float | None, attempt: int = 0
    ) -> list[Served]:
        """Measure at the SLO's load and, if time allows, up to the highest rate of each, in turns.
        Each attempt is a separate measurement."""
        time_plan = self.time
        needed_s = time_plan.prove_s(len(builds), time_plan.num_rounds)
        needed_s += len(builds) * MIN_SEARCH_S
        has_time = left_s is None or (time_plan.has_rates and left_s > needed_s)
        ends_at = math.inf if left_s is None else time.monotonic() + left_s

        def measure() -> list[Served]:
            limits = Limits(
                time_plan.num_rounds,
                SEARCH_S if has_time else 0.0,
                lambda: ends_at - time.monotonic(),
            )
            kept = self._kept(builds)
            return served.prove(builds, self._served_plan, self.rows, self._tell, limits, kept)

        self._tell("start servers for the proof")
        kind = "proof with rates" if has_time else "proof"
        return self._served(kind, builds, measure, f" attempt {attempt}" if attempt else "")

    def _limits(self) -> Limits:
        """Return the limits of a served measurement that begins now."""
        left_s = self._time_budget.stage_left_s
        ends_at = math.inf if left_s is None else time.monotonic() + left_s
        search_s = self.time.cost_search_s
        return Limits(self.time.num_rounds, search_s, lambda: ends_at - time.monotonic())

    def _served(
        self,
        kind: str,
        builds: Sequence[Build],
        measure: Callable[[], list[Served]],
        suffix: str = "",
    ) -> list[Served]:
        """Measure with the machine otherwise idle, or take the figures from the journal, at the
        current price."""
        self._settle()
        if self.time.level_s < self.plan.duration_s:
            # A run with a larger budget measures again, for longer.
            kind = f"{kind}, levels of {self.time.level_s:.3g} s"
        found = self.journal.remember(
            kind,
            _keys(builds) + suffix,
            list[Served],
            measure,
            passing=(PenstockError,),
            is_reusable=lambda servings: all(map(disturbance.is_reusable, servings)),
        )
        return [served.repriced(each, self.plan) for each in found]


def _opened(candidate: Candidate, folder: Path) -> Build:
    found = layout.read(folder)
    if found.problems:
        raise BackendFailed("; ".join(text for each in found.problems.values() for text in each))
    return Build(candidate, folder, found.configs[-1])


def _of_the_model(build: Build) -> Build:
    return replace(build, config=build.config.without_postprocess)


def _num_workers(config: ModelConfig, pair: tuple[int, int]) -> int:
    return len(with_instances(config, *pair).workers)


def _keys(builds: Sequence[Build]) -> str:
    return " ".join(build.candidate.key for build in builds)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
