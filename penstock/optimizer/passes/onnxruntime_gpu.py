"""Run the same ONNX file on ONNX Runtime's CUDA provider instead of our own engine: it may have a
faster kernel for a network, and it runs operators that we do not import.

The provider computes in the file's datatypes, so the FP16 of an earlier step is written to the
file. Layers that fall back to the CPU fail the check, as they would be copied with every batch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import penstock.optimizer.passes.building as building
from penstock.backends.onnxruntime_nodes import FALLBACK
from penstock.config import GPU_ENGINE, ONNX_RUNTIME, ModelConfig
from penstock.optimizer import folders, onnx_model
from penstock.optimizer.passes import Build, BuildContext, Facts, Pass, PassContext, Proposals, Step
from penstock.optimizer.plan import Plan
from penstock.repository.accelerators import CUDA_PROVIDER

PACKAGE = "onnxruntime-gpu"
DTYPE, LAYOUT = "penstock.dtype", "penstock.memory_format"
# Options of our own engine that mean nothing to the provider, or something else.
LEFT_OUT = ("penstock.compile", "penstock.fuse", building.CUDA_GRAPHS, LAYOUT, DTYPE)


class OnnxRuntimeGpu(Pass):
    name = "onnxruntime-gpu"
    stage = "compile"
    is_for_gpus = True
    starts_over = True

    def propose(self, context: PassContext) -> Proposals:
        config = context.build.config
        if config.device == "cpu":
            return self.skip("not on a GPU")
        if PACKAGE not in context.machine.versions:
            return self.skip(f"{PACKAGE} is not installed; docs/onnx-on-gpus.md has the recipe")
        if not building.is_onnx(context.build):
            return self.skip("the model is not an ONNX file")
        if config.engine == ONNX_RUNTIME:
            return self.skip("ONNX Runtime runs it already")
        if config.options.get(DTYPE) == "bf16":
            return self.skip("its converter has no BF16")
        tensors = (*config.model.inputs, *config.model.outputs)
        if texts := [spec.name for spec in tensors if spec.datatype == "BYTES"]:
            return self.skip(f"'{texts[0]}' is BYTES, which GPUs do not have")
        is_fixed = all(spec.is_fixed for spec in config.model.inputs)
        graphs = ["on"] if is_fixed or config.model.padding is not None else []
        return [Step(self.name, {"graphs": each}) for each in (*graphs, "off")]

    def configured(self, config: ModelConfig, step: Step, plan: Plan) -> ModelConfig:
        options = {key: text for key, text in config.options.items() if key not in LEFT_OUT}
        options |= {GPU_ENGINE: ONNX_RUNTIME, "providers": CUDA_PROVIDER}
        options[building.CUDA_GRAPHS] = step.settings["graphs"]
        if building.has_images(config):
            options[LAYOUT] = "channels_last"
        if (dtype := config.options.get(DTYPE, "")) in ("fp32", "tf32"):
            options[DTYPE] = dtype
        return replace(config, options=options)

    def build(self, parent: Build, step: Step, target: Path, context: BuildContext) -> None:
        config = self.configured(parent.config, step, context.plan)
        if parent.config.options.get(DTYPE) != "fp16":
            folders.write(parent, config, target)
            return
        from onnxruntime.transformers.float16 import convert_float_to_float16

        model = convert_float_to_float16(onnx_model.read(parent.artifact), keep_io_types=True)
        building.write_onnx(parent, model, target, config)

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        providers = after.built.get("providers", "")
        if after.backend != ONNX_RUNTIME or CUDA_PROVIDER not in providers:
            return [f"runs on '{providers or after.backend}', expected {CUDA_PROVIDER}"]
        if FALLBACK not in after.built:
            version = after.built.get("onnxruntime", "this version")
            return [f"ONNX Runtime {version} does not tell which provider runs each node"]
        return building.check_graphs(after) if step.settings["graphs"] == "on" else []
