"""Adds versions to a repository, selects the one that is served, and removes others, each in one
atomic step.

A version is written to a folder whose name starts with `.staging-`, which readers ignore, with a
manifest over all its bytes, synced to disk, and renamed to its number. A writer that is killed
leaves only such a folder, which the next writer removes. `layout` reads.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path

from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.repository import history, holds, layout, pbtxt, staging
from penstock.repository import manifest as manifests
from penstock.repository.history import Cause, HistoryEvent
from penstock.repository.layout import CONFIG
from penstock.repository.pbtxt_fields import Proto

# Files that the commit writes for each version.
OWN_FILES = (CONFIG, manifests.NAME)
MAX_NAME_BYTES = 255
# Errors of rename if another writer has taken the number.
TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)

AnyPath = str | os.PathLike[str]


def commit(
    root: AnyPath,
    name: str,
    source: AnyPath | Mapping[str, AnyPath],
    config: ModelConfig,
    evidence: Mapping[str, object] | None = None,
) -> str:
    """Add a version with the files of a folder, or with the given files by their new names; return
    its number. Fields of the model's config.pbtxt that a ModelConfig does not hold are kept. A new
    model gets its own config.pbtxt, so that Triton loads it too. StorageFull if the disk is full:
    then no version is added."""
    folder = _model_folder(root, name)
    evidence = dict(evidence or {})
    problems = []
    if config.name != name:
        problems.append(f"name: '{config.name}' but the model's folder is '{name}'")
    try:
        manifests.promised(evidence)
    except ConfigError as error:
        problems += error.problems
    files = _sources(source, problems)
    if problems:
        raise ConfigError(problems)
    staging.remove_abandoned(folder.parent, folder)
    is_new = not folder.is_dir()
    with (
        staging.explain_full(f"{folder}: the version was not committed"),
        staging.stage(folder.parent if is_new else folder) as stage,
    ):
        draft = stage / str(_last_number(folder) + 1)
        text = pbtxt.write(config, base=layout.read_message(folder))
        _write_version(draft, {**_labels(config, folder), **files}, text, evidence)
        _check_reads_back(draft, config)
        _write_model_level(stage, draft, layout.read_message(stage, draft.name))
        if is_new and _renamed(stage, folder):
            return draft.name
        is_first = not layout.version_folders(folder) and not (folder / CONFIG).exists()
        version = _take_number(draft, folder)
        if is_first:
            _publish(stage, folder)
        return version


def promote(root: AnyPath, name: str, version: str, cause: Cause | None = None) -> HistoryEvent:
    """Serve exactly this version from the next load on, and return the event that the history
    records. The model's config.pbtxt becomes that of the version. StorageFull if the disk is full:
    then the served version does not change."""
    folder = existing_folder(root, name)
    check_there(folder, version)
    if layout.read_version(folder, version, layout.read_message(folder)).manifest:
        manifests.check_digests(folder / version)
    staging.remove_abandoned(folder.parent, folder)
    with (
        staging.explain_full(f"{folder}: version {version} was not promoted"),
        staging.lock(folder),
        staging.stage(folder) as stage,
    ):
        # Again: it may have been removed meanwhile.
        check_there(folder, version)
        old = layout.read_message(folder)
        event = (cause or Cause()).event(version, layout.chosen(folder, old, []))
        message = _message_of(folder, version, old)
        message.version_policy.specific.versions[:] = [int(version)]
        _keep_configs(stage, folder, old)
        _write_model_level(stage, folder / version, message)
        # Before the rename, which needs no space, so that every promotion has its line.
        history.append(folder, event)
        _publish(stage, folder)
    return event


def remove(root: AnyPath, name: str, version: str, cause: Cause) -> HistoryEvent:
    """Remove a version, all of it or nothing, and return the event that the history records.
    ConfigError if it is served, or loaded by a server."""
    folder = existing_folder(root, name)
    staging.remove_abandoned(folder.parent, folder)
    with (
        staging.explain_full(f"{folder}: version {version} was not removed"),
        staging.stage(folder) as stage,
        staging.lock(folder),
    ):
        check_there(folder, version)
        served = served_versions(folder)
        if version in served:
            raise ConfigError(f"{name}: version {version} is served; promote another one first")
        event = cause.event(version, served)
        with holds.free(folder / version):
            history.append(folder, event)
            os.rename(folder / version, stage / version)
        staging.sync_folder(folder)
    return event


def served_versions(folder: Path) -> list[str]:
    """Return the versions that the next load of a model's folder serves."""
    return layout.chosen(folder, layout.read_message(folder), [])


