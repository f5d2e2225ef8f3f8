"""The folders and files that one server serves, as if they were one repository.

A name that two of them have is refused, with both paths: which one is meant cannot be known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from penstock.errors import ConfigError, InvalidRequest, NotFound
from penstock.repository import layout, model_source
from penstock.repository.layout import RepositoryScan
from penstock.repository.pbtxt_fields import Proto


@dataclass(frozen=True, slots=True)
class Repositories:
    """`config_name` chooses `configs/<name>.pbtxt` of each model that has such a file."""

    paths: tuple[str, ...]
    config_name: str = ""

    def names(self) -> list[str]:
        """Return the models there are, loadable or not, each once."""
        found = (name for path in self.paths for name in model_source.resolve(path).names())
        return list(dict.fromkeys(found))

    def read(self) -> RepositoryScan:
        """Read the configurations of what can be served; ConfigError if that is nothing."""
        if len(self.paths) == 1:
            return model_source.resolve(self.paths[0]).read(self.config_name)
        found, owners = RepositoryScan(), dict[str, str]()
        for path in self.paths:
            scan = model_source.resolve(path).read(self.config_name)
            both = {name: self._twice(name, owners[name], path) for name in scan.folders
                    if name in owners}  # fmt: skip
            owners |= {name: path for name in scan.folders if name not in both}
            found.add(scan)
            found.problems |= {name: [problem] for name, problem in both.items()}
        found.configs = [config for config in found.configs if config.name not in found.problems]
        return found

    def read_one(
        self, name: str, version: str = "", override: Proto | None = None
    ) -> RepositoryScan:
        """Read one of `names()`, as `ModelSource.read_one` does."""
        source = model_source.resolve(self.find(name))
        return source.read_one(name, version, override, self.config_name)

    def read_named(self, patterns: Sequence[str]) -> RepositoryScan:
        """Read the models whose names match one of the patterns, in which `*` and `?` stand for any
        characters. A pattern that matches nothing is a problem."""
        names, found = self.names(), RepositoryScan()
        for pattern in patterns:
            matching = [name for name in names if fnmatchcase(name, pattern)]
            if not matching:
                there = layout.listed(names)
                text = f"no such model: '{pattern}' is not in the model repository; there: {there}"
                found.problems[pattern] = [text]
            for name in matching:
                if name not in found.folders and name not in found.problems:
                    self._add(found, name)
        return found

    def _add(self, found: RepositoryScan, name: str) -> None:
        try:
            found.add(self.read_one(name))
        except (InvalidRequest, NotFound) as error:
            found.problems[name] = [str(error)]

    def find(self, name: str) -> str:
        """Return the path that has a model; the first one if none has. InvalidRequest if several
        have."""
        if len(self.paths) == 1:
            return self.paths[0]
        owners = [path for path in self.paths if name in model_source.resolve(path).names()]
        if len(owners) > 1:
            raise InvalidRequest(self._twice(name, *owners[:2]))
        if not owners:
            there = layout.listed(self.names())
            raise NotFound(
                f"no such model: '{name}' is not in the model repositories; there: {there}"
            )
        return owners[0]

    def folders(self) -> dict[str, list[Path]]:
        """Return the folders or files of each model, for a look at what changes there."""
        found: dict[str, list[Path]] = {}
        for path in self.paths:
            source = model_source.resolve(path)
            if source.kind is layout.ModelKind.REPOSITORY:
                for name in source.names():
                    file = source.path / f"{name}{layout.GGUF}"
                    found.setdefault(name, []).extend(
                        each for each in (source.path / name, file) if each.exists()
                    )
            elif isinstance(source.location, Path):
                found.setdefault(source.names()[0], []).append(source.location)
        return found

    def _twice(self, name: str, one: str, other: str) -> str:
        return f"'{name}' is both in {one} and in {other}; expected one model of that name"


def check_config_name(name: str) -> None:
    """Raise ConfigError unless it can be the name of a file."""
    if name and layout.CONFIG_NAME.fullmatch(name) is None:
        raise ConfigError(
            f"--model-config-name '{name}': expected letters, digits, _ and -, such as h100 for "
            "configs/h100.pbtxt"
        )
