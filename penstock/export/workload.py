"""The models that are exported: where a pod finds their files, and what their versions need.

Reads configurations and the evidence of committed versions; `sizing` decides with what is found.
"""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock import slo
from penstock.backends import GPU_MEMORY
from penstock.config import CPU, LLM, SLO_OFF, ModelConfig
from penstock.errors import ConfigError
from penstock.export.names import dns_name
from penstock.export.sizing import ModelNeeds
from penstock.llm.settings import DEFAULT_CACHE_BYTES, PREFIX
from penstock.repository import layout
from penstock.repository import manifest as manifests
from penstock.repository.ensemble_files import needed_models, take_out_cycles
from penstock.repository.layout import ModelKind
from penstock.repository.model_source import ModelSource
from penstock.serving.shard_count import THREADS, cores_of


@dataclass(frozen=True, slots=True)
class Workload:
    """Models that one Deployment serves."""

    # For resources of Kubernetes.
    name: str
    # Path of MODEL below the folder that holds the models; empty: the folder itself.
    path: str
    models: tuple[ModelNeeds, ...]
    # Optional dependencies that the image needs.
    extras: tuple[str, ...]


def read(source: ModelSource) -> Workload:
    """Read the models; ConfigError if one of them cannot be served."""
    folder = source.path
    scan = source.read()
    if scan.problems:
        raise ConfigError([f"{folder}: {problem}" for problem in layout.flat(scan.problems)])
    name = source.name or folder.name
    if problems := [*_ensemble_problems(source, scan.configs), *_record_problems(scan.configs)]:
        raise ConfigError([f"{folder}: {problem}" for problem in problems])
    models = tuple(read_needs(config) for config in scan.configs if not config.is_ensemble)
    extras = {extra for config in scan.configs if (extra := _extra(config))}
    # It includes torch.
    extras -= {"torch"} if extras & {"hf", "llm"} else set()
    return Workload(dns_name(name), _path_of(source), models, tuple(sorted(extras)))


def _ensemble_problems(source: ModelSource, configs: Sequence[ModelConfig]) -> Iterator[str]:
    """Yield what the pod would lack for its ensembles."""
    there = {config.name for config in configs}
    beside = source.path.parent
    if source.kind is ModelKind.VERSION_FOLDER:
        beside = beside.parent
    advice = "" if source.kind is ModelKind.REPOSITORY else f"; export the repository, {beside}"
    for config in configs:
        members = dict.fromkeys(step.model for step in config.steps)
        if missing := ", ".join(name for name in members if name not in there):
            yield f"ensemble '{config.name}' runs {missing}, not exported with it{advice}"
    for problems in take_out_cycles(needed_models(configs)).values():
        yield from problems


def _record_problems(configs: Sequence[ModelConfig]) -> Iterator[str]:
    """Yield the models that a server refuses without a folder for recordings."""
    for config in configs:
        if config.record is not None and config.record.max_bytes:
            where = "pods have no folder for recordings"
            yield f"{config.name}: parameters.penstock.record: {where}; set it to off"


def _path_of(source: ModelSource) -> str:
    """Return the path of a model below the folder that it lies in."""
    match source.kind:
        case ModelKind.REPOSITORY:
            return source.name
        case ModelKind.VERSION_FOLDER:
            return f"{source.path.parent.name}/{source.path.name}"
        case _:
            return source.path.name


