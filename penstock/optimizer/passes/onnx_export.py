"""Export PyTorch to ONNX for ONNX Runtime: the same answers without Python between operators."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.optimizer import folders, torch_source
from penstock.optimizer.passes import Build, BuildContext, Facts, Pass, PassContext, Proposals, Step
from penstock.optimizer.passes.building import STAYS_ON_GPU, stays_on_gpu
from penstock.repository import pt2_file

# Options that mean the same in both backends.
KEPT = ("intra_op_thread_count", "inter_op_thread_count")


class OnnxExport(Pass):
    name = "onnx-export"
    stage = "compile"

    def propose(self, context: PassContext) -> Proposals:
        build = context.build
        if build.config.backend != "pytorch":
            return self.skip("not a PyTorch model")
        if stays_on_gpu(build.config):
            return self.skip(STAYS_ON_GPU)
        if pt2_file.is_compiled(build.artifact):
            return self.skip("an AOTInductor package is machine code already")
        if not {"onnxruntime", "onnxruntime-gpu"} & context.machine.versions.keys():
            return self.skip("onnxruntime is not installed")
        return [Step(self.name)]

    def build(self, parent: Build, step: Step, target: Path, context: BuildContext) -> None:
        from penstock.backends.pytorch import load_module
        from penstock.optimizer.torch_export import to_onnx

        config = parent.config
        # In the precision of the weights: lower precision is a step of its own.
        plain = {k: v for k, v in config.options.items() if k == "penstock.factory"}
        version = folders.carry_over(parent, target, torch_source.own_files(parent.artifact))
        loaded = load_module(replace(config.model, options=plain, device="cpu"))
        try:
            to_onnx(loaded, config.model, version / "model.onnx")
        finally:
            loaded.close()
        options = {key: text for key, text in config.options.items() if key in KEPT}
        changed = replace(config, backend="onnxruntime", options=options, file="")
        folders.write_config(target, changed.on(["cpu"] * config.num_instances))

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        if after.backend != "onnxruntime":
            return [f"runs on '{after.backend}', expected onnxruntime"]
        if not after.operators:
            return ["the exported graph is empty"]
        if before.batching_problem == "" and after.batching_problem:
            return [f"rows may not share a batch any more: {after.batching_problem}"]
        return []
