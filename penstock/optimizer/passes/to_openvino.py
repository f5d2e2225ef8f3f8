"""Run the same ONNX file on OpenVINO, which compiles it for this processor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.optimizer import folders
from penstock.optimizer.candidates import Build, Skip, Stage, Step
from penstock.optimizer.facts import Facts
from penstock.optimizer.passes import BuildContext, Pass, PassContext
from penstock.optimizer.passes.building import STAYS_ON_GPU, stays_on_gpu

THREADS = {"intra_op_thread_count": "inference_num_threads"}


class ToOpenVino(Pass):
    name = "openvino"
    stage: Stage = "compile"

    def propose(self, context: PassContext) -> Sequence[Step | Skip]:
        config = context.build.config
        if stays_on_gpu(config):
            return [Skip(self.name, STAYS_ON_GPU)]
        if "openvino" not in context.machine.versions:
            return [Skip(self.name, 'not installed; pip install "penstock[openvino]" brings it')]
        if config.backend != "onnxruntime":
            return [Skip(self.name, "not an ONNX model")]
        if config.device != "cpu":
            return [Skip(self.name, f"computes on CPUs, and the model is on {config.device}")]
        tensors = (*config.model.inputs, *config.model.outputs)
        texts = [spec.name for spec in tensors if spec.datatype == "BYTES"]
        if texts:
            return [Skip(self.name, f"'{texts[0]}' is BYTES, which it does not take")]
        return [Step(self.name, {"hint": "LATENCY"})]

    def build(self, parent: Build, step: Step, target: Path, context: BuildContext) -> None:
        config = parent.config
        options = {
            new: config.options[old] for old, new in THREADS.items() if old in config.options
        }
        options["performance_hint"] = step.settings["hint"]
        folders.write(parent, replace(config, backend="openvino", options=options), target)

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        if after.backend != "openvino" or "openvino" not in after.built:
            return [f"runs on '{after.backend}', expected openvino"]
        problems: list[str] = []
        for key, wanted in (
            ("performance_hint", step.settings["hint"]),
            # By default it lowers the precision where the processor supports that.
            ("inference_precision_hint", "f32"),
        ):
            found = after.built.get(key, "nothing")
            if found != wanted:
                problems.append(f"{key} is {found}, expected {wanted}")
        return problems
