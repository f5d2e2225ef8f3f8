"""Repositories with versions of a model that has evidence, for tests."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.config import BatchPolicy, ModelConfig
from penstock.repository import versions
from penstock.types import TensorSpec

CONFIG = ModelConfig(
    name="model",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "FP32", (4,)),),
    outputs=(TensorSpec("y", "FP32", (4,)),),
    max_batch_size=8,
    batching=BatchPolicy(8, is_dynamic=True),
)


def interval(value: float) -> dict[str, float]:
    return {"value": value, "low": value * 0.9, "high": value * 1.1}


def evidence(p99_s: float = 0.012, **changes: object) -> dict[str, Any]:
    """Evidence as `penstock optimize` writes it."""
    measured = {
        "load": "200/s poisson",
        "p50": interval(p99_s / 2),
        "p99": interval(p99_s),
        "throughput": interval(200.0),
        "max_rate": interval(2 / p99_s),
        "memory_bytes": 100 << 20,
        "cost_per_million": 0.5,
        "streams": None,
    }
    hardware = {"cpu": "EPYC", "num_cores": 16, "memory_bytes": 1 << 36, "isa": ["avx2"]}
    steps = [{"pass": "int8", "settings": {"granularity": "tensor"}}, {"pass": "fold"}]
    return {
        "slo": "p99 < 20ms at 200/s poisson",
        "outcome": "kept",
        "measured": measured,
        "gpu_memory_bytes": None,
        "accuracy": {"metric": "top-1", "candidate": 0.91},
        "lineage": {"steps": steps},
        "hardware": {**hardware, "gpus": ["H200", "H200"]},
        "versions": {"onnx": "1.21"},
    } | changes


def add_version(
    root: Path,
    weights: bytes = b"weights",
    made: dict[str, object] | None = None,
    name: str = "model",
    **files: bytes,
) -> str:
    """Commit a version of a model; its evidence is `made`, or good."""
    root.mkdir(exist_ok=True)
    folder = root.parent / "sources" / str(len(list(root.parent.rglob("weights"))))
    folder.mkdir(parents=True)
    for file, data in {"weights": weights, **files}.items():
        (folder / file).write_bytes(data)
    config = replace(CONFIG, name=name)
    return versions.commit(root, name, folder, config, evidence() if made is None else made)
