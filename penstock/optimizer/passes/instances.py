"""Tune the number of instances and the threads of each. Writes only config.pbtxt."""

from __future__ import annotations

from penstock.config import CPU, ModelConfig
from penstock.optimizer import shapes
from penstock.optimizer.passes import Facts, Pass, PassContext, Proposals, Step
from penstock.optimizer.plan import Plan
from penstock.optimizer.shapes import WORTH, Ranking

MAX_STEPS = 3


class Instances(Pass):
    name = "instances"
    stage = "instances"
    is_config_only = True

    def propose(self, context: PassContext) -> Proposals:
        config, num_cores = context.build.config, context.machine.num_cores
        if num_cores == 1 and config.device == CPU:
            return self.skip("there is one core")
        now = config.num_instances, shapes.threads_of(config, num_cores)
        others = [pair for pair in shapes.arrangements(config, num_cores) if pair != now]
        ranking = Ranking(context)
        # Simulated with the current batching.
        rates = {pair: ranking.now(table) for pair, table in context.times.items()}
        best = max(rates.values(), default=0.0)
        found: Proposals = []
        # Unmeasured settings come before those that are known to be slower.
        for pair in sorted(others, key=lambda pair: -rates.get(pair, best)):
            step = Step(self.name, {"instances": str(pair[0]), "threads": str(pair[1])})
            if pair in rates and rates[pair] < WORTH * best:
                text = f"{rates[pair]:.4g}/s are predicted, {best:.4g}/s for the best"
                found += self.skip(text, step)
            elif sum(isinstance(each, Step) for each in found) < MAX_STEPS:
                found.append(step)
        return found

    def configured(self, config: ModelConfig, step: Step, plan: Plan) -> ModelConfig:
        num_instances, num_threads = int(step.settings["instances"]), int(step.settings["threads"])
        return shapes.with_instances(config, num_instances, num_threads)

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        if after.built.get("device", CPU) != CPU:
            # On a GPU, threads only feed it, and the facts are the same for any number of slots.
            return []
        asked = step.settings["threads"]
        option = shapes.THREADS.get(after.backend, "")
        for key, value in after.built.items():
            if key.lower() == option and value != asked:
                return [f"asked for {asked} threads, the runtime has {value}"]
        return []
