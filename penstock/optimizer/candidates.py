"""Steps, candidates made of them, and a candidate's files. Values only."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import msgspec

from penstock.config import ModelConfig

Stage = Literal["baseline", "compile", "precision", "quantise", "batching", "instances", "memory"]
STAGES: tuple[Stage, ...] = get_args(Stage)
# Passes that change how a model is served; all others make another model.
SERVING_PASSES = ("batching", "instances", "memory", "pace", "step-tokens", "sequences")


class Step(msgspec.Struct, frozen=True):
    """One pass with its settings: everything its build depends on besides the parent."""

    pass_name: str
    settings: dict[str, str] = {}

    def __str__(self) -> str:
        listed = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.pass_name}({listed})" if listed else self.pass_name


class Skip(msgspec.Struct, frozen=True):
    """A step that was not tried, and why: no hardware for it, no data, nothing to gain."""

    pass_name: str
    reason: str
    # The step that would have been tried; None if the pass has none to offer.
    step: Step | None = None
    # It would have been tried, but the time was up or the run was interrupted.
    cut_by: Literal["", "time", "interrupt"] = ""


class Candidate(msgspec.Struct, frozen=True):
    """The original after some steps. No steps: the original itself."""

    steps: tuple[Step, ...] = ()

    @property
    def key(self) -> str:
        """Return a hash of the steps in their order, the same in every run."""
        plain = [[step.pass_name, sorted(step.settings.items())] for step in self.steps]
        return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:12]

    @property
    def parent(self) -> Candidate:
        assert self.steps, "the original has no parent"
        return Candidate(self.steps[:-1])

    @property
    def model(self) -> Candidate:
        """Return the candidate without its serving steps."""
        serving = (n for n, step in enumerate(self.steps) if step.pass_name in SERVING_PASSES)
        return Candidate(self.steps[: next(serving, len(self.steps))])

    def then(self, *steps: Step) -> Candidate:
        return Candidate((*self.steps, *steps))

    def __str__(self) -> str:
        return " → ".join(map(str, self.steps)) or "original"


@dataclass(frozen=True, slots=True)
class Build:
    """A candidate as files: `folder` is a model's folder as in a repository, with config.pbtxt and
    version 1; `config` is its parsed configuration."""

    candidate: Candidate
    folder: Path
    config: ModelConfig

    @property
    def artifact(self) -> Path:
        return Path(self.config.artifact)

    @property
    def version_folder(self) -> Path:
        return self.folder / "1"
