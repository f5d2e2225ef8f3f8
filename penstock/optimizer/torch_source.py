"""PyTorch models as a version folder: from a user's factory, or a Hugging Face folder.

Both become `module.py` with `model.safetensors`; the signature is found by running the module. As
a process, `python -m penstock.optimizer.torch_source FD FACTORY FOLDER`, it writes the module of a
factory as a model's folder, for `model_source`, and reports problems, none if all went well.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends import COMPILED
from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import ConfigError, describe_error
from penstock.kernels import CHOICES, KERNELS
from penstock.optimizer import folders, pretrained_steps, sent, user_code
from penstock.optimizer.sent import Row
from penstock.repository import layout, pretrained
from penstock.repository.pretrained_message import PIXELS, TOKENS
from penstock.repository.python_file import report
from penstock.types import TensorSpec

if TYPE_CHECKING:
    import torch

MODULE, WEIGHTS = "module.py", "model.safetensors"
# Largest batch that is offered; how large batches are served depends on the device.
MAX_BATCH = 256
# Outputs of transformers models to serve: the first that exists.
ANSWERS = ("logits", "last_hidden_state")
# Variable sizes to try in turn: output sizes that change with them are variable too.
LENGTHS = (16, 24)
HUGGING_FACE_MODULE = '''"""{name} of transformers, as config.json beside this file describes it."""

from pathlib import Path

import transformers


def factory():
    config = transformers.AutoConfig.from_pretrained(Path(__file__).parent)
    return transformers.{name}(config{options})
'''
# Encoders are often saved without the head that their configuration names.
MASKED = "ForMaskedLM"
# Weights that only the base model has: the pooler, and numbers that older versions wrote.
POOLER, BESIDE_THE_HEAD = "pooler", ("pooler", "position_ids")


def take_factory(text: str, rows: Sequence[Row], version: Path) -> tuple[ModelConfig, str]:
    """Take a model from `package.module:factory`; return its configuration and a note on files."""
    torch = _library("torch")
    found = user_code.find(text, "model")
    try:
        module = found.call()
    except Exception as error:  # Users' code may raise anything.
        raise ConfigError([f"model: {text}() failed: {describe_error(error)}"]) from error
    if not isinstance(module, torch.nn.Module):
        got = type(module).__name__
        raise ConfigError([f"model: {text}() gave a {got}, expected a torch.nn.Module"])
    taken = inspect.signature(module.forward).parameters
    rows = sent.as_long_as_told(sent.without_labels(rows, taken), taken)
    rows = rows or _example_rows(found, text)
    note = _write_factory(found, version)
    _save(module.eval(), version)
    return _config(module, sent.specs_of(rows), _tensors_by_name, version), note


def take_hugging_face(folder: Path, rows: Sequence[Row], version: Path) -> tuple[ModelConfig, str]:
    """Take a model from a `save_pretrained` folder; return its configuration and a note."""
    _library("torch")
    name = _architecture(folder)
    library = _library("transformers", "hf")
    library.utils.logging.disable_progress_bar()
    kind = getattr(library, name, None)
    if kind is None:
        raise ConfigError([f"{folder}/config.json: transformers has no '{name}'"])
    loaded = _from_pretrained(kind, folder)
    note = name
    if name.endswith(MASKED) and _is_headless(loaded, folder):
        loaded = _base_model(library, folder)
        note = f"{loaded.name}: the weights have no head of {name}, so the base model is served"
    if missing := sorted(loaded.missing):
        # They would be random.
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if missing[5:] else "")
        raise ConfigError([f"{folder}: {loaded.name} has weights that are not there: {shown}"])
    module = loaded.module.float().eval()
    options = "".join(f", {key}={value}" for key, value in loaded.options.items())
    text = HUGGING_FACE_MODULE.format(name=loaded.name, options=options)
    (version / MODULE).write_text(text)
    pretrained_steps.copy_files(folder, version)
    _save(module, version)
    return _config(module, _specs(module, rows, folder), _answers_by_name, version), note


def own_files(artifact: Path) -> set[str]:
    """Return files that only a PyTorch module needs: the artifact, and those beside it."""
    shards = [path.name for path in artifact.parent.glob("*.safetensors")]
    made = {COMPILED, CHOICES, KERNELS}
    return {artifact.name, MODULE, "model.pt2", WEIGHTS, f"{WEIGHTS}.index.json", *shards, *made}


def _library(name: str, extra: str = "torch") -> Any:
    try:
        importlib.import_module("safetensors")
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        problem = f"model: needs the package '{error.name}', which is not installed"
        raise ConfigError([f'{problem}; pip install "penstock[{extra}]" brings it']) from error


def _example_rows(found: user_code.UserFunction, text: str) -> list[Row]:
    """Return rows of the factory's or its module's `example_inputs`: arrays by name."""
    given = getattr(found.call, "example_inputs", None)
    given = given if given is not None else getattr(found.module, "example_inputs", None)
    given = given() if callable(given) else given
    if not isinstance(given, Mapping) or not given:
        data = "data whose arrays have the names of forward's parameters"
        beside = "example_inputs() beside the factory that gives a batch by these names"
        expected = f"expected {data}, or {beside}"
        raise ConfigError([f"model: {text} does not say what it takes; {expected}"])
    arrays = {name: np.asarray(value) for name, value in given.items()}
    num_rows = min(len(array) if array.ndim else 0 for array in arrays.values())
    if num_rows == 0:
        raise ConfigError([f"model: example_inputs of {text}: expected a batch, first axis rows"])
    return [{name: array[n] for name, array in arrays.items()} for n in range(num_rows)]


def _write_factory(found: user_code.UserFunction, version: Path) -> str:
    """Write a `module.py` that calls the user's function, which is copied if it is one file."""
    source = found.source
    note = user_code.take_along(found, version, source.name if source else MODULE)
    if source is None or source.name != MODULE:
        module = f".{source.stem}" if source else found.module.__name__
        text = f'from {module} import {found.name} as factory\n\n__all__ = ["factory"]\n'
        (version / MODULE).write_text(text)
    elif found.name != "factory":
        with (version / MODULE).open("a") as file:
            file.write(f"\nfactory = {found.name}\n")
    return note


