"""Programs of Debian packages, unpacked under .bench/ and not installed."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / ".bench" / "debian"
LIBRARIES = "usr/lib/x86_64-linux-gnu"


def unpack(*packages: str) -> Path:
    """Return the folder that holds the files of the packages, as they lie under `/`. Skips the test
    where they cannot be downloaded."""
    folder = ROOT / "+".join(packages)
    if folder.is_dir():
        return folder
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        pytest.skip(f"{', '.join(packages)}: needs Debian's apt-get and dpkg")
    ROOT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT) as work:
        command = ["apt-get", "download", *packages]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            pytest.skip(f"{', '.join(packages)} cannot be downloaded: {done.stderr[-300:]}")
        files = Path(work) / "files"
        for package in Path(work).glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, files], check=True)
        files.rename(folder)
    return folder


def with_libraries(folder: Path) -> dict[str, str]:
    """The environment in which programs of the folder find their libraries."""
    return os.environ | {"LD_LIBRARY_PATH": str(folder / LIBRARIES)}
