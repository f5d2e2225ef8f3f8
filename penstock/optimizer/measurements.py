"""The speed of builds: batch times and profiles of trials, and served measurements."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.errors import PenstockError
from penstock.optimizer import disturbance, trials
from penstock.optimizer.candidates import Build
from penstock.optimizer.gpu_sessions import GpuProcesses, num_workers
from penstock.optimizer.inspector import Inspector
from penstock.optimizer.results import ServedMeasurement
from penstock.optimizer.run_context import Row, RunContext
from penstock.optimizer.served import ServedBench
from penstock.optimizer.served_figures import repriced
from penstock.optimizer.shapes import ON_GPU, num_free_cores
from penstock.optimizer.simulate import TimeTable
from penstock.optimizer.time_plan import MIN_SEARCH_S, SEARCH_S, MeasurementLimits
from penstock.profiling.profiler import profile_build
from penstock.profiling.results import Profile, StepTime
from penstock.types import Array

# Longest batch of slow models, whatever the SLO allows.
MAX_BATCH_S = 10.0


class Measurements:
    """Measures builds; every result is in the journal."""

    def __init__(self, run: RunContext, gpu: GpuProcesses, inspector: Inspector) -> None:
        self._run = run
        self._gpu = gpu
        self._inspector = inspector
        # A small budget has time for short levels only.
        self._plan = replace(run.served_plan, duration_s=run.budget.planned.level_s)

    def times(self, build: Build, num_instances: int, num_threads: int) -> TimeTable:
        run, gpu = self._run, self._gpu
        pair = num_instances, num_threads
        rules, limit_s = self._inspector.rules(build), run.plan.slo.latency_s
        # A batch beyond the latency limit fits no configuration.
        longest_s = trials.MAX_BATCH_S if limit_s is None else min(MAX_BATCH_S, 1.5 * limit_s)

        def measure() -> TimeTable:
            # A session has as many slots as every candidate is timed with.
            num_each = num_instances // len(set(build.config.devices))
            is_alone = num_workers(build.config, pair) == 1 and num_each <= ON_GPU[-1]
            if not build.config.uses_gpu or not is_alone:
                gpu.settle()
                gpu.make_room(build.config)
                return trials.times(build, run.rows, *pair, longest_s, rules)
            session = gpu.session(build)
            assert session is not None, "it is on a GPU"
            return session.times(run.rows, pair, longest_s, rules)

        run.tell(f"batch times, {num_instances} x {num_threads} threads")
        key = f"{build.candidate.key} {num_instances}x{num_threads}"
        asked = run.required(build, measure)
        found = run.journal.remember("times", key, TimeTable, asked, passing=run.passing)
        found.num_free_cores = num_free_cores(pair, run.machine.num_cores)
        return found

    def profile(self, build: Build) -> Profile:
        def measure() -> Profile:
            self._gpu.release()
            self._gpu.make_room(build.config)
            return profile_build(build.folder, self._run.rows)

        self._run.tell("profile")
        return self._run.journal.remember("profile", build.candidate.key, Profile, measure)

    def step_time(self, build: Build, num_rows: int) -> StepTime | None:
        """Return where a batch spends the GPU's time; None on a CPU, or if no kernel was seen."""

        def measure() -> StepTime | None:
            session = self._gpu.session(build)
            return None if session is None else session.step_time(self._run.rows, num_rows)

        self._run.tell("profile of the step")
        key = f"{build.candidate.key} {num_rows}"
        kind: type[StepTime | None] = StepTime | None  # type: ignore[assignment]
        passing = self._run.passing
        return self._run.journal.remember("step time", key, kind, measure, passing=passing)

    def operator_seconds(self, build: Build) -> dict[str, float] | None:
        """Return the seconds of each operator; None if it cannot be profiled."""
        try:
            operators = self.profile(build).operators
        except PenstockError:
            return None
        return {operator.name: operator.seconds for operator in operators}

    # Served.

    def serve(self, builds: Sequence[Build]) -> list[ServedMeasurement]:
        """Measure at the SLO's load; several builds in turns."""
        self._run.tell("start servers")
        return self._remember("served", builds, ServedBench.measure, self._limits())

    def with_rates(self, builds: Sequence[Build], search_s: float) -> list[ServedMeasurement]:
        """Measure at the SLO's load and up to the highest rate of each, in turns."""
        self._run.tell("start servers")
        limits = replace(self._limits(), search_s=search_s)
        return self._remember("served with rates", builds, ServedBench.with_rates, limits)

    def prove(
        self, builds: Sequence[Build], left_s: float | None, attempt: int = 0
    ) -> list[ServedMeasurement]:
        """Measure at the SLO's load and, if time allows, up to the highest rate of each, in turns.
        Each attempt is a separate measurement."""
        planned = self._run.budget.planned
        needed_s = planned.prove_s(len(builds), planned.num_rounds)
        needed_s += len(builds) * MIN_SEARCH_S
        has_time = left_s is None or (planned.has_rates and left_s > needed_s)
        limits = _limits_of(planned.num_rounds, SEARCH_S if has_time else 0.0, left_s)
        self._run.tell("start servers for the proof")
        kind = "proof with rates" if has_time else "proof"
        suffix = f" attempt {attempt}" if attempt else ""
        return self._remember(kind, builds, ServedBench.prove, limits, suffix)

    def served_answers(
        self, build: Build, rows: Sequence[Row], seconds: float
    ) -> list[tuple[int, dict[str, Array]]]:
        """Return the answers of the build behind its server, with the index of each row."""
        bench = replace(self._bench([build], self._limits()), rows=rows)
        return bench.answers(self._run.served(build), seconds)

    def _limits(self) -> MeasurementLimits:
        budget = self._run.budget
        planned = budget.planned
        return _limits_of(planned.num_rounds, planned.cost_search_s, budget.stage_left_s)

    def _bench(self, builds: Sequence[Build], limits: MeasurementLimits) -> ServedBench:
        run, kept = self._run, self._gpu.kept_servers(builds)
        return ServedBench(self._plan, run.asked.rows, run.tell, kept, limits)

    def _remember(
        self,
        kind: str,
        builds: Sequence[Build],
        measure: Callable[[ServedBench, Sequence[Build]], list[ServedMeasurement]],
        limits: MeasurementLimits,
        suffix: str = "",
    ) -> list[ServedMeasurement]:
        """Measure with the machine otherwise idle, or use the journal, at the current price."""

        def measured() -> list[ServedMeasurement]:
            return measure(self._bench(builds, limits), list(map(self._run.served, builds)))

        is_original = kind == "served" and len(builds) == 1
        asked = self._run.required(builds[0], measured) if is_original else measured
        plan, level_s = self._run.served_plan, self._plan.duration_s
        self._gpu.settle()
        if level_s < plan.duration_s:
            # A run with a larger budget measures again, for longer.
            kind = f"{kind}, levels of {level_s:.3g} s"
        found = self._run.journal.remember(
            kind,
            " ".join(build.candidate.key for build in builds) + suffix,
            list[ServedMeasurement],
            asked,
            passing=(PenstockError,),
            is_reusable=lambda servings: all(map(disturbance.is_reusable, servings)),
        )
        return [repriced(each, plan) for each in found]


def _limits_of(num_rounds: int, search_s: float, left_s: float | None) -> MeasurementLimits:
    ends_at = math.inf if left_s is None else time.monotonic() + left_s
    return MeasurementLimits(num_rounds, search_s, lambda: ends_at - time.monotonic())
