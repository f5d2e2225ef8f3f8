"""Encoders that can be packed, tiny, and some that only look so: written as the source of a
module.py, so that the server loads them as it would a user's."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from penstock.backends import Batch
from penstock.config import BatchPolicy, ModelConfig, PadAxis, Padding
from penstock.types import TensorSpec

SOURCE = """
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, INNER, LAYERS, HEADS = {width}, {inner}, {layers}, {heads}
IS_PRE_NORM, ACTIVATION, OUTPUT = {is_pre_norm}, "{activation}", "{output}"
# Embeddings by these names are recognised, and packed too.
NAMES = "{names}"


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        words, positions = nn.Embedding(120, WIDTH), nn.Embedding(512, WIDTH)
        if NAMES == "hugging":
            self.word_embeddings, self.position_embeddings = words, positions
        else:
            self.word, self.position = words, positions
        self.LayerNorm = nn.LayerNorm(WIDTH)

    def forward(self, ids):
        words, positions, _ = self.children()
        return self.LayerNorm(words(ids) + positions.weight[: ids.shape[1]])


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
        if IS_PRE_NORM:
            return residual + self.dense(x)
        return self.LayerNorm(self.dense(x) + residual)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.self, self.output = SelfAttention(), Output(WIDTH)

    def forward(self, x, mask):
        normed = self.output.LayerNorm(x) if IS_PRE_NORM else x
        return self.output(self.self(normed, mask), x)


class Intermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, INNER)

    def forward(self, x):
        x = self.dense(x)
        return dict(
            gelu=F.gelu, tanh=lambda x: F.gelu(x, approximate="tanh"), relu=F.relu, silu=F.silu
        )[ACTIVATION](x)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.intermediate = Attention(), Intermediate()
        self.output = Output(INNER)

    def forward(self, x, mask):
        x = self.attention(x, mask)
        return self.output(self.intermediate(x), x)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x, mask):
        for layer in self.layer:
            x = layer(x, mask)
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder = Embeddings(), Encoder()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, input_ids, attention_mask):
        is_token = attention_mask.bool()
        x = self.encoder(self.embeddings(input_ids), is_token[:, None, None, :])
        if OUTPUT == "tokens":
            return {{"y": self.head(x)}}
        if OUTPUT == "counts":
            return {{"y": self.head(x)[:, 0].argmax(-1, keepdim=True)}}
        weights = is_token[:, :, None].float()
        if OUTPUT == "peeks":
            # Looks at what the mask leaves out.
            return {{"y": self.head(x.mean(1)).float()}}
        mean = (x.float() * weights).sum(1) / weights.sum(1).clamp(min=1)
        return {{"y": self.head(mean.to(self.head.weight.dtype))}}


def factory():
    return Model()
"""
USUAL = {
    "width": 64,
    "inner": 128,
    "layers": 2,
    "heads": 2,
    "is_pre_norm": False,
    "activation": "gelu",
    "output": "mean",
    "names": "own",
}
BUCKETS = (32,)


def write(folder: Path, seed: int = 0, **changes: object) -> ModelConfig:
    """module.py and its weights, and how they are served. Norms differ from ones and zeros, so
    that one forgotten shows."""
    settings = USUAL | changes
    folder.mkdir(parents=True, exist_ok=True)
    source = SOURCE.format(**settings)
    (folder / "module.py").write_text(source)
    space: dict[str, object] = {}
    exec(source, space)
    torch.manual_seed(seed)
    module = space["factory"]()
    for name, weight in module.named_parameters():
        if "LayerNorm" in name:
            weight.data += 0.2 * torch.randn_like(weight)
    save_file(module.state_dict(), folder / "model.safetensors")
    integers = tuple(TensorSpec(n, "INT64", (-1,)) for n in ("input_ids", "attention_mask"))
    shape = (-1, 4) if settings["output"] == "tokens" else (4,)
    output = TensorSpec("y", "FP32", shape)
    if settings["output"] == "counts":
        output = TensorSpec("y", "INT64", (1,))
    return ModelConfig(
        name="encoder",
        version="1",
        backend="pytorch",
        artifact=str(folder / "module.py"),
        inputs=integers,
        outputs=(output,),
        max_batch_size=16,
        batching=BatchPolicy(16, is_dynamic=True),
        padding=Padding((PadAxis("input_ids", 0), PadAxis("attention_mask", 0)), BUCKETS),
    )


def texts(lengths, length: int = 32, seed: int = 5, *, is_right: bool = False) -> dict:
    """Ids and mask of sequences so long, filled up behind, or before."""
    import numpy as np

    random = np.random.default_rng(seed)
    mask = np.arange(length)[None, :] < np.array(lengths)[:, None]
    if is_right:
        mask = mask[:, ::-1]
    ids = random.integers(1, 120, mask.shape) * mask
    return {"input_ids": ids, "attention_mask": mask.astype(np.int64)}


def answer(runner, inputs: dict):
    num_rows = len(inputs["attention_mask"])
    (outputs,) = runner.start(Batch(inputs, num_rows)).wait()
    return outputs["y"].copy()
