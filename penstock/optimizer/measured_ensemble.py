"""An ensemble as a run measures it: its files as a repository of its own, and the repositories in
which one member is a build of the run. Users see only the ensemble, so its answers are judged and
its times are measured; `bottleneck` says which member is optimised."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.config import EnsembleStep, ModelConfig
from penstock.errors import ConfigError
from penstock.optimizer import folders
from penstock.optimizer.candidates import Build, Candidate
from penstock.optimizer.examples import Examples
from penstock.repository import ensemble_files, layout
from penstock.repository.layout import RepositoryScan
from penstock.repository.model_source import resolve
from penstock.slo import Latency, Slo

# A member's share of a latency limit is never below this, however slow the others are.
MIN_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class EnsembleFiles:
    """A repository that holds one ensemble and its members, and nothing else."""

    root: Path
    config: ModelConfig
    # By name, members of members too; of several versions the newest.
    members: Mapping[str, ModelConfig]

    @property
    def build(self) -> Build:
        """The ensemble with its members as they came, as servers of builds take it."""
        return Build(Candidate(), self.root, self.config)

    @property
    def uses_gpu(self) -> bool:
        return any(config.uses_gpu for config in self.members.values())


@dataclass(frozen=True, slots=True)
class MeasuredEnsemble:
    """The ensemble around the model that a run optimises."""

    files: EnsembleFiles
    member: str
    # Of the ensemble; that of the run's plan is the member's share of it.
    slo: Slo
    # The user's examples, which clients of the ensemble send.
    samples: Examples
    # The repositories with builds.
    folder: Path

    @property
    def config(self) -> ModelConfig:
        return self.files.config

    def around(self, build: Build) -> Build:
        """Return the ensemble with this build as its member, as a repository that is served."""
        target = self.folder / build.candidate.key
        if not target.is_dir():
            draft = target.with_name(f".{target.name}")
            shutil.rmtree(draft, ignore_errors=True)
            for model in self.files.root.iterdir():
                source = build.folder if model.name == self.member else model
                folders.link_tree(source, draft / model.name)
            os.rename(draft, target)
        return replace(build, folder=target, config=self.config)


def take(model: str, root: Path) -> EnsembleFiles:
    """Write an ensemble of a repository and its members to the folder `root`; ConfigError says what
    is wrong with any of them."""
    source = resolve(model)
    found = source.read()
    config = found.only(source.path, "", "name the folder of one")
    folder = found.folders[config.name]
    scan = RepositoryScan([config], {}, {config.name: folder})
    ensemble_files.add_members(scan, lambda name: layout.read_one(folder.parent, name))
    if scan.problems:
        raise ConfigError([f"{model}: {text}" for text in layout.flat(scan.problems)])
    for name, path in scan.folders.items():
        versions = {each.version for each in scan.configs if each.name == name}
        _copy(path, root / name, versions)
    return read(root, config.name)


def _copy(folder: Path, target: Path, versions: set[str]) -> None:
    others = set(layout.version_folders(folder)) - versions

    def left_out(path: str, names: list[str]) -> set[str]:
        hidden = {name for name in names if name.startswith(".") or name == "__pycache__"}
        return hidden | (others if Path(path) == folder else set())

    shutil.copytree(folder, target, ignore=left_out)


def read(root: Path, name: str) -> EnsembleFiles:
    """Read a repository that `take` has written."""
    found = layout.read(root)
    if found.problems:
        raise ConfigError(layout.flat(found.problems))
    configs = {config.name: config for config in found.configs}
    return EnsembleFiles(root, configs.pop(name), configs)


def steps_of(config: ModelConfig, member: str) -> list[EnsembleStep]:
    return [step for step in config.steps if step.model == member]


def member_slo(slo: Slo, others_s: float) -> Slo:
    """Return the SLO that a member must keep by itself: the limits without the time that the other
    members compute."""

    def share(term: Latency) -> Latency:
        left_s = max(MIN_SHARE * term.limit_s, term.limit_s - others_s)
        # As people write it: it may become the member's penstock.slo.
        return replace(term, limit_s=float(f"{left_s:.3g}"))

    terms = (share(term) if isinstance(term, Latency) else term for term in slo.terms)
    return replace(slo, terms=tuple(terms))


def describe(files: EnsembleFiles) -> str:
    """Return `ensemble of 'decode' and 'classify'`."""
    names: Sequence[str] = [
        f"'{name}'" for name in dict.fromkeys(s.model for s in files.config.steps)
    ]
    *most, last = names
    return f"ensemble of {', '.join(most)} and {last}" if most else f"ensemble of {last}"
