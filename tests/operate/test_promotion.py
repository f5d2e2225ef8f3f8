"""Promotion needs evidence from this hardware, or a reason; a rollback needs a history."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import ConfigError, InvalidRequest, StorageFull
from penstock.operate import promotion
from penstock.operate.promotion import Grounds
from penstock.optimizer.machine import Machine
from penstock.optimizer.this_machine import read_machine
from penstock.repository import history, layout, staging, versions
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
HERE = Machine("Xeon", 8, 1 << 34, ("avx2", "avx512f"), ("H200",), {"torch": "2.13", "onnx": "1"})
Commit = Callable[..., str]


def evidence_from(machine: Machine, **changes: object) -> dict[str, object]:
    hardware = msgspec.to_builtins(machine)
    software = hardware.pop("versions")
    found = {"slo": "p99 < 20ms", "outcome": "kept", "hardware": hardware, "versions": software}
    return {key: value for key, value in (found | changes).items() if value is not None}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.fixture
def commit(root: Path, tmp_path: Path) -> Commit:
    """Commit a version with evidence from HERE, changed."""

    def run(machine: Machine = HERE, **changes: object) -> str:
        (tmp_path / "weights").write_bytes(b"weights")
        made = evidence_from(machine, **changes)
        return versions.commit(root, "model", {"weights": tmp_path / "weights"}, CONFIG, made)

    return run


def promote(root: Path, version: str, machine: Machine = HERE, force: str = "") -> None:
    promotion.prepare(root, "model", version, Grounds("ada", "", force), machine).apply()


def served(root: Path) -> str:
    [config] = layout.read(root).configs
    return config.version


def refusal(root: Path, version: str, machine: Machine = HERE) -> list[str]:
    """Why a promotion is refused; it changes nothing."""
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    with pytest.raises(ConfigError) as caught:
        promotion.prepare(root, "model", version, Grounds("ada"), machine)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    return list(caught.value.problems)


# The evidence


def test_a_version_with_evidence_from_this_hardware_is_promoted(root: Path, commit: Commit) -> None:
    commit()
    commit()
    grounds = Grounds("ada", "faster")
    change = promotion.prepare(root, "model", "1", grounds, HERE)
    assert served(root) == "2", "it is only checked"
    event = change.apply()
    assert served(root) == "1"
    assert (event.kind, event.version, event.previous) == ("promoted", "1", ("2",))
    assert (event.actor, event.reason, event.figures) == ("ada", "faster", {})
    assert history.read(root / "model") == [event]


def test_the_functions_ask_this_machine(root: Path, commit: Commit) -> None:
    here = read_machine()
    commit(here)
    commit(msgspec.structs.replace(here, cpu="Pentium"))
    event = promotion.promote(root, "model", "1", actor="ada", reason="r")
    assert (event.kind, event.actor, event.reason) == ("promoted", "ada", "r")
    with pytest.raises(ConfigError, match="other hardware: CPU Pentium"):
        promotion.promote(root, "model", "2")
    assert promotion.promote(root, "model", "2", force="a test").kind == "forced"
    assert promotion.rollback(root, "model", actor="bob", reason="slow").version == "1"
    assert served(root) == "1"


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"cpu": "EPYC"}, "CPU Xeon (here EPYC)"),
        ({"num_cores": 4}, "8 cores (here 4)"),
        ({"isa": ("avx2",)}, "avx512f (not here)"),
        ({"gpus": ()}, "1 x H200 (here no GPU)"),
        ({"gpus": ("H100",)}, "1 x H200 (here 1 x H100)"),
        ({"gpus": ("H200", "H200")}, "1 x H200 (here 2 x H200)"),
        ({"cpu": "EPYC", "num_cores": 1}, "CPU Xeon (here EPYC), 8 cores (here 1)"),
        ({"num_cores": 16}, ""),
        ({"isa": ("avx2", "avx512f", "amx_int8")}, ""),
        ({"memory_bytes": 1}, ""),
    ],
)
def test_other_hardware_is_refused(
    root: Path, commit: Commit, change: dict[str, object], problem: str
) -> None:
    commit()
    machine = msgspec.structs.replace(HERE, **change)
    if not problem:
        promote(root, "1", machine)
        return
    first, advice = refusal(root, "1", machine)
    assert first == f"model: version 1: its evidence is from other hardware: {problem}"
    assert "--force REASON" in advice and "penstock optimize" in advice


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"outcome": "missed"}, "evidence.outcome is 'missed': the SLO p99 < 20ms was not kept"),
        ({"outcome": "disturbed"}, "evidence.outcome is 'disturbed'"),
        ({"outcome": None}, "evidence.outcome is missing"),
        ({"hardware": None}, "evidence.hardware is missing"),
        ({"hardware": {"cpu": "Xeon"}}, "evidence.hardware is incomplete (Object missing"),
        ({"hardware": [1]}, "evidence.hardware is incomplete"),
    ],
)
def test_evidence_that_does_not_tell_is_refused(
    root: Path, commit: Commit, change: dict[str, object], problem: str
) -> None:
    commit(**change)
    first, advice = refusal(root, "1")
    assert first.startswith(f"model: version 1: {problem}")
    assert "--force REASON" in advice


def test_every_problem_is_told(root: Path, commit: Commit) -> None:
    commit(outcome="missed")
    machine = msgspec.structs.replace(HERE, cpu="EPYC", num_cores=1)
    missed, hardware, _ = refusal(root, "1", machine)
    assert "'missed'" in missed and "8 cores (here 1)" in hardware


def test_versions_without_evidence_are_refused(root: Path, commit: Commit) -> None:
    commit(slo=None, outcome=None, hardware=None, versions=None)
    assert "was committed without a measurement" in refusal(root, "1")[0]
    shutil.copytree(root / "model" / "1", root / "model" / "2")
    (root / "model" / "2" / "manifest.json").unlink()
    assert "there is no manifest.json, so it was made by hand" in refusal(root, "2")[0]


def test_force_is_recorded_with_what_it_overrode(root: Path, commit: Commit) -> None:
    commit(outcome="missed")
    promote(root, "1", msgspec.structs.replace(HERE, num_cores=4), force="  the demo is today ")
    [event] = history.read(root / "model")
    assert (event.kind, event.reason) == ("forced", "the demo is today")
    assert event.figures["force"] == "the demo is today"
    problems = event.figures["problems"]
    assert isinstance(problems, list) and len(problems) == 2
    change = promotion.prepare(root, "model", "1", Grounds("ada", "why", "because"), HERE)
    assert (change.cause.reason, change.cause.figures["force"]) == ("why", "because")


def test_force_without_need_is_a_promotion(root: Path, commit: Commit) -> None:
    commit()
    promote(root, "1", force="to be sure")
    [event] = history.read(root / "model")
    assert (event.kind, event.reason, event.figures) == ("promoted", "to be sure", {})


def test_blank_force_is_none(root: Path, commit: Commit) -> None:
    commit(outcome="missed")
    with pytest.raises(ConfigError, match="not kept"):
        promote(root, "1", force="  ")


def test_force_does_not_promote_a_damaged_version(root: Path, commit: Commit) -> None:
    commit()
    commit()
    (root / "model" / "1" / "weights").write_bytes(b"WEIGHTS")
    with pytest.raises(ConfigError, match="differs from what was committed"):
        promote(root, "1", force="now")
    assert served(root) == "2" and history.read(root / "model") == []


def test_other_libraries_are_a_warning(root: Path, commit: Commit) -> None:
    commit()
    machine = msgspec.structs.replace(HERE, versions={"torch": "2.14", "new": "1"})
    change = promotion.prepare(root, "model", "1", Grounds(), machine)
    expected = ["onnx is not installed; measured with 1", "torch is 2.14; measured with 2.13"]
    assert change.warnings == expected
    assert promotion.warnings_of(change.apply().figures) == expected
    assert history.read(root / "model")[0].figures == {"warnings": expected}


@pytest.mark.parametrize("version", ["0", "01", "3", "", "../model/1", "1/", "x", "-1"])
def test_a_version_that_is_not_there_is_refused(root: Path, commit: Commit, version: str) -> None:
    commit()
    [problem] = refusal(root, version)
    assert problem == f"model: no version {version}; there are 1"


def test_a_model_that_is_not_there_is_refused(root: Path, commit: Commit) -> None:
    commit()
    for name, reason in (("other", "no such model"), ("../model", "cannot be the name")):
        with pytest.raises(ConfigError, match=reason):
            promotion.promote(root, name, "1")
        with pytest.raises(ConfigError, match=reason):
            promotion.rollback(root, name)
    with pytest.raises(ConfigError, match="no such folder; expected a model repository"):
        promotion.promote(root / "nowhere", "model", "1")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_repository_that_cannot_be_written_is_reported(
    root: Path, commit: Commit, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    commit()
    commit()

    def refuse(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(ConfigError, match="the repository must be writable") as caught:
        promote(root, "1")
    assert os.strerror(number) in str(caught.value) and ".staging-" in str(caught.value)
    assert served(root) == "2"


def test_a_full_disk_is_reported_as_such(
    root: Path, commit: Commit, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit()

    def full(path: Path, line: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(staging, "append", full)
    with pytest.raises(StorageFull, match="version 1 was not promoted"):
        promote(root, "1")


# Rollback


def rollback(root: Path) -> str:
    return promotion.rollback(root, "model", actor="ada", reason="slow").version


def test_rollbacks_go_further_back_each_time(root: Path, commit: Commit) -> None:
    for _ in range(3):
        promote(root, commit())
    assert served(root) == "3"
    assert (rollback(root), served(root)) == ("2", "2")
    assert (rollback(root), served(root)) == ("1", "1")
    with pytest.raises(ConfigError, match="no version that was served before 1; choose a version"):
        rollback(root)
    assert served(root) == "1"
    events = history.read(root / "model")[-2:]
    assert [(each.kind, each.previous, each.reason) for each in events] == [
        ("rolled back", ("3",), "slow"),
        ("rolled back", ("2",), "slow"),
    ]


def test_a_rollback_needs_no_evidence(root: Path, commit: Commit) -> None:
    commit(outcome="missed")
    promote(root, "1", force="first")
    promote(root, commit())
    assert rollback(root) == "1"


def test_without_a_promotion_there_is_no_way_back(root: Path, commit: Commit) -> None:
    commit()
    commit()
    with pytest.raises(
        ConfigError, match="no version that was served before 2; choose a version with"
    ):
        rollback(root)


def test_a_version_that_is_gone_is_not_rolled_back_to(root: Path, commit: Commit) -> None:
    for _ in range(3):
        commit()
    promote(root, "1")
    promote(root, "2")
    shutil.rmtree(root / "model" / "1")
    with pytest.raises(ConfigError, match="version 1, which was served before 2, is gone"):
        rollback(root)
    assert served(root) == "2"


def test_several_versions_are_not_rolled_back_to(root: Path, commit: Commit) -> None:
    commit()
    commit()
    with open(root / "model" / "config.pbtxt", "a") as file:
        file.write("version_policy { all { } }")
    promote(root, "1")
    with pytest.raises(ConfigError, match="versions 1, 2 were served together before 1"):
        rollback(root)


def test_the_config_of_the_model_follows(root: Path, commit: Commit, tmp_path: Path) -> None:
    commit()
    changed = replace(CONFIG, num_instances=2)
    files = {"weights": tmp_path / "weights"}
    versions.commit(root, "model", files, changed, evidence_from(HERE))
    promote(root, "1")
    promote(root, "2")
    assert layout.read(root).configs[0].num_instances == 2
    rollback(root)
    assert layout.read(root).configs[0].num_instances == 1


@pytest.mark.parametrize("name", ["reason", "force"])
def test_reasons_have_a_limit(name: str) -> None:
    assert getattr(Grounds(**{name: "x" * 1000}), name) == "x" * 1000
    with pytest.raises(InvalidRequest, match=f"{name}: 1001 characters are too many.*at most 1000"):
        Grounds(**{name: "x" * 1001})
