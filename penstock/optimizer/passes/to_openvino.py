"""Run the same ONNX file on OpenVINO, which compiles it for this processor."""

from __future__ import annotations

from dataclasses import replace

from penstock.config import ModelConfig
from penstock.optimizer.passes import Facts, Pass, PassContext, Proposals, Step
from penstock.optimizer.passes.building import STAYS_ON_GPU, stays_on_gpu
from penstock.optimizer.plan import Plan

THREADS = "intra_op_thread_count"


class ToOpenVino(Pass):
    name = "openvino"
    stage = "compile"

    def propose(self, context: PassContext) -> Proposals:
        config = context.build.config
        if stays_on_gpu(config):
            return self.skip(STAYS_ON_GPU)
        if "openvino" not in context.machine.versions:
            return self.skip('not installed; pip install "penstock[openvino]" brings it')
        if config.backend != "onnxruntime":
            return self.skip("not an ONNX model")
        if config.device != "cpu":
            return self.skip(f"computes on CPUs, and the model is on {config.device}")
        tensors = (*config.model.inputs, *config.model.outputs)
        texts = [spec.name for spec in tensors if spec.datatype == "BYTES"]
        if texts:
            return self.skip(f"'{texts[0]}' is BYTES, which it does not take")
        return [Step(self.name, {"hint": "LATENCY"})]

    def configured(self, config: ModelConfig, step: Step, plan: Plan) -> ModelConfig:
        options = {"performance_hint": step.settings["hint"]}
        if THREADS in config.options:
            options["inference_num_threads"] = config.options[THREADS]
        return replace(config, backend="openvino", options=options)

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        if after.backend != "openvino" or "openvino" not in after.built:
            return [f"runs on '{after.backend}', expected openvino"]
        # By default it lowers the precision where the processor supports that.
        asked = {"performance_hint": step.settings["hint"], "inference_precision_hint": "f32"}
        found = [(key, after.built.get(key, "nothing"), wanted) for key, wanted in asked.items()]
        return [f"{key} is {is_now}, expected {to}" for key, is_now, to in found if is_now != to]
