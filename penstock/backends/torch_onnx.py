"""ONNX files for the PyTorch engine: imported, simplified for the shapes that are configured, and
cast."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.backends.onnx_import.folding import Sample, fold_shapes, retype
from penstock.backends.onnx_import.importer import ImportedGraph, import_file
from penstock.backends.onnx_import.patterns import fuse_patterns
from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.types import DATATYPES

# Batch sizes and lengths for which shapes are worked out. What is the same for all of them is taken
# to be so always, so they are far apart; some networks take only multiples of 32.
ROWS = (1, 2, 3, 5, 7, 64)
LENGTHS = (32, 64, 1, 96, 512, 1760)
ALTERNATIVE = "KIND_CPU in instance_group runs the model on ONNX Runtime"


def load_graph(config: ModelConfig, dtype: torch.dtype | None) -> ImportedGraph:
    """Import the model's file. Raise ConfigError naming what this engine does not have, and what to
    do instead."""
    batch = (-1,) if config.max_batch_size else ()
    sizes = {spec.name: (*batch, *spec.shape) for spec in config.inputs}
    try:
        graph = import_file(Path(config.artifact), sizes=sizes)
    except ConfigError as error:
        name = Path(config.artifact).name
        problems = [f"{config.version}/{name}: {problem}" for problem in error.problems]
        raise ConfigError([*problems[:-1], f"{problems[-1]}; {ALTERNATIVE}"]) from None
    fold_shapes(graph, samples(config))
    fuse_patterns(graph.module)
    if dtype is not None:
        retype(graph, dtype)
    # Outputs by name: a configuration may have them in another order.
    (output,) = (node for node in graph.module.graph.nodes if node.op == "output")
    output.args = (dict(zip(graph.outputs, output.args[0], strict=True)),)
    graph.module.recompile()
    return graph


def samples(config: ModelConfig) -> list[Sample]:
    """Return shapes of inputs as they may come: several batch sizes, and lengths of buckets."""
    lengths = LENGTHS if config.padding is None else tuple(config.padding.buckets)
    found: list[Sample] = []
    for number in range(max(len(ROWS), len(lengths))):
        rows, length = ROWS[number % len(ROWS)], lengths[number % len(lengths)]
        batch = (rows,) if config.max_batch_size else ()
        found.append(
            {
                spec.name: (
                    torch_type(spec.datatype),
                    (*batch, *(length if size < 0 else size for size in spec.shape)),
                )
                for spec in config.inputs
            }
        )
    return found


def torch_type(datatype: str) -> torch.dtype:
    """Return the torch type of a v2 datatype other than BYTES."""
    found: torch.dtype = getattr(
        torch, "bfloat16" if datatype == "BF16" else DATATYPES[datatype].numpy.name
    )
    return found
