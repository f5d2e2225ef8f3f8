"""Checks shared by backends: configured tensors against those of the file, thread counts, and which
compiled code beside a model may be loaded."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.repository import manifest
from penstock.types import TensorSpec, shape_fits

MAX_THREADS = 1024
log = logging.getLogger("penstock.backend")


def check_signature(
    config: ModelConfig, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> None:
    """Check the configured tensors against the file's; a mismatch would fail every request."""
    problems: list[str] = []
    has_batch = config.max_batch_size > 0
    both = ("input", config.inputs, inputs), ("output", config.outputs, outputs)
    for kind, wanted, actual in both:
        by_name = {spec.name: spec for spec in actual}
        for spec in wanted:
            problems += _mismatch(kind, spec, by_name, has_batch)
    configured = {spec.name for spec in config.inputs}
    needed = [spec.name for spec in inputs if spec.name not in configured]
    problems += [f"input: the model needs '{name}', which is not configured" for name in needed]
    if problems:
        raise ConfigError(problems)


def warn_without_effect(key: str, why: str) -> None:
    log.warning("parameters.%s: has no effect; %s", key, why)


def num_threads(settings: Mapping[str, str], key: str, default: int, problems: list[str]) -> int:
    text = settings.get(key, str(default))
    if not (text.isascii() and text.isdigit() and int(text) <= MAX_THREADS):
        problems.append(f"parameters.{key}: '{text}' is not a number of threads")
        return default
    return int(text) or default


def share_of_cores(config: ModelConfig) -> int:
    """Return the threads for one instance when all instances compute at once."""
    num_cores = config.num_cores or len(os.sched_getaffinity(0))
    return max(1, num_cores // config.num_instances)


def _mismatch(
    kind: str, spec: TensorSpec, actual: Mapping[str, TensorSpec], has_batch: bool
) -> list[str]:
    found = actual.get(spec.name)
    where = f"{kind} '{spec.name}'"
    if found is None:
        return [f"{where}: the model has only {', '.join(sorted(actual))}"]
    problems: list[str] = []
    if found.datatype != spec.datatype:
        problems.append(f"{where}: configured as {spec.datatype}, the model has {found.datatype}")
    shape = (-1, *spec.shape) if has_batch else spec.shape
    # An output without a declared shape may have any rank, one that is divided among requests too.
    if kind == "output" and (not found.shape or spec.is_ragged):
        return problems
    if has_batch and found.shape and found.shape[0] != -1:
        fixed = f"the model's first dimension is fixed at {found.shape[0]}"
        problems.append(f"{where}: {fixed}, so max_batch_size must be 0")
    elif not _fits(kind, shape, found.shape):
        problems.append(f"{where}: configured as {list(shape)}, the model has {list(found.shape)}")
    return problems


def _fits(kind: str, configured: Sequence[int], actual: Sequence[int]) -> bool:
    """Return whether the shapes fit: an input may be narrower than the model's, never wider."""
    if kind == "input" or len(configured) != len(actual):
        return shape_fits(configured, actual)
    pairs = zip(configured, actual, strict=True)
    return all(-1 in (ours, theirs) or ours == theirs for ours, theirs in pairs)


def read_code(config: ModelConfig, name: str) -> bytes | None:
    """Return a file of compiled code beside the model, if it may be loaded. Beside module.py, which
    is code too, it may. Other models are only data, so there the version's manifest must have the
    file's digest: then it was committed by `optimize`. Never beside a .pt2 or
    TorchScript."""
    path = Path(config.artifact).parent / name
    if not path.is_file() or config.artifact.endswith((".pt2", ".pt")):
        return None
    content = path.read_bytes()
    if config.artifact.endswith(".py"):
        return content
    version = Path(config.manifest).parent
    found = manifest.read(version) if config.manifest else None
    if found is None or not path.resolve().is_relative_to(version.resolve()):
        return None
    entry = found.files.get(path.resolve().relative_to(version.resolve()).as_posix())
    is_listed = entry is not None and entry.sha256 == hashlib.sha256(content).hexdigest()
    return content if is_listed else None
