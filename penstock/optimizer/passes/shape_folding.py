"""Shape-specialised constant folding: padding and other shape arithmetic that the model computes
at run time becomes constant, with the same answers for the shapes that are served.

Shapes are those that the model declares. If it leaves the image size open and all rows of the data
have the same one, a second step fixes that size; the version then accepts no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import ModelConfig
from penstock.optimizer import onnx_model
from penstock.optimizer.candidates import Candidate
from penstock.optimizer.passes import Build, BuildContext, Facts, Pass, PassContext, Proposals, Step
from penstock.optimizer.passes.building import (
    IMAGE_RANK,
    fold_shapes,
    is_onnx,
    stays_on_gpu,
    write_onnx,
)
from penstock.optimizer.simulate import fitted
from penstock.types import TensorSpec

if TYPE_CHECKING:
    from onnx import ModelProto

# Prefix of the setting that fixes an input's size; the input's name follows.
ACCEPTS = "accepts "
# Operators that compute or apply shapes; embeddings use Gather too, and stay.
SHAPE_OPERATORS = frozenset(
    {"ConstantOfShape", "Expand", "Gather", "Pad", "Range", "Shape", "Size", "Slice", "Unsqueeze"}
)


class ShapeFolding(Pass):
    name = "shape-folding"
    stage = "compile"

    def propose(self, context: PassContext) -> Proposals:
        build = context.build
        if not is_onnx(build):
            return self.skip("the model is not an ONNX file")
        if stays_on_gpu(build.config):
            return self.skip("the GPU's engine folds shapes when it loads the file")
        sizes = [size for spec in build.config.model.inputs for size in spec.shape]
        options = [Step(self.name)] if any(size > 0 for size in sizes) else []
        if agreed := _agreed_sizes(context):
            options.append(Step(self.name, agreed))
        if not options:
            return self.skip("no input has a known size beside the batch")
        if not num_shape_nodes(context.facts.operators):
            return self.skip("no operator computes shapes")
        return self._worthwhile(build, options)

    def _worthwhile(self, build: Build, options: Sequence[Step]) -> Proposals:
        """Return the steps that leave ONNX Runtime with fewer operators that compute shapes."""
        model = onnx_model.read(build.artifact)
        num_left = _num_left(model)
        found: Proposals = []
        for step in options:
            num_after = _num_left(fold_shapes(model, _accepting(build.config, step)))
            if num_after < num_left:
                found.append(step)
                num_left = num_after
        reason = "nothing to fold beyond what ONNX Runtime folds when it loads the model"
        return found or self.skip(reason)

    def build(self, parent: Build, step: Step, target: Path, context: BuildContext) -> None:
        config = _accepting(parent.config, step)
        model = fold_shapes(onnx_model.read(parent.artifact), config)
        write_onnx(parent, onnx_model.optimised(model), target, config)

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        """Compare counts after the runtime's optimisation where known, else those in the file."""
        found = [before.optimised_operators, after.optimised_operators]
        if not all(found):
            found = [before.operators, after.operators]
        was, became = map(num_shape_nodes, found)
        return [f"{became} operators compute shapes, as many as before"] if became >= was else []


def num_shape_nodes(operators: Mapping[str, int]) -> int:
    """Return how many of these nodes (by operator type) compute or apply shapes."""
    return sum(operators.get(name, 0) for name in SHAPE_OPERATORS)


def narrowing(candidate: Candidate) -> str:
    """Describe the sizes to which a candidate restricts inputs that the original leaves open."""
    steps = [step.settings for step in candidate.steps if step.pass_name == ShapeFolding.name]
    sizes = [each for settings in steps for each in settings.items()]
    return ", ".join(f"'{key.removeprefix(ACCEPTS)}' {size}" for key, size in sizes)


def _num_left(model: ModelProto) -> int:
    """Count the operators that compute shapes, after ONNX Runtime's own optimisation."""
    nodes = onnx_model.nodes(onnx_model.optimised(model).graph)
    return num_shape_nodes(Counter(node.op_type for node in nodes))


def _agreed_sizes(context: PassContext) -> dict[str, str]:
    """Return the image sizes that the model leaves open and all rows of the data share, as
    settings; empty without any, or if another input is open too."""
    config = context.build.config
    is_open = [spec for spec in config.inputs if not spec.is_fixed]
    if context.examples is None or config.is_processed or config.padding is not None:
        return {}
    if any(len(spec.shape) < IMAGE_RANK or spec.datatype == "BYTES" for spec in is_open):
        return {}
    agreed: dict[str, str] = {}
    rows = fitted(context.examples.rows, config)
    for spec in is_open:
        sizes = {row[spec.name].shape for row in rows if spec.name in row}
        if len(sizes) != 1:
            return {}
        agreed[f"{ACCEPTS}{spec.name}"] = "x".join(map(str, sizes.pop()))
    return agreed


def _accepting(config: ModelConfig, step: Step) -> ModelConfig:
    def fixed(spec: TensorSpec) -> TensorSpec:
        size = step.settings.get(f"{ACCEPTS}{spec.name}")
        return spec if size is None else replace(spec, shape=tuple(map(int, size.split("x"))))

    return replace(config, inputs=tuple(map(fixed, config.inputs)))