def _save(module: torch.nn.Module, version: Path) -> None:
    if module.state_dict():
        importlib.import_module("safetensors.torch").save_model(module, str(version / WEIGHTS))
        # The library makes it readable by its owner only; the server may run as another user.
        (version / WEIGHTS).chmod((version / MODULE).stat().st_mode)


def _architecture(folder: Path) -> str:
    names = layout.architectures(folder)
    if not names:
        raise ConfigError([f"{folder}/config.json: names no architecture under 'architectures'"])
    name = names[0]
    if name.endswith((*pretrained.GENERATORS, "ForConditionalGeneration")):
        raise ConfigError([f"{folder}: {name} generates text; expected an encoder or a classifier"])
    return name


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A module, its options, and the weights that transformers did not find."""

    module: torch.nn.Module
    options: Mapping[str, bool]
    missing: frozenset[str]
    # Weights in the files that the module does not have.
    unexpected: frozenset[str]

    @property
    def name(self) -> str:
        return type(self.module).__name__


def _from_pretrained(kind: Any, folder: Path, **options: bool) -> _Loaded:
    try:
        given = {"output_loading_info": True, "local_files_only": True, "use_safetensors": True}
        module, info = kind.from_pretrained(folder, **given, **options)
    except Exception as error:  # transformers raises many types for what it cannot read.
        raise ConfigError([f"{folder}: transformers cannot load it: {error}"]) from error
    missing = {str(key) for key in (*info["missing_keys"], *info["mismatched_keys"])}
    unexpected = {str(key) for key in info["unexpected_keys"]}
    return _Loaded(module, options, frozenset(missing), frozenset(unexpected))


def _is_headless(loaded: _Loaded, folder: Path) -> bool:
    """Return whether the files hold the whole encoder and nothing of the head. Weights that the
    head shares with the encoder are not expected in the files."""
    prefix = f"{loaded.module.base_model_prefix}."
    head = {name for name in loaded.module.state_dict() if not name.startswith(prefix)}
    others = [name for name in loaded.unexpected if not any(w in name for w in BESIDE_THE_HEAD)]
    has_encoder = loaded.missing <= head and not others
    return bool(loaded.missing) and has_encoder and not head & _names(folder)


def _names(folder: Path) -> set[str]:
    from safetensors import safe_open

    found: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), "pt") as file:
            found |= set(file.keys())
    return found


def _base_model(library: Any, folder: Path) -> _Loaded:
    """Load the base model, without the pooler if that has no weights: it would be random."""
    loaded = _from_pretrained(library.AutoModel, folder)
    if loaded.missing and all(POOLER in name for name in loaded.missing):
        return _from_pretrained(library.AutoModel, folder, add_pooling_layer=False)
    return loaded


def _specs(module: torch.nn.Module, rows: Sequence[Row], folder: Path) -> list[TensorSpec]:
    parameters = inspect.signature(module.forward).parameters
    if PIXELS in parameters:
        size = pretrained.image_settings(folder)
        return [TensorSpec(PIXELS, "FP32", (3, size.height, size.width))]
    taken = [name for name in TOKENS if name in parameters]
    if "input_ids" not in taken:
        raise ConfigError([f"{folder}: the model takes no input_ids; export it to ONNX instead"])
    if rows:
        taken = [name for name in taken if name in rows[0]]
    elif getattr(module.config, "type_vocab_size", 0) < 2 and TOKENS[2] in taken:
        taken.remove(TOKENS[2])
    return [TensorSpec(name, "INT64", (-1,)) for name in taken]


# Returns the tensors of an answer by name.
Read = Callable[[object], "dict[str, torch.Tensor]"]


def _config(
    module: torch.nn.Module, specs: Sequence[TensorSpec], read: Read, version: Path
) -> ModelConfig:
    """Return the configuration with the module's outputs; batched if their first axes are rows."""
    signature = inspect.signature(module.forward)
    try:
        signature.bind(**dict.fromkeys(spec.name for spec in specs))
    except TypeError as error:
        given = ", ".join(f"'{spec.name}'" for spec in specs)
        raise ConfigError([f"model: forward{signature}: {error}; the data has {given}"]) from None
    try:
        outputs, max_batch = _outputs(module, specs, read, has_batch=True), MAX_BATCH
    except _NoBatch as reason:
        try:
            outputs, max_batch = _outputs(module, specs, read, has_batch=False), 0
        except _NoBatch:
            raise ConfigError([f"model: fails on inputs like those given: {reason}"]) from None
    return ModelConfig(
        name=version.parent.name,
        version=version.name,
        backend="pytorch",
        artifact=str(version / MODULE),
        inputs=tuple(specs),
        outputs=outputs,
        max_batch_size=max_batch,
        batching=BatchPolicy(max(1, max_batch), is_dynamic=max_batch > 0),
    )


