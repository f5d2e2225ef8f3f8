"""Open the files of a language model: a Hugging Face folder (config.json and safetensors, in one
file or several), a GGUF file, or a configuration alone with random weights for speed tests.

Weights are read one at a time, on request. Pickles are not read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.errors import ConfigError
from penstock.llm.gguf import GgufFile
from penstock.llm.json_files import read_object
from penstock.llm.models.families import family_of
from penstock.llm.models.family import FilePlace, ModelFamily
from penstock.llm.models.shape import DecoderShape
from penstock.llm.models.weights import HEAD, weight_sizes

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# Tensor of GGUF files with the divisors of the RoPE frequencies.
ROPE = "rope_freqs.weight"
MAX_NAMES = 5
# Weights that some files have but that are not needed: a tied output head, RoPE frequencies, the
# masks of GPT-2.
LEFT_OUT = (HEAD, "rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
SEED = 11
# Standard deviation of random weights, as is usual before training.
SPREAD = 0.02
Sizes = Mapping[str, tuple[int, ...]]


@dataclass(slots=True)
class Checkpoint:
    """Open weight files of a model; call `close` when done."""

    shape: DecoderShape
    weight: Callable[[str], Tensor]
    close: Callable[[], None]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder or a GGUF file; raise ConfigError with all problems."""
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if not path.is_dir():
        raise ConfigError([f"{path}: expected a folder with {CONFIG}, or a .gguf file"])
    return _open_folder(path)


def made_up(config: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Return random weights of the true sizes, the same ones on each kind of device."""
    values = read_object(config)
    shape = family_of(_architecture(values, config.name)).shape_of_config(values)
    generator = torch.Generator(device).manual_seed(SEED)
    sizes = weight_sizes(shape)

    def weight(name: str) -> Tensor:
        size = sizes[name]
        if len(size) == 1:
            made = torch.zeros if name.endswith("bias") else torch.ones
            return made(size, dtype=dtype, device=device)
        empty = torch.empty(size, dtype=dtype, device=device)
        return empty.normal_(0.0, SPREAD, generator=generator)

    return Checkpoint(shape, weight, lambda: None)


# Hugging Face.


def _open_folder(folder: Path) -> Checkpoint:
    values = read_object(folder / CONFIG)
    family = family_of(_architecture(values, CONFIG))
    shape = family.shape_of_config(values)
    files, sizes = _files(folder), weight_sizes(shape)
    places = _file_places(family, shape, files)
    with ExitStack() as stack:
        opened = {name: stack.enter_context(_open(folder / name)) for name in set(files.values())}
        wanted = _whole_sizes(places, sizes)
        # An index may name weights that are in none of its files.
        found = {
            name: tuple(opened[file].get_slice(name).get_shape()) if name in wanted else ()
            for name, file in files.items()
            if name in wanted or not name.endswith(LEFT_OUT)
        }
        _check(wanted, found, "weight")
        close = stack.pop_all().close

    def weight(name: str) -> Tensor:
        place = places[name]
        rows = opened[files[place.name]].get_slice(place.name)
        own = slice(place.start, place.start + sizes[name][0])
        found: Tensor = rows[:, own].t() if place.is_transposed else rows[own]
        return family.from_file(name, found, shape)

    return Checkpoint(shape, weight, close)


def _file_places(
    family: ModelFamily, shape: DecoderShape, files: Mapping[str, str]
) -> dict[str, FilePlace]:
    """Return where the files have each weight; some leave out the beginning of names."""
    places, prefix = family.file_places(shape), family.optional_prefix
    if not prefix or any(name.startswith(prefix) for name in files):
        return places
    return {
        name: replace(place, name=place.name.removeprefix(prefix)) for name, place in places.items()
    }


def _whole_sizes(places: Mapping[str, FilePlace], sizes: Sizes) -> Sizes:
    """Return the shapes of a file's tensors, of which the decoder's weights are parts."""
    found: dict[str, tuple[int, ...]] = {}
    for name, place in places.items():
        num_rows, *rest = sizes[name]
        num_rows += place.start
        num_matrices = 1 if place.matrix is None else place.matrix + 1
        if before := found.get(place.name):
            num_rows = max(num_rows, before[-1 if place.is_transposed else -1 - len(rest)])
            num_matrices = max(num_matrices, before[0])
        whole = (*rest, num_rows) if place.is_transposed else (num_rows, *rest)
        found[place.name] = whole if place.matrix is None else (num_matrices, *whole)
    return found


def _files(folder: Path) -> dict[str, str]:
    if (folder / WHOLE).is_file():
        with _open(folder / WHOLE) as file:
            return dict.fromkeys(file.keys(), WHOLE)
    try:
        found = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    except FileNotFoundError:
        raise ConfigError([f"{folder.name}: neither {WHOLE} nor {INDEX} is there"]) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"{INDEX}: cannot be read: {error}"]) from None
    strange = [name for name in set(found.values()) if Path(name).name != name]
    if strange:
        raise ConfigError([f"{INDEX}: '{name}' leaves the folder" for name in strange])
    return dict(found)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError([f"{path.name}: cannot be read as safetensors: {error}"]) from None


def _check(wanted: Sizes, found: Sizes, kind: str, label: str = "") -> None:
    """Check that every weight is there and has the right shape."""
    missing, others = wanted.keys() - found.keys(), found.keys() - wanted.keys()
    problems = [f"{label}no {kind} '{name}'" for name in sorted(missing)]
    problems += [f"{label}'{name}' is a {kind} that this model has not" for name in sorted(others)]
    problems += [
        f"{label}'{name}' has shape {list(found[name])}; expected {list(wanted[name])}"
        for name in sorted(wanted.keys() & found.keys())
        if found[name] != wanted[name]
    ]
    if problems:
        more = [f"and {len(problems) - MAX_NAMES} more"] if len(problems) > MAX_NAMES else []
        raise ConfigError([*problems[:MAX_NAMES], *more])


def _architecture(values: Mapping[str, object], label: str) -> str:
    found = values.get("architectures")
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], str):
        raise ConfigError([f"{label}: architectures is {found!r}; expected a list of one name"])
    return found[0]


# GGUF.


def _open_gguf(path: Path) -> Checkpoint:
    with ExitStack() as stack:
        file = stack.enter_context(GgufFile(path))
        family = family_of(str(file.metadata.get("general.architecture", "")))
        shape = family.shape_of_gguf(file.metadata)
        shape = replace(shape, is_tied="output.weight" not in file.tensors)
        if ROPE in file.tensors:
            divisors = tuple(map(float, file.tensor(ROPE)))
            shape = replace(shape, rope=replace(shape.rope, divisors=divisors))
        places, sizes = family.gguf_places(shape), weight_sizes(shape)
        found = {name: entry.shape for name, entry in file.tensors.items() if name != ROPE}
        _check(_whole_sizes(places, sizes), found, "tensor", f"{path.name}: ")
        close = stack.pop_all().close

    def weight(name: str) -> Tensor:
        place = places[name]
        num_rows, start = sizes[name][0], place.start
        if place.matrix is not None:
            start += place.matrix * num_rows
        values = family.from_gguf(name, file.rows(place.name, start, num_rows), shape)
        return torch.from_numpy(values.copy())

    return Checkpoint(shape, weight, close)