def read_needs(config: ModelConfig) -> ModelNeeds:
    """Read what one version needs from its configuration, files and evidence."""
    evidence: Mapping[str, object] = {}
    manifest = manifests.read(Path(config.manifest).parent) if config.manifest else None
    if manifest is not None:
        evidence = manifest.evidence
    measured = _mapping(evidence.get("measured"))
    hardware = _mapping(evidence.get("hardware"))
    memory = _positive(measured.get("memory_bytes"))
    of_one = _instance_gpu_bytes(config, _positive(evidence.get(GPU_MEMORY)))
    num_on_gpus = sum(device != CPU for device in config.devices)
    is_llm = config.engine == LLM
    return ModelNeeds(
        config.name,
        config.version,
        config.engine,
        num_workers=len(config.workers),
        num_cores=_cores(config, _positive(hardware.get("num_cores"))),
        num_rows=0 if is_llm else max(1, config.max_batch_size) * len(config.devices),
        load_timeout_s=config.load_timeout_s,
        file_bytes=_file_bytes(config) if manifest is None else manifest.num_bytes,
        cache_bytes=_cache_bytes(config) if is_llm and not config.uses_gpu else 0,
        memory_bytes=None if memory is None else round(memory),
        memory_limit_bytes=config.memory_bytes,
        num_gpus=_num_gpus(config.devices),
        gpu_memory_bytes=None if of_one is None else of_one * num_on_gpus,
        instance_gpu_bytes=of_one,
        slo_latency_s=config.batching.slo_latency_s,
        rate_per_s=_rate(config, measured),
    )


def _cores(config: ModelConfig, measured: float | None) -> int | None:
    """Return the threads of all workers: as configured, or else the cores of the measurement."""
    option = THREADS.get(config.engine)
    given = config.options.get(option, "") if option is not None else "1"
    is_given = (given.isdigit() and int(given) > 0) or CPU not in config.devices
    if not is_given and measured is None:
        return None
    return cores_of([config], round(measured or 1))


def _instance_gpu_bytes(config: ModelConfig, measured: float | None) -> int | None:
    """Return the GPU memory of one instance; None if it is unknown, or all are on the CPU."""
    if not config.uses_gpu:
        return None
    return config.gpu_memory_bytes if measured is None else round(measured)


def _num_gpus(devices: Sequence[str]) -> int:
    """Return how many GPUs a pod must see: one for `cuda`, or enough for the highest number."""
    on_gpus = [device for device in devices if device != CPU]
    return max((int(device.partition(":")[2] or 0) + 1 for device in on_gpus), default=0)


def _rate(config: ModelConfig, measured: Mapping[str, object]) -> float | None:
    """Return the highest rate that was measured to keep the SLO, or else the rate of the SLO."""
    if not config.slo or config.slo == SLO_OFF:
        return None
    highest = _positive(_mapping(measured.get("max_rate")).get("value"))
    promised = slo.parse(config.slo).rate
    return highest or (None if promised is None else promised.per_s)


def _file_bytes(config: ModelConfig) -> int:
    """Return the bytes of a version's files: weights may lie beside the one that is loaded."""
    artifact = Path(config.artifact)
    is_of_folder = artifact.name == layout.TEXT_CONFIG or artifact.parent.name == config.version
    if artifact.is_dir() or (is_of_folder and artifact.parent.is_dir()):
        folder = artifact if artifact.is_dir() else artifact.parent
        return sum(_size(folder / name) for name in manifests.names_below(folder))
    # A file by itself, with the weights of its format: model.onnx.data, model.bin of model.xml.
    beside = artifact.parent.glob(f"{glob.escape(artifact.name)}*")
    weights = {artifact.with_suffix(".bin")} if artifact.suffix == ".xml" else set()
    return sum(map(_size, weights.union(beside)))


def _cache_bytes(config: ModelConfig) -> int:
    given = config.options.get(f"{PREFIX}kv_cache_bytes", "")
    return int(given) if given.isdigit() and int(given) else DEFAULT_CACHE_BYTES


def _size(path: Path) -> int:
    return path.stat().st_size if os.path.exists(path) else 0


def _extra(config: ModelConfig) -> str:
    if config.engine == "pytorch":
        return "hf" if config.is_staged or config.has_head else "torch"
    return {"openvino": "openvino", LLM: "llm"}.get(config.engine, "")


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _positive(value: object) -> float | None:
    """Return a number above 0; None for everything else: evidence is an open JSON object."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type, operator]
        return None
    return float(value)  # type: ignore[arg-type]
