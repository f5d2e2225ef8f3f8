"""Integer weights for linear layers, on GPUs: with a few rows a layer takes as long as reading its
weights does, and INT8 or INT4 are a half or a quarter of 16 bits. Computes in BF16."""

from __future__ import annotations

from pathlib import Path

from penstock.optimizer import folders
from penstock.optimizer.passes import Build, BuildContext, Facts, Pass, PassContext, Proposals, Step
from penstock.optimizer.passes.building import (
    has_open_layers,
    tolerating,
    with_options,
)
from penstock.optimizer.passes.fp8 import num_weights

OPTION = "penstock.weights"
KINDS = ("int8", "int4")
# Options that decide on the layers already.
DECIDED = (OPTION, "penstock.fp8", "penstock.pack", "penstock.compile")
# Rows beyond which arithmetic is the limit, as in `kernels.integer_weights`.
MAX_ROWS = 64
# Fewer weights in linear layers than this are read in a few microseconds.
MIN_WEIGHTS = 8_000_000
# How much rows may change each other's answers, for the check at load.
TOLERANCE = 0.05


class WeightOnly(Pass):
    name = "weight-only"
    stage = "quantise"
    is_for_gpus = True
    changes_answers = True

    def propose(self, context: PassContext) -> Proposals:
        config = context.build.config
        steps = [Step(self.name, {"weights": kind}) for kind in KINDS]
        if not has_open_layers(config):
            return self.skip("not a PyTorch module, nor an ONNX file on a GPU")
        if any(option in config.options for option in DECIDED) or context.facts.quantised:
            return self.skip("decided already")
        if config.device == "cpu":
            return self.skip("on CPUs weights would be converted for every batch", steps[0])
        if num_weights(context.build) < MIN_WEIGHTS:
            return self.skip(f"fewer than {MIN_WEIGHTS} weights are in linear layers", steps[0])
        num_rows = rows_per_batch(context)
        if num_rows > MAX_ROWS:
            reason = f"batches have up to {num_rows} rows or tokens: arithmetic is the limit"
            return self.skip(reason, steps[0])
        return [*steps]

    def build(self, parent: Build, step: Step, target: Path, context: BuildContext) -> None:
        dtype = parent.config.options.get("penstock.dtype", "")
        options = {OPTION: step.settings["weights"]}
        if dtype not in ("fp16", "bf16"):
            options["penstock.dtype"] = "bf16"
        config = tolerating(with_options(parent.config, options), TOLERANCE)
        folders.write(parent, config, target)

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        asked, found = step.settings["weights"], after.built.get("weights", "none")
        return [] if found.startswith(f"{asked}:") else [f"asked for {asked}, got {found}"]


def rows_per_batch(context: PassContext) -> int:
    """Return the rows that a linear layer sees at most: those of the largest batch that was timed,
    or is allowed, times the tokens of a row."""
    config = context.build.config
    batches = [
        batch
        for table in context.times.values()
        for by_batch in table.seconds.values()
        for batch in by_batch
    ]
    num_tokens = 1
    for spec in config.model.inputs:
        is_sequence = spec.datatype.startswith(("INT", "UINT")) or len(spec.shape) > 1
        given = [row[spec.name] for row in context.rows if spec.name in row]
        lengths = [len(array) for array in given if array.ndim]
        if is_sequence and lengths:
            num_tokens = max(num_tokens, *lengths)
        elif is_sequence and spec.shape and spec.shape[0] > 0:
            num_tokens = max(num_tokens, spec.shape[0])
    return max(batches, default=max(1, config.max_batch_size)) * num_tokens
