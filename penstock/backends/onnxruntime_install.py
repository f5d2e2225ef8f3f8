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
from collections.abc import Iterable, Mapping, Sequence
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


def installed(path: Sequence[str] | None = None) -> dict[str, str]:
    """Return the installed builds with their versions; `path` replaces sys.path."""
    found: dict[str, str] = {}
    for each in importlib.metadata.distributions(path=list(sys.path if path is None else path)):
        name = re.sub(r"[-_.]+", "-", each.metadata["Name"] or "").lower()
        if name in BUILDS:
            found.setdefault(name, each.version)
    return found


def remedy(version: str) -> str:
    """Return the commands that leave the GPU build alone in its folder."""
    wanted = f"{GPU_BUILD}=={version}" if version else GPU_BUILD
    return f"run: pip uninstall -y {' '.join(BUILDS[:2])} && pip install --no-deps {wanted}"


def gpu_problem(builds: Mapping[str, str], providers: Sequence[str]) -> str:
    """Return why GPU providers cannot be used, and what to do; empty if they can. `providers` are
    those that the imported library has."""
    others = [f"{name} {version}" for name, version in builds.items() if name != GPU_BUILD]
    version = builds.get(GPU_BUILD, "")
    if CUDA_PROVIDER in providers:
        mixed = [name for name in builds if name != GPU_BUILD and builds[name] != version]
        if not version or not mixed:
            return ""
        what = f"{GPU_BUILD} {version} and {', '.join(others)} share one package folder"
        return f"{what}, and their files are mixed; {remedy(version)}"
    if not version:
        return f"needs {GPU_BUILD}, which is not installed; {remedy(builds.get(CPU_BUILD, ''))}"
    if not others:
        return f"{GPU_BUILD} {version} is installed, but has no {CUDA_PROVIDER} on this platform"
    hidden = (
        f"{GPU_BUILD} {version} is installed, but {', '.join(others)} has overwritten its files"
    )
    return f"{hidden}: they share one package folder; {remedy(version)}"


def clash_warning(builds: Mapping[str, str]) -> str:
    """Return a warning about builds that work together only until one is installed again; empty
    without any."""
    if GPU_BUILD not in builds or len(builds) == 1:
        return ""
    names = " and ".join(builds)
    risk = "the next upgrade of one may overwrite the other"
    return f"{names} share one package folder: {risk}; {remedy(builds[GPU_BUILD])}"


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
