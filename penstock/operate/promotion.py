"""Promotion and rollback: which version of a model is served next, and whether its evidence allows
it.

A version is promoted if its evidence says that the SLO was kept on hardware like this one; `force`
overrides that, and the history records why. A rollback needs no evidence: it must always work. A
`Change` is checked but not done, so that a server can load the version before the disk changes.
`repository.versions` makes the change itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock import units
from penstock.errors import ConfigError, InvalidRequest
from penstock.optimizer.machine import Machine
from penstock.repository import history, versions
from penstock.repository import manifest as manifests
from penstock.repository.history import Cause, HistoryEvent
from penstock.repository.manifest import Manifest
from penstock.repository.versions import AnyPath

# Keys of `HistoryEvent.figures`.
PROBLEMS, WARNINGS, FORCE = "problems", "warnings", "force"
# Characters of a reason in the history.
MAX_REASON = 1000
ADVICE = (
    "not promoted; measure the version on this machine with penstock optimize, or give "
    "--force REASON to promote it as it is, which the history records"
)


@dataclass(frozen=True, slots=True)
class Grounds:
    """Actor and reason of a change; `force` is why problems of the evidence are overridden. Both
    texts are limited, as every reader of the history gets them."""

    actor: str = ""
    reason: str = ""
    force: str = ""

    def __post_init__(self) -> None:
        for name in ("reason", "force"):
            if (length := len(getattr(self, name))) > MAX_REASON:
                problem = f"{name}: {length} characters are too many; expected at most {MAX_REASON}"
                raise InvalidRequest(problem, name)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the served version that was checked and not done yet."""

    root: AnyPath
    name: str
    version: str
    cause: Cause

    @property
    def warnings(self) -> list[str]:
        return warnings_of(self.cause.figures)

    def apply(self) -> HistoryEvent:
        """Change the repository. ConfigError if it cannot be written; then nothing changes."""
        try:
            return versions.promote(self.root, self.name, self.version, self.cause)
        except OSError as error:
            raise cannot_write(self.root, self.name, error) from None


def promote(
    root: AnyPath, name: str, version: str, *, actor: str = "", reason: str = "", force: str = ""
) -> HistoryEvent:
    """Serve this version from the next load on. ConfigError says what its evidence lacks, unless
    `force` says why that does not matter."""
    return prepare(root, name, version, Grounds(actor, reason, force)).apply()


def rollback(root: AnyPath, name: str, *, actor: str = "", reason: str = "") -> HistoryEvent:
    """Serve the version from before the last promotion that was not rolled back yet."""
    return prepare_rollback(root, name, Grounds(actor, reason)).apply()


def prepare(
    root: AnyPath, name: str, version: str, grounds: Grounds, machine: Machine | None = None
) -> Change:
    """Check a promotion. ConfigError if there is no such version, or if the evidence does not allow
    it and is not overridden. `machine` defaults to this one."""
    folder = versions.existing_folder(root, name)
    versions.check_there(folder, version)
    manifest = manifests.read(folder / version)
    machine = machine or _this_machine()
    problems = problems_of_evidence(manifest, machine)
    force = grounds.force.strip()
    if problems and not force:
        raise ConfigError([*(f"{name}: version {version}: {each}" for each in problems), ADVICE])
    figures: dict[str, object] = {}
    if warnings := warnings_of_evidence(manifest, machine):
        figures[WARNINGS] = warnings
    if problems:
        figures |= {FORCE: force, PROBLEMS: problems}
    kind = history.FORCED if problems else history.PROMOTED
    cause = Cause(kind, grounds.actor, grounds.reason or force, figures)
    return Change(root, name, version, cause)


