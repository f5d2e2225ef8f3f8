"""Dynamic INT8 quantisation: ranges are computed for every batch. It needs no calibration, but adds
a pass over each activation before its matmul. For models that are mostly MatMul."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import penstock.optimizer.passes.building as building
from penstock.optimizer import onnx_model
from penstock.optimizer.passes import Build, BuildContext, Facts, Pass, PassContext, Proposals, Step

if TYPE_CHECKING:
    from onnx import ModelProto

# The quantiser turns Gemm into MatMul and Add; Attention contains the matmuls of its projections.
OPERATORS = ("MatMul", "Gemm", "Attention")
# One range for the whole batch: other rows change a row's answers by up to this share of the
# largest value. The server's check at load rejects more.
TOLERANCE = 0.25


class Int8Dynamic(Pass):
    name = "int8-dynamic"
    stage = "quantise"
    changes_answers = True

    def propose(self, context: PassContext) -> Proposals:
        facts = context.facts
        few_bits = {} if context.machine.has_int8 else {"range": "7 bits"}
        step = Step(self.name, {"weights": "per-channel", **few_bits})
        # Attention contains its weights, and is not counted among the layers that can gain.
        is_lone_attention = "Attention" in facts.operators and not facts.quantised
        if building.stays_on_gpu(context.build.config):
            return self.skip(building.STAYS_ON_GPU)
        if (reason := building.reason_not_to_quantise(context)) and not is_lone_attention:
            return self.skip(reason)
        if context.build.config.engine != "onnxruntime":
            return self.skip("only ONNX Runtime has operators with ranges by batch")
        if facts.weight_bytes.get("FP16", 0) > facts.weight_bytes.get("FP32", 0):
            # The quantiser would leave all of them unchanged.
            return self.skip("only weights in FP32 are quantised, and these are FP16")
        if facts.operators.get("Conv") and not facts.is_transformer:
            # Reported as eight times slower: onnxruntime#6732.
            return self.skip("ranges by batch make convolutions slower than floats", step)
        if few_bits and not context.plan.is_exhaustive:
            return self.skip(building.NO_INT8, step)
        return [step]

    def build(self, parent: Build, step: Step, target: Path, context: BuildContext) -> None:
        model = _quantised(onnx_model.prepared(onnx_model.read(parent.artifact)), step)
        config = building.without_slow_fusion(building.tolerating(parent.config, TOLERANCE))
        building.write_onnx(parent, model, target, config)

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        return building.check_quantised(before, after)


def _quantised(ready: ModelProto, step: Step) -> ModelProto:
    from onnx import TensorProto
    from onnxruntime.quantization import QuantizationMode, QuantType
    from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer

    weights = onnx_model.constants(ready.graph)
    nodes = [node for node in ready.graph.node if node.op_type in OPERATORS]
    chosen = [n.name for n in nodes if n.op_type == "Attention" or onnx_model.can_gain(n, weights)]
    quantizer = ONNXQuantizer(
        ready,
        per_channel=step.settings.get("weights") == "per-channel",
        reduce_range="range" in step.settings,
        mode=QuantizationMode.IntegerOps,
        static=False,
        weight_qType=QuantType.QInt8,
        activation_qType=QuantType.QUInt8,
        tensors_range=None,
        nodes_to_quantize=chosen,
        nodes_to_exclude=[],
        op_types_to_quantize=list(OPERATORS),
        # ONNX cannot infer types behind a fused operator.
        extra_options={"MatMulConstBOnly": True, "DefaultTensorType": TensorProto.FLOAT},
    )
    with building.quiet_log():
        quantizer.quantize_model()
    model: ModelProto = quantizer.model.model
    return model
