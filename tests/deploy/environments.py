"""Virtual environments of tools from PyPI, made once under .bench/."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2] / ".bench"
READY = ".ready"


def environment(name: str, *packages: str, alone: Sequence[str] = ()) -> Path:
    """Return the folder of programs of an environment with these packages, and others without what
    they need; made again if they change."""
    folder = ROOT / f"venv-{name}"
    marker = folder / READY
    wanted = "\n".join([*packages, *alone])
    if marker.is_file() and marker.read_text() == wanted:
        return folder / "bin"
    shutil.rmtree(folder, ignore_errors=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
    for command in (
        [sys.executable, "-m", "venv", folder],
        [*pip, *packages],
        *([[*pip, "--no-deps", *alone]] if alone else []),
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-3000:]
    marker.write_text(wanted)
    return folder / "bin"
