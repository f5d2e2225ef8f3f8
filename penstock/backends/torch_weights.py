"""Weights of torch modules: `load_weights` loads the safetensors files beside a module.py, whose
names must match exactly; `load_network` has transformers make the network of a Hugging Face folder.

Pickles (.pt, .pth, .bin) are not read: they can run any code here. Of a Hugging Face folder only
config.json and safetensors are used: no code of the folder, and nothing from the network.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from penstock.errors import ConfigError, first_line
from penstock.repository import pretrained
from penstock.repository.layout import listed

WHOLE, INDEX = pretrained.WEIGHTS
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
# Limit of names listed for one kind of problem.
MAX_NAMES = 5
CONVERT = (
    "a pickle, which can run any code and is not read; convert it where you trust it: "
    f"safetensors.torch.save_file(torch.load(file, weights_only=True), '{WHOLE}')"
)
# transformers' class for each task.
CLASSES = {
    "text classifier": "AutoModelForSequenceClassification",
    "token classifier": "AutoModelForTokenClassification",
    "image classifier": "AutoModelForImageClassification",
    "encoder": "AutoModel",
}
Weights = Mapping[str, torch.Tensor]


class _Index(msgspec.Struct):
    """The file of each weight, as Hugging Face writes it."""

    weight_map: dict[str, str]


def load_weights(module: torch.nn.Module, folder: Path, version: str) -> None:
    """Load the weights; raise ConfigError with all mismatches."""
    expected: Weights = module.state_dict()
    if (folder / WHOLE).exists():
        where, weights = f"{version}/{WHOLE}", _read(folder, WHOLE, version)
    elif (folder / INDEX).exists():
        where, weights = f"{version}/{INDEX}", _read_shards(folder, version)
    elif expected:
        raise _missing(folder, version, list(expected))
    else:
        return
    problems = _misfits(weights, expected)
    if not problems:
        result = module.load_state_dict(weights, strict=False)
        # Tied weights share memory with a loaded one.
        loaded = {expected[name].data_ptr() for name in weights if name in expected}
        absent = [n for n in result.missing_keys if expected[n].data_ptr() not in loaded]
        if absent:
            problems.append(f"no weight for {_list(absent)}")
        if result.unexpected_keys:
            problems.append(f"{_list(result.unexpected_keys)}: the module has no such weight")
    if problems:
        raise ConfigError([f"{where}: {problem}" for problem in problems])


def _read(folder: Path, name: str, version: str) -> Weights:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ConfigError(f"{version}/{name}: leaves the version folder")
    try:
        weights: Weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{version}/{name}: cannot be read as safetensors: {error}") from None
    return weights


def _read_shards(folder: Path, version: str) -> Weights:
    try:
        index = msgspec.json.decode((folder / INDEX).read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{version}/{INDEX}: cannot be read: {error}") from None
    weights: dict[str, torch.Tensor] = {}
    problems: list[str] = []
    for file in sorted(set(index.values())):
        promised = {name for name, where in index.items() if where == file}
        try:
            found = _read(folder, file, version)
        except ConfigError as error:
            problems += error.problems
            continue
        if absent := sorted(promised - found.keys()):
            problems.append(f"{version}/{file}: {_list(absent)} should be in it by {INDEX}")
        weights |= found
    if problems:
        raise ConfigError(problems)
    return weights


def _misfits(weights: Weights, expected: Weights) -> list[str]:
    names = sorted(weights.keys() & expected.keys())
    misfits = [(name, _misfit(weights[name], expected[name])) for name in names]
    problems = [f"'{name}' {misfit}" for name, misfit in misfits if misfit]
    if len(problems) > MAX_NAMES:
        problems[MAX_NAMES:] = [f"{len(problems) - MAX_NAMES} more of this kind"]
    return problems


def _misfit(found: torch.Tensor, wanted: torch.Tensor) -> str:
    if found.shape != wanted.shape:
        return f"has shape {list(found.shape)}, the module wants {list(wanted.shape)}"
    if found.dtype == wanted.dtype:
        return ""
    if not (found.is_floating_point() and wanted.is_floating_point()):
        return f"is {found.dtype}, the module wants {wanted.dtype}"
    if _overflows(found, wanted.dtype):
        return f"is {found.dtype} with values too large for {wanted.dtype}, which the module wants"
    return ""


def _overflows(found: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a number would overflow, to infinity or to the largest of the type."""
    limit = torch.finfo(dtype).max
    if limit >= torch.finfo(found.dtype).max:
        return False
    # One-byte types do not support comparison.
    values = found.float() if found.element_size() == 1 else found
    return bool((values.isfinite() & (values.abs() > limit)).any())


def _missing(folder: Path, version: str, names: Sequence[str]) -> ConfigError:
    text = f"{version}/{WHOLE}: no such file, and the module has weights: {_list(names)}"
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    return ConfigError(f"{text}; {pickles[0]} is {CONVERT}" if pickles else text)


def _list(names: Sequence[str]) -> str:
    return listed([f"'{name}'" for name in names], MAX_NAMES)


def load_network(folder: Path) -> torch.nn.Module:
    """Return the network in FP32. ConfigError if weights are missing: they would be random."""
    found = pretrained.read(folder)
    if found is None:
        raise ConfigError(f"{folder.name}: a language model; expected {pretrained.ACCEPTED}")
    network = getattr(_transformers(), CLASSES[found.task])
    trust = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    try:
        module, info = network.from_pretrained(folder, output_loading_info=True, **trust)
    except Exception as error:  # transformers raises many types for what it cannot read.
        text = f"{folder.name}: transformers cannot load it: {first_line(error)}"
        raise ConfigError(text) from error
    missing = sorted(map(str, (*info["missing_keys"], *info["mismatched_keys"])))
    if found.task == "encoder" and missing and all("pooler" in name for name in missing):
        # Embeddings do not use the pooler, which is often saved without.
        missing = []
    if missing:
        problem = f"no weights for {listed(missing, MAX_NAMES)}, which {found.architecture} has"
        raise ConfigError(f"{folder.name}: {problem}")
    return module.float().eval()


def _transformers() -> ModuleType:
    try:
        library = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        what = f"the folder needs the package '{error.name}', which is not installed"
        how = 'pip install "penstock[hf]" brings it; a folder with onnx/model.onnx does not need it'
        raise ConfigError(f"backend: {what}; {how}") from error
    library.utils.logging.disable_progress_bar()
    return library
