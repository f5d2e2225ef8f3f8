"""Checkouts of Triton's repositories that the user brings; they are read, never written to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# Repository: a path that it has.
LANDMARKS = {
    "client": "src/python/examples/simple_http_infer_client.py",
    "server": "docs/examples/model_repository",
    "python_backend": "examples/add_sub/model.py",
}


class MissingCheckoutError(Exception):
    pass


@dataclass(frozen=True, slots=True)
class Checkouts:
    client: Path
    server: Path
    python_backend: Path

    @property
    def qa(self) -> Path:
        return self.server / "qa"

    @property
    def images(self) -> Path:
        return self.qa / "images"


def find_checkouts() -> Checkouts:
    """Read the variables TRITON_CLIENT and so on; MissingCheckoutError says how to get the rest."""
    found: dict[str, Path] = {}
    problems: list[str] = []
    for name, landmark in LANDMARKS.items():
        variable = f"TRITON_{name.upper()}"
        folder = os.environ.get(variable, "")
        if not folder:
            problems.append(f"{variable} is not set")
        elif not (Path(folder) / landmark).exists():
            problems.append(f"{variable}={folder}: {landmark} is missing there")
        else:
            found[name] = Path(folder).resolve()
    if problems:
        raise MissingCheckoutError("\n".join([*problems, "", how_to_get()]))
    return Checkouts(**found)


def how_to_get() -> str:
    lines = ["Get the checkouts, then run the target with them:", ""]
    for name in LANDMARKS:
        url = f"https://github.com/triton-inference-server/{name}"
        lines.append(f"    git clone --depth 1 {url} triton/{name}")
    settings = " ".join(f"TRITON_{name.upper()}=triton/{name}" for name in LANDMARKS)
    return "\n".join([*lines, f"    make verify-triton {settings}"])
