"""Facts of builds, read back rather than assumed, and how their rows may be batched."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.errors import ConfigError
from penstock.optimizer import influence, passes, trials
from penstock.optimizer.builder import Builder
from penstock.optimizer.candidates import Build, Candidate
from penstock.optimizer.facts import Facts
from penstock.optimizer.gpu_sessions import GpuProcesses
from penstock.optimizer.run_context import RunContext
from penstock.optimizer.shapes import with_batching
from penstock.optimizer.trials import TrialLimits

# Passes that change only how the model is served.
SERVING_ONLY = ("batching", "instances")
NOT_REPEATED = (
    "the model's answers differ between two runs on the same rows: {}; no candidate can be "
    "compared with such a model: turn off dropout and sampling, fix its seed, or remove its state"
)


@dataclass(slots=True)
class Inspector:
    run: RunContext
    gpu: GpuProcesses
    builder: Builder
    _facts: dict[str, Facts] = field(default_factory=dict)

    def facts(self, build: Build) -> Facts:
        """Return the facts of a build. Batching problems of its parents apply to it too, whatever
        tolerance its own rounding gets."""
        run = self.run
        run.tell("read back")
        key = build.candidate.key
        build = self._canonical_build(build)
        inspect = run.required(build, lambda: self._inspect(build))
        canonical = build.candidate.key
        found = run.journal.remember("facts", canonical, Facts, inspect, passing=run.passing)
        self._facts[key] = self._facts[canonical] = found
        lineage = self._lineage(build.candidate)
        found.batching_problem = next(filter(None, (each.batching_problem for each in lineage)), "")
        if build.config.padding is None and build.candidate.steps:
            parents = (each.padding_problem for each in lineage[1:])
            found.padding_problem = found.padding_problem or next(parents, "")
        return found

    def rules(self, build: Build) -> TrialLimits:
        """Return how rows may be batched, as far as known: both serving and judging follow it."""
        run = self.run
        known = self._lineage(build.candidate)
        is_alone = any(each.batching_problem for each in known)
        may_pad = not (known and known[0].padding_problem)
        max_rows = 1 if is_alone else run.subject.max_rows
        is_short = run.budget.planned.is_short and not build.config.uses_gpu
        num_lengths = trials.FEW_LENGTHS if is_short else trials.MAX_LENGTHS
        return TrialLimits(max_rows, may_pad, run.deadline(build), max_lengths=num_lengths)

    def check_rows(self) -> None:
        """Serve the original without batching or padding from the start if real rows require it.
        ConfigError if it gives different answers to the same rows."""
        run = self.run
        facts, config = self.facts(run.original), run.original.config
        if facts.batching_problem:
            run.notes.append(f"the original is served without batching: {facts.batching_problem}")
            if config.batching.is_dynamic:
                run.configure_original(with_batching(config, {"mode": "off"}, None))
        elif facts.padding_problem:
            run.notes.append(f"the original is served without padding: {facts.padding_problem}")
            if config.padding is not None:
                run.configure_original(replace(config, padding=None))

    def _lineage(self, candidate: Candidate) -> list[Facts]:
        """Return the known facts of a candidate and its parents, its own first."""
        num_steps = len(candidate.steps)
        keys = [Candidate(candidate.steps[:num]).key for num in range(num_steps, -1, -1)]
        return [self._facts[key] for key in keys if key in self._facts]

    def _canonical_build(self, build: Build) -> Build:
        """Return the build whose facts apply to this one. On a GPU, that is the model without its
        serving steps, which has been inspected already, unless rows are padded differently."""
        candidate = _without_serving(build.candidate)
        if not build.config.uses_gpu or candidate == build.candidate:
            return build
        model = self.builder.build(candidate)
        return model if build.config.padding in (None, model.config.padding) else build

    def _inspect(self, build: Build) -> Facts:
        run = self.run
        session = self.gpu.session(build)
        if not self._has_own_rows(build):
            if session is None:
                return trials.inspect(build, run.deadline(build))
            return session.inspect()
        run.tell("rows alone and in batches")
        steps = build.candidate.steps
        is_lossy = any(passes.find(step.pass_name).changes_answers for step in steps)
        if session is None:
            ends_at = run.deadline(build)
            facts = influence.inspect(build, run.rows, is_lossy=is_lossy, ends_at=ends_at)
        else:
            facts = session.inspect()
            model = self.gpu.session(without_postprocess(build))
            assert model is not None, "it is on a GPU"
            is_rounded = is_lossy or bool(facts.quantised)
            influence.add_check(facts, model.check_rows(run.rows, is_rounded=is_rounded))
        if facts.repeat_problem and not build.candidate.steps:
            raise ConfigError([NOT_REPEATED.format(facts.repeat_problem)])
        return facts

    def _has_own_rows(self, build: Build) -> bool:
        """Return whether to check with real rows: there is data, and model or padding is new."""
        candidate = _without_serving(build.candidate)
        if self.run.examples is None or candidate == build.candidate:
            return self.run.examples is not None
        return build.config.padding not in (None, self.builder.build(candidate).config.padding)


def without_postprocess(build: Build) -> Build:
    return replace(build, config=build.config.without_postprocess)


def _without_serving(candidate: Candidate) -> Candidate:
    """Return the candidate without trailing steps that change only how it is served."""
    while candidate.steps and candidate.steps[-1].pass_name in SERVING_ONLY:
        candidate = candidate.parent
    return candidate
