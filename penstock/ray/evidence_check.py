"""Whether the versions of a model have evidence for the machine of their replica, before they
start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.operate.promotion import problems_of_evidence
from penstock.optimizer.this_machine import read_machine
from penstock.repository import manifest as manifests
from penstock.repository.manifest import Manifest

log = logging.getLogger("penstock.ray")
# What happens if the evidence does not hold here.
MODES = ("off", "warn", "require")


def check_evidence(configs: Sequence[ModelConfig], mode: str, num_cores: int | None) -> None:
    """Log what the evidence of versions lacks on this machine, or raise ConfigError if it is
    required. `num_cores` are those that the replica may use; None: all."""
    if mode == "off":
        return
    machine = read_machine()
    if num_cores is not None:
        machine = msgspec.structs.replace(machine, num_cores=num_cores)
    problems = [
        f"{config.name}: version {config.version}: {each}"
        for config in configs
        for each in problems_of_evidence(read_manifest(config), machine)
    ]
    if problems and mode == "require":
        raise ConfigError([*problems, "measure the version on this machine: penstock optimize"])
    for problem in problems:
        log.warning("%s", problem)


def read_manifest(config: ModelConfig) -> Manifest | None:
    return manifests.read(Path(config.manifest).parent) if config.manifest else None