def prepare_rollback(root: AnyPath, name: str, grounds: Grounds) -> Change:
    """Find the version to go back to. ConfigError if the history knows none, or if it is gone."""
    folder = versions.existing_folder(root, name)
    served = versions.served_versions(folder)
    target = history.rollback_target(history.read(folder), served)
    now = ", ".join(served)
    choose = "choose a version with penstock repo promote"
    if not target:
        reason = f"its history has no version that was served before {now}"
        raise ConfigError(f"{name}: cannot be rolled back: {reason}; {choose}")
    if len(target) > 1:
        several = ", ".join(target)
        reason = f"versions {several} were served together before {now}"
        raise ConfigError(f"{name}: cannot be rolled back to one version: {reason}; {choose}")
    [version] = target
    if not (folder / version).is_dir():
        reason = f"version {version}, which was served before {now}, is gone"
        raise ConfigError(f"{name}: cannot be rolled back: {reason}; {choose}")
    return Change(root, name, version, Cause(history.ROLLED_BACK, grounds.actor, grounds.reason))


def problems_of_evidence(manifest: Manifest | None, machine: Machine) -> list[str]:
    """Return why a version may not be promoted on this machine, one sentence each."""
    if manifest is None:
        return [f"it has no evidence: there is no {manifests.NAME}, so it was made by hand"]
    evidence = manifest.evidence
    if not evidence:
        return ["it has no evidence: it was committed without a measurement"]
    problems: list[str] = []
    outcome = evidence.get("outcome")
    if outcome is None:
        problems.append("evidence.outcome is missing, so nothing says that the SLO was kept")
    elif outcome not in manifests.KEPT:
        slo = f"the SLO {evidence['slo']}" if evidence.get("slo") else "its SLO"
        problems.append(f"evidence.outcome is {outcome!r}: {slo} was not kept")
    try:
        measured = msgspec.convert(evidence.get("hardware"), Machine, strict=False)
    except msgspec.ValidationError as error:
        told = "is missing" if "hardware" not in evidence else f"is incomplete ({error})"
        return [*problems, f"evidence.hardware {told}, so the figures may be from other hardware"]
    if different := hardware_differences(measured, machine):
        problems.append(f"its evidence is from other hardware: {', '.join(different)}")
    return problems


def hardware_differences(measured: Machine, machine: Machine) -> list[str]:
    """Return how this machine differs from the one that was measured, where figures no longer
    apply: another CPU, fewer cores, instruction sets that are missing, other GPUs or another number
    of them. More cores, and the size of the memory, do not count."""
    found: list[str] = []
    if measured.cpu != machine.cpu:
        found.append(f"CPU {measured.cpu} (here {machine.cpu})")
    if measured.num_cores > machine.num_cores:
        found.append(f"{units.count(measured.num_cores, 'core')} (here {machine.num_cores})")
    if missing := [name for name in measured.isa if name not in machine.isa]:
        found.append(f"{' and '.join(missing)} (not here)")
    if sorted(measured.gpus) != sorted(machine.gpus):
        found.append(f"{_gpus(measured.gpus)} (here {_gpus(machine.gpus)})")
    return found


def warnings_of_evidence(manifest: Manifest | None, machine: Machine) -> list[str]:
    """Return the libraries whose versions differ from those of the measurement."""
    measured = manifest.evidence.get("versions") if manifest is not None else None
    if not isinstance(measured, dict):
        return []
    return [
        f"{name} is {machine.versions.get(name, 'not installed')}; measured with {version}"
        for name, version in sorted(measured.items())
        if machine.versions.get(name) != version
    ]


def warnings_of(figures: dict[str, object]) -> list[str]:
    """Return the warnings that an event holds."""
    found = figures.get(WARNINGS)
    return [str(each) for each in found] if isinstance(found, list) else []


def cannot_write(root: AnyPath, name: str, error: OSError) -> ConfigError:
    """Explain why a repository could not be changed."""
    where = error.filename or Path(root) / name
    problem = f"{where}: {error.strerror or error}"
    return ConfigError(f"{name}: cannot be changed: {problem}; the repository must be writable")


def _gpus(names: Sequence[str]) -> str:
    counts = Counter(names)
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items())) or "no GPU"


def _this_machine() -> Machine:
    # Imports what a server needs only here.
    from penstock.optimizer.this_machine import read_machine

    return read_machine()
