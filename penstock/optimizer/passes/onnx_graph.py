"""Rewrite the graph with the same answers: convert old operator sets, turn weights that
block folding into constants, and open a first dimension that is fixed at 1 for batching."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import BackendFailed, first_line
from penstock.optimizer import onnx_model
from penstock.optimizer.passes import Build, BuildContext, Facts, Pass, PassContext, Proposals, Step
from penstock.optimizer.passes.building import is_onnx, with_options, write_onnx
from penstock.repository.pbtxt import DEFAULT_MAX_BATCH
from penstock.types import Array, TensorSpec

if TYPE_CHECKING:
    from onnx import ModelProto

# The first with all that quantisation and fusion need, and the least for per-channel scales.
OPSET = 17
MIN_OPSET = 13
BATCH = "batch"
NUM_TRIED_ROWS = 3
# Share of the largest value: kernels for other shapes round differently.
TOLERANCE = 1e-4
# Share of denormal weights from which the processors' slow path for them matters.
MIN_DENORMAL_SHARE = 1e-3
DENORMALS = "session.set_denormal_as_zero"


class OnnxGraph(Pass):
    name = "onnx-graph"
    stage = "compile"

    def propose(self, context: PassContext) -> Proposals:
        build = context.build
        if not is_onnx(build):
            return self.skip("the model is not an ONNX file")
        model = onnx_model.read(build.artifact)
        settings: dict[str, str] = {}
        if onnx_model.opset(model) < MIN_OPSET:
            settings["opset"] = str(OPSET)
        if onnx_model.has_weights_as_inputs(model.graph):
            settings["weights"] = "constant"
        # Pre- and postprocessing functions expect one row with its leading 1.
        can_be_opened = build.config.max_batch_size == 0 and not build.config.is_processed
        values = (*onnx_model.true_inputs(model.graph), *model.graph.output)
        dims = [value.type.tensor_type.shape.dim for value in values]
        if can_be_opened and all(each and each[0].dim_value == 1 for each in dims):
            settings["batch"] = "dynamic"
        if build.config.engine == "onnxruntime" and _denormal_share(model) > MIN_DENORMAL_SHARE:
            settings["denormals"] = "zero"
        if settings:
            # If the batch cannot be opened, the other changes must not be lost.
            rest = {key: text for key, text in settings.items() if key != "batch"}
            wanted = [settings, rest] if rest and rest != settings else [settings]
            return [Step(self.name, each) for each in wanted]
        reason = "nothing to change in the file: ONNX Runtime folds and fuses the rest at load"
        return self.skip(reason)

    def build(self, parent: Build, step: Step, target: Path, context: BuildContext) -> None:
        original = onnx_model.read(parent.artifact)
        model, config = original, parent.config
        if "weights" in step.settings or "opset" in step.settings:
            model = _with_constant_weights(model)
        if "opset" in step.settings:
            model = _converted(model, int(step.settings["opset"]))
        if step.settings.get("batch") == "dynamic":
            model = _with_open_batch(model)
            config = _batched(config)
            _check_rows(original, model)
        if step.settings.get("denormals") == "zero":
            config = with_options(config, {DENORMALS: "1"})
        write_onnx(parent, onnx_model.optimised(model), target, config)

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        if before.operators and not after.operators:
            return ["the graph that was written has no operators"]
        return []


def _with_constant_weights(model: ModelProto) -> ModelProto:
    """Remove weights from the inputs: a caller could override them there, which blocks folding."""
    changed = copy.deepcopy(model)
    del changed.graph.input[:]
    changed.graph.input.extend(onnx_model.true_inputs(model.graph))
    # Before IR version 4 every weight had to be an input.
    changed.ir_version = max(changed.ir_version, 8)
    return changed


def _converted(model: ModelProto, opset: int) -> ModelProto:
    import onnx

    try:
        return onnx.version_converter.convert_version(model, opset)
    except Exception as error:  # The converter raises RuntimeError and others.
        change = f"operator set {onnx_model.opset(model)} cannot be converted to {opset}"
        raise BackendFailed(f"{change}: {first_line(error)}") from None


def _with_open_batch(model: ModelProto) -> ModelProto:
    """Make the first dimension of every input and output symbolic. Reshapes with a constant leading
    1 take that dimension from their input instead."""
    from onnx import numpy_helper

    opened = copy.deepcopy(model)
    graph = opened.graph
    for value in (*onnx_model.true_inputs(graph), *graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = BATCH
    del graph.value_info[:]
    computed = {value.name for value in onnx_model.true_inputs(graph)}
    weights = onnx_model.constants(graph)
    for node in graph.node:
        if not computed.intersection(node.input):
            continue
        computed.update(node.output)
        if node.op_type == "Reshape" and node.input[0] in computed and node.input[1] in weights:
            sizes = numpy_helper.to_array(weights[node.input[1]]).copy()
            if sizes.size and sizes[0] == 1:
                # 0 in a Reshape copies the dimension of the input.
                sizes[0] = 0
                name = f"{node.output[0]}_open_shape"
                node.input[1] = onnx_model.add_constant(graph, name, sizes)
    return opened


def _batched(config: ModelConfig) -> ModelConfig:
    def row(spec: TensorSpec) -> TensorSpec:
        return replace(spec, shape=spec.shape[1:])

    return replace(
        config,
        inputs=tuple(map(row, config.inputs)),
        outputs=tuple(map(row, config.outputs)),
        max_batch_size=DEFAULT_MAX_BATCH,
        batching=BatchPolicy(DEFAULT_MAX_BATCH, is_dynamic=True),
    )


def _check_rows(original: ModelProto, opened: ModelProto) -> None:
    """Raise BackendFailed unless rows alone and in a batch give the original's answers."""
    old, new = onnx_model.session(original), onnx_model.session(opened)
    feeds = [onnx_model.made_up(original.graph, 1, 16, seed) for seed in range(NUM_TRIED_ROWS)]
    expected = [onnx_model.run(old, each) for each in feeds]
    together = {name: np.concatenate([each[name] for each in feeds]) for name in feeds[0]}
    for rows, wanted in ((feeds[0], expected[:1]), (together, expected)):
        for name, answer in onnx_model.run(new, rows).items():
            _compare(name, answer, np.concatenate([each[name] for each in wanted]))


def _compare(name: str, answer: Array, wanted: Array) -> None:
    if answer.shape != wanted.shape:
        shapes = f"has the shape {list(answer.shape)}, expected {list(wanted.shape)}"
        problem = f"output '{name}' of {len(wanted)} rows {shapes}"
        raise BackendFailed(f"the model cannot be batched: {problem}")
    if not onnx_model.is_close(answer, wanted, TOLERANCE):
        problem = f"of a row changes when {len(wanted)} rows are computed together"
        raise BackendFailed(f"the model must not be batched: output '{name}' {problem}")


def _denormal_share(model: ModelProto) -> float:
    import onnx

    num_small, num_all = 0, 1
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            values = np.abs(onnx.numpy_helper.to_array(tensor))
            num_small += int(np.count_nonzero((values > 0) & (values < np.finfo("f4").tiny)))
            num_all += values.size
    return num_small / num_all
