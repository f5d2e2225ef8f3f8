"""Evidence that is committed with the chosen version: its SLO, what was measured, and how it was
made. `versions` writes it; the server reads the SLO from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from penstock import units
from penstock.backends import GPU_MEMORY
from penstock.errors import StorageFull
from penstock.optimizer import workspace
from penstock.optimizer.candidates import Build
from penstock.optimizer.results import Optimization, ServedMeasurement
from penstock.optimizer.simulate import TimeTable
from penstock.repository import layout, versions
from penstock.repository import manifest as manifests
from penstock.serving.input_statistics import KEY

CALIBRATION = "calibration.json"
# Outcomes of versions that keep their SLO; "met" was written before 2026-11.
PROMISED = ("kept", "met")
# Fields that are equal in two commits of the same candidate by the same run.
SAME = ("lineage", "outcome", "measured", "accuracy")
Evidence = dict[str, object]


def commit(
    build: Build,
    found: Optimization,
    run: str,
    prepare: Callable[[], Evidence] | None = None,
) -> None:
    """Commit, unless a run killed after its commit has, and record the version in `found`. If there
    is nothing to commit, or writing fails, record why: the results are worth keeping without it.
    `prepare` writes what the version needs first, and returns what to add to the evidence."""
    out = Path(found.out)
    if found.proof_failure:
        found.uncommitted = f"the proof of {build.candidate} failed: {found.proof_failure}"
        return
    made = evidence(build, found, run)
    found.version = committed(out / found.name, made)
    if not found.version:
        found.kept_version = _kept_version(out / found.name, found)
    if found.version or found.kept_version:
        return
    size = workspace.size_of(build.version_folder)
    try:
        missing = workspace.missing_room(out, size)
        if missing:
            found.uncommitted = f"{out}: not enough disk space for the version: {missing}"
            return
        out.mkdir(parents=True, exist_ok=True)
        made |= {} if prepare is None else prepare()
        found.version = versions.commit(out, found.name, build.version_folder, build.config, made)
    except (OSError, StorageFull) as error:
        needed, free = units.size(size), units.size(workspace.free_bytes(out))
        text = str(error)
        if isinstance(error, OSError):
            text = f"{error.filename or out}: {error.strerror or error}"
        found.uncommitted = f"{text}; the version needs {needed}, {free} free"


def _kept_version(folder: Path, found: Optimization) -> str:
    """Return the served version that keeps its SLO, unless this result is a proven verdict: an
    unproven one must not replace it. Empty if no version keeps its SLO."""
    is_verdict = found.is_proven and found.outcome not in ("disturbed", "interrupted")
    if is_verdict or not os.path.isdir(folder) or not layout.version_folders(folder):
        return ""
    for version in reversed(layout.chosen(folder, layout.read_message(folder), [])):
        manifest = manifests.read(folder / version)
        if manifest is not None and manifest.evidence.get("outcome") in PROMISED:
            return version
    return ""


def evidence(build: Build, found: Optimization, run: str) -> Evidence:
    """Return the evidence as plain JSON values, with null for NaN and infinity."""
    calibration = build.version_folder / CALIBRATION
    after, hardware = found.after, msgspec.structs.asdict(found.machine)
    software = hardware.pop("versions")
    made = {
        "slo": found.slo,
        "outcome": found.outcome,
        "headline": found.headline,
        "measured": _measured(after),
        GPU_MEMORY: after.gpu_memory_bytes or None if after is not None else None,
        "batch_times": _batch_times(build, found),
        "original": _measured(found.before),
        "accuracy": found.held_out,
        "accuracy_budget": found.accuracy_budget,
        "calibration": msgspec.Raw(calibration.read_bytes()) if calibration.is_file() else None,
        KEY: found.input_statistics or None,
        "lineage": {
            "run": run,
            "candidate": build.candidate.key,
            "source": found.source_text,
            "source_digest": found.source_digest,
            "data": found.data_text,
            **_live(found.live_span),
            "steps": [
                {"pass": step.pass_name, "settings": step.settings}
                for step in build.candidate.steps
            ],
        },
        "hardware": hardware,
        "versions": software,
        "price_per_hour": found.price_per_hour,
        "created": found.created,
    }
    return msgspec.json.decode(msgspec.json.encode(made), type=Evidence)


def _live(span: Sequence[str]) -> Evidence:
    """Return when live data was recorded; nothing for other data."""
    return {"live": {"from": span[0], "to": span[-1]}} if span else {}


def _batch_times(build: Build, found: Optimization) -> TimeTable | None:
    """Return the batch times of the chosen candidate, with as many instances as it has."""
    key = build.candidate.model.key
    same = [each for each in found.tries if each.candidate.model.key == key]
    tables = [table for each in same for table in each.times]
    fitting = [each for each in tables if each.num_instances == build.config.num_instances]
    return next(iter(reversed(fitting or tables)), None)


def _measured(served: ServedMeasurement | None) -> Evidence | None:
    if served is None:
        return None
    return {key: each for key, each in msgspec.structs.asdict(served).items() if key != "curve"}


def committed(folder: Path, made: Evidence) -> str:
    """Return the version with the same evidence (`SAME`); empty if no version has it."""
    if not os.path.isdir(folder):
        return ""
    for version in layout.version_folders(folder):
        manifest = manifests.read(folder / version)
        if manifest is not None and all(manifest.evidence.get(key) == made[key] for key in SAME):
            return version
    return ""
