"""The optimisation passes, one file each, and the protocol they implement.

A pass proposes steps for the current model, or says why it has none; builds a step; and checks
that the build is what the step asked for. It measures nothing and does not decide whether a step
pays: the search does that, in the same way for all passes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from penstock.config import ModelConfig
from penstock.optimizer import folders
from penstock.optimizer.candidates import Build, Skip, Stage, Step
from penstock.optimizer.facts import Facts

if TYPE_CHECKING:
    from penstock.optimizer.examples import Examples
    from penstock.optimizer.machine import Machine
    from penstock.optimizer.plan import Plan
    from penstock.optimizer.results import FallbackLayer
    from penstock.optimizer.simulate import TimeTable
    from penstock.types import Array

# With what is defined here, all that a pass needs to know of candidates.
__all__ = ["PASSES", "Build", "BuildContext", "Facts", "LayeredPass", "Pass", "PassContext"]
__all__ += ["Proposals", "Skip", "Step", "find", "sequence"]

Proposals = list[Step | Skip]

# In search order: cheap and lossless first. Module and class by name.
PASSES: Mapping[str, tuple[str, str]] = {
    "onnx-export": ("penstock.optimizer.passes.onnx_export", "OnnxExport"),
    "onnx-graph": ("penstock.optimizer.passes.onnx_graph", "OnnxGraph"),
    "transformer-fusion": ("penstock.optimizer.passes.transformer_fusion", "TransformerFusion"),
    "shape-folding": ("penstock.optimizer.passes.shape_folding", "ShapeFolding"),
    "openvino": ("penstock.optimizer.passes.to_openvino", "ToOpenVino"),
    "onnxruntime-gpu": ("penstock.optimizer.passes.onnxruntime_gpu", "OnnxRuntimeGpu"),
    "conv-fusion": ("penstock.optimizer.passes.conv_fusion", "ConvFusion"),
    "packing": ("penstock.optimizer.passes.packing", "SequencePacking"),
    "cuda-graphs": ("penstock.optimizer.passes.cuda_graphs", "CudaGraphs"),
    "torch-compile": ("penstock.optimizer.passes.torch_compile", "TorchCompile"),
    "half": ("penstock.optimizer.passes.half", "Half"),
    "int8-dynamic": ("penstock.optimizer.passes.int8_dynamic", "Int8Dynamic"),
    "int8-static": ("penstock.optimizer.passes.int8_static", "Int8Static"),
    "fp8": ("penstock.optimizer.passes.fp8", "Fp8"),
    "weight-only": ("penstock.optimizer.passes.weight_only", "WeightOnly"),
    "tensorrt": ("penstock.optimizer.passes.to_tensorrt", "ToTensorRt"),
    "batching": ("penstock.optimizer.passes.batching", "Batching"),
    "instances": ("penstock.optimizer.passes.instances", "Instances"),
    "memory": ("penstock.optimizer.passes.memory", "LessMemory"),
}


@dataclass(frozen=True, slots=True)
class PassContext:
    """Inputs of `propose`: the current model, the machine and the user's plan."""

    plan: Plan
    machine: Machine
    build: Build
    facts: Facts
    # None without data: then inputs are generated from the signature, and calibration is off.
    examples: Examples | None
    # Batch times of the current model by (instances, threads); empty until measured.
    times: Mapping[tuple[int, int], TimeTable]
    # Inputs of requests: the examples, or inputs generated from the signature.
    rows: Sequence[Mapping[str, Array]] = ()


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Inputs of `build`."""

    plan: Plan
    machine: Machine
    examples: Examples | None
    # Folder for data that builds and runs can share, such as calibration ranges.
    cache: Path
    # Seconds that a compiler started now may take; None: no limit.
    compile_timeout_s: Callable[[], float | None] = lambda: None
    # Called between parts of long work; raises if the time for it is up.
    check_time: Callable[[], None] = lambda: None


class Pass(Protocol):
    name: str
    stage: Stage
    # True: the accuracy gate must pass. False: answers change only by rounding.
    changes_answers: bool = False
    # True: writes only config.pbtxt; the model's files are unchanged.
    is_config_only: bool = False
    # Of a layered pass. False: its steps are variants of one speed. True: each is timed by itself.
    steps_differ: bool = False
    # True: another engine or compiler, which starts again from the model's own operators, however
    # far other passes have come; it is tried on parents that are not the best, too.
    starts_over: bool = False
    # Seconds that a step takes on a GPU beyond loading and timing it, to tune or compile kernels:
    # of one stage, passes that take longer come later.
    gpu_seconds: float = 0.0
    # True: it has no steps on a CPU.
    is_for_gpus: bool = False

    def propose(self, context: PassContext) -> Proposals: ...

    def skip(self, reason: str, step: Step | None = None) -> Proposals:
        """Return the only proposal of a pass that has nothing to try."""
        return [Skip(self.name, reason, step)]

    def configured(self, config: ModelConfig, step: Step, plan: Plan) -> ModelConfig:
        """Return the configuration after the step, where that is all it changes."""
        return config

    def build(self, parent: Build, step: Step, target: Path, context: BuildContext) -> None:
        """Write a model folder (config.pbtxt and version 1) at `target`, from the parent's. May
        raise PenstockError or the library's own errors: the search records them as the reason."""
        folders.write(parent, self.configured(parent.config, step, context.plan), target)

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        """Return how the build differs from what the step asked for; empty if it does not. Pure."""


@runtime_checkable
class LayeredPass(Pass, Protocol):
    """A pass whose setting `keep` names layers to leave in float, so that sensitive ones can be."""

    def fall_back(
        self,
        parent: Build,
        step: Step,
        context: BuildContext,
        passes: Callable[[Step], bool],
        seconds: Mapping[str, float] | None = None,
    ) -> tuple[Step | None, list[FallbackLayer]]:
        """Return the step with the fewest layers in float for which `passes`, which builds and
        judges it, returns True, and those layers. If no choice that was tried passes: no step, and
        the layers that lose most. `seconds`, where measured: time of a layer in float, by name."""


def sequence() -> list[Pass]:
    return [find(name) for name in PASSES]


def find(name: str) -> Pass:
    module, class_name = PASSES[name]
    made: Pass = getattr(importlib.import_module(module), class_name)()
    return made
