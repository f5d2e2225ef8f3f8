"""Static INT8 quantisation: Q/DQ nodes with calibrated ranges around the operators that gain from
them, so that ONNX Runtime and OpenVINO compute these in INT8. Three calibration methods are tried,
because no rule predicts the best one."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import penstock.optimizer.passes.building as building
from penstock.errors import BackendFailed, ConfigError
from penstock.optimizer import calibration, fallback, folders, onnx_model
from penstock.optimizer.calibration import METHODS, Calibration, Method, Range
from penstock.optimizer.candidates import Build, Step
from penstock.optimizer.numerics import Answers
from penstock.optimizer.passes import BuildContext, Facts, LayeredPass, PassContext, Proposals
from penstock.optimizer.passes.building import stays_on_gpu
from penstock.optimizer.results import FallbackLayer
from penstock.types import Array

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto


# Matmuls and convolutions, and the operators between them that can pass INT8 on. In transformers
# the operators between are better in float.
CNN_OPERATORS = (
    *("Conv", "Gemm", "MatMul", "Relu", "Clip", "Add", "MaxPool", "AveragePool"),
    *("GlobalAveragePool", "Concat", "Reshape", "Flatten", "Transpose"),
)
TRANSFORMER_OPERATORS = ("MatMul", "Gemm")
# On a GPU a layer takes INT8 and computes what follows it, up to the next layer, in its epilogue.
# So only inputs are quantised, of layers and of the sums that end a residual block.
GPU_OPERATORS = ("Conv", "Gemm", "MatMul", "Add")
# Activations that its layers compute, and those that SiLU and hard-swish multiply a result by.
GATES = ("Sigmoid", "HardSigmoid")
ACTIVATIONS = (*GATES, "Relu", "Clip", "LeakyRelu", "HardSwish", "Gelu", "Swish")
# Its kernels read rows of matrices from multiples of so many bytes.
ROW_BYTES = 16
MIN_OPSET = 13
SEPARATOR = ","
# Option of the PyTorch engine for what stays in float.
DTYPE = "penstock.dtype"


@dataclass(frozen=True, slots=True)
class Scheme:
    """Settings of a step."""

    method: Method
    per_channel: bool
    # 7-bit weights, for processors whose INT8 multiply-add saturates.
    reduce_range: bool
    is_transformer: bool
    keep: tuple[str, ...] = ()
    is_gpu: bool = False

    @property
    def operators(self) -> tuple[str, ...]:
        if self.is_gpu and not self.is_transformer:
            return GPU_OPERATORS
        return TRANSFORMER_OPERATORS if self.is_transformer else CNN_OPERATORS


class Int8Static(LayeredPass):
    name = "int8-static"
    stage = "quantise"
    changes_answers = True

    def propose(self, context: PassContext) -> Proposals:
        steps = self._steps(context)
        config = context.build.config
        reason = building.reason_not_to_quantise(context)
        if reason and not building.can_export(config):
            return self.skip(reason)
        if context.examples is None or not context.examples.split.calibration:
            return self.skip("there are no examples to calibrate with", steps[0])
        if stays_on_gpu(config):
            return [*steps]
        if not context.machine.has_int8 and not context.plan.is_exhaustive:
            slow = "without which they are hardly faster than floats"
            return self.skip(f"{building.NO_INT8}, {slow}", steps[0])
        return [*steps]

    def _steps(self, context: PassContext) -> list[Step]:
        shared = {"kind": "transformer" if context.facts.is_transformer else "cnn"}
        if stays_on_gpu(context.build.config):
            shared["device"] = "gpu"
        elif not context.machine.has_int8:
            shared["range"] = "7 bits"
        weights = ("per-channel", "per-tensor") if context.plan.is_exhaustive else ("per-channel",)
        settings = [{"calibrator": name, "weights": each} for each in weights for name in METHODS]
        return [Step(self.name, {**each, **shared}) for each in settings]

    def build(self, parent: Build, step: Step, target: Path, context: BuildContext) -> None:
        if context.examples is None:
            raise ConfigError(["int8-static: there are no examples to calibrate with"])
        scheme = scheme_of(step)
        ready = prepared(parent, context.cache)
        known = calibrate(ready, scheme, parent, context)
        model = quantised(ready, known.ranges(scheme.method), scheme)
        config = parent.config
        if scheme.is_gpu:
            config = building.with_options(config, {DTYPE: config.options.get(DTYPE, "fp16")})
        elif scheme.is_transformer:
            config = building.without_slow_fusion(config)
        if scheme.keep and not scheme.is_gpu:
            config = building.with_floats_kept(config)
        building.write_onnx(parent, model, target, config)
        path = target / folders.VERSION / calibration.FILE
        # It may be a link to the parent's file.
        path.unlink(missing_ok=True)
        path.write_text(json.dumps(known.record(scheme.method), indent=1))

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        scheme = scheme_of(step)
        if scheme.is_gpu:
            return check_on_gpu(after)
        return building.check_quantised(before, after, num_kept=len(scheme.keep))

    def fall_back(
        self,
        parent: Build,
        step: Step,
        context: BuildContext,
        passes: Callable[[Step], bool],
        seconds: Mapping[str, float] | None = None,
    ) -> tuple[Step | None, list[FallbackLayer]]:
        if context.examples is None:
            raise ConfigError(["int8-static: there are no examples to compare layers with"])
        scheme = replace(scheme_of(step), keep=())
        ready = prepared(parent, context.cache)
        ranges = calibrate(ready, scheme, parent, context).ranges(scheme.method)
        indices = context.examples.split.choice
        rows = calibration.model_rows(parent.config, context.examples, indices)
        batches = list(calibration.feeds(ready, parent.config.model, rows))
        is_batched = parent.config.max_batch_size > 0
        trial = LayerTrial(ready, ranges, scheme, batches, is_batched).on_most_different()

        def answers(keep: tuple[str, ...]) -> Answers:
            context.check_time()
            return trial.answers(keep)

        ranked = fallback.sensitivity(trial.layers(seconds), answers, trial.original())
        kept = fallback.find_fallback(ranked, lambda keep: passes(with_kept(step, keep)))
        if kept is None:
            return None, fallback.most_harmful(ranked)
        names = [name for effect in kept for name in effect.group.names]
        return with_kept(step, names), fallback.described(kept, ranked)


def scheme_of(step: Step) -> Scheme:
    settings = step.settings
    method = settings.get("calibrator", "minmax")
    if method not in METHODS:
        raise ConfigError([f"calibrator: '{method}' is not one of {', '.join(METHODS)}"])
    return Scheme(
        method=method,
        per_channel=settings.get("weights", "per-channel") == "per-channel",
        reduce_range="range" in settings,
        is_transformer=settings.get("kind") == "transformer",
        keep=tuple(filter(None, settings.get("keep", "").split(SEPARATOR))),
        is_gpu=settings.get("device") == "gpu",
    )


def with_kept(step: Step, keep: Sequence[str]) -> Step:
    settings = {key: text for key, text in step.settings.items() if key != "keep"}
    if keep:
        settings["keep"] = SEPARATOR.join(keep)
    return Step(step.pass_name, settings)


def prepared(parent: Build, cache: Path) -> ModelProto:
    """Return the graph to quantise; layer names refer to this one."""
    model = onnx_model.read(building.onnx_artifact(parent, cache))
    if onnx_model.opset(model) < MIN_OPSET:
        expected = f"expected at least {MIN_OPSET} (the pass onnx-graph converts it)"
        opset = onnx_model.opset(model)
        raise BackendFailed(f"operator set {opset} has no scales by channel; {expected}")
    # Fold computed padding: between two convolutions it would interrupt the INT8 data flow.
    ready = onnx_model.prepared(building.fold_shapes(model, parent.config))
    _widen_biases(ready)
    return ready


def _widen_biases(ready: ModelProto) -> None:
    """Give every Gemm with one bias for all rows the bias that quantisers expect: one number for
    each column, and no factor."""
    from onnx import numpy_helper

    weights = onnx_model.constants(ready.graph)
    for node in ready.graph.node:
        if node.op_type != "Gemm" or not _has_plain_bias(node, weights):
            continue
        factor = onnx_model.attribute(node, "beta", 1.0)
        kept = [each for each in node.attribute if each.name != "beta"]
        del node.attribute[:]
        node.attribute.extend(kept)
        if len(node.input) < 3 or not node.input[2]:
            continue
        num_columns = onnx_model.product_sides(node, weights[node.input[1]].dims)[1]
        bias = numpy_helper.to_array(weights[node.input[2]])
        if bias.shape == (num_columns,) and factor == 1:
            continue
        wide = np.broadcast_to(bias.reshape(-1) * bias.dtype.type(factor), num_columns)
        name = f"{node.name}_bias_by_column"
        node.input[2] = onnx_model.add_constant(ready.graph, name, np.ascontiguousarray(wide))


def _has_plain_bias(node: NodeProto, weights: Mapping[str, TensorProto]) -> bool:
    """Return whether a Gemm has constant weights, and no bias or a constant one for all rows."""
    if len(node.input) < 3 or not node.input[2]:
        return node.input[1] in weights
    if node.input[1] not in weights or node.input[2] not in weights:
        return False
    dims = weights[node.input[2]].dims
    return all(size == 1 for size in dims[:-1])


def calibrate(
    ready: ModelProto, scheme: Scheme, parent: Build, context: BuildContext
) -> Calibration:
    assert context.examples is not None
    names = onnx_model.float_tensors(ready.graph, scheme.operators)
    indices = context.examples.split.calibration
    rows = calibration.model_rows(parent.config, context.examples, indices)
    return calibration.calibrate(
        ready, names, parent.config.model, rows, context.cache, context.check_time
    )


def check_on_gpu(after: Facts) -> list[str]:
    """Check that the engine computes layers in INT8."""
    found = after.built.get("fusion", "")
    is_so = re.search(r"\b[1-9]\d* layers in INT8", found)
    return [] if is_so else [f"no layer computes in INT8: {found or 'nothing is fused'}"]


def layers(ready: ModelProto, scheme: Scheme | None = None) -> list[NodeProto]:
    """Return the layers that INT8 can make faster."""
    weights = onnx_model.constants(ready.graph)
    gain = [
        node
        for node in ready.graph.node
        if onnx_model.can_gain(node, weights)
        and (node.op_type != "Gemm" or _has_plain_bias(node, weights))
    ]
    if scheme is None or not scheme.is_gpu:
        return gain
    return [node for node in gain if _suits_gpu(node, weights[node.input[1]].dims)]


def _suits_gpu(node: NodeProto, dims: Sequence[int]) -> bool:
    """Return whether a GPU's INT8 kernels take the layer: not depthwise nor dilated, of images, and
    rows of a matmul in blocks."""
    if node.op_type != "Conv":
        return onnx_model.product_sides(node, dims)[0] % ROW_BYTES == 0
    is_image = len(dims) == len(("out", "in", "height", "width"))
    is_plain = onnx_model.attribute(node, "group", 1) == 1
    return is_image and is_plain and set(onnx_model.attribute(node, "dilations", [1])) == {1}


def quantised(ready: ModelProto, ranges: Mapping[str, Range], scheme: Scheme) -> ModelProto:
    """Return a copy of the graph with Q/DQ nodes, except around layers in `scheme.keep`."""
    from onnx import TensorProto
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.calibrate import CalibrationMethod, TensorData, TensorsData
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

    names = {node.name for node in layers(ready, scheme)}
    if unknown := sorted(set(scheme.keep) - names):
        raise ConfigError([f"keep: there is no layer '{each}'" for each in unknown])
    known = {
        name: TensorData(lowest=np.array(low, np.float32), highest=np.array(high, np.float32))
        for name, (low, high) in ranges.items()
    }
    # ONNX cannot infer types behind a fused operator.
    options: dict[str, object] = {"DefaultTensorType": TensorProto.FLOAT}
    options |= {"MatMulConstBOnly": True, "WeightSymmetric": True}
    if scheme.is_gpu:
        options |= {"ActivationSymmetric": True}
    if scheme.is_transformer or scheme.is_gpu:
        # The next operator computes in float, so quantising the output would gain nothing.
        options["OpTypesToExcludeOutputQuantization"] = list(scheme.operators)
    quantizer = QDQQuantizer(
        copy.deepcopy(ready),
        per_channel=scheme.per_channel,
        reduce_range=scheme.reduce_range,
        weight_qType=QuantType.QInt8,
        activation_qType=QuantType.QInt8 if scheme.is_gpu else QuantType.QUInt8,
        tensors_range=TensorsData(CalibrationMethod.MinMax, known),
        nodes_to_quantize=_to_quantise(ready, names - set(scheme.keep), scheme),
        nodes_to_exclude=[],
        op_types_to_quantize=list(scheme.operators),
        extra_options=options,
    )
    with building.quiet_log():
        quantizer.quantize_model()
    # New nodes are at the end, which ONNX Runtime takes, but ONNX does not allow.
    quantizer.model.topological_sort()
    model: ModelProto = quantizer.model.model
    if scheme.is_gpu:
        _keep_sums_exact(model)
    return model


def _keep_sums_exact(model: ModelProto) -> None:
    """Let a layer add the residual to its own sums: take the rounding between them out."""
    makers = {name: node for node in model.graph.node for name in node.output}
    readers = Counter(name for node in model.graph.node for name in node.input)
    readers.update(value.name for value in model.graph.output)
    results = _layer_results(model, lambda node: node.op_type in onnx_model.WEIGHTED)
    removed = []
    for node in model.graph.node:
        if node.op_type != "Add":
            continue
        for position, name in enumerate(node.input):
            undo = makers.get(name)
            rounding = undo and makers.get(undo.input[0])
            if rounding is None or undo is None or rounding.op_type != "QuantizeLinear":
                continue
            is_alone = readers[name] == readers[undo.input[0]] == readers[rounding.input[0]] == 1
            if is_alone and rounding.input[0] in results:
                node.input[position] = rounding.input[0]
                removed += [rounding, undo]
                break
    for node in removed:
        model.graph.node.remove(node)


def _layer_results(model: ModelProto, is_layer: Callable[[NodeProto], bool]) -> set[str]:
    """Return what layers give, before and after an activation that they compute themselves."""
    found: set[str] = set()
    gates: dict[str, str] = {}
    for node in model.graph.node:
        if is_layer(node):
            found.update(node.output)
        elif node.op_type in GATES and node.input[0] in found:
            gates[node.output[0]] = node.input[0]
        if node.op_type in ACTIVATIONS and node.input[0] in found:
            found.update(node.output)
        elif node.op_type == "Mul" and len(node.input) == 2:
            one, other = node.input
            if gates.get(other) == one or gates.get(one) == other:
                found.update(node.output)
    return found


def _to_quantise(ready: ModelProto, products: Collection[str], scheme: Scheme) -> list[str]:
    """Return the matmuls and convolutions, and the operators between whose inputs are all INT8."""
    weights = onnx_model.constants(ready.graph)
    chosen = set(products)
    if scheme.is_gpu:
        # Sums of a layer's result and another tensor.
        sums = _layer_results(ready, lambda node: node.name in products)
        for node in ready.graph.node:
            is_tensor = all(name not in weights for name in node.input)
            if node.op_type == "Add" and is_tensor and sums & set(node.input):
                chosen.add(node.name)
        return [node.name for node in ready.graph.node if node.name in chosen]
    makers = {name: node for node in ready.graph.node for name in node.output}
    for node in ready.graph.node:
        if node.op_type in onnx_model.WEIGHTED or node.op_type not in scheme.operators:
            continue
        sources = [makers.get(name) for name in node.input if name and name not in weights]
        if sources and all(each is not None and each.name in chosen for each in sources):
            chosen.add(node.name)
    return [node.name for node in ready.graph.node if node.name in chosen]


@dataclass(frozen=True, slots=True)
class LayerTrial:
    """The model with any of its layers in float, run in this process on some rows."""

    ready: ModelProto
    ranges: Mapping[str, Range]
    scheme: Scheme
    batches: Sequence[Mapping[str, Array]]
    # The first dimension of all inputs and outputs is the batch.
    is_batched: bool = False

    def original(self) -> Answers:
        return self._answers(self.ready)

    def answers(self, keep: tuple[str, ...]) -> Answers:
        return self._answers(quantised(self.ready, self.ranges, replace(self.scheme, keep=keep)))

    def layers(self, seconds: Mapping[str, float] | None) -> list[fallback.WeightedLayer]:
        nodes = layers(self.ready, self.scheme)
        known = [(node.name, node.op_type, _flops(self.ready, node)) for node in nodes]
        return fallback.with_costs(known, seconds)

    def on_most_different(self) -> LayerTrial:
        """Return the trial on only the rows where INT8 and float disagree most."""
        if not self.is_batched:
            chosen = fallback.most_different(self.original(), self.answers(()))
            return replace(self, batches=[self.batches[index] for index in chosen])
        rows = [row for batch in self.batches for row in _rows(batch)]
        pairs = self.original(), self.answers(())
        one, other = ([row for batch in each for row in _rows(batch)] for each in pairs)
        chosen = fallback.most_different(one, other)
        # Rows of equal shapes were in one batch.
        groups: dict[tuple[object, ...], list[Mapping[str, Array]]] = {}
        for index in sorted(chosen):
            shapes = tuple((name, array.shape) for name, array in rows[index].items())
            groups.setdefault(shapes, []).append(rows[index])
        size = max(len(array) for batch in self.batches for array in batch.values())
        parts = [
            group[start : start + size]
            for group in groups.values()
            for start in range(0, len(group), size)
        ]
        batches = [
            {name: np.concatenate([row[name] for row in part]) for name in part[0]}
            for part in parts
        ]
        return replace(self, batches=batches)

    def _answers(self, model: ModelProto) -> Answers:
        loaded = onnx_model.session(model, entries={building.LEFT_OUT: building.FLOATS_TO_BYTES})
        return [onnx_model.run(loaded, batch) for batch in self.batches]


def _rows(batch: Mapping[str, Array]) -> list[dict[str, Array]]:
    """Return each row of a batch as a batch of one."""
    count = min(len(array) for array in batch.values())
    return [{name: array[n : n + 1] for name, array in batch.items()} for n in range(count)]


def _flops(ready: ModelProto, node: NodeProto) -> float:
    """Return the FLOP per position, times height x width of the output for convolutions."""
    weight = onnx_model.constants(ready.graph)[node.input[1]]
    num_positions = 1
    for value in ready.graph.value_info:
        if node.op_type == "Conv" and value.name == node.output[0]:
            sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim][2:]
            num_positions = max(1, int(np.prod(sizes)))
    return 2.0 * onnx_model.num_values(weight) * num_positions
