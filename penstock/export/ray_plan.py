"""What a model needs on a Ray cluster: CPUs and GPUs of one replica, how many replicas there may
be, and how many requests each takes. Pure: from configurations and evidence.

`penstock.ray` makes deployments of it, `export.ray_files` a file for Ray.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.config import CPU, LLM, ModelConfig, ScalingConfig
from penstock.errors import ConfigError
from penstock.export.sizing import DEFAULT_CORES, ModelNeeds

# Requests that wait for a replica, beside those that it answers; the batcher needs them to fill
# batches, and refuses those that would be late.
ONGOING_FACTOR = 8
MIN_ONGOING = 100
# Sequences of an engine, where the configuration says none (`llm.settings`): on a CPU, on a GPU.
MAX_SEQUENCES = (16, 256)
# Ray separates the parts of a replica's name by it.
RESERVED = "#"
# Names of deployments that are no models.
INGRESS, SERVER = "penstock_ingress", "penstock_server"


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """One model on a cluster. `reasons` say where each figure comes from."""

    model: str
    versions: tuple[str, ...]
    num_cpus: int
    num_gpus: int
    min_replicas: int
    max_replicas: int
    # Requests per replica, queued ones included, that autoscaling aims at.
    target_ongoing_requests: float
    # Requests that a replica takes; further ones wait in the ingress.
    max_ongoing_requests: int
    max_queued_requests: int
    # Whether it is a language model, whose replicas have prefix caches.
    is_text: bool
    reasons: Mapping[str, str]

    @property
    def scales(self) -> bool:
        return self.max_replicas > self.min_replicas


def plan_model(
    configs: Sequence[ModelConfig],
    needs: ModelNeeds,
    evidence: Mapping[str, object],
    max_replicas: int = 0,
) -> ReplicaPlan:
    """Plan the versions of one model that are served together. `needs` and `evidence` are those of
    the newest; `max_replicas` 0 takes the limit of the configuration."""
    newest = configs[-1]
    if RESERVED in newest.name or newest.name in (INGRESS, SERVER):
        raise ConfigError(f"{newest.name}: cannot be the name of a deployment of Ray Serve")
    num_cpus = DEFAULT_CORES if needs.num_cores is None else needs.num_cores
    target, why_target = _target(newest, needs, evidence)
    low, high, why_replicas = _replicas(newest, max_replicas)
    most = max(MIN_ONGOING, math.ceil(ONGOING_FACTOR * target))
    max_ongoing = min(most, newest.batching.max_pending)
    reasons = {
        "num_cpus": "not measured" if needs.num_cores is None else "threads of the workers",
        "replicas": why_replicas,
        "target_ongoing_requests": why_target,
    }
    return ReplicaPlan(
        model=newest.name,
        versions=tuple(config.version for config in configs),
        num_cpus=num_cpus,
        num_gpus=max(len(_gpus(config)) for config in configs),
        min_replicas=low,
        max_replicas=high,
        # Ray would never scale for more than a replica takes.
        target_ongoing_requests=min(target, max_ongoing),
        max_ongoing_requests=max_ongoing,
        max_queued_requests=newest.batching.max_pending,
        is_text=newest.backend == LLM,
        reasons=reasons,
    )


def replica_config(config: ModelConfig, num_cores: int | None) -> ModelConfig:
    """Return a version as one replica serves it: on the GPUs and cores that Ray gives it, GPUs
    being numbered from 0, and with a fixed number of instances, as Ray scales replicas."""
    names = {device: f"cuda:{number}" for number, device in enumerate(_gpus(config))}
    if names:
        config = config.on([names.get(device, device) for device in config.devices])
    cores = config.num_cores or num_cores
    return replace(config, num_cores=cores, scaling=ScalingConfig())


def _gpus(config: ModelConfig) -> list[str]:
    """Return the GPUs that are named; instances on each GPU count as one, as a replica has one GPU
    and further GPUs get further replicas."""
    return list(dict.fromkeys(device for device in config.devices if device != CPU))


def _replicas(config: ModelConfig, max_replicas: int) -> tuple[int, int, str]:
    """Return the fewest and most replicas; each has the instances of the configuration."""
    if config.sequences is not None:
        return 1, 1, "one: replicas do not share sequences"
    scaling, number = config.scaling, config.num_instances
    low = 1 if scaling.min_instances is None else math.ceil(scaling.min_instances / number)
    high = max(1, low, math.ceil((scaling.max_instances or 0) / number))
    if max_replicas:
        return min(low, max_replicas), max_replicas, f"at most {max_replicas}, as asked for"
    if scaling.min_instances is None and scaling.max_instances is None:
        return 1, 1, "one: nothing says that there may be more"
    return low, high, "penstock.min_instances and penstock.max_instances"


def _mean_latency_s(measured: object) -> float:
    """Return the sum of the measured phases; 0 if they are missing: evidence is an open JSON
    object."""
    phases = measured.get("phases") if isinstance(measured, Mapping) else None
    values = list(phases.values()) if isinstance(phases, Mapping) else []
    return sum(values) if all(isinstance(each, int | float) for each in values) else 0.0


def _target(
    config: ModelConfig, needs: ModelNeeds, evidence: Mapping[str, object]
) -> tuple[float, str]:
    """Return the requests in flight at the load that a replica can carry, by Little's law from the
    evidence: rate times mean latency. Without evidence, a full batch for each instance."""
    seconds = _mean_latency_s(evidence.get("measured"))
    if needs.rate_per_s is not None and seconds > 0:
        number = round(max(1.0, needs.rate_per_s * seconds), 2)
        return number, f"{needs.rate_per_s:.0f}/s x {seconds * 1e3:.2f} ms, as measured"
    if config.backend == LLM:
        given = config.options.get("penstock.max_num_seqs", "")
        most = int(given) if given.isdigit() else MAX_SEQUENCES[config.uses_gpu]
        return float(most), f"{most} sequences run at a time"
    rows = needs.num_rows if config.batching.is_dynamic else len(config.devices)
    return float(rows), f"{rows} rows of all instances; the SLO was not measured"
