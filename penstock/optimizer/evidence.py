"""Evidence that is committed with the chosen version: its SLO, what was measured, and how it was
made. `versions` writes it; the server reads the SLO from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from penstock import units
from penstock.backends import GPU_MEMORY
from penstock.errors import StorageFull
from penstock.optimizer import disk
from penstock.optimizer.candidates import Build
from penstock.optimizer.results import Optimization, ServedMeasurement
from penstock.repository import layout, versions
from penstock.repository import manifest as manifests

CALIBRATION = "calibration.json"
# Outcomes of versions that keep their SLO; "met" was written before 2026-11.
PROMISED = ("kept", "met")
# Fields that are equal in two commits of the same candidate by the same run.
SAME = ("lineage", "outcome", "measured", "accuracy")


def commit(build: Build, found: Optimization, run: str) -> str:
    """Commit and return the version's number. A run that was killed after its commit does not
    commit again."""
    out = Path(found.out)
    out.mkdir(parents=True, exist_ok=True)
    made = evidence(build, found, run)
    there = _committed(out / found.name, made)
    if there:
        return there
    return versions.commit(out, found.name, build.version_folder, build.config, made)


def try_commit(build: Build, found: Optimization, run: str) -> None:
    """Commit and record the version in `found`. If there is nothing to commit, or writing fails,
    record why: the results are worth keeping without it."""
    out = Path(found.out)
    if found.proof_failure:
        found.uncommitted = f"the proof of {build.candidate} failed: {found.proof_failure}"
        return
    found.kept_version = _kept_version(out / found.name, evidence(build, found, run), found)
    if found.kept_version:
        return
    size = disk.size_of(build.version_folder)
    try:
        missing = disk.missing_room(out, size)
        if missing and not _committed(out / found.name, evidence(build, found, run)):
            found.uncommitted = f"{out}: not enough disk space for the version: {missing}"
            return
        found.version = commit(build, found, run)
    except (OSError, StorageFull) as error:
        needed, free = units.size(size), units.size(disk.free_bytes(out))
        text = str(error)
        if isinstance(error, OSError):
            text = f"{error.filename or out}: {error.strerror or error}"
        found.uncommitted = f"{text}; the version needs {needed}, {free} free"


def _kept_version(folder: Path, made: dict[str, Any], found: Optimization) -> str:
    """Return the served version that keeps its SLO, unless this result is a proven verdict: an
    unproven one must not replace it. Empty if no version keeps its SLO."""
    is_verdict = found.is_proven and found.outcome not in ("disturbed", "interrupted")
    if is_verdict or not os.path.isdir(folder) or _committed(folder, made):
        return ""
    if not layout.version_folders(folder):
        return ""
    for version in reversed(layout.chosen(folder, layout.read_message(folder), [])):
        manifest = manifests.read(folder / version)
        if manifest is not None and manifest.evidence.get("outcome") in PROMISED:
            return version
    return ""


def evidence(build: Build, found: Optimization, run: str) -> dict[str, Any]:
    """Return the evidence as plain JSON values."""
    after, before = found.after, found.before
    made: dict[str, Any] = {
        "slo": found.slo,
        "outcome": found.outcome,
        "headline": found.headline,
        "measured": None if after is None else _measured(after),
        GPU_MEMORY: after.gpu_memory_bytes or None if after is not None else None,
        "original": None if before is None else _measured(before),
        "accuracy": msgspec.to_builtins(found.held_out),
        "accuracy_budget": found.accuracy_budget,
        "calibration": _calibration(build),
        "lineage": {
            "run": run,
            "candidate": build.candidate.key,
            "source": found.source_text,
            "source_digest": found.source_digest,
            "data": found.data_text,
            "steps": [
                {"pass": step.pass_name, "settings": step.settings}
                for step in build.candidate.steps
            ],
        },
        "hardware": {
            "cpu": found.machine.cpu,
            "num_cores": found.machine.num_cores,
            "memory_bytes": found.machine.memory_bytes,
            "isa": list(found.machine.isa),
            "gpus": list(found.machine.gpus),
        },
        "versions": dict(found.machine.versions),
        "price_per_hour": found.price_per_hour,
        "created": found.created,
    }
    plain: dict[str, Any] = _without_nan(made)
    return plain


def _measured(served: ServedMeasurement) -> dict[str, Any]:
    found = msgspec.to_builtins(served, str_keys=True)
    found.pop("curve")
    assert isinstance(found, dict)
    return found


def _calibration(build: Build) -> Any:
    path = build.version_folder / CALIBRATION
    return json.loads(path.read_bytes()) if path.is_file() else None


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


def _committed(folder: Path, made: dict[str, Any]) -> str:
    """Return the version with the same evidence (`SAME`); empty if no version has it."""
    if not os.path.isdir(folder):
        return ""
    for version in layout.version_folders(folder):
        manifest = manifests.read(folder / version)
        if manifest is not None and all(manifest.evidence.get(key) == made[key] for key in SAME):
            return version
    return ""
