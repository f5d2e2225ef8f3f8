"""Removes old versions of a model, and keeps those that are needed: the served one, the one that a
rollback goes to, those that a server has loaded, and the newest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock import units
from penstock.errors import ConfigError
from penstock.operate import model_folders
from penstock.operate.promotion import Grounds, cannot_write
from penstock.operate.version_list import size_of
from penstock.repository import history, holds, layout, versions
from penstock.repository.history import Cause
from penstock.wire.version_rows import PruneAnswer


@dataclass(frozen=True, slots=True)
class VersionsInUse:
    """Versions that must stay, whatever their age."""

    served: Collection[str]
    rollback_target: Collection[str]
    loaded: Collection[str]

    def reason(self, version: str) -> str:
        """Return why a version must stay; empty if it need not."""
        reasons = {
            "served": self.served,
            "a rollback goes to it": self.rollback_target,
            "loaded by a server": self.loaded,
        }
        return ", ".join(reason for reason, kept in reasons.items() if version in kept)


def choose(available: Sequence[str], in_use: VersionsInUse, keep: int) -> dict[str, str]:
    """Return why each version is kept, or an empty reason for those to remove; `available` is
    sorted, oldest first."""
    newest = set(available[-keep:])
    text = "the newest" if keep == 1 else f"one of the {keep} newest"
    return {
        version: in_use.reason(version) or (text if version in newest else "")
        for version in available
    }


def prune(
    root: Path,
    name: str,
    keep: int,
    grounds: Grounds,
    loaded: Collection[str] = (),
    dry_run: bool = False,
) -> PruneAnswer:
    """Remove all versions but the `keep` newest and those in use; each is removed whole or not at
    all. With `dry_run`, nothing is removed. ConfigError if one cannot be removed."""
    if keep < 1:
        raise ConfigError(f"keep: {keep} is too small; at least 1, the newest version, is kept")
    folder = model_folders.find_model(root, name)
    served = versions.served_versions(folder)
    target = history.rollback_target(history.read(folder), served)
    available = layout.version_folders(folder)
    held = {version for version in available if holds.is_held(folder / version)}
    reasons = choose(available, VersionsInUse(served, target, {*loaded, *held}), keep)
    removed = [version for version, reason in reasons.items() if not reason]
    sizes = {version: size_of(folder / version) for version in removed}
    if not dry_run:
        for version in removed:
            _remove(root, name, version, sizes[version], keep, grounds)
    kept = {version: reason for version, reason in reasons.items() if reason}
    return PruneAnswer(name, removed, kept, sum(sizes.values()), dry_run)


def _remove(
    root: Path, name: str, version: str, num_bytes: int, keep: int, grounds: Grounds
) -> None:
    reason = grounds.reason or f"keep {units.count(keep, 'version')}"
    cause = Cause(history.PRUNED, grounds.actor, reason, {"num_bytes": num_bytes})
    try:
        versions.remove(root, name, version, cause)
    except OSError as error:
        raise cannot_write(root, name, error) from None
