"""FP8 for packed encoders: the four linear layers of each block in e4m3, with calibrated or
per-token input scales and per-channel weight scales. Half the bytes and twice the peak rate of
16-bit floats, on GPUs that support it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.optimizer import calibration, folders
from penstock.optimizer.passes import Build, BuildContext, Facts, Pass, PassContext, Proposals, Step
from penstock.optimizer.passes.building import tolerating, with_options
from penstock.types import DATATYPES, Array

OPTION, FILE = "penstock.fp8", "fp8.json"
PACK = "penstock.pack"
# Linear layers of each block. The last one's input has outliers, which cost most accuracy.
PRODUCTS = ("qkv", "out", "inner", "outer")
SEPARATOR = ","
# One scale per token: a little slower, but values outside the calibrated range are not clipped.
BY_ROW = "rowwise"
# How much rows of a batch may change each other's answers, for the check at load: a value halfway
# between two e4m3 values rounds either way, depending on the order of summation.
TOLERANCE = 0.1
# Rows per calibration batch.
NUM_ROWS = 16


class Fp8(Pass):
    name = "fp8"
    stage = "quantise"
    changes_answers = True

    def propose(self, context: PassContext) -> Proposals:
        config = context.build.config
        products = {"products": SEPARATOR.join(PRODUCTS)}
        whole = Step(self.name, products)
        by_row = Step(self.name, {**products, "scaling": BY_ROW})
        if config.backend != "pytorch" or PACK not in config.options:
            return self.skip("only the products of packed encoders (pass packing)")
        if OPTION in config.options:
            return self.skip("decided already")
        if config.device == "cpu" or not _has_fp8():
            reason = "needs a GPU that multiplies in FP8 (compute capability 8.9)"
            return self.skip(reason, whole)
        if context.examples is None or not context.examples.split.calibration:
            return [*self.skip("there are no examples to calibrate with", whole), by_row]
        return [whole, by_row, Step(self.name, {"products": SEPARATOR.join(PRODUCTS[:3])})]

    def build(self, parent: Build, step: Step, target: Path, context: BuildContext) -> None:
        if step.settings.get("scaling") == BY_ROW:
            folders.carry_over(parent, target)
            chosen = BY_ROW
        else:
            ranges = _calibrated(parent.config, step, context)
            version = folders.carry_over(parent, target, {FILE})
            (version / FILE).write_text(json.dumps(ranges, indent=1))
            chosen = FILE
        # BF16 for everything else, because it has the range of FP32.
        config = with_options(parent.config, {OPTION: chosen, "penstock.dtype": "bf16"})
        folders.write_config(target, tolerating(config, TOLERANCE))

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        found = after.built.get("fp8", "none")
        num_asked = len(step.settings["products"].split(SEPARATOR))
        counts = [int(word) for word in found.split() if word.isdigit()]
        is_so = len(counts) == 2 and counts[0] * len(PRODUCTS) == counts[1] * num_asked
        return [] if is_so else [f"asked for {num_asked} products of each layer, got {found}"]


def _calibrated(config: ModelConfig, step: Step, context: BuildContext) -> dict[str, float]:
    if context.examples is None:
        raise ConfigError(["fp8: there are no examples to calibrate with"])
    indices = context.examples.split.calibration
    rows = calibration.model_rows(config, context.examples, indices)
    asked = step.settings["products"].split(SEPARATOR)
    ranges = _ranges(config, rows)
    return {name: largest for name, largest in ranges.items() if name.partition(".")[2] in asked}


def _has_fp8() -> bool:
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return bool(torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9))


def _ranges(config: ModelConfig, rows: Sequence[Mapping[str, Array]]) -> dict[str, float]:
    """Calibrate on the serving device, in FP32: one calibration fits every precision."""
    import torch

    from penstock.backends import torch_packing
    from penstock.backends.pytorch import by_name, load_module

    model = config.model
    options = {key: text for key, text in model.options.items() if key != "penstock.dtype"}
    loaded = load_module(replace(model, options=options))
    names = [spec.name for spec in model.outputs]

    def call(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return by_name(loaded.call(tensors), names)

    try:
        packing = torch_packing.pack(loaded.module, call, model)
        batches = (
            {name: torch.from_numpy(array).to(model.device) for name, array in batch.items()}
            for batch in _batches(model, packing.mask, rows)
        )
        return torch_packing.calibrated(packing, call, batches)
    finally:
        loaded.close()


def _batches(
    config: ModelConfig, mask: str, rows: Sequence[Mapping[str, Array]]
) -> Iterator[dict[str, Array]]:
    """Yield batches of rows of any length, padded with zeros that the mask excludes."""
    import numpy as np

    for start in range(0, len(rows), NUM_ROWS):
        some = rows[start : start + NUM_ROWS]
        length = max(len(row[mask]) for row in some)
        batch: dict[str, Array] = {}
        for spec in config.inputs:
            values = np.zeros((len(some), length), DATATYPES[spec.datatype].numpy)
            for number, row in enumerate(some):
                values[number, : len(row[spec.name])] = row[spec.name]
            batch[spec.name] = values
        yield batch
