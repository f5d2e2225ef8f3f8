"""A process that writes the module of `package.module:factory` as a model's folder: `python -m
penstock.optimizer.factory_folder FD FACTORY FOLDER`.

`model_source` starts it to serve a factory. It reports problems, none if all went well.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from penstock.errors import ConfigError
from penstock.optimizer import folders, torch_source


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
    with os.fdopen(fd, "wb") as pipe:
        pipe.write(msgspec.json.encode(problems))
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the model's code must not keep the process alive.
    os._exit(0)


if __name__ == "__main__":
    main()
