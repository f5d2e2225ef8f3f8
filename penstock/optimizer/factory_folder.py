"""A process that writes the module of `package.module:factory` as a model's folder: `python -m
penstock.optimizer.factory_folder FD FACTORY FOLDER`.

`model_source` starts it to serve a factory. It reports problems, none if all went well.
"""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.errors import ConfigError
from penstock.optimizer import folders, torch_source
from penstock.repository.python_file import report


def write(factory: str, folder: Path) -> None:
    """Call the factory and write the module, with the tensors of its `example_inputs`."""
    version = folder / folders.VERSION
    version.mkdir(parents=True)
    config, _ = torch_source.take_factory(factory, [], version)
    folders.write_config(folder, config)


def main() -> None:
    fd, factory, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    problems: list[str] = []
    try:
        write(factory, folder)
    except ConfigError as error:
        problems = list(error.problems)
    report(fd, problems)


if __name__ == "__main__":
    main()
