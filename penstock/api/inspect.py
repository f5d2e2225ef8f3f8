"""Resolve a MODEL without loading it, for `penstock.inspect` and `penstock inspect`."""

from __future__ import annotations

import html
import os
from dataclasses import dataclass

from penstock.api import shown
from penstock.backends import inspection
from penstock.repository import layout, pbtxt
from penstock.repository.model_source import resolve
from penstock.serving import placement
from penstock.system import devices


@dataclass(frozen=True, slots=True)
class InspectedModel:
    """One version as it would be served."""

    name: str
    version: str
    artifact: str
    # What else is known about the files, one sentence each.
    notes: tuple[str, ...]
    # The complete configuration, as config.pbtxt.
    config_text: str

    def __str__(self) -> str:
        lines = [f"# {self.name}, version {self.version}: {self.artifact}"]
        lines += [f"#   {note}" for note in self.notes]
        return "\n".join([*lines, self.config_text])


@dataclass(frozen=True, slots=True)
class InspectResult:
    """Every version of every model that was found, and why others cannot be served."""

    models: tuple[InspectedModel, ...]
    # By model.
    problems: dict[str, list[str]]

    def __str__(self) -> str:
        return "\n".join([*map(str, self.models), *layout.flat(self.problems)])

    def _repr_html_(self) -> str:
        return f'<pre style="{shown.STYLE}">{html.escape(str(self))}</pre>'


def inspect(model: str) -> InspectResult:
    """Resolve a model or repository; ConfigError if the path is neither."""
    found = resolve(model).read()
    models = []
    problems = dict(found.problems)
    for config in found.configs:
        if refused := inspection.find_problems(config):
            problems[config.name] = [*problems.get(config.name, ()), *refused]
            continue
        notes = list(layout.about(found.folders[config.name], config))
        if config.uses_gpu:
            gpus = devices.read_gpus()
            notes.append(f"instances: {placement.describe_placement(config, gpus)}")
            notes += [f"MPS: {devices.mps()}"] if gpus else []
        artifact, text = os.path.relpath(config.artifact), pbtxt.describe(config)
        one = InspectedModel(config.name, config.version, artifact, tuple(notes), text)
        models.append(one)
    return InspectResult(tuple(models), problems)
