"""PyTorch that stays PyTorch: compiled ahead by AOTInductor, compiled at load where shapes are
fixed, and channels-last for convolutions."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock import pt2_file
from penstock.config import ModelConfig
from penstock.optimizer import folders, torch_source
from penstock.optimizer.candidates import Build, Skip, Stage, Step
from penstock.optimizer.facts import Facts
from penstock.optimizer.passes import Situation, Workshop

COMPILERS = ("g++", "clang++", "c++")
AHEAD = "ahead"
# Of an image without the batch.
IMAGE_RANK = 3
# Of the module's form: they are no options of a package.
OF_MODULES = ("penstock.factory", "penstock.compile", "penstock.dtype", "penstock.memory_format")


class TorchCompile:
    name = "torch-compile"
    stage: Stage = "compile"
    changes_answers = False
    is_config_only = False
    has_layers = False

    def propose(self, situation: Situation) -> Sequence[Step | Skip]:
        build = situation.build
        if build.config.backend != "pytorch":
            return [Skip(self.name, "not a PyTorch model")]
        if pt2_file.is_compiled(build.artifact) or "penstock.compile" in build.config.options:
            return [Skip(self.name, "compiled already")]
        if "penstock.fuse" in build.config.options:
            return [Skip(self.name, "its convolutions are fused: the compiler sees none in them")]
        return [*self._memory_formats(build.config), *self._compilations(situation)]

    def _memory_formats(self, config: ModelConfig) -> list[Step | Skip]:
        has_images = any(len(spec.shape) == IMAGE_RANK for spec in config.model.inputs)
        if not has_images or config.max_batch_size == 0 or not config.artifact.endswith(".py"):
            return []
        if "penstock.memory_format" in config.options:
            return []
        return [Step(self.name, {"memory_format": "channels_last"})]

    def _compilations(self, situation: Situation) -> list[Step | Skip]:
        config = situation.build.config
        steps = [] if "penstock.dtype" in config.options else [Step(self.name, {"mode": AHEAD})]
        if all(spec.is_fixed for spec in config.model.inputs):
            steps += [Step(self.name, {"mode": mode}) for mode in ("default", "max-autotune")]
        reason = ""
        if not any(map(shutil.which, COMPILERS)):
            reason = f"no C++ compiler; expected one of {', '.join(COMPILERS)}"
        elif config.device == "cpu" and not situation.plan.is_exhaustive:
            reason = (
                "takes a minute or more to compile; ONNX Runtime is there and compiles in seconds"
            )
        return [Skip(self.name, reason, step) for step in steps] if reason else list(steps)

    def build(self, parent: Build, step: Step, target: Path, workshop: Workshop) -> None:
        config = parent.config
        if step.settings.get("mode") == AHEAD:
            _build_package(parent, target)
            options = {k: v for k, v in config.options.items() if k not in OF_MODULES}
            folders.write_config(target, replace(config, options=options, file=""))
            return
        added = {"mode": "penstock.compile", "memory_format": "penstock.memory_format"}
        options = {added[key]: text for key, text in step.settings.items()}
        folders.write(parent, replace(config, options={**config.options, **options}), target)

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


def _build_package(parent: Build, target: Path) -> None:
    from penstock.backends.pytorch import load_module
    from penstock.optimizer.torch_export import to_package

    config = parent.config.model
    version = folders.carry_over(parent, target, torch_source.own_files(parent.artifact))
    loaded = load_module(config)
    try:
        to_package(loaded, config, version / "model.pt2")
    finally:
        loaded.close()
