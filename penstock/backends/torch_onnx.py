"""ONNX files for the PyTorch engine: imported, simplified for the shapes that are configured, and
cast."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import fx

from penstock.backends.onnx_import.casting import retype
from penstock.backends.onnx_import.folding import Sample, find_agreed, fold_shapes
from penstock.backends.onnx_import.importer import ImportedGraph, import_file
from penstock.backends.onnx_import.patterns import fuse_patterns
from penstock.backends.onnx_import.precision import UNCAST, find_limited
from penstock.backends.onnx_import.weights import BrokenFile
from penstock.backends.torch_floats import find_kept, unmix, with_constants
from penstock.backends.torch_int8 import quantise_graph, quantised_inputs
from penstock.config import ModelConfig
from penstock.errors import ConfigError, first_line
from penstock.kernels.convolution import Tuner
from penstock.types import DATATYPES, Array, TensorSpec, shape_fits

# Sizes for which shapes are worked out: each dynamic size varies by itself, while the others keep
# their first value. A value that is the same for all sizes becomes a constant.
ROWS = (3, 1, 2, 5, 8)
LENGTHS = (37, 2, 33, 34, 64, 101, 515, 2051)
# So that no two sizes are equal by chance.
APART = 6
# Names of the batch size, and of lengths that are padded to buckets.
BATCH, BUCKET = "batch size", "bucket"
# Option with the values of inputs that are constants of the model.
FIXED = "penstock.fixed_inputs"
ALTERNATIVE = (
    "KIND_CPU in instance_group runs the model on ONNX Runtime, and "
    "penstock.gpu_engine: 'onnxruntime' runs it with ONNX Runtime on the GPU"
)


def read_fixed(config: ModelConfig, inputs: Sequence[TensorSpec]) -> dict[str, Array]:
    """Return the values of inputs that the configuration fixes: "sr=16000, k=3", or a JSON object
    for values with several numbers. Raise ConfigError with all problems."""
    text = config.options.get(FIXED, "").strip()
    if not text:
        return {}
    specs = {spec.name: spec for spec in inputs}
    values, problems = {}, []
    try:
        is_object = text.startswith("{")
        given = json.loads(text, object_pairs_hook=list) if is_object else list(_pairs(text))
    except ValueError:
        expected = 'expected "name=number, …" or a JSON object'
        raise ConfigError(f"parameters.{FIXED}: '{text}': {expected}") from None
    for name, times in Counter(name for name, _ in given).items():
        if times > 1:
            problems.append(f"'{name}': given {times} times")
    for name, value in given:
        if name not in specs:
            problems.append(f"'{name}': the model has only {', '.join(specs)}")
        elif config.max_batch_size and name in {spec.name for spec in config.inputs}:
            problems.append(f"'{name}': with batches, leave it out of `input`")
        else:
            try:
                values[name] = _fixed_value(specs[name], value)
            except (ValueError, TypeError, OverflowError) as error:
                problems.append(f"'{name}': {first_line(error)}")
    if problems:
        raise ConfigError([f"parameters.{FIXED}: {problem}" for problem in problems])
    return values


def _pairs(text: str) -> Iterator[tuple[str, object]]:
    for part in text.split(","):
        name, _, value = part.rpartition("=")
        yield name.strip(), json.loads(value)


def _fixed_value(spec: TensorSpec, value: object) -> Array:
    """Return the value as the input's datatype and shape; one number fills all its elements."""
    if spec.datatype in ("BYTES", "BF16"):
        raise ValueError(f"{spec.datatype} cannot be fixed")
    found = np.array(value)
    kind = DATATYPES[spec.datatype].numpy
    with np.errstate(over="ignore", invalid="ignore"):
        made = found.astype(kind) if found.dtype.kind in "biuf" else found
    # Truth values are true and false, integers exact, and floats rounded but finite.
    is_same = (found.dtype.kind == "b") == (kind.kind == "b")
    is_held = np.isfinite(made).all() if kind.kind == "f" else np.array_equal(made, found)
    if found.dtype.kind not in "biuf" or not is_same or not is_held:
        raise ValueError(f"{json.dumps(value)} is not {spec.datatype}")
    shape = spec.shape if found.ndim == 0 and spec.is_fixed else found.shape
    if not shape_fits(shape, spec.shape):
        raise ValueError(f"shape {list(shape)} does not fit {list(spec.shape)}")
    return np.broadcast_to(made, shape).copy()


