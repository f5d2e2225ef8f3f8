"""Which build of ONNX Runtime is installed, and what to do if it is not the GPU build.

`onnxruntime` and `onnxruntime-gpu` are two distributions of one package folder: whichever was
installed last has overwritten the files of the other, and pip does not say so. docs/onnx-on-gpus.md
has the recipe. The decisions are pure; `preload` loads CUDA's libraries into this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.repository.accelerators import CUDA_PROVIDER

CPU_BUILD, GPU_BUILD = "onnxruntime", "onnxruntime-gpu"
# Distributions whose files are in the folder `onnxruntime`.
BUILDS = (
    CPU_BUILD,
    GPU_BUILD,
    *(f"onnxruntime-{name}" for name in ("openvino", "training", "qnn")),
)
# Libraries of CUDA that the provider needs, each after those that it depends on. cuDNN loads its
# own parts by itself.
LIBRARIES = ("cudart", "nvJitLink", "nvrtc", "cublasLt", "cublas", "curand", "cufft", "cudnn")


@dataclass(frozen=True, slots=True)
class InstalledBuild:
    name: str
    version: str
    # Folder on sys.path that has the package's folder.
    folder: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def installed(path: Sequence[str] | None = None) -> list[InstalledBuild]:
    """Return the installed builds in the order of sys.path, or of `path`."""
    found: list[InstalledBuild] = []
    for each in importlib.metadata.distributions(path=list(sys.path if path is None else path)):
        name = re.sub(r"[-_.]+", "-", each.metadata["Name"] or "").lower()
        if name in BUILDS:
            folder = str(Path(str(each.locate_file(""))).resolve())
            found.append(InstalledBuild(name, each.version, folder))
    return list(dict.fromkeys(found))


def package_folder() -> str:
    """Return the folder on sys.path from which the library is imported."""
    spec = importlib.util.find_spec(CPU_BUILD)
    return str(Path(spec.origin).resolve().parents[1]) if spec and spec.origin else ""


def remedy(version: str) -> str:
    """Return the commands that leave the GPU build alone in its folder."""
    wanted = f"{GPU_BUILD}=={version}" if version else GPU_BUILD
    return f"run: pip uninstall -y {CPU_BUILD} {GPU_BUILD} && pip install --no-deps {wanted}"


def gpu_problem(builds: Sequence[InstalledBuild], providers: Sequence[str], folder: str) -> str:
    """Return why GPU providers cannot be used, and what to do; empty if they can. `providers` are
    those of the library that was imported from `folder`."""
    ours = next((each for each in builds if each.name == GPU_BUILD and each.folder == folder), None)
    others = [each for each in builds if each.name != GPU_BUILD and each.folder == folder]
    names = " and ".join(map(str, others))
    if CUDA_PROVIDER in providers:
        if ours is None or all(each.version == ours.version for each in others):
            return ""
        mixed = f"{ours} and {names} share one package folder, and their files are mixed"
        return f"{mixed}; {remedy(ours.version)}"
    if ours is not None and others:
        hidden = f"{ours} is installed, but {names} has overwritten its files"
        return f"{hidden}: they share one package folder; {remedy(ours.version)}"
    if ours is not None:
        return f"{ours} is installed, but has no {CUDA_PROVIDER} on this platform"
    if elsewhere := next((each for each in builds if each.name == GPU_BUILD), None):
        return f"{elsewhere} is in {elsewhere.folder}, but {folder} comes first on sys.path"
    version = others[0].version if others else ""
    return f"needs {GPU_BUILD}, which is not installed; {remedy(version)}"


def clash_warning(builds: Sequence[InstalledBuild], folder: str) -> str:
    """Return a warning about builds that work together only until one is installed again; empty
    without any."""
    here = [each for each in builds if each.folder == folder]
    ours = next((each for each in here if each.name == GPU_BUILD), None)
    if ours is None or len(here) == 1:
        return ""
    names = " and ".join(each.name for each in here)
    risk = "the next upgrade of one may overwrite the other"
    return f"{names} share one package folder: {risk}; {remedy(ours.version)}"


def cuda_libraries(folders: Iterable[str]) -> list[Path]:
    """Return CUDA's libraries in these `nvidia` folders of pip's packages, in the order in which to
    load them."""
    found = [
        path
        for folder in folders
        for path in sorted(Path(folder).glob("*/lib/lib*.so.*"))
        if re.fullmatch(rf"lib({'|'.join(LIBRARIES)})\.so\.\d+", path.name)
    ]
    return sorted(found, key=lambda path: LIBRARIES.index(path.name[3:].partition(".")[0]))


def preload() -> None:
    """Load the CUDA libraries that came with torch or nvidia's packages: the provider asks the
    system's loader for them, which does not look there."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec is not None else None
    for path in cuda_libraries(folders or ()):
        # One for another version of CUDA, or a driver that is missing: the session's error tells.
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
