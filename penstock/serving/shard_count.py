"""How many shards a server has by default, from its cores and models. Pure.

A shard pays if a core is left for it while the models compute. Idle shards cost little: at low
rates only the first accept connections (`serving.accept_policy`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.config import CPU, LLM, ModelConfig
from penstock.serving.pipeline import stages_of

# More were not measured.
MAX_SHARDS = 8
# Below this, the core is the only shard: it needs one core, and the models another.
MIN_CORES = 3
# Options with the number of threads of one instance on the CPU; other backends use one thread.
THREADS = {
    "onnxruntime": "intra_op_thread_count",
    "pytorch": "intra_op_thread_count",
    "openvino": "inference_num_threads",
    LLM: "penstock.threads",
}


@dataclass(frozen=True, slots=True)
class ShardChoice:
    """The number of shards, and why."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.number} shard{'s' if self.number > 1 else ''}: {self.reason}"


def choose(
    num_cores: int, configs: Sequence[ModelConfig], refusals: Sequence[str] = ()
) -> ShardChoice:
    """Choose for models whose devices are known. `refusals` are the reasons against several shards,
    if there are any."""
    if refusals:
        return ShardChoice(1, refusals[0])
    if configs and all(config.engine == LLM for config in configs):
        # 8 shards gave 0.98 of the tokens/s of one with 256 clients on an H200 (2026-11-18).
        return ShardChoice(1, "the engine is the bottleneck of language models")
    have = f"{num_cores} core{'s' if num_cores > 1 else ''}"
    if num_cores < MIN_CORES:
        return ShardChoice(1, have)
    num_used = cores_of(configs, num_cores)
    used = f"models use {'all' if num_used >= num_cores else num_used} of {have}"
    # A core for the core process; a third of the rest for the kernel's network stack and clients.
    number = min(MAX_SHARDS, 2 * (num_cores - 1 - num_used) // 3)
    return ShardChoice(max(1, number), used)


def cores_of(configs: Iterable[ModelConfig], num_cores: int) -> int:
    """Return how many cores the workers keep busy: their threads, or one to feed a GPU. Models
    with several versions count once, as clients use one of them at a time."""
    by_name: dict[str, int] = {}
    for config in configs:
        stages = [each.config for each in stages_of(config)] if config.is_staged else [config]
        used = sum(
            _threads(stage, num_cores) if device == CPU else 1
            for stage in stages
            for device, _ in stage.places
        )
        by_name[config.name] = max(used, by_name.get(config.name, 0))
    return sum(by_name.values())


def _threads(config: ModelConfig, num_cores: int) -> int:
    option = THREADS.get(config.engine)
    if option is None:
        return 1
    given = config.options.get(option, "")
    if given.isdigit() and int(given):
        return int(given)
    # By default, instances share all cores.
    return max(1, num_cores // max(len(config.devices), config.max_instances))
