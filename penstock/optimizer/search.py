"""The search loop: from the original, step by step, to the first candidate that keeps the SLO.

In each stage, passes propose steps. A proposal is built, read back, compared with the original, put
through the accuracy gate if its answers may differ, and timed. Candidates that are predicted to
come near the SLO are served and measured; the search ends at the first stage that is enough, unless
it is exhaustive. Failed and slower candidates are kept with their reasons. The search only asks the
lab, whose results may come from the journal: the same results lead to the same choice.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from penstock.config import ModelConfig
from penstock.errors import BackendFailed, PenstockError
from penstock.optimizer import goals, outcomes, wording
from penstock.optimizer.candidates import STAGES, Build, Candidate, Skip, Stage, Step
from penstock.optimizer.facts import Facts
from penstock.optimizer.lab import CHOICE, Lab
from penstock.optimizer.passes import Pass, Situation
from penstock.optimizer.progress import Progress
from penstock.optimizer.results import Served, Try
from penstock.optimizer.shapes import alone_s, arrangements, shapes, with_instances
from penstock.optimizer.simulate import TimeTable
from penstock.optimizer.time_plan import (
    PROFILE_S,
    OutOfTime,
    plan_time,
    smallest_budget_s,
)
from penstock.profile.results import Profile
from penstock.slo import Memory

MODEL_STAGES: tuple[Stage, ...] = ("compile", "precision", "quantise")
# On a GPU, FP16 halves the work and needs only a check. Compiled code is tuned for one precision,
# so precision comes first to avoid compiling twice.
ON_GPU: tuple[Stage, ...] = ("precision", "compile", "quantise")
# Maximum number of served candidates, besides the original.
MAX_FINALISTS = 3
# Arrangements of instances and threads in which one candidate may be served.
NUM_ARRANGEMENTS = 3
# Maximum number of served candidates after a stage that may be the last.
NUM_SEMIFINALISTS = 2
# Estimated seconds to judge and save the choice.
SAVED_S = 5.0
# Headroom: to be enough, the predicted rate must be this many times the required rate. Fully loaded
# servers keep an SLO on one day and not on the next.
ROOM = 1.3
# Time to search for the highest rate of one finalist.
RATE_S = 30.0
# A prediction above this share of the best is worth a served measurement.
NEAR = 0.85
# On a GPU, a prediction for one instance below this share of the best ends the timing.
HOPELESS = 0.6
# Parents below this share of the best are not used in the stage: BF16 may double the rate, INT8
# more.
MIN_PARENT: Mapping[Stage, float] = {"precision": 0.6, "quantise": 0.4}
# Passes whose later steps, on a GPU, are at best as fast as the first: BF16 and TF32 after FP16,
# FP8 for some matmuls after FP8 for all.
ALTERNATIVES = ("half", "fp8")
# Starts again from the model's own operators, however far other passes have come.
COMPILER = "torch-compile"
# Smallest time budget with room for a profile on a GPU, which measures the device first.
PROFILE_BUDGET_S = 900.0
FAR_BEHIND = "the candidates that it could build on are far slower than the best"
# Share of the machine's memory that instances of one candidate may take while they are timed.
MAX_MEMORY = 0.25
NEEDS_DATA = "needs data: without examples no loss of accuracy can be seen"
UNLESS_REFUSED = " (unless the held-out examples refuse it)"
NO_TIME = "out of time before it was tried"


@dataclass(slots=True)
class Contender:
    """A candidate that passed its gates, with its timings."""

    build: Build
    facts: Facts
    times: dict[tuple[int, int], TimeTable]
    # Steps of the serving passes with their predicted highest rates, best first.
    shapes: list[tuple[tuple[Step, ...], float]]
    is_lossy: bool

    @property
    def candidate(self) -> Candidate:
        return self.build.candidate

    @property
    def rate(self) -> float:
        return self.shapes[0][1] if self.shapes else 0.0

    def is_ahead(self, other: Contender) -> bool:
        """Compare beyond the noise: by the predicted rate that keeps the SLO; if neither has one,
        by the latency of a single request."""
        if self.rate or other.rate:
            return goals.is_better(self.rate, other.rate)
        return goals.is_better(other.alone_s, self.alone_s)

    @property
    def alone_s(self) -> float:
        return min(alone_s(table) for table in self.times.values())

    @property
    def speed_text(self) -> str:
        if self.rate:
            return f"about {self.rate:,.0f}/s"
        return f"no rate within the SLO, {self.alone_s * 1e3:.3g} ms alone"


@dataclass(slots=True)
class Finalist:
    """A contender in one serving configuration, served and measured."""

    contender: Contender
    build: Build
    served: Served

    @property
    def simplicity(self) -> int:
        """Lower is simpler: lossless before lossy, fewer steps before more."""
        return 100 * self.contender.is_lossy + len(self.build.candidate.steps)


@dataclass(slots=True)
class Findings:
    """Results of the search; the report is written from it."""

    tries: list[Try] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    contenders: list[Contender] = field(default_factory=list)
    # From the best to the worst.
    finalists: list[Finalist] = field(default_factory=list)
    original: Served | None = None
    # Profile of the best candidate before quantisation: shows the bottleneck.
    profile: Profile | None = None
    # Key of the profiled candidate.
    profiled: str = ""
    # Proof measurements by key.
    proofs: dict[str, Served] = field(default_factory=dict)
    is_interrupted: bool = False
    is_out_of_time: bool = False
    # Notes on what the time budget did not allow, one sentence each.
    notes: list[str] = field(default_factory=list)

    @property
    def best(self) -> Contender:
        """The best by prediction; of equal ones the simpler, which came earlier."""
        best = self.contenders[0]
        for contender in self.contenders[1:]:
            if contender.is_ahead(best):
                best = contender
        return best

    def is_met(self) -> bool:
        """Return whether the SLO is met with certainty: a limit that is barely kept may be missed
        next time."""
        return bool(self.finalists) and self.finalists[0].served.is_sure


class Search:
    """The search of one run. Does not measure or write anything itself."""

    def __init__(
        self,
        lab: Lab,
        watch: Callable[[Progress], None],
        sequence: Sequence[Pass],
        clock: Callable[[], float] = time.monotonic,
        began: float | None = None,
    ) -> None:
        self._lab = lab
        self._plan = lab.plan
        self._watch = watch
        self._passes = sequence
        self._clock = clock
        self._began = clock() if began is None else began
        assert lab.plan.slo is not None
        self._slo = lab.plan.slo
        self._seen: set[str] = set()
        self._asked: set[str] = set()
        self._served: dict[str, Finalist] = {}
        self._is_on_gpu = False
        # The current stage, or "proof".
        self._stage: str = "baseline"
        self._model_stage: Stage = "baseline"
        self._trying = ""
        self._doing = "start"
        # Saved on an interruption once the choice is made; see `prove`.
        self._to_save = ""
        # Time estimates; see `_start`.
        self._time = plan_time(lab.plan, is_on_gpu=False)
        # Time for facts and batch times of the original: a step takes at least as long.
        self._step_s = 0.0
        # Time from the start to the end of the baseline.
        self._baseline_s = 0.0
        # Work that was started in time is being finished.
        self._is_finishing = False
        self.findings = Findings()
        lab.watch = self._tell
        lab.left_s = self._left_to_build_s
        lab.check_time = self._check_piece

    def run(self) -> Findings:
        """Run the search. An interruption or the end of the time budget ends it but keeps its
        results; a second interruption ends everything."""
        try:
            self._sequence()
        except KeyboardInterrupt:
            self.findings.is_interrupted = True
            self._note_left("interrupted before it was tried", "interrupt")
            self._tell("finishing with the best so far")
        except OutOfTime:
            self.findings.is_out_of_time = True
            self._note_left(NO_TIME, "time")
            self._note_no_step()
        is_cut = self.findings.is_interrupted or self.findings.is_out_of_time
        if is_cut and len(self.findings.contenders) > 1:
            self._finish_early()
        return self.findings

    def _sequence(self) -> None:
        self._start()
        if self._is_enough():
            return
        for stage in self._model_stages:
            if stage == "quantise":
                self._profile()
            self._run_stage(stage)
            if self._may_be_enough():
                self._measure_finalists(NUM_SEMIFINALISTS, is_final=False)
                if self._is_enough():
                    return
        self._measure_finalists(MAX_FINALISTS)
        self._measure_overlooked()
        self._note_serving()
        self._try_memory()

    def _note_left(self, reason: str, cut_by: Literal["time", "interrupt"]) -> None:
        """Note the passes that did not run, or not to the end."""
        self.findings.skipped += [
            Skip(each.name, reason, cut_by=cut_by)
            for each in self._passes
            if each.stage in MODEL_STAGES and each.name not in self._asked
        ]

    def _note_no_step(self) -> None:
        """If not even one step had time, say so and suggest a sufficient budget."""
        is_done = any(each.outcome != "cut off" for each in self.findings.tries[1:])
        if is_done or self._plan.budget_s is None:
            return
        needed_s = self._baseline_s + self._step_s + self._time.shortest_kept_s
        # More than the budget that was too small.
        suggested_s = smallest_budget_s(max(needed_s, self._plan.budget_s + 1))
        self.findings.notes.append(
            f"no step was completed: {wording.span(self._plan.budget_s)} are enough for the "
            f"baseline and the proof of the original only; use --budget {suggested_s:.0f}s or more"
        )

    def _finish_early(self) -> None:
        """Serve the best candidates so far in a short measurement, so that they have real figures;
        time is reserved for this. At the end of the time budget, those already served are skipped
        in favour of the next ones."""
        if self.findings.is_interrupted:
            self._measure(self._still_to_measure())
        else:
            self._measure_finalists(NUM_SEMIFINALISTS, is_fresh=True)

    def _still_to_measure(self) -> list[tuple[Contender, tuple[Step, ...]]]:
        """Return what to serve after an interruption: the best by prediction, if it was not served
        yet and there is time."""
        if len(self.findings.contenders) < 2:
            return []
        num_known = sum(one.served.is_met for one in self.findings.finalists[:1])
        if self._num_measurable(num_known, 0.0, is_final=True) < 1:
            return []
        return [
            (contender, steps)
            for contender, steps in self._nearest(1)
            if contender.candidate.then(*steps).key not in self._served
        ]

    def _is_enough(self) -> bool:
        """Return whether the SLO is met with certainty and headroom. The original needs no
        headroom: it requires no change."""
        if self._plan.is_exhaustive or not self.findings.is_met():
            return False
        best = self.findings.finalists[0]
        return not best.build.candidate.steps or self._has_room(best.contender)

    def _may_be_enough(self) -> bool:
        """Return whether a served run may show that the search can end. On a GPU, where servers
        start slowly, and with a small budget, the prediction must have headroom."""
        if (self._is_on_gpu or self._time.is_short) and not self._plan.is_exhaustive:
            return self._has_room(self.findings.best)
        return self._is_in_reach()

    def _has_room(self, contender: Contender) -> bool:
        required = goals.required_rate(self._slo, self._plan.price_per_hour)
        return contender.rate >= ROOM * required

    def _is_in_reach(self) -> bool:
        rate = self.findings.best.rate
        return goals.is_within_reach(rate, self._slo, self._plan.price_per_hour)

    # The original.

    def _start(self) -> None:
        """Measure the original in its own configuration."""
        original = self._lab.original
        self._is_on_gpu = original.config.uses_gpu
        judge_s = self._time.judge_s
        self._time = replace(plan_time(self._plan, is_on_gpu=self._is_on_gpu), judge_s=judge_s)
        self._trying = str(original.candidate)
        began = self._clock()
        facts = self._lab.facts(original)
        contender = self._timed(original, facts, is_lossy=False)
        self._step_s = self._clock() - began
        began = self._clock()
        served = self._lab.serve([original])[0]
        self._time = self._time.with_start(self._clock() - began)
        self._baseline_s = self._clock() - self._began
        self.findings.contenders.append(contender)
        self.findings.original = served
        self._add_served(contender, original, served)
        reason = "the original, as it would be served"
        record = Try(original.candidate, "baseline", "kept", reason, facts=facts, served=served)
        self._note_times(record, contender)
        record.seconds = self._clock() - began
        self.findings.tries.append(record)

    # One stage.

    def _run_stage(self, stage: Stage) -> None:
        self._stage = self._model_stage = stage
        for each in self._passes:
            if each.stage == stage:
                self._run_pass(each)

    def _profile(self) -> None:
        """Profile the best candidate to find the bottleneck. If this fails, only the report lacks a
        figure."""
        budget_s, left_s = self._plan.budget_s, self._search_left_s()
        if self._is_on_gpu and budget_s is not None and budget_s < PROFILE_BUDGET_S:
            return
        if left_s is not None and left_s < PROFILE_S:
            return
        best = self.findings.best
        self._trying = str(best.candidate)
        with contextlib.suppress(PenstockError):
            self.findings.profile = self._lab.profile(best.build)
            self.findings.profiled = best.candidate.key

    def _run_pass(self, each: Pass) -> None:
        for parent, steps in self._proposals(each):
            fresh = [one for one in steps if parent.candidate.then(one).key not in self._seen]
            if each.has_layers:
                self._try_variants(each, parent, fresh)
            else:
                self._try_each(each, parent, fresh)
        self._asked.add(each.name)

    def _try_each(self, each: Pass, parent: Contender, steps: Sequence[Step]) -> None:
        """Try all steps, until the rest cannot win any more."""
        for place, step in enumerate(steps):
            record = self._try(each, parent, step)
            reason = self._reason_to_stop(each, step, record)
            if reason:
                left = steps[place + 1 :]
                self.findings.skipped += [Skip(each.name, reason, other) for other in left]
                return

    def _reason_to_stop(self, each: Pass, step: Step, record: Try) -> str:
        """Return why to skip the remaining steps, on a GPU: the step passed and the others are its
        fallbacks, or the compiler's kernels are behind and it would only get more tuning time."""
        if not self._is_on_gpu or self._plan.is_exhaustive:
            return ""
        is_passed = record.outcome not in ("rejected", "failed", "cut off")
        if each.name in ALTERNATIVES and is_passed:
            return f"{step} has passed, and this would be no faster"
        if each.name != COMPILER or "mode" not in step.settings:
            return ""
        if not is_passed:
            how = "failed" if record.outcome == "failed" else f"was {record.outcome}"
            return f"{step} {how}: the same compiler with more time is not tried"
        if record.outcome != "kept":
            best = self.findings.best.candidate
            return f"{step} is not ahead of {best}; tuning the same for longer would not bring it"
        return ""

    def _proposals(self, each: Pass) -> list[tuple[Contender, list[Step]]]:
        """Return the steps that the pass proposes for the best contender of each family."""
        if each.changes_answers and self._lab.examples is None:
            self.findings.skipped.append(Skip(each.name, NEEDS_DATA))
            return []
        proposals: dict[tuple[str, bool], tuple[Contender, list[Step]]] = {}
        skips: dict[str, Skip] = {}
        for parent in sorted(self.findings.contenders, key=_from_the_best):
            family = _family(parent.build.config)
            if family in proposals or each.name in _pass_names(parent.candidate):
                continue
            if self._is_far_behind(parent):
                skips[FAR_BEHIND] = Skip(each.name, FAR_BEHIND)
                continue
            found = each.propose(self._situation(parent))
            steps = [one for one in found if isinstance(one, Step)]
            skips.update({one.reason: one for one in found if isinstance(one, Skip)})
            if steps or self._stands_for_all(each):
                proposals[family] = (parent, steps)
        found_any = [each for each in proposals.values() if each[1]]
        if not found_any:
            self.findings.skipped += skips.values()
        return found_any

    def _stands_for_all(self, each: Pass) -> bool:
        """Return whether only the best of a family is asked, even if the pass proposes nothing for
        it: on a GPU, passes that build on their parent are not tried on slower parents. Compilers
        start again from the model's own operators."""
        is_adding = self._model_stage == "compile" and each.name != COMPILER
        return self._is_on_gpu and is_adding and not self._plan.is_exhaustive

    def _is_far_behind(self, parent: Contender) -> bool:
        """Return whether a parent is too slow for any precision to make it the best. A compiler
        might."""
        if self._model_stage == "compile" or self._plan.is_exhaustive:
            return False
        return parent.rate < MIN_PARENT[self._model_stage] * self.findings.best.rate

    def _situation(self, parent: Contender) -> Situation:
        lab = self._lab
        return Situation(
            self._plan,
            lab.machine,
            parent.build,
            parent.facts,
            lab.examples,
            parent.times,
            lab.rows,
        )

    # One candidate.

    def _try(self, each: Pass, parent: Contender, step: Step) -> Try:
        with self._record(parent, step) as record:
            build = self._checked(each, parent, record)
            if build is not None:
                is_lossy = parent.is_lossy or each.changes_answers
                contender = self._timed(build, _facts(record), is_lossy=is_lossy)
                self._note_times(record, contender)
                if not is_lossy or self._is_accurate(build, record):
                    self._compare(contender, record)
        return record

    def _try_variants(self, each: Pass, parent: Contender, steps: Sequence[Step]) -> None:
        """Try steps that build the same operators with other numbers: all are judged, and the best
        is timed for all of them. If none passes, fall back to float for some layers."""
        judged: list[Try] = []
        try:
            for step in steps:
                with self._record(parent, step) as record:
                    build = self._checked(each, parent, record)
                    if build is not None:
                        self._is_accurate(build, record)
                        judged.append(record)
        except OutOfTime:
            # Steps that have passed are worth timing, if there is time.
            is_worth = any(record.outcome != "rejected" for record in judged)
            needed_s = self._step_s + self._time.shortest_kept_s
            if is_worth and self.left_s is not None and self.left_s >= needed_s:
                self._is_finishing = True
                self._compare_variants(each, parent, judged)
            raise
        self._compare_variants(each, parent, judged)

    def _compare_variants(self, each: Pass, parent: Contender, judged: Sequence[Try]) -> None:
        best, contender = self._timed_best(judged)
        if best is None or contender is None:
            return
        for record in judged:
            self._note_times(record, contender)
        if best.outcome == "rejected":
            self._fall_back(each, parent, best, contender)
            return
        self._compare(contender, best)
        for record in judged:
            if record is not best and record.outcome != "rejected":
                record.outcome = "equal"
                record.reason = f"as fast as {best.candidate.steps[-1]}, which loses no more"

    def _timed_best(self, judged: Sequence[Try]) -> tuple[Try | None, Contender | None]:
        """Return the most accurate try that can be timed, and its contender."""
        for record in sorted(judged, key=_by_accuracy):
            try:
                build = self._lab.build(record.candidate)
                return record, self._timed(build, _facts(record), is_lossy=True)
            except PenstockError as error:
                record.outcome, record.reason = outcomes.outcome_of_error(error)
        return None, None

    @contextlib.contextmanager
    def _record(self, parent: Contender, step: Step) -> Iterator[Try]:
        """Record a try; a candidate that fails is a result like others."""
        self._check_time(self._step_s)
        began = self._clock()
        candidate = parent.candidate.then(step)
        self._seen.add(candidate.key)
        self._trying = str(candidate)
        record = Try(candidate, self._model_stage, "failed", "")
        try:
            yield record
        except OutOfTime:
            self.findings.skipped.append(Skip(step.pass_name, outcomes.CUT_OFF, step))
            raise
        except PenstockError as error:
            record.outcome, record.reason = outcomes.outcome_of_error(error)
        record.seconds = self._clock() - began
        self.findings.tries.append(record)

    def _checked(self, each: Pass, parent: Contender, record: Try) -> Build | None:
        """Build, read back and compare with the original; None if one of these fails."""
        candidate = record.candidate
        build = self._lab.build(candidate)
        record.facts = facts = self._lab.facts(build)
        # Rows influence each other at any precision; the tolerance for a build's own rounding must
        # not hide it.
        facts.batching_problem = facts.batching_problem or parent.facts.batching_problem
        problems = each.check(candidate.steps[-1], parent.facts, facts)
        if problems:
            _reject(record, f"not what was asked for: {'; '.join(problems)}")
            return None
        if facts.repeat_problem:
            text = f"the same rows give different answers each time: {facts.repeat_problem}"
            _reject(record, text)
            return None
        is_exact = not (parent.is_lossy or each.changes_answers)
        record.numerics = self._lab.numerics(build, is_exact=is_exact)
        if record.numerics.problems:
            _reject(record, "; ".join(record.numerics.problems))
            return None
        return build

    def _is_accurate(self, build: Build, record: Try) -> bool:
        began = self._clock()
        record.accuracy = self._lab.judge(build, CHOICE)
        self.learn_judging(self._clock() - began)
        if not record.accuracy.is_passed:
            _reject(record, record.accuracy.text)
        else:
            record.outcome = "equal"
        return record.accuracy.is_passed

    def _timed(self, build: Build, facts: Facts, *, is_lossy: bool) -> Contender:
        lab = self._lab
        began = self._clock()
        times: dict[tuple[int, int], TimeTable] = {}
        is_on_gpu = build.config.uses_gpu
        for pair in arrangements(build.config, lab.machine.num_cores):
            memory_bytes = pair[0] * max((t.memory_bytes for t in times.values()), default=0)
            if memory_bytes > MAX_MEMORY * lab.machine.memory_bytes and not is_on_gpu:
                break
            if times and not self._has_search_time((self._clock() - began) / len(times)):
                break
            times[pair] = lab.times(build, *pair)
            if self._time.is_short and not is_on_gpu:
                break
            if is_on_gpu and self._is_hopeless(Contender(build, facts, times, [], is_lossy)):
                # More instances only overlap copies with compute, which would not make it the best.
                break
        contender = Contender(build, facts, times, [], is_lossy)
        contender.shapes = self._within_memory(contender)
        return contender

    def _is_hopeless(self, contender: Contender) -> bool:
        """Compare with the best at the smallest number of instances."""
        if not self.findings.contenders or self._plan.is_exhaustive:
            return False
        contender.shapes = shapes(self._situation(contender))
        fewest = min(num_instances for num_instances, _ in contender.times)
        best = self.findings.best.shapes
        alone = [rate for steps, rate in best if _arrangement(steps)[0] == fewest]
        return contender.rate < HOPELESS * max(alone, default=0.0)

    def _within_memory(self, contender: Contender) -> list[tuple[tuple[Step, ...], float]]:
        """Return the shapes that fit the SLO's memory limit; all of them if none is known to
        fit."""
        found = shapes(self._situation(contender))
        limits = [term.max_bytes for term in self._slo.terms if isinstance(term, Memory)]
        if not limits:
            return found
        config = contender.build.config
        one = max(table.memory_bytes for table in contender.times.values())

        def needed(steps: Sequence[Step]) -> int:
            pair = _arrangement(steps)
            known = contender.times.get(pair)
            memory_bytes = one if known is None else known.memory_bytes
            return len(with_instances(config, *pair).workers) * memory_bytes

        fitting = [each for each in found if needed(each[0]) <= min(limits)]
        return fitting or found

    def _note_times(self, record: Try, contender: Contender) -> None:
        record.times = list(contender.times.values())
        record.predicted_rate = contender.rate
        if contender.shapes:
            record.predicted_shape = ", ".join(map(str, contender.shapes[0][0]))

    def _compare(self, contender: Contender, record: Try) -> None:
        """Compare with the best so far by prediction."""
        best = self.findings.best
        self.findings.contenders.append(contender)
        against = f"{contender.speed_text} predicted, {best.candidate} {best.speed_text}"
        if contender.is_ahead(best):
            record.outcome, record.reason = "kept", against
        elif best.is_ahead(contender):
            record.outcome, record.reason = "slower", against
        else:
            record.outcome, record.reason = "equal", f"{against}: no difference beyond the noise"
        # This may change what Ctrl-C would do.
        self._tell(self._doing)

    # Fallback to float.

    def _fall_back(self, each: Pass, parent: Contender, refused: Try, timed: Contender) -> None:
        """If it would be the fastest, keep some layers in float: those that regain the most
        accuracy for the time they cost."""
        if not timed.is_ahead(self.findings.best):
            refused.reason += "; no faster either, so no layer was kept in float for it"
            return
        self._trying = str(refused.candidate)
        try:
            found = self._lab.fall_back(parent.build, refused.candidate.steps[-1], self._check_time)
        except PenstockError as error:
            refused.reason += f"; the sensitivity of layers could not be measured: {error}"
            return
        if found.step is None:
            refused.reason += "; keeping layers in float did not help"
            return
        self._try(each, parent, found.step).fallback = found.layers

    # Served measurements.

    def _measure_finalists(
        self, limit: int, *, is_fresh: bool = False, is_final: bool = True
    ) -> None:
        """Serve the finalists. If the SLO is out of reach, search for the highest rate that keeps
        its latency: overloaded servers all look the same. Predictions are off by more than builds
        differ, so several builds are served, and the best one in a second arrangement of instances
        and threads too. If no rate is predicted to keep the SLO, none is searched for: the lowest
        latency wins."""
        has_rates = self._slo.latency_s is not None and self.findings.best.rate > 0
        if self._is_in_reach() or not (has_rates and self._time.has_rates):
            self._measure(self._nearest(limit, is_fresh=is_fresh), is_final=is_final)
            return
        ranked = sorted(self.findings.contenders, key=lambda one: -one.rate)
        leading = [(one, one.shapes[0][0]) for one in ranked[:MAX_FINALISTS] if one.shapes]
        others = _different(ranked[0].shapes)[1:2]
        leading += [(ranked[0], steps) for steps, rate in others if rate >= NEAR * ranked[0].rate]
        self._measure(leading, is_rated=True, is_final=is_final)

    def _measure_overlooked(self) -> None:
        """Serve the next contenders if all finalists miss the SLO: one with a wrong prediction must
        not hide those behind it."""
        if any(one.served.is_met for one in self.findings.finalists):
            return
        tried = {one.contender.candidate.key for one in self._served.values()}
        price = self._plan.price_per_hour
        left = [
            contender
            for contender in self.findings.contenders
            if contender.candidate.key not in tried
            and contender.rate
            and goals.is_within_reach(contender.rate, self._slo, price)
        ]
        left.sort(key=lambda contender: -contender.rate)
        self._measure([(each, each.shapes[0][0]) for each in left[:NUM_SEMIFINALISTS]])

    def _measure(
        self,
        chosen: Sequence[tuple[Contender, tuple[Step, ...]]],
        *,
        is_rated: bool = False,
        is_final: bool = True,
    ) -> None:
        """Serve contenders in turns, in these serving configurations. The best that already keeps
        the SLO is measured along with them, if there is time. `is_rated` searches for the highest
        rate of each, too; `is_final`: no more steps follow."""
        kept = [one for one in self.findings.finalists[:1] if one.served.is_met]
        known = [(one.contender, one.build) for one in kept]
        search_s = RATE_S if is_rated else 0.0
        stage, self._stage = self._stage, "batching"
        fresh: list[tuple[Contender, Build]] = []
        # Build only as many as there is time to measure.
        shaped = self._shaped(chosen)
        while len(fresh) < self._num_measurable(len(known), search_s, is_final=is_final):
            one = next(shaped, None)
            if one is None:
                break
            fresh.append(one)
        # The builds may have used up the time to measure them.
        if not fresh or not self._num_measurable(0, search_s, is_final=is_final):
            self._stage = stage
            return
        if not self._num_measurable(len(known), search_s, is_final=is_final):
            known = []
        runners = known + fresh
        self._trying = ", ".join(str(build.candidate) for _, build in fresh)
        serve = self._serve_rated if is_rated else self._lab.serve
        for contender, build, served, seconds in self._serve(runners, serve):
            self._add_served(contender, build, served)
            self._note_served(build, served, seconds)
        self._stage = stage

    def _num_measurable(self, num_known: int, search_s: float, *, is_final: bool) -> float:
        """Return how many new builds there is time to serve beside `num_known` known ones. At the
        end, one new build is worth more than a long proof or the comparison with known ones."""
        time, left_s = self._time, self.left_s
        if left_s is None:
            return math.inf
        if not is_final:
            return time.num_in_turns(left_s - time.kept_s(), num_known, search_s)
        num = time.num_in_turns(left_s - time.proof_s, num_known, search_s)
        is_worth = left_s - time.shortest_proof_s >= time.in_turns_s(1, search_s)
        return max(num, 1 if is_worth and not num_known else 0)

    def _serve_rated(self, builds: Sequence[Build]) -> list[Served]:
        return self._lab.with_rates(builds, RATE_S)

    def _has_time(self, needed_s: float) -> bool:
        """Return whether this fits before the shortest proof."""
        return self.left_s is None or self.left_s - self._time.shortest_proof_s >= needed_s

    def _note_served(self, build: Build, served: Served, seconds: float) -> None:
        """Record a serving configuration as a try. If it was measured before, the last figures
        count, and the time of both. Its comparison is added once the choice is made."""
        if not build.candidate.steps:
            return
        reason = f"served: {served.goodput:.1%} in time, {served.throughput.value:,.0f}/s answered"
        record = Try(build.candidate, "batching", "equal", reason, served=served, seconds=seconds)
        key = build.candidate.key
        record.seconds += sum(
            each.seconds for each in self.findings.tries if each.candidate.key == key
        )
        others = [each for each in self.findings.tries if each.candidate.key != key]
        self.findings.tries = [*others, record]

    def _serve(
        self,
        runners: Sequence[tuple[Contender, Build]],
        serve: Callable[[Sequence[Build]], list[Served]],
    ) -> Iterator[tuple[Contender, Build, Served, float]]:
        """Serve in turns, and yield each with its share of the time. If that fails, serve one by
        one, so that only the failing one is lost."""
        began = self._clock()
        try:
            servings = serve([build for _, build in runners])
        except PenstockError as error:
            if len(runners) > 1 and self._has_time(self._time.serve_s()):
                for runner in runners:
                    yield from self._serve([runner], serve)
                return
            seconds = (self._clock() - began) / len(runners)
            outcome, reason = outcomes.outcome_of_error(error)
            reason = f"not served: {reason}"
            self.findings.tries += [
                Try(build.candidate, "batching", outcome, reason, seconds=seconds)
                for _, build in runners
                if build.candidate.key not in self._served
            ]
            return
        seconds = (self._clock() - began) / len(runners)
        for (contender, build), served in zip(runners, servings, strict=True):
            yield contender, build, served, seconds

    def _note_serving(self) -> None:
        """Note why serving passes have nothing to offer."""
        situation = self._situation(self.findings.best)
        for each in self._passes:
            if each.is_config_only and each.stage != "memory":
                found = each.propose(situation)
                self.findings.skipped += [one for one in found if isinstance(one, Skip)]

    def _try_memory(self) -> None:
        """If the best misses only its memory limit, try it with less memory."""
        best = self.findings.finalists[0]
        missed = {each.unit for each in best.served.verdicts if each.outcome == "missed"}
        if missed != {"bytes"}:
            return
        self._stage = "memory"
        for each in self._passes:
            if each.stage == "memory":
                self._try_less(each, best)

    def _try_less(self, each: Pass, best: Finalist) -> None:
        contender = best.contender
        situation = replace(self._situation(contender), build=best.build)
        for step in each.propose(situation):
            if isinstance(step, Skip):
                self.findings.skipped.append(step)
                continue
            if not self._has_time(self._time.in_turns_s(2)):
                self.findings.skipped.append(Skip(each.name, NO_TIME, step))
                continue
            candidate = best.build.candidate.then(step)
            self._trying = str(candidate)
            try:
                build = self._build_shape(contender, candidate, [step])
            except PenstockError as error:
                self.findings.tries.append(
                    Try(candidate, "memory", *outcomes.outcome_of_error(error))
                )
                continue
            pair = [(contender, best.build), (contender, build)]
            for _, other, served, seconds in self._serve(pair, self._lab.serve):
                self._add_served(contender, other, served)
                self._note_served(other, served, seconds)

    def _nearest(
        self, limit: int, *, is_fresh: bool = False
    ) -> list[tuple[Contender, tuple[Step, ...]]]:
        """Return what is predicted to come near the best: each contender in its best shape before
        any in its second; among equals, the simpler first. `is_fresh` skips what was served
        already."""
        best = self.findings.best.rate
        found = [
            (
                place,
                goals.is_better(best, rate),
                # If nothing keeps the SLO at any rate: by latency.
                0.0 if rate else contender.alone_s,
                _simplicity(contender),
                -rate,
                contender,
                steps,
            )
            for contender in self.findings.contenders
            for place, (steps, rate) in enumerate(_different(contender.shapes))
            if rate >= NEAR * best
            and not (is_fresh and contender.candidate.then(*steps).key in self._served)
        ]
        found.sort(key=lambda each: each[:5])
        return [(contender, steps) for *_, contender, steps in found[:limit]]

    def _shaped(
        self, chosen: Sequence[tuple[Contender, tuple[Step, ...]]]
    ) -> Iterator[tuple[Contender, Build]]:
        """Yield those not served so far; each is built when it is needed."""
        for contender, steps in chosen:
            candidate = contender.candidate.then(*steps)
            if candidate.key in self._served:
                continue
            try:
                yield contender, self._build_shape(contender, candidate, steps)
            except PenstockError as error:
                self.findings.tries.append(
                    Try(candidate, "batching", *outcomes.outcome_of_error(error))
                )

    def _build_shape(
        self, contender: Contender, candidate: Candidate, steps: Sequence[Step]
    ) -> Build:
        build = self._lab.build(candidate)
        facts = self._lab.facts(build)
        for step in steps:
            problems = self._pass(step).check(step, contender.facts, facts)
            if problems:
                raise BackendFailed(f"not what was asked for: {'; '.join(problems)}")
        return build

    def _pass(self, step: Step) -> Pass:
        return next(each for each in self._passes if each.name == step.pass_name)

    def _add_served(self, contender: Contender, build: Build, served: Served) -> None:
        self._served[build.candidate.key] = Finalist(contender, build, served)
        pool = list(self._served.values())
        ranked = goals.order([one.served for one in pool], [one.simplicity for one in pool])
        self.findings.finalists = [pool[index] for index in ranked]
        self._tell(self._doing)

    # Time.

    @property
    def left_s(self) -> float | None:
        """Seconds left of the time budget; None: no limit."""
        if self._plan.budget_s is None:
            return None
        return self._plan.budget_s - (self._clock() - self._began)

    def learn_judging(self, took_s: float) -> None:
        """Learn how long judging takes: the final check is expected to take as long."""
        self._time = self._time.with_judging(took_s)

    def has_time_to_prove(self, num_builds: int) -> bool:
        """Return whether each can be served and measured once before the budget ends."""
        return self.left_s is None or self.left_s >= self._time.prove_s(num_builds, 1)

    def prove(self, candidate: Candidate, to_save: str = "") -> None:
        """Set the progress of the proof, after the search: the candidate, and what an interruption
        would save; empty: the best that passes on the held-out set."""
        self._stage, self._trying, self._to_save = "proof", str(candidate), to_save

    def _search_left_s(self) -> float | None:
        """Return the seconds left, without the time reserved for the end."""
        if self.left_s is None or self._plan.budget_s is None:
            return None
        if len(self.findings.tries) <= 1:
            # A one-round proof of an optimised candidate is worth more than a long proof of the
            # original.
            return self.left_s - self._time.shortest_kept_s
        # On GPUs the last steps reach far more than the first ones, and servers stay up.
        is_far = not self._is_on_gpu and self.findings.contenders and not self._is_in_reach()
        return self.left_s - self._time.kept_s(is_far=bool(is_far))

    def _left_to_build_s(self) -> float | None:
        """Return how long a process of the current stage may run. Baseline and final check have no
        limit: without them there is no result. Serving may have to compile for its batches first;
        it may use the reserved time except that of the proof."""
        if self._stage in ("baseline", "proof"):
            return None
        left_s = self._search_left_s()
        if left_s is None or self.left_s is None or self._stage in MODEL_STAGES:
            return left_s
        return max(left_s, self.left_s - self._time.shortest_proof_s)

    def _has_search_time(self, needed_s: float) -> bool:
        left_s = self._search_left_s()
        return left_s is None or left_s >= needed_s

    def _check_time(self, needed_s: float = 0.0) -> None:
        """Raise OutOfTime if this would use time reserved for finalists and proof."""
        if not self._has_search_time(needed_s):
            raise OutOfTime

    def _check_piece(self) -> None:
        """Check time between the parts of long work; only steps can be cut short."""
        if self._stage in MODEL_STAGES and not self._is_finishing:
            self._check_time()

    def announce(self, note: str) -> None:
        """Show a line that stays on screen."""
        self._tell("start", note)

    def _tell(self, doing: str, note: str = "") -> None:
        self._doing = doing
        best = self.findings.best if self.findings.contenders else None
        left = self._still_to_measure() if self._stage != "proof" else []
        self._watch(
            Progress(
                stage=self._stage,
                candidate=self._trying,
                doing=doing,
                num_tried=len(self.findings.tries),
                best="" if best is None else str(best.candidate),
                best_text="" if best is None else best.speed_text,
                elapsed_s=self._clock() - self._began,
                left_s=self.left_s,
                stages=self._all_stages,
                note=note,
                to_measure=", ".join(str(one.candidate.then(*steps)) for one, steps in left),
                to_save=self._to_save or self._first_finalist(),
                finish_s=SAVED_S + (self._time.serve_s() if left else 0.0),
            )
        )

    def _first_finalist(self) -> str:
        """Return what is saved if nothing more is measured."""
        if not self.findings.finalists:
            return ""
        candidate = self.findings.finalists[0].build.candidate
        is_judged = bool(candidate.steps) and self._lab.examples is not None
        return f"{candidate}{UNLESS_REFUSED if is_judged else ''}"

    @property
    def _model_stages(self) -> tuple[Stage, ...]:
        return ON_GPU if self._is_on_gpu else MODEL_STAGES

    @property
    def _all_stages(self) -> tuple[Stage, ...]:
        """All stages, in the order of this run."""
        order = iter(self._model_stages)
        return tuple(next(order) if each in MODEL_STAGES else each for each in STAGES)


