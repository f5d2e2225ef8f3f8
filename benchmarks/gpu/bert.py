"""BERT-large on one GPU: what padding costs and what packing, CUDA graphs and FP8 give back. Random
weights of the true shape; sequences as long as SQuAD's (seeded, 177 tokens on average, 384 at
most). `run.py --model bert-large` measures it.

Rates are of sequences of the mean length: batches differ a little. Batches of packed techniques are
made for a number of tokens, those of padded ones for a number of rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from measuring import Load
from models import Technique, fed, runs_on, served

from penstock.backends import torch_packing
from penstock.backends.pytorch import load_module
from penstock.config import BatchPolicy, ModelConfig, PadAxis, Padding
from penstock.types import TensorSpec

MODULE = '''
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, INNER, LAYERS, WORDS, POSITIONS = {sizes}


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, mask):
        heads = [
            each(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        ]
        return F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2)


class Output(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(width, WIDTH), nn.LayerNorm(WIDTH, 1e-12)

    def forward(self, x, residual):
        return self.LayerNorm(self.dense(x) + residual)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.self, self.output = SelfAttention(), Output(WIDTH)

    def forward(self, x, mask):
        return self.output(self.self(x, mask), x)


class Intermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, INNER)

    def forward(self, x):
        return F.gelu(self.dense(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.intermediate = Attention(), Intermediate()
        self.output = Output(INNER)

    def forward(self, x, mask):
        x = self.attention(x, mask)
        return self.output(self.intermediate(x), x)


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(WORDS, WIDTH)
        self.position_embeddings = nn.Embedding(POSITIONS, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, 1e-12)

    def forward(self, input_ids):
        positions = self.position_embeddings.weight[: input_ids.shape[1]]
        return self.LayerNorm(self.word_embeddings(input_ids) + positions)


class Bert(nn.Module):
    """For questions about a text: where an answer begins and ends."""

    def __init__(self):
        super().__init__()
        self.embeddings = Embeddings()
        self.layer = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.qa_outputs = nn.Linear(WIDTH, 2)

    def forward(self, input_ids, attention_mask):
        x = self.embeddings(input_ids)
        mask = attention_mask.bool()[:, None, None, :]
        for layer in self.layer:
            x = layer(x, mask)
        return {{"logits": self.qa_outputs(x)}}


def factory():
    return Bert()
'''


@dataclass(frozen=True)
class Scale:
    """Width, heads, inner width, layers, words, positions; what is sent."""

    sizes: tuple[int, int, int, int, int, int]
    mean_length: int
    max_length: int
    # Rows of a padded batch, tokens of a packed one.
    num_rows: int
    num_tokens: int
    alone: tuple[int, ...]


LARGE = Scale((1024, 16, 4096, 24, 30522, 512), 177, 384, 128, 32768, (384, 128))
TINY = Scale((64, 2, 128, 2, 500, 64), 12, 24, 4, 64, (24, 8))
SPREAD = 0.42
# Sequences that errors are measured on, and that ranges are found on.
NUM_CHECKED, SEED, CHECK_SEED, RANGE_SEED = 8, 7, 17, 99
NUM_FEW = 32
PACKED = {"penstock.pack": "tokens"}
GRAPHS = {"penstock.cuda_graphs": "on"}
BF16 = {"penstock.dtype": "bf16"}
FP8_FILE, WEIGHTS = "fp8.json", "model.safetensors"
FP8 = {"penstock.fp8": FP8_FILE}
BY_ROW = {"penstock.fp8": "rowwise"}
# Each kind of layer once: as one graph, 24 layers were not compiled in three minutes.
COMPILED = {"penstock.compile": "regional"}
PACKED_GRAPHED = Technique(BF16 | PACKED | GRAPHS)
# The first is what answers are compared with. max-autotune is left out: it compiles for minutes.
TECHNIQUES: Mapping[str, Technique] = {
    "padded FP32": Technique({"penstock.dtype": "fp32"}),
    "padded TF32": Technique({"penstock.dtype": "tf32"}),
    "padded FP16": Technique({"penstock.dtype": "fp16"}),
    "padded BF16": Technique(BF16),
    "padded BF16, CUDA graphs": Technique(BF16 | GRAPHS),
    "packed BF16": Technique(BF16 | PACKED),
    "packed BF16, CUDA graphs": PACKED_GRAPHED,
    "packed FP8, CUDA graphs": Technique(BF16 | PACKED | FP8 | GRAPHS),
    "packed FP8 by row, CUDA graphs": Technique(BF16 | PACKED | BY_ROW | GRAPHS),
    **fed("packed BF16, CUDA graphs", PACKED_GRAPHED),
    # Padded rows of several lengths differ by more in BF16 than FP32 outputs may.
    **served("packed BF16, CUDA graphs", PACKED_GRAPHED, max_batch=32),
    "padded BF16, compile, CUDA graphs": Technique(BF16 | COMPILED | GRAPHS),
}


def draw_lengths(scale: Scale, count: int, seed: int) -> np.ndarray:
    """Log-normal, cut off at the longest, moved to the mean by bisection."""
    noise = np.random.default_rng(seed).standard_normal(count)
    low, high = 0.0, 8.0
    for _ in range(40):
        middle = (low + high) / 2
        lengths = np.exp(middle + SPREAD * noise).clip(scale.mean_length / 6, scale.max_length)
        lengths = lengths.round().astype(int)
        low, high = (middle, high) if lengths.mean() < scale.mean_length else (low, middle)
    return lengths


def batch_of(scale: Scale, lengths: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    mask = np.arange(scale.max_length)[None, :] < lengths[:, None]
    ids = np.random.default_rng(seed).integers(1, scale.sizes[4], mask.shape) * mask
    return {"input_ids": ids, "attention_mask": mask.astype(np.int64)}


def write_model(folder: Path, scale: Scale) -> ModelConfig:
    from safetensors.torch import save_file

    source = MODULE.format(sizes=scale.sizes)
    (folder / "module.py").write_text(source)
    space: dict[str, Any] = {}
    exec(source, space)
    module = space["factory"]()
    generator = torch.Generator().manual_seed(3)
    for name, weight in module.named_parameters():
        is_norm = "LayerNorm" in name
        # As BERT's are before training. Larger ones make rounding grow from layer to layer.
        weight.data.normal_(0.0, 0.1 if is_norm else 0.02, generator=generator)
        if is_norm and name.endswith("weight"):
            weight.data += 1
    # Whole or not at all: others look whether it is there.
    save_file(module.state_dict(), folder / "model.part")
    (folder / "model.part").rename(folder / WEIGHTS)
    return config_of(folder, scale)


def config_of(folder: Path, scale: Scale) -> ModelConfig:
    most = max(scale.num_rows, 2 * scale.num_tokens // scale.mean_length)
    axes = (PadAxis("input_ids", 0), PadAxis("attention_mask", 0))
    return ModelConfig(
        name="bert",
        version="1",
        backend="pytorch",
        artifact=str(folder / "module.py"),
        inputs=tuple(TensorSpec(each.input, "INT64", (-1,)) for each in axes),
        outputs=(TensorSpec("logits", "FP32", (-1, 2)),),
        max_batch_size=most,
        batching=BatchPolicy(most, is_dynamic=True),
        num_instances=2,
        padding=Padding(axes, (scale.max_length,)),
    )


def calibrate(config: ModelConfig, scale: Scale, device: str) -> None:
    """Ranges for FP8 beside the module, from other sequences than those that are measured."""
    loaded = load_module(replace(config, device="cpu"))

    def call(inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return loaded.module(**inputs)

    packing = torch_packing.pack(loaded.module, call, config)
    loaded.module.to(device)
    rows = batch_of(scale, draw_lengths(scale, 32, RANGE_SEED), RANGE_SEED)
    there = {name: torch.from_numpy(each).to(device) for name, each in rows.items()}
    ranges = torch_packing.calibrated(packing, call, [there])
    Path(config.artifact).with_name(FP8_FILE).write_text(json.dumps(ranges))
    loaded.close()


def filling(scale: Scale, device: str) -> Scale:
    """With as many tokens as make this GPU's batches full."""
    properties = torch.cuda.get_device_properties(device)
    full = torch_packing.full_batch(properties.multi_processor_count)
    return replace(scale, num_tokens=full)


