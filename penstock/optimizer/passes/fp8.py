"""FP8: linear layers in e4m3, with calibrated or per-row input scales and per-channel weight
scales. Half the bytes and twice the peak rate of 16-bit floats, on GPUs that support it. In packed
encoders the four linear layers of each block; in other models every linear layer, but those that
lose too much."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

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
from penstock.optimizer.passes.building import (
    SEPARATOR,
    has_open_layers,
    tolerating,
    with_options,
)
from penstock.optimizer.results import FallbackLayer
from penstock.repository import pretrained
from penstock.types import DATATYPES, Array

OPTION, FILE = "penstock.fp8", "fp8.json"
PACK = "penstock.pack"
# Linear layers of each block. The last one's input has outliers, which cost most accuracy.
PRODUCTS = ("qkv", "out", "inner", "outer")
# Instead of these, in models that are not packed.
LINEAR = "linear"
# Fewer weights in linear layers than this, and the rest of a model takes most of the time.
MIN_WEIGHTS = 1_000_000
# One scale per token: a little slower, but values outside the calibrated range are not clipped.
BY_ROW = "rowwise"
# How much rows of a batch may change each other's answers, for the check at load: a value halfway
# between two e4m3 values rounds either way, depending on the order of summation.
TOLERANCE = 0.1
KEEP = "penstock.fp8_keep"
# Sides of weights in e4m3 are multiples of this; those of a linear layer differ at most so much.
MULTIPLE, MAX_RATIO = 16, 16
# Rows per calibration batch.
NUM_ROWS = 16


class Fp8(LayeredPass):
    name = "fp8"
    stage = "quantise"
    is_for_gpus = True
    changes_answers = True
    steps_differ = True

    def propose(self, context: PassContext) -> Proposals:
        config = context.build.config
        if PACK not in config.options:
            return self._propose_linear(context)
        products = {"products": SEPARATOR.join(PRODUCTS)}
        whole = Step(self.name, products)
        by_row = Step(self.name, {**products, "scaling": BY_ROW})
        if OPTION in config.options:
            return self.skip("decided already")
        if config.device == "cpu" or not _has_fp8():
            reason = "needs a GPU that multiplies in FP8 (compute capability 8.9)"
            return self.skip(reason, whole)
        if context.examples is None or not context.examples.split.calibration:
            return [*self.skip("there are no examples to calibrate with", whole), by_row]
        return [whole, by_row, Step(self.name, {"products": SEPARATOR.join(PRODUCTS[:3])})]

    def _propose_linear(self, context: PassContext) -> Proposals:
        config = context.build.config
        by_row = Step(self.name, {"products": LINEAR, "scaling": BY_ROW})
        if not has_open_layers(config):
            return self.skip("not a PyTorch module, nor an ONNX file on a GPU")
        if OPTION in config.options:
            return self.skip("decided already")
        if "penstock.compile" in config.options:
            return self.skip("the compiler has kernels of its own for all layers")
        if context.facts.quantised:
            return self.skip("the model is quantised already")
        if num_weights(context.build) < MIN_WEIGHTS:
            return self.skip(f"fewer than {MIN_WEIGHTS} weights are in linear layers", by_row)
        if config.device == "cpu" or not _has_fp8():
            reason = "needs a GPU that multiplies in FP8 (compute capability 8.9)"
            return self.skip(reason, by_row)
        # One pass over memory finds the range of a row and quantises it, so calibrated ranges are
        # no faster here.
        has_examples = context.examples is not None and context.examples.split.calibration
        if context.plan.is_exhaustive and has_examples:
            return [by_row, Step(self.name, {"products": LINEAR})]
        return [by_row]

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
        kept = step.settings.get("keep", "")
        options = {OPTION: chosen, "penstock.dtype": "bf16", **({KEEP: kept} if kept else {})}
        config = with_options(parent.config, options)
        folders.write_config(target, tolerating(config, TOLERANCE))

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        found = after.built.get("fp8", "none")
        if step.settings["products"] == LINEAR:
            is_linear = LINEAR in found and not found.startswith("0 ")
            return [] if is_linear else [f"asked for linear layers in FP8, got {found}"]
        num_asked = len(step.settings["products"].split(SEPARATOR))
        counts = [int(word) for word in found.split() if word.isdigit()]
        is_so = len(counts) == 2 and counts[0] * len(PRODUCTS) == counts[1] * num_asked
        return [] if is_so else [f"asked for {num_asked} products of each layer, got {found}"]

    def fall_back(
        self,
        parent: Build,
        step: Step,
        context: BuildContext,
        passes: Callable[[Step], bool],
        seconds: Mapping[str, float] | None = None,
    ) -> tuple[Step | None, list[FallbackLayer]]:
        if step.settings["products"] != LINEAR:
            # Packed encoders have steps for some of their products.
            return None, []
        if context.examples is None:
            raise ConfigError(["fp8: there are no examples to compare layers with"])
        config, indices = parent.config, context.examples.split.choice
        rows = calibration.model_rows(config, context.examples, indices)
        with torch_layers.opened(config, rows, {"penstock.dtype": "bf16"}) as trial:
            switched = _Switched(trial, context.check_time)
            layers = fallback.with_costs(switched.layers)
            ranked = fallback.sensitivity(layers, switched.answers, switched.original)
        kept = fallback.find_fallback(ranked, lambda keep: passes(_with_kept(step, keep)))
        if kept is None:
            return None, fallback.most_harmful(ranked)
        names = [name for effect in kept for name in effect.group.names]
        return _with_kept(step, names), fallback.described(kept, ranked)


class _Switched:
    """A model in BF16, whose linear layers can be switched to FP8."""

    def __init__(self, trial: torch_layers.TorchTrial, check_time: Callable[[], None]) -> None:
        from penstock.backends import torch_linear
        from penstock.kernels.fp8_linear import E4m3Linear, fits

        self._trial, self._check_time = trial, check_time
        found = torch_linear.find_layers(trial.loaded.module)
        self._floats = {name: each for name, each in found.items() if fits(each)}
        self._small = {name: E4m3Linear(each) for name, each in self._floats.items()}
        self.original = trial.answers()

    @property
    def layers(self) -> list[tuple[str, str, float]]:
        return [(name, "Linear", float(w.weight.numel())) for name, w in self._floats.items()]

    def answers(self, keep: Sequence[str]) -> list[dict[str, Array]]:
        self._check_time()
        module = self._trial.loaded.module
        for name, small in self._small.items():
            module.set_submodule(name, self._floats[name] if name in keep else small)
        return self._trial.answers()


def _with_kept(step: Step, keep: Sequence[str]) -> Step:
    return Step(step.pass_name, {**step.settings, "keep": SEPARATOR.join(keep)})


def num_weights(build: Build) -> int:
    """Return the number of weights in matrices that linear layers may have, as far as the files
    tell: of ONNX nodes, or of safetensors, without those of embeddings."""
    path, shapes = build.artifact, list[tuple[int, ...]]()
    if path.suffix == ".onnx":
        graph = onnx_model.read(path, weights=False).graph
        weights = onnx_model.constants(graph)
        nodes = (node for node in graph.node if node.op_type in ("MatMul", "Gemm"))
        found = (weights.get(node.input[1]) for node in nodes)
        shapes = [tuple(each.dims) for each in found if each is not None]
    else:
        for file in sorted(path.parent.glob("*.safetensors")):
            shapes += [tuple(each.shape) for each in pretrained.read_header(file) or ()]
    return sum(math.prod(shape) for shape in shapes if _is_matrix(shape))


def _is_matrix(shape: Sequence[int]) -> bool:
    # Embeddings are far longer than wide.
    is_wide = len(shape) == 2 and max(shape) <= MAX_RATIO * min(shape)
    return is_wide and not any(size % MULTIPLE for size in shape)


def _calibrated(config: ModelConfig, step: Step, context: BuildContext) -> dict[str, float]:
    if context.examples is None:
        raise ConfigError(["fp8: there are no examples to calibrate with"])
    indices = context.examples.split.calibration
    rows = calibration.model_rows(config, context.examples, indices)
    if step.settings["products"] == LINEAR:
        kept = step.settings.get("keep", "").split(SEPARATOR)
        return {
            name: each for name, each in _linear_ranges(config, rows).items() if name not in kept
        }
    asked = step.settings["products"].split(SEPARATOR)
    ranges = packed_ranges(config, rows)
    return {name: largest for name, largest in ranges.items() if name.partition(".")[2] in asked}


def _has_fp8() -> bool:
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return bool(torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9))


def packed_ranges(config: ModelConfig, rows: Sequence[Mapping[str, Array]]) -> dict[str, float]:
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


def _linear_ranges(config: ModelConfig, rows: Sequence[Mapping[str, Array]]) -> dict[str, float]:
    from penstock.backends import torch_linear

    with torch_layers.opened(config, rows, {"penstock.dtype": "fp32"}) as trial:
        with torch_linear.watching(trial.loaded.module) as largest:
            trial.answers()
        return largest


def _batches(
    config: ModelConfig, mask: str, rows: Sequence[Mapping[str, Array]]
) -> Iterator[dict[str, Array]]:
    """Yield batches of rows of any length, padded with zeros that the mask excludes."""
    import numpy as np

    for start in range(0, len(rows), NUM_ROWS):
        some = rows[start : start + NUM_ROWS]
        length = max(len(row[mask]) for row in some)
        buckets = config.padding.buckets if config.padding is not None else ()
        # Graphs of ONNX files take the lengths of buckets alone.
        length = min((each for each in buckets if each >= length), default=length)
        batch: dict[str, Array] = {}
        for spec in config.inputs:
            values = np.zeros((len(some), length), DATATYPES[spec.datatype].numpy)
            for number, row in enumerate(some):
                values[number, : len(row[spec.name])] = row[spec.name]
            batch[spec.name] = values
        yield batch
