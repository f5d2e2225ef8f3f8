"""Virtual environments of the alternatives, under .bench/, made on first use."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / ".bench"
APPS = Path(__file__).with_name("apps")
REPOSITORY = ROOT / "examples" / "repository"
ATTEMPTS = 3
PAUSE_S = 20  # registries refuse quick repeats


class InstallError(Exception):
    """The alternative cannot be installed on this machine."""


@dataclass(frozen=True, slots=True)
class Environment:
    python: Path
    version: str
    note: str  # not empty when an older release than the first wanted had to do

    @property
    def site_packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.python.parents[1] / "lib" / version / "site-packages"

    def script(self, name: str) -> str:
        return str(self.python.with_name(name))


def onnx_path(model_name: str) -> Path:
    return REPOSITORY / model_name / "1" / "model.onnx"


def ensure(
    name: str,
    package: str,
    versions: Sequence[str],
    extras: Sequence[str] = (),
    runtime: str = "onnxruntime",
) -> Environment:
    """The environment with the first of these versions that installs.

    Every environment gets the release of the runtime that Penstock has, so the model costs the
    same; none where the alternative brings its own.
    """
    same = [f"{runtime}=={_own_release(runtime)}"] if runtime else []
    home = BENCH / name
    marker = home / "installed.json"
    wanted = [*versions, *extras, *same]
    if marker.exists():
        saved = json.loads(marker.read_text())
        if saved["wanted"] == wanted:
            return _environment(home, saved["version"], saved["reasons"])
    reasons: list[str] = []
    for version in versions:
        try:
            _install(home, [f"{package}=={version}", *extras, *same])
        except InstallError as error:
            reasons.append(str(error))
            continue
        marker.write_text(json.dumps({"wanted": wanted, "version": version, "reasons": reasons}))
        return _environment(home, version, reasons)
    raise InstallError("; ".join(reasons))


def _own_release(package: str) -> str:
    """Without what was said about a build, which registries do not know."""
    return importlib.metadata.version(package).partition("+")[0]


def _environment(home: Path, version: str, reasons: Sequence[str]) -> Environment:
    note = f"not the release first asked for ({'; '.join(reasons)})" if reasons else ""
    return Environment(home / "bin/python", version, note)


def _install(home: Path, requirements: Sequence[str]) -> None:
    print(f"installing {' '.join(requirements)} into .bench/{home.name} ...", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    pip = [str(home / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check"]
    for attempt in range(ATTEMPTS):
        done = subprocess.run(
            [*pip, "--quiet", *requirements], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return
        if "No matching distribution" in done.stderr:
            break
        if attempt + 1 < ATTEMPTS:
            print(f"  pip failed, once more in {PAUSE_S} s", flush=True)
            time.sleep(PAUSE_S)
    raise InstallError(f"{requirements[0]}: {_reason(done.stderr)}")


def _reason(text: str) -> str:
    errors = [line for line in text.splitlines() if line.startswith("ERROR:")]
    return publishable(errors[-1].removeprefix("ERROR: "))[:200] if errors else "pip failed"


def publishable(text: str) -> str:
    """Text of other programs without this machine's folders and without addresses."""
    for folder in (str(ROOT), sys.base_prefix, str(Path.home())):
        text = text.replace(folder, "...")
    return re.sub(r"https?://\S+", "(address)", text)


def work_folder(name: str) -> Path:
    """An empty folder for a server's generated configuration."""
    folder = BENCH / "work" / name
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    return folder