class _NoBatch(Exception):
    """The module does not run, or its outputs do not have a row for each input row."""


def _outputs(
    module: torch.nn.Module, specs: Sequence[TensorSpec], read: Read, has_batch: bool
) -> tuple[TensorSpec, ...]:
    """Return the output specs; sizes that do not change with variable input sizes are fixed."""
    from penstock.backends.pytorch import TORCH_TYPES

    names = {kind: datatype for datatype, kind in TORCH_TYPES.items()}
    leading = [[2], [3]] if has_batch else [[], []]
    seen = [_answer(module, specs, read, *sizes) for sizes in zip(leading, LENGTHS, strict=True)]
    outputs: list[TensorSpec] = []
    for name, first in seen[0].items():
        if first.dtype not in names:
            problem = f"output '{name}' is {first.dtype}, which the protocol has not"
            raise ConfigError([f"model: {problem}"])
        shapes = [list(answer[name].shape) for answer in seen]
        if has_batch and [shape[:1] for shape in shapes] != leading:
            raise _NoBatch(f"output '{name}' has no row for each row of the input")
        pairs = list(zip(*(shape[1:] if has_batch else shape for shape in shapes), strict=True))
        shape = tuple(one if one == other else -1 for one, other in pairs)
        outputs.append(TensorSpec(name, names[first.dtype], shape))
    return tuple(outputs)


def _answer(
    module: torch.nn.Module, specs: Sequence[TensorSpec], read: Read, leading: list[int], size: int
) -> dict[str, torch.Tensor]:
    import torch

    from penstock.backends.pytorch import TORCH_TYPES

    tensors = {}
    for spec in specs:
        shape = [*leading, *(size if each < 0 else each for each in spec.shape)]
        tensors[spec.name] = torch.ones(shape, dtype=TORCH_TYPES[spec.datatype])
    try:
        with torch.inference_mode():
            return read(module(**tensors))
    except ConfigError:
        raise
    except Exception as error:  # A module may raise anything on inputs that do not suit it.
        raise _NoBatch(describe_error(error)) from error


def _tensors_by_name(answer: object) -> dict[str, torch.Tensor]:
    """Return outputs by the names that the backend will use: by key, or else by position."""
    import torch

    if isinstance(answer, torch.Tensor):
        return {"OUTPUT__0": answer}
    if isinstance(answer, Mapping):
        found = {str(name): value for name, value in answer.items()}
    elif isinstance(answer, tuple | list):
        names = getattr(answer, "_fields", None) or [f"OUTPUT__{n}" for n in range(len(answer))]
        found = dict(zip(names, answer, strict=True))
    else:
        found = {}
    tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        got = type(answer).__name__
        raise ConfigError([f"model: it gave a {got}, expected a tensor, or tensors by name"])
    return tensors


def _answers_by_name(answer: object) -> dict[str, torch.Tensor]:
    tensors = _tensors_by_name(answer)
    return next(({name: tensors[name]} for name in ANSWERS if name in tensors), tensors)


def main(fd: str, factory: str, folder: str) -> None:
    """Write the module with the tensors of its `example_inputs`."""
    version = Path(folder) / folders.VERSION
    version.mkdir(parents=True)
    problems: list[str] = []
    try:
        config, _ = take_factory(factory, [], version)
        folders.write_config(Path(folder), config)
    except ConfigError as error:
        problems = list(error.problems)
    report(int(fd), problems)


if __name__ == "__main__":
    main(*sys.argv[1:])
