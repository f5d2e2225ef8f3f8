"""Small models of linear layers, as the source of a module.py and as ONNX files."""

import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file

# Of a row of the transformer.
SHAPE = (7, 64)
TRANSFORMER = """
from torch import nn
from torch.nn import functional as F

IS_SHY = 0


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first_norm, self.last_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        normed = self.first_norm(x)
        heads = [
            each(normed).unflatten(-1, (4, -1)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        ]
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.outer(F.gelu(self.inner(self.last_norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(64) for _ in range(2))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        # What depends on sizes is exported, and cannot be traced.
        if IS_SHY and x.shape[1] > 3:
            x = 1.0 * x
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def factory():
    return Model()
"""
# The middle layer's results are beyond FP16, and the next one brings them back.
MLP = """
from torch import nn

WIDTH = 64
FACTOR = 1


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.back, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        x = self.first(x).relu()
        x = self.middle(x).relu()
        return self.last(self.back(x).relu())


def factory():
    return Model()
"""


def made(source: str, seed: int = 0) -> "torch.nn.Module":
    space: dict[str, object] = {}
    exec(source, space)
    torch.manual_seed(seed)
    module = space["factory"]().eval()
    if factor := space.get("FACTOR", 1) - 1:
        with torch.no_grad():
            module.middle.weight *= factor
            module.back.weight /= factor
    return module


def write_module(folder: Path, source: str) -> Path:
    (folder / "module.py").write_text(source)
    save_file(made(source).state_dict(), folder / "model.safetensors")
    return folder / "module.py"


def write_onnx(folder: Path, source: str, shape: tuple[int, ...] = SHAPE) -> Path:
    path = folder / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            made(source), (torch.zeros(2, *shape),), str(path), dynamo=False, opset_version=17,
            input_names=["x"], output_names=["y"], dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
        )  # fmt: skip
    return path
