"""Evidence of versions on the machine of their replica."""

import logging
from pathlib import Path

import msgspec
import pytest
from ray_doubles import EXAMPLES

from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.optimizer.this_machine import read_machine
from penstock.ray.evidence_check import check_evidence
from penstock.ray.replica import read_versions
from penstock.repository import versions

CONFIGS = read_versions(str(EXAMPLES), "identity").configs


PROBLEM = "identity: version 1: it has no evidence: there is no manifest.json"


def test_versions_without_evidence_are_told_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_evidence(CONFIGS, "off", None)
        assert caplog.text == ""
        check_evidence(CONFIGS, "warn", None)
        assert PROBLEM in caplog.text
    with pytest.raises(ConfigError, match=PROBLEM):
        check_evidence(CONFIGS, "require", None)


def committed(root: Path, num_cores: int) -> list[ModelConfig]:
    """A version with evidence of this machine."""
    hardware = msgspec.to_builtins(read_machine()) | {"num_cores": num_cores}
    software = hardware.pop("versions")
    evidence = {"outcome": "kept", "hardware": hardware, "versions": software}
    versions.commit(root, "identity", EXAMPLES / "identity" / "1", CONFIGS[0], evidence)
    return read_versions(str(root), "identity").configs


def test_evidence_of_this_machine_is_enough_with_as_many_cores(tmp_path: Path) -> None:
    configs = committed(tmp_path, 2)
    check_evidence(configs, "require", 2)
    check_evidence(configs, "require", 8)
    with pytest.raises(ConfigError, match=r"2 cores \(here 1\)"):
        check_evidence(configs, "require", 1)