def read_config(folder: Path, version: str) -> Proto:
    """Return the configuration that applies to a version, without version policy."""
    return _message_of(folder, version, layout.read_message(folder))


def existing_folder(root: AnyPath, name: str) -> Path:
    """Return the folder of a model; ConfigError if there is none of this name."""
    folder = _model_folder(root, name)
    if not folder.is_dir():
        raise ConfigError(f"{name}: no such model in {root}")
    return folder


def check_there(folder: Path, version: str) -> None:
    """Raise ConfigError unless the model has this version."""
    available = layout.version_folders(folder)
    if version not in available:
        there = ", ".join(available) or "none"
        raise ConfigError(f"{folder.name}: no version {version}; there are {there}")


def _model_folder(root: AnyPath, name: str) -> Path:
    path = Path(os.path.abspath(root))
    if not path.is_dir():
        raise ConfigError(f"{root}: no such folder; expected a model repository")
    if problem := problem_of_name(name):
        raise ConfigError(problem)
    folder = path / name
    if not folder.resolve().is_relative_to(path.resolve()):
        raise ConfigError(f"{name}: a link that leads out of the repository")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{name}: {folder} is not a folder")
    return folder


def problem_of_name(name: str) -> str:
    """Return why a model cannot have this name; empty if it can."""
    is_plain = manifests.is_plain(name) and "/" not in name and not name.startswith(".")
    if is_plain and len(name.encode()) <= MAX_NAME_BYTES:
        return ""
    return f"name: {name!r} cannot be the name of a model's folder"


def _sources(source: AnyPath | Mapping[str, AnyPath], problems: list[str]) -> dict[str, Path]:
    """Return the source files by their names below the version folder."""
    if isinstance(source, Mapping):
        files = {name: Path(path) for name, path in source.items()}
        own = [name for name in OWN_FILES if name in files]
        problems += [f"{name}: is written by the commit itself" for name in own]
    else:
        files = _files_below(Path(source), problems)
    for name, path in files.items():
        if not manifests.is_plain(name):
            problems.append(f"'{name}': is not a name below the version folder")
        elif not path.is_file():
            problems.append(f"{name}: {path} is not a file")
    return files


def _files_below(folder: Path, problems: list[str]) -> dict[str, Path]:
    """Return a folder's files, without OWN_FILES, Python's caches and names with a leading dot."""
    if not folder.is_dir():
        problems.append(f"{folder}: no such folder")
    names = [name for name in manifests.names_below(folder) if name not in OWN_FILES]
    linked = [name for name in names if (folder / name).is_dir()]
    problems += [f"{folder / name}: a link to a folder" for name in linked]
    return {name: folder / name for name in names if name not in linked}


def _labels(config: ModelConfig, folder: Path) -> dict[str, Path | bytes]:
    """Return label files for a version: made from the configuration's labels, else copied from the
    model's folder. Files that come with the version override them."""
    files: dict[str, Path | bytes] = {}
    for spec in config.outputs:
        name, labels = spec.label_file, folder / spec.label_file
        if not manifests.is_plain(name) or name in OWN_FILES:
            continue
        if spec.labels:
            files[name] = "".join(f"{label}\n" for label in spec.labels).encode()
        elif labels.is_file():
            files[name] = labels
    return files


def _write_version(
    draft: Path, files: Mapping[str, Path | bytes], config: str, evidence: dict[str, object]
) -> None:
    os.mkdir(draft)
    entries = {
        name: staging.write(draft / name, content)
        if isinstance(content, bytes)
        else staging.copy(content, draft / name)
        for name, content in sorted({**files, CONFIG: config.encode()}.items())
    }
    manifest = manifests.Manifest(manifests.FORMAT, _now(), entries, evidence)
    staging.write(draft / manifests.NAME, manifest.encode())
    for written, _, _ in os.walk(draft, topdown=False):
        staging.sync_folder(Path(written))


