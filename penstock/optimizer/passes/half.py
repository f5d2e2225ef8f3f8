"""16-bit floats: FP16 weights where a device computes with them, BF16 where the processor has
instructions for it; TF32 on GPUs too. Inputs and outputs keep their datatypes. In the PyTorch
engine layers that overflow, or lose too much, can stay in FP32."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import penstock.optimizer.passes.building as building
from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.optimizer import calibration, fallback, folders, onnx_model, torch_layers
from penstock.optimizer.passes import (
    Build,
    BuildContext,
    Facts,
    LayeredPass,
    PassContext,
    Proposals,
    Step,
)
from penstock.optimizer.results import FallbackLayer
from penstock.types import Array

# The backend's option for its compute datatype, and its name when read back.
OPTIONS = {"openvino": "inference_precision", "pytorch": "penstock.dtype"}
READ_BACK = {"openvino": "inference_precision_hint", "pytorch": "dtype"}
NAMES = {"bf16": ("bf16",), "fp16": ("fp16", "float16"), "tf32": ("float32",)}
# Lets tensor cores convolve without transposing every image.
CHANNELS_LAST = {"memory_format": "channels_last"}
ROUNDED_TO_TF32 = "matrices,convolutions"
# How much rows may change each other's answers at lower precision, for the check at load.
TOLERANCE = 0.05
KEEP = "penstock.keep_fp32"
# Runs in FP16 that look for layers that overflow; each finds the next ones.
MAX_ROUNDS = 40
Row = torch_layers.Row


class Half(LayeredPass):
    name = "half"
    stage = "precision"
    changes_answers = True
    steps_differ = True

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
        names["keep"] = KEEP
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

    def fall_back(
        self,
        parent: Build,
        step: Step,
        context: BuildContext,
        passes: Callable[[Step], bool],
        seconds: Mapping[str, float] | None = None,
    ) -> tuple[Step | None, list[FallbackLayer]]:
        """Keep the layers that overflow; if that is not enough, those that lose most."""
        config, datatype = parent.config, step.settings["datatype"]
        if config.engine != "pytorch" or datatype == "tf32":
            return None, []
        if context.examples is None:
            raise ConfigError(["half: there are no examples to compare layers with"])
        split = context.examples.split
        indices = split.calibration or split.choice
        rows = calibration.model_rows(config, context.examples, indices)
        overflowing: list[str] = []
        if datatype == "fp16":
            overflowing = overflowing_layers(config, rows, context.check_time)
        if overflowing and passes(with_kept(step, overflowing)):
            share = 1 / len(overflowing)
            found = [FallbackLayer(name, "overflows", share, 0.0) for name in overflowing]
            return with_kept(step, overflowing), found
        return self._least_accurate(parent, step, context, passes, (rows, overflowing))

    def _least_accurate(
        self,
        parent: Build,
        step: Step,
        context: BuildContext,
        passes: Callable[[Step], bool],
        known: tuple[Sequence[Row], Sequence[str]],
    ) -> tuple[Step | None, list[FallbackLayer]]:
        rows, overflowing = known
        datatype, config = step.settings["datatype"], parent.config

        def answers(keep: Sequence[str]) -> list[dict[str, Array]]:
            context.check_time()
            return _answers(config, rows, {"penstock.dtype": datatype}, [*overflowing, *keep])

        with torch_layers.opened(config, rows, {"penstock.dtype": "fp32"}) as trial:
            original = trial.answers()
            layers = [each for each in weighted_layers(trial) if each[0] not in overflowing]
        if not layers:
            return None, []
        ranked = fallback.sensitivity(fallback.with_costs(layers), answers, original)
        kept = fallback.find_fallback(
            ranked, lambda keep: passes(with_kept(step, [*overflowing, *keep]))
        )
        if kept is None:
            return None, fallback.most_harmful(ranked)
        names = [name for effect in kept for name in effect.group.names]
        return with_kept(step, [*overflowing, *names]), fallback.described(kept, ranked)


def with_kept(step: Step, keep: Sequence[str]) -> Step:
    return Step(step.pass_name, {**step.settings, "keep": building.SEPARATOR.join(keep)})


def overflowing_layers(
    config: ModelConfig, rows: Sequence[Row], check_time: Callable[[], None] = lambda: None
) -> list[str]:
    """Return the layers whose inputs or results FP16 does not hold, on these rows."""
    from penstock.backends import torch_floats

    def watched(trial: torch_layers.TorchTrial) -> list[torch_floats.LayerWatch]:
        loaded, found = trial.loaded, []
        for batch in trial.batches:
            given = {name: batch[name] for name in loaded.positional}
            call = functools.partial(loaded.call, batch)
            found.append(torch_floats.watched(loaded.module, given, call))
        return found

    with torch_layers.opened(config, rows, {"penstock.dtype": "fp32"}) as trial:
        exact = watched(trial)
    keep: list[str] = []
    for _ in range(MAX_ROUNDS):
        check_time()
        options = {"penstock.dtype": "fp16", KEEP: building.SEPARATOR.join(keep)}
        with torch_layers.opened(config, rows, options) as trial:
            rounded = watched(trial)
        pairs = zip(exact, rounded, strict=True)
        found = {name for one, other in pairs for name in torch_floats.overflowing(one, other)}
        if not found - {*keep}:
            break
        keep += sorted(found - {*keep})
    return keep


def weighted_layers(trial: torch_layers.TorchTrial) -> list[tuple[str, str, float]]:
    """Return the modules that have weights of their own: name, kind and number of weights."""
    return [
        (name, type(each).__name__, float(sum(w.numel() for w in each.parameters(recurse=False))))
        for name, each in trial.loaded.module.named_modules()
        if name and any(True for _ in each.parameters(recurse=False))
    ]


def _answers(
    config: ModelConfig, rows: Sequence[Row], options: Mapping[str, str], keep: Sequence[str]
) -> list[dict[str, Array]]:
    chosen = {**options, KEEP: building.SEPARATOR.join(keep)}
    with torch_layers.opened(config, rows, chosen) as trial:
        return trial.answers()
