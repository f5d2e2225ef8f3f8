"""The steps of the sequence: one file each, and what they all are.

A pass proposes steps for the model as it stands, or says why it has none; builds what it proposed;
and says from what was built whether it is what was asked for. It measures nothing and decides
nothing about its worth: that is the search's business, and the same for all passes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from penstock.optimizer.candidates import Build, Skip, Stage, Step

if TYPE_CHECKING:
    from penstock.optimizer.examples import Examples
    from penstock.optimizer.facts import Facts
    from penstock.optimizer.machine import Machine
    from penstock.optimizer.plan import Plan
    from penstock.optimizer.simulate import TimeTable
    from penstock.types import Array

# In the order of the sequence: cheap and lossless first. Module and class by name.
PASSES: Mapping[str, tuple[str, str]] = {
    "onnx-export": ("penstock.optimizer.passes.onnx_export", "OnnxExport"),
    "onnx-graph": ("penstock.optimizer.passes.onnx_graph", "OnnxGraph"),
    "transformer-fusion": ("penstock.optimizer.passes.transformer_fusion", "TransformerFusion"),
    "shape-folding": ("penstock.optimizer.passes.shape_folding", "ShapeFolding"),
    "openvino": ("penstock.optimizer.passes.to_openvino", "ToOpenVino"),
    "conv-fusion": ("penstock.optimizer.passes.conv_fusion", "ConvFusion"),
    "packing": ("penstock.optimizer.passes.packing", "Packing"),
    "cuda-graphs": ("penstock.optimizer.passes.cuda_graphs", "CudaGraphs"),
    "torch-compile": ("penstock.optimizer.passes.torch_compile", "TorchCompile"),
    "half": ("penstock.optimizer.passes.half", "Half"),
    "int8-dynamic": ("penstock.optimizer.passes.int8_dynamic", "Int8Dynamic"),
    "int8-static": ("penstock.optimizer.passes.int8_static", "Int8Static"),
    "fp8": ("penstock.optimizer.passes.fp8", "Fp8"),
    "batching": ("penstock.optimizer.passes.batching", "Batching"),
    "instances": ("penstock.optimizer.passes.instances", "Instances"),
    "memory": ("penstock.optimizer.passes.memory", "Memory"),
}


@dataclass(frozen=True, slots=True)
class Situation:
    """What a pass may look at when it proposes: the model as it stands, the machine, the wishes."""

    plan: Plan
    machine: Machine
    build: Build
    facts: Facts
    # None without data: inputs are then drawn from the signature, and nothing can be calibrated.
    examples: Examples | None
    # How long batches of the model as it stands take, by (instances, threads); empty until known.
    times: Mapping[tuple[int, int], TimeTable]
    # What requests are made of: the examples, or inputs drawn from the signature.
    rows: Sequence[Mapping[str, Array]] = ()


@dataclass(frozen=True, slots=True)
class Workshop:
    """What a pass may use when it builds."""

    plan: Plan
    machine: Machine
    examples: Examples | None
    # For what is worth keeping between builds and runs, such as calibration ranges.
    cache: Path
    # How long a compiler may take that is asked now; None: as long as it takes.
    compile_timeout_s: Callable[[], float | None] = lambda: None
    # Called between the pieces of long work; raises where the time for it is up.
    check_time: Callable[[], None] = lambda: None


class Pass(Protocol):
    name: str
    stage: Stage
    # True when answers may become other ones, so that the accuracy gate has to be passed. False:
    # they may differ by rounding only, which numerics check.
    changes_answers: bool
    # True: only config.pbtxt is written anew, the model's files stay as they are.
    is_config_only: bool
    # True: its setting `keep` names layers that stay as they are, so that those which do not bear
    # the pass can be left out of it.
    has_layers: bool

    def propose(self, situation: Situation) -> Sequence[Step | Skip]: ...

    def build(self, parent: Build, step: Step, target: Path, workshop: Workshop) -> None:
        """Write a model's folder (config.pbtxt and version 1) at `target`, from the parent's.
        Raises PenstockError or what the library raises: the search keeps it as the reason."""

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        """In what the build is not what the step asked for; empty when it is. Pure."""


def sequence() -> list[Pass]:
    """All of them, in order."""
    return [find(name) for name in PASSES]


def find(name: str) -> Pass:
    module, class_name = PASSES[name]
    made: Pass = getattr(importlib.import_module(module), class_name)()
    return made