class Sequences:
    """The model, in a folder that it keeps, and what is sent to it."""

    def __init__(self, device: str, folder: Path) -> None:
        self.device = device
        self.scale = TINY if device == "cpu" else filling(LARGE, device)
        self.techniques = {name: each for name, each in TECHNIQUES.items() if runs_on(each, device)}
        self.folder = folder / ("bert-tiny" if device == "cpu" else "bert-large") / "1"
        self.folder.mkdir(parents=True, exist_ok=True)
        is_written = (self.folder / WEIGHTS).is_file()
        self._config = (config_of if is_written else write_model)(self.folder, self.scale)

    def config(self, technique: Technique) -> ModelConfig:
        options = dict(technique.options)
        if self.device == "cpu":
            options.pop("penstock.cuda_graphs", None)
        if options.get("penstock.fp8") == FP8_FILE:
            calibrate(self._config, self.scale, self.device)
        slots = technique.num_slots
        return replace(self._config, device=self.device, num_instances=slots, options=options)

    def loads(self, technique: Technique) -> list[Load]:
        scale = self.scale
        checked = draw_lengths(scale, NUM_CHECKED, CHECK_SEED)
        if "penstock.pack" in technique.options:
            lengths = draw_lengths(scale, scale.num_tokens // scale.mean_length, SEED)
            full = lengths[np.cumsum(lengths) <= scale.num_tokens]
        else:
            full = draw_lengths(scale, scale.num_rows, SEED)
        few = draw_lengths(scale, min(NUM_FEW, scale.num_rows), SEED)
        alone, short = (np.array([length]) for length in scale.alone)
        return [
            replace(self._load("checked", checked, CHECK_SEED), is_checked_only=True),
            replace(self._load("1 short", short, SEED), amount=1.0),
            replace(self._load("1", alone, SEED), amount=1.0),
            self._load(str(len(few)), few, SEED),
            self._load("full", full, SEED),
        ]

    def rows(self, technique: Technique) -> list[dict[str, np.ndarray]]:
        """Sequences as long as they are."""
        lengths = draw_lengths(self.scale, NUM_FEW, SEED)
        batch = batch_of(self.scale, lengths, SEED)
        return [
            {name: each[index : index + 1, :length].copy() for name, each in batch.items()}
            for index, length in enumerate(lengths)
        ]

    def _load(self, name: str, lengths: np.ndarray, seed: int) -> Load:
        num_tokens = int(lengths.sum())
        inputs = batch_of(self.scale, lengths, seed)
        amount = num_tokens / self.scale.mean_length
        return Load(name, inputs, len(lengths), amount, num_tokens)

    def compared(self, load: Load, outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Other loads are not of the same sequences. What the mask leaves out may be anything."""
        if not load.is_checked_only:
            return {}
        is_token = load.inputs["attention_mask"][: len(outputs["logits"])] != 0
        return {name: each[is_token] for name, each in outputs.items()}
