"""Tune request batching: rows or tokens per batch, Triton's rules or the SLO's, padding buckets.
Writes only config.pbtxt."""

from __future__ import annotations

from penstock.config import ModelConfig
from penstock.optimizer import shapes
from penstock.optimizer.passes import Facts, Pass, PassContext, Proposals, Step
from penstock.optimizer.plan import Plan
from penstock.optimizer.shapes import Ranking, Settings
from penstock.optimizer.simulate import TimeTable

MAX_STEPS = 4
# Predicted gains below this are not worth a measurement.
MIN_GAIN = 0.02
# Tried when no batch times are known.
USUAL_BATCHES = (8, 32)


class Batching(Pass):
    name = "batching"
    stage = "batching"
    is_config_only = True

    def propose(self, context: PassContext) -> Proposals:
        config, facts = context.build.config, context.facts
        now = shapes.settings_of(config)
        if config.max_batch_size == 0:
            return self.skip("the model has no batch dimension")
        if facts.batching_problem:
            off = Step(self.name, {"mode": "off"})
            skip = self.skip(facts.batching_problem)
            return [*skip, off] if now["mode"] != "off" else skip
        ranking = Ranking(context)
        table = _table(context)
        if table is None:
            wanted = _usual(context, ranking)
            other = [each for each in wanted if each != now]
            return [Step(self.name, each) for each in other[:MAX_STEPS]]
        if table.max_rows == 1:
            return self.skip("the model takes one row at a time")
        today = ranking.now(table)
        others = [shape for shape in ranking.batching(table) if shape.settings != now]
        better = [shape for shape in others if shape.rate > today * (1 + MIN_GAIN)]
        if not better:
            text = f"no other setting is predicted to do more than the {today:.4g}/s of this one"
            return self.skip(text)
        return [Step(self.name, shape.settings) for shape in better[:MAX_STEPS]]

    def configured(self, config: ModelConfig, step: Step, plan: Plan) -> ModelConfig:
        return shapes.with_batching(config, step.settings, plan.slo)

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        if step.settings["mode"] == "off":
            return []
        problems = [after.batching_problem] if after.batching_problem else []
        if "buckets" in step.settings and after.padding_problem:
            problems.append(after.padding_problem)
        return problems


def _table(context: PassContext) -> TimeTable | None:
    """Return the batch times of the current instances and threads, else any."""
    config = context.build.config
    threads = shapes.threads_of(config, context.machine.num_cores)
    known = context.times.get((config.num_instances, threads))
    return known or next(iter(context.times.values()), None)


def _usual(context: PassContext, ranking: Ranking) -> list[Settings]:
    slo = context.plan.slo
    kept = ranking.buckets()[-1] | shapes.tokens_of(context.build.config)
    modes = ["fixed"] + ["slo"] * (slo is not None and slo.latency_s is not None)
    return [
        {"mode": mode, "max_batch": str(size), **kept} for mode in modes for size in USUAL_BATCHES
    ]
