"""Optimisations within PyTorch: ahead-of-time compilation by AOTInductor, torch.compile at load if
shapes are fixed, of the whole module or of its repeated blocks, and channels-last for convolutions.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from penstock import units
from penstock.config import ModelConfig
from penstock.optimizer import folders, torch_source, trials
from penstock.optimizer.passes import Build, BuildContext, Facts, Pass, PassContext, Proposals, Step
from penstock.optimizer.passes.building import has_images, has_open_layers, with_options
from penstock.repository import pt2_file, torchscript_file

COMPILERS = ("g++", "clang++", "c++")
# For GPUs Inductor emits Triton kernels, whose launchers need a C compiler.
C_COMPILERS = ("gcc", "clang", "cc")
AHEAD, AUTOTUNE = "ahead", "max-autotune"
# The GPU mode includes the backend's own CUDA graphs: without them compiled code is launch-bound,
# and would lose to eager mode with graphs.
USUAL, USUAL_ON_GPU = "default", "reduce-overhead"
# Repeated blocks only: for budgets in which the whole module might not be done.
REGIONAL = "regional"
# Modes that take so long that with less time than MIN_BUDGET_S nothing else would get its turn.
LONG_MODES = (AUTOTUNE, AHEAD)
MIN_BUDGET_S = 900.0
# Options of Python modules, which packages do not have.
OF_MODULES = (
    *("penstock.factory", "penstock.compile", "penstock.dtype"),
    *("penstock.memory_format", "penstock.pack", "penstock.fp8", "penstock.fuse"),
)


class TorchCompile(Pass):
    name = "torch-compile"
    stage = "compile"

    def propose(self, context: PassContext) -> Proposals:
        build = context.build
        if build.config.engine != "pytorch":
            return self.skip("not a PyTorch model")
        if torchscript_file.is_named(build.artifact):
            return self.skip("torch.compile does not compile TorchScript; see onnx-export")
        if pt2_file.is_compiled(build.artifact) or "penstock.compile" in build.config.options:
            return self.skip("compiled already")
        if "penstock.pack" in build.config.options:
            return self.skip("packed: the layers are kernels already")
        if "penstock.fuse" in build.config.options:
            return self.skip("its convolutions are fused: the compiler sees none in them")
        formats = self._memory_formats(build.config, context.examples is not None)
        return formats + self._compilations(context)

    def _memory_formats(self, config: ModelConfig, has_examples: bool) -> Proposals:
        is_module = has_open_layers(config) and config.max_batch_size > 0
        if not is_module or not has_images(config) or "penstock.memory_format" in config.options:
            return []
        if config.uses_gpu and has_examples:
            # It comes with FP16, which gains from it; FP32 hardly does.
            return []
        return [Step(self.name, {"memory_format": "channels_last"})]

    def _compilations(self, context: PassContext) -> Proposals:
        config = context.build.config
        is_exported = "penstock.dtype" in config.options or config.artifact.endswith(".onnx")
        modes = [] if is_exported else [AHEAD]
        if all(spec.is_fixed for spec in config.model.inputs) or config.model.padding is not None:
            # On a GPU start with the mode that takes seconds: it shows if the others are worth it.
            usual = [USUAL_ON_GPU, *modes] if config.uses_gpu else [*modes, USUAL]
            budget_s, is_code = context.plan.budget_s, config.artifact.endswith(".py")
            is_short = budget_s is not None and budget_s < MIN_BUDGET_S
            modes = [*usual, *[REGIONAL] * (config.uses_gpu and is_short and is_code), AUTOTUNE]
        found: Proposals = []
        for mode in modes:
            step = Step(self.name, {"mode": mode})
            reason = _reason_against(context, mode)
            found += self.skip(reason, step) if reason else [step]
        return found

    def build(self, parent: Build, step: Step, target: Path, context: BuildContext) -> None:
        config = parent.config
        if step.settings.get("mode") == AHEAD:
            version = folders.carry_over(parent, target, torch_source.own_files(parent.artifact))
            timeout_s = context.compile_timeout_s() or trials.LOAD_TIMEOUT_S
            trials.compile_ahead(config.model, version / "model.pt2", timeout_s)
            options = {k: v for k, v in config.options.items() if k not in OF_MODULES}
            folders.write_config(target, replace(config, options=options, file=""))
            return
        added = {"mode": "penstock.compile", "memory_format": "penstock.memory_format"}
        options = {added[key]: text for key, text in step.settings.items()}
        folders.write(parent, with_options(config, options), target)

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        mode = step.settings.get("mode")
        if mode == AHEAD:
            wanted = ("form", "AOTInductor package")
        elif mode:
            wanted = ("compile", mode)
        else:
            wanted = ("memory_format", step.settings["memory_format"])
        found = after.built.get(wanted[0], "nothing")
        return [] if found == wanted[1] else [f"{wanted[0]} is {found}, expected {wanted[1]}"]


def _reason_against(context: PassContext, mode: str) -> str:
    """Return why the mode is not tried; empty if it may be."""
    config, plan = context.build.config, context.plan
    needs_cpp = mode == AHEAD or not config.uses_gpu
    compilers, language = (COMPILERS, "C++") if needs_cpp else (C_COMPILERS, "C")
    if not any(map(shutil.which, compilers)):
        return f"no {language} compiler; expected one of {', '.join(compilers)}"
    if not config.uses_gpu and not plan.is_exhaustive:
        return "takes a minute or more to compile; ONNX Runtime is there and compiles in seconds"
    if mode in LONG_MODES and plan.budget_s is not None and plan.budget_s < MIN_BUDGET_S:
        return f"compiles for minutes, and the budget is {units.duration(plan.budget_s)}"
    return ""