def _check_reads_back(draft: Path, config: ModelConfig) -> None:
    """Raise ConfigError unless the written version reads back as the requested configuration."""
    message = layout.read_message(draft.parent, draft.name)
    found = pbtxt.resolve(message, config.name, draft)
    # Paths and the contents of label files are not compared.
    asked = replace(
        config,
        version=found.version,
        artifact=found.artifact,
        outputs=tuple(replace(spec, labels=()) for spec in config.outputs),
        manifest="",
        unkept_slo="",
        # The model's own config.pbtxt may add to these.
        metric_tags=found.metric_tags,
        warmups=found.warmups,
        # The manifest has the digests of a version.
        checksums=found.checksums,
        # Those of the model's instance groups stay.
        host_policies=found.host_policies,
    )
    if config.is_slo_from_evidence:
        batching = replace(config.batching, slo_latency_s=None)
        asked = replace(asked, slo="", is_slo_from_evidence=False, batching=batching)
    found = replace(found, outputs=tuple(replace(spec, labels=()) for spec in found.outputs))
    different = [
        f"{each.name}: {getattr(asked, each.name)} cannot be written to {CONFIG}, "
        f"which would give {getattr(found, each.name)}"
        for each in fields(ModelConfig)
        if each.compare and getattr(asked, each.name) != getattr(found, each.name)
    ]
    if different:
        raise ConfigError(different)


def _write_model_level(stage: Path, version: Path, message: Proto) -> None:
    """Write to the stage what Triton expects in the model's folder: labels and config.pbtxt."""
    for file in _label_files(message):
        labels = version / file
        if labels.is_file():
            staging.copy(labels, stage / file)
    staging.write(stage / CONFIG, pbtxt.to_text(message).encode())
    staging.sync_folder(stage)


def _publish(stage: Path, folder: Path) -> None:
    """Move files from the stage to the model's folder; config.pbtxt last, since it decides."""
    staged = layout.read_message(stage)
    for file in (*_label_files(staged), CONFIG):
        if (stage / file).is_file():
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(stage / file, target)
            staging.sync_folder(target.parent)


def _message_of(folder: Path, version: str, model_level: Proto) -> Proto:
    """Return a copy of the configuration that applies to a version, without version policy."""
    is_own = layout.has_own_config(folder, version)
    message = type(model_level)()
    message.CopyFrom(layout.read_message(folder, version) if is_own else model_level)
    message.ClearField("version_policy")
    return message


def _label_files(message: Proto) -> list[str]:
    """Return the label files in the model's folder itself, not in a version's folder."""
    names = {item.label_filename for item in message.output} - {"", *OWN_FILES}
    return sorted(name for name in names if not name.partition("/")[0].isdigit())


def _keep_configs(stage: Path, folder: Path, old: Proto) -> None:
    """Copy the model's config.pbtxt and labels, before they change, to versions that need them."""
    root = folder.parent.resolve()
    for version in layout.version_folders(folder):
        path = folder / version
        if not path.resolve().is_relative_to(root) or (path / manifests.NAME).exists():
            continue
        message = _message_of(folder, version, old)
        for name in _label_files(message):
            if (folder / name).is_file() and not (path / name).exists():
                staging.copy(folder / name, stage / "kept")
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(stage / "kept", path / name)
        if not layout.has_own_config(folder, version):
            staging.write(stage / "kept", pbtxt.to_text(message).encode())
            os.replace(stage / "kept", path / CONFIG)
        staging.sync_folder(path)


def _renamed(draft: Path, target: Path) -> bool:
    """Rename the draft; False if another writer has just taken the target's name."""
    try:
        os.rename(draft, target)
    except OSError as error:
        if error.errno not in TAKEN:
            raise
        return False
    staging.sync_folder(target.parent)
    return True


def _last_number(folder: Path) -> int:
    there = layout.version_folders(folder) if folder.is_dir() else []
    return int(there[-1]) if there else 0


def _take_number(draft: Path, folder: Path) -> str:
    """Rename the draft to the next free version number and return that."""
    for number in range(_last_number(folder) + 1, layout.MAX_VERSION + 1):
        if _renamed(draft, folder / str(number)):
            return str(number)
    raise ConfigError(f"{folder.name}: there is no version number left after {layout.MAX_VERSION}")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
