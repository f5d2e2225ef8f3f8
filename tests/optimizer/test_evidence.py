"""What goes into the repository with a version."""

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from optimizer import made_optimizations
from suites import onnx_models

from penstock.optimizer import evidence
from penstock.optimizer.candidates import Build, Candidate, Step
from penstock.optimizer.results import Optimization
from penstock.repository import layout, manifest, staging
from penstock.serving.fleet import CONTEXT_BYTES, need_of
from penstock.serving.placement import Need


@pytest.fixture
def build(tmp_path: Path) -> Build:
    made = onnx_models.build_of(onnx_models.stack(1), tmp_path / "work" / "small")
    return Build(
        Candidate((Step("int8-static", {"calibrator": "minmax"}),)), made.folder, made.config
    )


@pytest.fixture
def found(tmp_path: Path) -> Optimization:
    return msgspec.structs.replace(
        made_optimizations.kept(), name="small", out=str(tmp_path / "models")
    )


def committed(build: Build, found: Optimization, run: str) -> str:
    evidence.commit(build, found, run)
    return found.version


def test_all_of_it_is_there(build: Build, found: Optimization) -> None:
    (build.version_folder / evidence.CALIBRATION).write_text('{"format": 1, "inputs": {}}')
    version = committed(build, found, "run")
    kept = manifest.read(Path(found.out) / "small" / version)
    assert kept is not None
    proof = kept.evidence
    assert proof["slo"] == found.slo
    assert found.after is not None
    assert proof["measured"]["p99"]["value"] == found.after.p99.value
    assert proof["measured"]["cost_per_million"] == found.after.cost_per_million
    assert proof["accuracy"]["loss_bound"] == found.held_out.loss_bound
    assert proof["gpu_memory_bytes"] is None, "it was measured on a CPU"
    assert proof["calibration"] == {"format": 1, "inputs": {}}
    assert proof["lineage"]["steps"] == [
        {"pass": "int8-static", "settings": {"calibrator": "minmax"}}
    ]
    assert proof["hardware"]["cpu"] == found.machine.cpu
    assert proof["versions"] == found.machine.versions
    assert evidence.CALIBRATION in kept.files


def test_what_is_not_known_is_null(build: Build, tmp_path: Path) -> None:
    unknown = msgspec.structs.replace(
        made_optimizations.unknown_figures(), name="small", out=str(tmp_path / "models")
    )
    made = evidence.evidence(build, unknown, "run")
    json.dumps(made, allow_nan=False)


def test_what_an_instance_takes_of_a_gpu_is_where_the_server_looks_for_it(
    build: Build, found: Optimization
) -> None:
    assert found.after is not None
    found.after.gpu_memory_bytes = 7 << 30
    committed(build, found, "run")
    [config] = layout.read(found.out).configs
    assert need_of(config) == Need((7 << 30) + CONTEXT_BYTES, "evidence")


def test_the_same_run_does_not_commit_twice(build: Build, found: Optimization) -> None:
    assert committed(build, found, "run") == "1"
    assert committed(build, found, "run") == "1"
    assert committed(build, found, "another run") == "2"
    other = Build(Candidate(), build.folder, build.config)
    assert committed(other, found, "run") == "3"
    assert layout.version_folders(Path(found.out) / "small") == ["1", "2", "3"]


def test_no_version_is_begun_without_space_for_it(
    build: Build, found: Optimization, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=1 << 40, used=0, free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    found.version = ""
    evidence.commit(build, found, "run")
    assert found.version == ""
    assert "needs 4.0" in found.uncommitted and "1.00 MiB free" in found.uncommitted
    assert not Path(found.out).exists()


def test_a_disk_that_fills_up_meanwhile_leaves_no_half_version(
    build: Build, found: Optimization, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(staging, "write", full)
    evidence.commit(build, found, "run")
    assert "No space left on device" in found.uncommitted
    assert "free" in found.uncommitted
    assert not list(Path(found.out).iterdir())
    monkeypatch.undo()
    found.uncommitted = ""
    evidence.commit(build, found, "run")
    assert (found.version, found.uncommitted) == ("1", "")


def test_what_is_committed_already_needs_no_space(
    build: Build, found: Optimization, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence.commit(build, found, "run")
    usage = SimpleNamespace(total=1 << 40, used=0, free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    found.version = ""
    evidence.commit(build, found, "run")
    assert (found.version, found.uncommitted) == ("1", "")


UNPROVEN = [("disturbed", True), ("interrupted", False), ("kept", False), ("missed", False)]


class TestAKeptVersion:
    """A result that is not proven does not take the place of a version that keeps its SLO."""

    def again(self, found: Optimization, outcome: str, *, is_proven: bool) -> Optimization:
        assert found.after is not None
        after = msgspec.structs.replace(found.after, num_requests=found.after.num_requests + 1)
        return msgspec.structs.replace(
            found, outcome=outcome, is_proven=is_proven, after=after, version=""
        )

    def served(self, found: Optimization) -> list[str]:
        return [config.version for config in layout.read(found.out).configs]

    @pytest.mark.parametrize(("outcome", "is_proven"), UNPROVEN)
    def test_stays(self, build: Build, found: Optimization, outcome: str, is_proven: bool) -> None:
        evidence.commit(build, found, "run")
        other = self.again(found, outcome, is_proven=is_proven)
        evidence.commit(build, other, "run")
        assert (other.version, other.kept_version, other.uncommitted) == ("", "1", "")
        assert self.served(found) == ["1"]

    @pytest.mark.parametrize("outcome", ["kept", "missed", "refused"])
    def test_is_followed_by_what_is_proven(
        self, build: Build, found: Optimization, outcome: str
    ) -> None:
        evidence.commit(build, found, "run")
        other = self.again(found, outcome, is_proven=True)
        evidence.commit(build, other, "run")
        assert (other.version, other.kept_version) == ("2", "")

    def test_that_is_no_longer_served_does_not_hold_up_others(
        self, build: Build, found: Optimization
    ) -> None:
        for outcome in ("kept", "missed"):
            evidence.commit(build, self.again(found, outcome, is_proven=True), "run")
        other = self.again(found, "disturbed", is_proven=True)
        evidence.commit(build, other, "run")
        assert (other.version, self.served(found)) == ("3", ["3"])

    def test_is_not_needed_for_a_first_result(self, build: Build, found: Optimization) -> None:
        other = self.again(found, "disturbed", is_proven=True)
        evidence.commit(build, other, "run")
        assert other.version == "1"

    def test_committed_before_by_the_same_run_is_named(
        self, build: Build, found: Optimization
    ) -> None:
        found.is_proven = False
        for _ in range(2):
            evidence.commit(build, found, "run")
            assert (found.version, found.kept_version) == ("1", "")


def test_a_version_whose_proof_failed_is_not_committed(build: Build, found: Optimization) -> None:
    found.outcome, found.version = "failed", ""
    found.proof_failure = "the server did not start"
    evidence.commit(build, found, "run")
    assert not found.version and not (Path(found.out) / "small").exists()
    assert found.uncommitted.endswith("failed: the server did not start")
