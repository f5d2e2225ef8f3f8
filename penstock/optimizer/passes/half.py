"""16-bit floats: FP16 weights where a device computes with them, BF16 where the processor has
instructions for it; TF32 on GPUs too. Inputs and outputs keep their datatypes."""

from __future__ import annotations

from pathlib import Path

import penstock.optimizer.passes.building as building
from penstock.optimizer import folders, onnx_model
from penstock.optimizer.passes import Build, BuildContext, Facts, Pass, PassContext, Proposals, Step

# The backend's option for its compute datatype, and its name when read back.
OPTIONS = {"openvino": "inference_precision", "pytorch": "penstock.dtype"}
READ_BACK = {"openvino": "inference_precision_hint", "pytorch": "dtype"}
NAMES = {"bf16": ("bf16",), "fp16": ("fp16", "float16"), "tf32": ("float32",)}
# Lets tensor cores convolve without transposing every image.
CHANNELS_LAST = {"memory_format": "channels_last"}
ROUNDED_TO_TF32 = "matrices,convolutions"
# How much rows may change each other's answers at lower precision, for the check at load.
TOLERANCE = 0.05


class Half(Pass):
    name = "half"
    stage = "precision"
    changes_answers = True

    def propose(self, context: PassContext) -> Proposals:
        config, facts = context.build.config, context.facts
        if facts.quantised:
            return self.skip("the model is quantised already")
        if config.engine in OPTIONS:
            return self._by_option(context)
        if not building.is_onnx(context.build):
            return self.skip(f"backend '{config.backend}' has no choice of datatype")
        if not facts.weight_bytes.get("FP32"):
            return self.skip("the model has no weights in FP32")
        step = Step(self.name, {"datatype": "fp16"})
        providers = config.options.get("providers", "")
        is_on_gpu = "CUDA" in providers or "Tensorrt" in providers
        if is_on_gpu or context.plan.is_exhaustive:
            return [step]
        reason = "on CPUs ONNX Runtime has few operators in FP16 and converts to FP32 around others"
        return self.skip(reason, step)

    def _by_option(self, context: PassContext) -> Proposals:
        config = context.build.config
        if config.options.get(OPTIONS[config.engine], "f32") not in ("f32", "fp32", "float32"):
            return self.skip("the model already computes in less than FP32")
        if config.engine == "pytorch" and not building.has_open_layers(config):
            return self.skip("an exported program keeps the datatypes it was exported with")
        if config.device != "cpu":
            # FP16 and BF16 are equally fast: FP16 is finer, BF16 has the range of FP32. TF32 stays
            # FP32 in memory, for models that tolerate neither.
            is_turned = building.has_images(config) and config.max_batch_size > 0
            is_free = is_turned and "penstock.memory_format" not in config.options
            last = CHANNELS_LAST if is_free else {}
            halves = [Step(self.name, {"datatype": name, **last}) for name in ("fp16", "bf16")]
            return [*halves, Step(self.name, {"datatype": "tf32"})]
        bf16 = Step(self.name, {"datatype": "bf16"})
        if context.machine.has_bf16 or context.plan.is_exhaustive:
            return [bf16]
        return self.skip("the processor has no instructions for BF16", bf16)

    def build(self, parent: Build, step: Step, target: Path, context: BuildContext) -> None:
        config = parent.config
        if config.engine not in OPTIONS:
            from onnxruntime.transformers.float16 import convert_float_to_float16

            model = onnx_model.read(parent.artifact)
            building.write_onnx(parent, convert_float_to_float16(model, keep_io_types=True), target)
            return
        names = {"datatype": OPTIONS[config.engine], "memory_format": "penstock.memory_format"}
        options = {names[key]: text for key, text in step.settings.items()}
        config = building.tolerating(building.with_options(config, options), TOLERANCE)
        folders.write(parent, config, target)

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        if after.backend in READ_BACK:
            asked = step.settings["datatype"]
            got = after.built.get(READ_BACK[after.backend], "not told")
            # "float16" is part of "bfloat16".
            is_so = any(name in got.replace("bfloat16", "bf16") for name in NAMES[asked])
            if asked == "tf32" and after.built.get("tf32") != ROUNDED_TO_TF32:
                is_so, got = False, f"TF32 for {after.built.get('tf32', 'nothing')}"
            return [] if is_so else [f"asked for {asked}, got {got}"]
        stayed, half = (after.weight_bytes.get(name, 0) for name in ("FP32", "FP16"))
        if half <= stayed:
            return [f"{stayed} bytes of weights are still FP32, only {half} are FP16"]
        return []
