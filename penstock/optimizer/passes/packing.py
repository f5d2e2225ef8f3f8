"""Encoders without padding: the tokens of a batch are concatenated, so masked positions are not
computed. The backend packs the model when it loads it and checks there that answers stay the same;
a model that cannot be packed fails with the reason."""

from __future__ import annotations

from dataclasses import replace

from penstock.config import PACK, TOKENS, ModelConfig, Padding
from penstock.optimizer.passes import Facts, Pass, PassContext, Proposals, Step
from penstock.optimizer.passes.building import has_open_layers, with_options
from penstock.optimizer.plan import Plan
from penstock.optimizer.simulate import row_lengths, variable_axes
from penstock.types import DATATYPES


class SequencePacking(Pass):
    name = "packing"
    stage = "compile"
    is_config_only = True

    def propose(self, context: PassContext) -> Proposals:
        config = context.build.config
        if reason := _reason_against(config):
            return self.skip(reason)
        settings = {"pack": TOKENS}
        if not all(spec.is_fixed for spec in config.model.inputs):
            longest = _longest(context)
            if not longest:
                return self.skip("not known how long requests are; penstock.pad says so")
            settings["bucket"] = str(longest)
        step = Step(self.name, settings)
        if config.device == "cpu" and not context.plan.is_exhaustive:
            return self.skip("on CPUs attention goes by way of the padded batch", step)
        return [step]

    def configured(self, config: ModelConfig, step: Step, plan: Plan) -> ModelConfig:
        config = with_options(config, {PACK: step.settings["pack"]})
        if "bucket" in step.settings:
            config = _with_one_bucket(config, int(step.settings["bucket"]))
        return config

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        found = after.built.get("pack", "nothing")
        is_so = found.startswith(step.settings["pack"])
        problems = [] if is_so else [f"asked for {step.settings['pack']}, packed is {found}"]
        return problems + ([after.padding_problem] if after.padding_problem else [])


def _reason_against(config: ModelConfig) -> str:
    if not has_open_layers(config):
        return "not a PyTorch module, nor an ONNX file on a GPU"
    if PACK in config.options:
        return "packed already"
    if "penstock.compile" in config.options:
        return "the model is compiled for its shapes"
    integers = [s for s in config.model.inputs if DATATYPES[s.datatype].numpy.kind in "iub"]
    masks = [spec for spec in integers if "mask" in spec.name.lower()]
    if len(masks) != 1 or config.max_batch_size == 0:
        return "no batches with one mask that says which positions are tokens"
    if not masks[0].is_fixed and not variable_axes(config.model):
        return "inputs have more than one length: nothing to fill up"
    return ""


def _longest(context: PassContext) -> int:
    """Return the length to pad batches to: the configured one, else that of the longest request.
    A longer one might exceed the model's maximum position."""
    config = context.build.config
    if config.model.padding is not None:
        return config.model.padding.buckets[-1]
    return 0 if config.is_processed else max(row_lengths(context.rows, config), default=0)


def _with_one_bucket(config: ModelConfig, bucket: int) -> ModelConfig:
    """Use one bucket for all lengths, so that they share batches: padding costs nothing now."""
    model = config.model
    known = model.padding or Padding(variable_axes(model))
    padding = replace(known, buckets=(bucket,))
    if config.preprocess is not None:
        return replace(config, preprocess=replace(config.preprocess, padding=padding))
    return replace(config, padding=padding)
