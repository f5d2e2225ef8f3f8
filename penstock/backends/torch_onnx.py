"""ONNX files for the PyTorch engine: imported, simplified for the shapes that are configured, and
cast."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from penstock.backends.onnx_import.folding import Sample, fold_shapes, retype
from penstock.backends.onnx_import.importer import ImportedGraph, import_file
from penstock.backends.onnx_import.patterns import fuse_patterns
from penstock.backends.torch_floats import unmix, with_constants
from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.types import DATATYPES, TensorSpec

# Sizes for which shapes are worked out: each dynamic size varies by itself, while the others keep
# their first value. A value that is the same for all sizes becomes a constant.
ROWS = (3, 1, 2, 5, 8)
LENGTHS = (37, 2, 33, 34, 64, 101, 515, 2051)
# So that no two sizes are equal by chance.
APART = 6
# Names of the batch size, and of lengths that are padded to buckets.
BATCH, BUCKET = "batch size", "bucket"
ALTERNATIVE = "KIND_CPU in instance_group runs the model on ONNX Runtime"


def load_graph(
    config: ModelConfig, dtype: torch.dtype | None, keep: Collection[str] = ()
) -> ImportedGraph:
    """Import the model's file and cast it; nodes in `keep` and their constants are not cast. Raise
    ConfigError naming what this engine does not have, and what to do instead."""
    batch = (-1,) if config.max_batch_size else ()
    sizes = {spec.name: (*batch, *spec.shape) for spec in config.inputs}
    try:
        graph = import_file(Path(config.artifact), sizes=sizes)
    except ConfigError as error:
        name = Path(config.artifact).name
        problems = [f"{config.version}/{name}: {problem}" for problem in error.problems]
        raise ConfigError([*problems[:-1], f"{problems[-1]}; {ALTERNATIVE}"]) from None
    fold_shapes(graph, samples(config, graph))
    fuse_patterns(graph.module)
    # Outputs by name: a configuration may have them in another order.
    (output,) = (node for node in graph.module.graph.nodes if node.op == "output")
    output.args = (dict(zip(graph.outputs, output.args[0], strict=True)),)
    graph.module.recompile()
    if dtype is not None:
        cast_graph(graph, dtype, keep)
    return graph


def cast_graph(graph: ImportedGraph, dtype: torch.dtype, keep: Collection[str] = ()) -> None:
    kept = with_constants(graph.module, keep)
    retype(graph, dtype, kept)
    unmix(graph.module, dtype, kept)


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
        return list(config.padding.buckets)
    return [LENGTHS[0] + APART * number, *LENGTHS[1:]]


def torch_type(datatype: str) -> torch.dtype:
    """Return the torch type of a v2 datatype other than BYTES."""
    found: torch.dtype = getattr(
        torch, "bfloat16" if datatype == "BF16" else DATATYPES[datatype].numpy.name
    )
    return found
