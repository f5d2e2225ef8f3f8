"""Build a TensorRT plan from the ONNX file, for users who have TensorRT installed. The plan
computes in the precision that the model has come to: FP16, or INT8 and FP8 by Q/DQ in the file."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import penstock.optimizer.passes.building as building
from penstock.backends import COMPILED
from penstock.config import ModelConfig, PadAxis
from penstock.kernels import CHOICES, KERNELS
from penstock.optimizer import folders, onnx_model, trials
from penstock.optimizer.passes import Build, BuildContext, Facts, Pass, PassContext, Proposals, Step
from penstock.optimizer.trial_child import BuildPlan
from penstock.repository import onnx_file

PACKAGE = "tensorrt"
PLAN_FILE, TIMING_CACHE = "model.plan", "tensorrt-timing.cache"
# Precision of the plan by the precision of its parent. BF16 is coarser than TF32.
PRECISIONS = {"fp16": "fp16", "tf32": "tf32", "bf16": "tf32"}
QUANTISED, FP16 = "quantised", "fp16"
# Names of datatypes in the engine's inspector, which must be there after the build.
NAMES = {FP16: ("half", "fp16"), QUANTISED: ("int8", "fp8")}
# How much rows may change each other's answers, for the check at load.
TOLERANCE = 0.05


class ToTensorRt(Pass):
    name = "tensorrt"
    stage = "quantise"
    is_for_gpus = True
    changes_answers = True

    def propose(self, context: PassContext) -> Proposals:
        config = context.build.config
        if not building.stays_on_gpu(config) or not building.is_onnx(context.build):
            return self.skip("only for ONNX files on a GPU")
        if not any(name.startswith(PACKAGE) for name in context.machine.versions):
            return self.skip("not installed; pip install tensorrt brings it")
        if reason := _reason_against(config.model):
            return self.skip(reason)
        asked = PRECISIONS.get(config.options.get("penstock.dtype", ""), "fp32")
        return [Step(self.name, {"precision": QUANTISED if context.facts.quantised else asked})]

    def build(self, parent: Build, step: Step, target: Path, context: BuildContext) -> None:
        config, precision = parent.config, step.settings["precision"]
        made = {COMPILED, CHOICES, KERNELS}
        replaced = {parent.artifact.name, *made, *onnx_file.weight_files(parent.artifact)}
        version = folders.carry_over(parent, target, replaced)
        with tempfile.TemporaryDirectory(dir=context.cache) as folder:
            source = parent.artifact
            if precision == FP16:
                source = _as_fp16(source, Path(folder))
            plan = BuildPlan(
                source=str(source),
                target=str(version / PLAN_FILE),
                device=config.device,
                profile=profile(config.model),
                allows_tf32=precision != "fp32",
                timing_cache=str(context.cache / TIMING_CACHE),
            )
            timeout_s = context.compile_timeout_s() or trials.LOAD_TIMEOUT_S
            trials.build_plan(config.model, plan, timeout_s)
        # Shapes are fixed or padded to buckets, as CUDA graphs need them.
        options = {building.CUDA_GRAPHS: "on"}
        config = replace(config, backend=PACKAGE, file="", options=options)
        folders.write_config(target, building.tolerating(config, TOLERANCE))

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        if after.backend != PACKAGE or PACKAGE not in after.built:
            return [f"runs on '{after.backend}', expected {PACKAGE}"]
        wanted, found = NAMES.get(step.settings["precision"]), after.built.get("datatypes", "")
        if wanted and not any(name in found.casefold() for name in wanted):
            return [f"no layer computes in {' or '.join(wanted)}; layers compute in {found}"]
        return []


def _reason_against(config: ModelConfig) -> str:
    """Return why no plan can be built for these tensors; empty if one can."""
    if "penstock.fixed_inputs" in config.options:
        return "penstock.fixed_inputs: a plan has no fixed inputs"
    tensors = (*config.inputs, *config.outputs)
    if texts := [spec.name for spec in tensors if spec.datatype in ("BYTES", "FP64")]:
        return f"'{texts[0]}' has a datatype that it does not take"
    for spec in config.inputs:
        padded = {each.axis for each in _axes(config) if each.input == spec.name}
        if any(size < 0 and axis not in padded for axis, size in enumerate(spec.shape)):
            return f"'{spec.name}' {list(spec.shape)} has no largest size (penstock.pad_buckets)"
    return ""


def _axes(config: ModelConfig) -> tuple[PadAxis, ...]:
    return () if config.padding is None else config.padding.axes


def profile(config: ModelConfig) -> dict[str, tuple[list[int], list[int], list[int]]]:
    """Return the smallest, usual and largest shape of each input with variable sizes: batches of
    any size that a trial may use, and lengths up to the largest bucket."""
    found = {}
    most = max(config.max_batch_size, trials.LARGEST_ON_GPU)
    rows = (1, config.max_batch_size, most) if config.max_batch_size else None
    for spec in config.inputs:
        padded = {each.axis for each in _axes(config) if each.input == spec.name}
        longest = config.padding.buckets[-1] if config.padding is not None else 0
        shapes = [
            [limit if axis in padded else size for axis, size in enumerate(spec.shape)]
            for limit in (1, longest, longest)
        ]
        if rows is not None:
            shapes = [[count, *shape] for count, shape in zip(rows, shapes, strict=True)]
        if rows is not None or padded:
            found[spec.name] = (shapes[0], shapes[1], shapes[2])
    return found


def _as_fp16(source: Path, folder: Path) -> Path:
    """Write the model with weights and layers in FP16; inputs and outputs keep their datatypes."""
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from onnxruntime.transformers.onnx_model import OnnxModel

    model = convert_float_to_float16(onnx_model.read(source), keep_io_types=True)
    # Its casts of inputs are behind the nodes that read them.
    OnnxModel(model).topological_sort()
    onnx_model.write(model, folder / building.ONNX_FILE)
    return folder / building.ONNX_FILE