def load_graph(
    config: ModelConfig,
    dtype: torch.dtype | None,
    keep: Collection[str] = (),
    fixed: Mapping[str, Array] | None = None,
    tuner: Tuner | None = None,
) -> ImportedGraph:
    """Import the model's file and cast it; the nodes and layers named in `keep` are not cast, and
    `tuner` chooses the kernels of layers in INT8. Raise ConfigError naming what this engine does
    not have, and what to do instead."""
    batch = (-1,) if config.max_batch_size else ()
    sizes = {spec.name: (*batch, *spec.shape) for spec in config.inputs}
    try:
        constants = {name: torch.from_numpy(value) for name, value in (fixed or {}).items()}
        graph = import_file(
            Path(config.artifact),
            constants,
            sizes,
            lambda part: find_agreed(part, samples(config, part)),
        )
        fold_shapes(graph, samples(config, graph))
    except ConfigError as error:
        name = Path(config.artifact).name
        problems = [f"{config.version}/{name}: {problem}" for problem in error.problems]
        if isinstance(error, BrokenFile):
            raise ConfigError(problems) from None
        raise ConfigError([*problems[:-1], f"{problems[-1]}; {ALTERNATIVE}"]) from None
    fuse_patterns(graph.module)
    graph.int8.update(quantise_graph(graph.module, tuner))
    # Outputs by name: a configuration may have them in another order.
    (output,) = (node for node in graph.module.graph.nodes if node.op == "output")
    output.args = (dict(zip(graph.outputs, output.args[0], strict=True)),)
    graph.module.recompile()
    if dtype is not None:
        cast_graph(graph, dtype, keep)
    return graph


def cast_graph(graph: ImportedGraph, dtype: torch.dtype, keep: Collection[str] = ()) -> None:
    found = find_kept(graph.module, keep)
    kept = with_constants(graph.module, found)
    retype(graph, dtype, kept)
    unmix(graph.module, dtype, kept)
    # Nodes that are exact in 16 bits may have been replaced.
    left = {node.name for node in graph.module.graph.nodes}
    left.update(name for name, _ in graph.module.named_modules())
    graph.kept.update(found & left)


def uncast_inputs(graph: ImportedGraph) -> frozenset[str]:
    """Return the inputs that the graph takes in their own datatype."""
    exact = {name for name, node in _placeholders(graph) if node.meta.get(UNCAST)}
    return quantised_inputs(graph.module, graph.inputs) | exact


def limited_inputs(graph: ImportedGraph) -> frozenset[str]:
    """Return the inputs whose finite numbers must stay finite when they are cast."""
    found = find_limited(graph.module)
    return frozenset(name for name, node in _placeholders(graph) if node in found)


def _placeholders(graph: ImportedGraph) -> Iterator[tuple[str, fx.Node]]:
    nodes = [node for node in graph.module.graph.nodes if node.op == "placeholder"]
    return zip(graph.inputs, nodes, strict=True)


def samples(config: ModelConfig, graph: ImportedGraph) -> list[Sample]:
    """Return shapes of inputs as they may come. Sizes with the same name in the file are equal, as
    are batch sizes; others are not, nor are they multiples of each other."""
    named = {spec.name: _names(config, spec, graph) for spec in config.inputs}
    symbols = sorted({name for names in named.values() for name in names if name})
    values = {name: _values(config, name, number) for number, name in enumerate(symbols)}
    first = {name: each[0] for name, each in values.items()}
    chosen = [first]
    for name, each in values.items():
        chosen += [{**first, name: size} for size in each[1:]]
    return [
        {
            spec.name: (
                torch_type(spec.datatype),
                [
                    sizes[name] if name else size
                    for name, size in zip(named[spec.name], _shape(config, spec), strict=True)
                ],
            )
            for spec in config.inputs
        }
        for sizes in chosen
    ]


def _shape(config: ModelConfig, spec: TensorSpec) -> tuple[int, ...]:
    return (-1, *spec.shape) if config.max_batch_size else spec.shape


def _names(config: ModelConfig, spec: TensorSpec, graph: ImportedGraph) -> list[str]:
    """Return a name for each dynamic size of an input; empty for fixed ones."""
    declared = graph.symbols.get(spec.name, ())
    names = []
    for axis, size in enumerate(_shape(config, spec)):
        if config.max_batch_size and axis == 0:
            names.append(BATCH)
        elif size >= 0:
            names.append("")
        elif _is_padded(config, spec.name, axis):
            names.append(BUCKET)
        else:
            names.append((declared[axis] if axis < len(declared) else "") or f"{spec.name}.{axis}")
    return names


def _is_padded(config: ModelConfig, name: str, axis: int) -> bool:
    axes = () if config.padding is None else config.padding.axes
    row_axis = axis - 1 if config.max_batch_size else axis
    return any(each.input == name and each.axis == row_axis for each in axes)


def _values(config: ModelConfig, name: str, number: int) -> list[int]:
    if name == BATCH:
        most = config.max_batch_size
        return list(dict.fromkeys(min(rows, most) for rows in (*ROWS, most)))
    if name == BUCKET and config.padding is not None:
        # Other lengths come too: beyond the last bucket, or all if padding would change answers.
        most = config.padding.buckets[-1]
        others = (each for each in (most + 1, *LENGTHS) if each <= most + 1)
        return list(dict.fromkeys((*config.padding.buckets, *others)))
    return [LENGTHS[0] + APART * number, *LENGTHS[1:]]


def torch_type(datatype: str) -> torch.dtype:
    """Return the torch type of a v2 datatype other than BYTES."""
    found: torch.dtype = getattr(
        torch, "bfloat16" if datatype == "BF16" else DATATYPES[datatype].numpy.name
    )
    return found
