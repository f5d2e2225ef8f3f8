"""A path as a target: an in-process model that takes tensors or text."""

from __future__ import annotations

from penstock.benchmark.targets import Target, TargetSpec
from penstock.config import LLM
from penstock.errors import PenstockError
from penstock.repository.model_source import resolve


def is_text(spec: TargetSpec) -> bool:
    """Whether it is a language model; problems with it are reported by `describe`."""
    try:
        found = resolve(spec.address, name=spec.model).read()
    except PenstockError:
        return False
    configs = [config for config in found.configs if spec.version in ("", config.version)]
    return bool(configs) and all(config.backend == LLM for config in configs)


def open_path(spec: TargetSpec) -> Target:
    """Open an in-process target, importing only what it needs."""
    if is_text(spec):
        from penstock.benchmark.targets.in_process_text import InProcessText

        return InProcessText(spec)
    from penstock.benchmark.targets.in_process import InProcess

    return InProcess(spec)
