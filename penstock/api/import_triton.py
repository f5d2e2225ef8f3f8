"""Report what a Triton repository becomes here: `penstock import triton`. Nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.backends import inspection
from penstock.export import from_triton
from penstock.repository.model_source import resolve


@dataclass(frozen=True, slots=True)
class ImportedVersion:
    version: str
    # Backend, instances and batches, in one line.
    served: str
    # What is not as in Triton.
    differs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ImportedFromTriton:
    """One model: its versions, or why it is refused."""

    name: str
    versions: tuple[ImportedVersion, ...]
    refused: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TritonImport:
    models: tuple[ImportedFromTriton, ...]

    @property
    def num_refused(self) -> int:
        return sum(bool(each.refused) for each in self.models)

    def __str__(self) -> str:
        lines: list[str] = []
        for model in self.models:
            lines.append(f"{model.name}: {'refused' if model.refused else 'served'}")
            lines += [f"  refused: {text}" for text in model.refused]
            for each in model.versions:
                lines.append(f"  version {each.version}: {each.served}")
                lines += [f"    differs: {text}" for text in each.differs]
        served = len(self.models) - self.num_refused
        return "\n".join([*lines, f"{served} of {len(self.models)} models are served"])


def import_triton(repository: str) -> TritonImport:
    """Read a repository; ConfigError if the path is none."""
    found = resolve(repository).read()
    models: list[ImportedFromTriton] = []
    for name in sorted(found.folders):
        configs = [config for config in found.configs if config.name == name]
        refused = list(found.problems.get(name, ()))
        versions: list[ImportedVersion] = []
        for config in configs:
            problems = [*from_triton.refusals(config), *inspection.find_problems(config)]
            refused += [problem for problem in problems if problem not in refused]
            differs = (*config.warnings, *from_triton.differences(config))
            versions.append(ImportedVersion(config.version, from_triton.describe(config), differs))
        models.append(ImportedFromTriton(name, tuple(versions), tuple(refused)))
    return TritonImport(tuple(models))
