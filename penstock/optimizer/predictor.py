"""Times builds and predicts the rates that they keep the SLO at, in every serving configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.optimizer.candidates import Build, Step
from penstock.optimizer.evaluator import Evaluator
from penstock.optimizer.facts import Facts
from penstock.optimizer.finalists import arrangement
from penstock.optimizer.findings import Contender, Findings
from penstock.optimizer.passes import PassContext
from penstock.optimizer.shapes import arrangements, shapes, with_instances
from penstock.optimizer.simulate import TimeTable
from penstock.optimizer.time_budget import TimeBudget
from penstock.slo import Memory

# On a GPU, a prediction for one instance below this share of the best ends the timing.
HOPELESS = 0.6
# Share of the machine's memory that instances of one candidate may take while they are timed.
MAX_MEMORY = 0.25


@dataclass(slots=True)
class Predictor:
    """Makes contenders of builds that passed their gates."""

    evaluator: Evaluator
    findings: Findings
    budget: TimeBudget
    context: Callable[[Contender], PassContext]

    def predict(self, build: Build, facts: Facts, *, is_lossy: bool) -> Contender:
        """Measure batch times, as far as they matter and there is time, and simulate servers."""
        machine, budget = self.evaluator.run.machine, self.budget
        began = budget.clock()
        times: dict[tuple[int, int], TimeTable] = {}
        contender = Contender(build, facts, times, [], is_lossy)
        is_on_gpu = build.config.uses_gpu
        for pair in arrangements(build.config, machine.num_cores):
            memory_bytes = pair[0] * max((t.memory_bytes for t in times.values()), default=0)
            if memory_bytes > MAX_MEMORY * machine.memory_bytes and not is_on_gpu:
                break
            if times and not budget.has_search_time((budget.clock() - began) / len(times)):
                break
            times[pair] = self.evaluator.measurements.times(build, *pair)
            if budget.estimates.is_short and not is_on_gpu:
                break
            if is_on_gpu and self._is_hopeless(contender):
                # More instances only overlap copies with compute, which would not make it the best.
                break
        contender.shapes = self._within_memory(contender)
        return contender

    def _is_hopeless(self, contender: Contender) -> bool:
        """Compare with the best at the smallest number of instances."""
        if not self.findings.contenders or self.evaluator.run.plan.is_exhaustive:
            return False
        contender.shapes = shapes(self.context(contender))
        fewest = min(num_instances for num_instances, _ in contender.times)
        best = self.findings.best.shapes
        alone = [rate for steps, rate in best if arrangement(steps)[0] == fewest]
        return contender.rate < HOPELESS * max(alone, default=0.0)

    def _within_memory(self, contender: Contender) -> list[tuple[tuple[Step, ...], float]]:
        """Return the shapes that fit the SLO's memory limit; all of them if none is known to
        fit."""
        slo = self.evaluator.run.plan.slo
        assert slo is not None
        found = shapes(self.context(contender))
        limits = [term.max_bytes for term in slo.terms if isinstance(term, Memory)]
        if not limits:
            return found
        config = contender.build.config
        one = max(table.memory_bytes for table in contender.times.values())

        def needed(steps: Sequence[Step]) -> int:
            pair = arrangement(steps)
            known = contender.times.get(pair)
            memory_bytes = one if known is None else known.memory_bytes
            return len(with_instances(config, *pair).workers) * memory_bytes

        fitting = [each for each in found if needed(each[0]) <= min(limits)]
        return fitting or found
