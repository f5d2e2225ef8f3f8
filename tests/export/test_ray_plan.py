"""What a model needs on a Ray cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.config import BatchPolicy, ModelConfig, ScalingConfig, SequencePolicy
from penstock.errors import ConfigError
from penstock.export import ray_plan
from penstock.export.ray_plan import ReplicaPlan, replica_config
from penstock.export.workload import read_needs
from penstock.types import TensorSpec

EVIDENCE: dict[str, object] = {"measured": {"phases": {"queue": 0.002, "compute": 0.018}}}


def plan_model(
    configs: list[ModelConfig],
    evidence: dict[str, object] | None = None,
    max_replicas: int = 0,
    **needs: Any,
) -> ReplicaPlan:
    """Plan with what the newest version needs, as read from its configuration, and as measured."""
    found = replace(read_needs(configs[-1]), **needs)
    return ray_plan.plan_model(configs, found, evidence or {}, max_replicas)


def config(**changes: Any) -> ModelConfig:
    base = ModelConfig(
        name="m",
        version="1",
        backend="onnxruntime",
        artifact="m/1/model.onnx",
        inputs=(TensorSpec("x", "FP32", (4,)),),
        outputs=(TensorSpec("y", "FP32", (4,)),),
        max_batch_size=8,
        batching=BatchPolicy(8, is_dynamic=True),
    )
    return replace(base, **changes)


def test_evidence_says_how_many_cores_and_requests_a_replica_has() -> None:
    measured = {"num_cores": 16, "rate_per_s": 500.0}
    plan = plan_model([config(num_instances=4)], EVIDENCE, **measured)
    assert (plan.num_cpus, plan.num_gpus) == (16, 0)
    # Little's law: 500/s x 20 ms.
    assert plan.target_ongoing_requests == 10.0
    assert plan.max_ongoing_requests == 100
    assert plan.reasons["target_ongoing_requests"] == "500/s x 20.00 ms, as measured"
    assert (plan.min_replicas, plan.max_replicas, plan.scales) == (1, 1, False)


def test_without_evidence_threads_and_batches_do() -> None:
    plan = plan_model([config(num_instances=3)])
    assert (plan.num_cpus, plan.target_ongoing_requests) == (2, 24.0)
    assert plan.max_ongoing_requests == 192
    assert plan.reasons["num_cpus"] == "not measured"
    threads = plan_model([config(num_instances=3, options={"intra_op_thread_count": "4"})])
    assert threads.num_cpus == 12
    alone = config(batching=BatchPolicy(8, is_dynamic=False))
    assert plan_model([alone]).target_ongoing_requests == 1.0


@pytest.mark.parametrize(
    "measured", [{}, {"phases": {}}, {"phases": None}, {"phases": {"queue": "0.1"}}, None]
)
def test_figures_that_are_missing_are_not_used(measured: object) -> None:
    plan = plan_model([config()], {"measured": measured}, rate_per_s=100.0)
    assert plan.target_ongoing_requests == 8.0
    assert plan_model([config()], EVIDENCE).target_ongoing_requests == 8.0


def test_a_replica_that_takes_few_requests_scales_at_those() -> None:
    few = config(batching=BatchPolicy(8, is_dynamic=True, max_pending=4))
    plan = plan_model([few], max_replicas=3)
    assert (plan.target_ongoing_requests, plan.max_ongoing_requests) == (4, 4)


def test_language_models_count_sequences() -> None:
    text = config(backend="llm", options={"penstock.max_num_seqs": "24"})
    plan = plan_model([text])
    assert (plan.is_text, plan.target_ongoing_requests) == (True, 24.0)
    assert plan_model([config(backend="llm")]).target_ongoing_requests == 16.0
    gpu = config(backend="llm", device="cuda:0")
    assert plan_model([gpu]).target_ongoing_requests == 256.0


@pytest.mark.parametrize(
    ("spread", "num_gpus", "placed"),
    [
        ((), 0, ("cpu",)),
        (("cuda",), 1, ("cuda:0",)),
        (("cuda", "cuda"), 1, ("cuda:0", "cuda:0")),
        (("cuda:3",), 1, ("cuda:0",)),
        (("cuda:2", "cuda:5", "cuda:2"), 2, ("cuda:0", "cuda:1", "cuda:0")),
    ],
)
def test_gpus_of_a_replica_are_numbered_from_0(
    spread: tuple[str, ...], num_gpus: int, placed: tuple[str, ...]
) -> None:
    made = config(device=(spread or ("cpu",))[0], spread=spread, num_instances=len(spread) or 1)
    assert plan_model([made]).num_gpus == num_gpus
    assert sorted(replica_config(made, 3).devices) == sorted(placed)


def test_a_replica_has_the_cores_of_ray_and_a_fixed_number_of_instances() -> None:
    scaled = config(num_instances=2, scaling=ScalingConfig(0, 8))
    made = replica_config(scaled, 4)
    assert (made.num_cores, made.num_instances, made.is_scaled) == (4, 2, False)
    assert replica_config(config(num_cores=3), 4).num_cores == 3


@pytest.mark.parametrize(
    ("scaling", "limit", "replicas"),
    [
        (ScalingConfig(), 0, (1, 1)),
        (ScalingConfig(), 6, (1, 6)),
        (ScalingConfig(2, 9), 0, (1, 5)),
        (ScalingConfig(4, 4), 0, (2, 2)),
        (ScalingConfig(0, 3), 0, (0, 2)),
        (ScalingConfig(0, None), 0, (0, 1)),
        (ScalingConfig(None, 8), 3, (1, 3)),
        (ScalingConfig(8, 9), 3, (3, 3)),
    ],
)
def test_limits_of_instances_are_limits_of_replicas(
    scaling: ScalingConfig, limit: int, replicas: tuple[int, int]
) -> None:
    """A replica has two instances here."""
    plan = plan_model([config(num_instances=2, scaling=scaling)], max_replicas=limit)
    assert (plan.min_replicas, plan.max_replicas) == replicas


def test_versions_are_served_together() -> None:
    plan = plan_model([config(version="1", device="cuda:0"), config(version="3")])
    assert (plan.versions, plan.num_gpus) == (("1", "3"), 1)


@pytest.mark.parametrize("name", ["a#b", "penstock_ingress", "penstock_server"])
def test_names_that_ray_or_the_application_needs_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a deployment"):
        plan_model([config(name=name)])


def test_sequences_have_one_replica() -> None:
    """Replicas do not share them, and any replica may get the next request."""
    plan = plan_model([config(sequences=SequencePolicy())], max_replicas=8)
    assert (plan.min_replicas, plan.max_replicas) == (1, 1)
    assert plan.reasons["replicas"] == "one: replicas do not share sequences"