def _different(
    ranked: Sequence[tuple[tuple[Step, ...], float]],
) -> list[tuple[tuple[Step, ...], float]]:
    """Return the best shape of each of the best three arrangements of instances and threads:
    predictions are more certain about batches than about how instances affect each other and the
    server."""
    best: dict[tuple[int, int], tuple[tuple[Step, ...], float]] = {}
    for each in ranked:
        best.setdefault(_arrangement(each[0]), each)
    return list(best.values())[:NUM_ARRANGEMENTS]


def _arrangement(steps: Sequence[Step]) -> tuple[int, int]:
    """Return instances, and threads of each."""
    [settings] = [step.settings for step in steps if step.pass_name == "instances"]
    return int(settings["instances"]), int(settings["threads"])


def _reject(record: Try, reason: str) -> None:
    record.outcome, record.reason = "rejected", reason


def _by_accuracy(record: Try) -> tuple[bool, float]:
    """Sort key: passed first, then by the smallest loss bound."""
    assert record.accuracy is not None
    return not record.accuracy.is_passed, record.accuracy.loss_bound


def _facts(record: Try) -> Facts:
    assert record.facts is not None
    return record.facts


def _from_the_best(contender: Contender) -> tuple[float, float]:
    """Sort key: by rate; without one that keeps the SLO, by the latency of a single request."""
    return -contender.rate, 0.0 if contender.rate else contender.alone_s


def _simplicity(contender: Contender) -> tuple[bool, int]:
    return contender.is_lossy, len(contender.candidate.steps)


def _family(config: ModelConfig) -> tuple[str, bool]:
    """Return the family of a build, of which the best stands for all: builds of one backend. On a
    GPU, models compiled at load are a separate family: later steps may decide whether that pays."""
    return config.backend, config.uses_gpu and "penstock.compile" in config.options


def _pass_names(candidate: Candidate) -> set[str]:
    return {step.pass_name for step in candidate.steps}
