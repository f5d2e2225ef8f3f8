"""The models of the GPU benchmarks in plain torch, with random weights of the true shapes, and what
is measured of each. This file is also their `module.py`: a version holds a copy of it.

A new model is a factory and a row of MODELS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Tensor:
    datatype: str
    shape: tuple[int, ...]
    # Of whole numbers: below this. Floats are normal.
    below: int = 0

    def drawn(self, num_rows: int, dtype: str, seed: int) -> np.ndarray:
        random = np.random.default_rng(seed)
        shape = (num_rows, *self.shape)
        if self.below:
            return random.integers(0, self.below, shape).astype(dtype)
        return random.standard_normal(shape, np.float32).astype(dtype)


@dataclass(frozen=True, slots=True)
class Technique:
    """Options of the backend, the datatype that floats are sent in, and how the host feeds it."""

    options: Mapping[str, str]
    floats: str = "FP32"
    # Batches on their way at a time.
    num_slots: int = 2
    # Whether batches lie in memory that the device knows.
    is_pinned: bool = True
    # The model so often on the device, each with streams of its own.
    num_copies: int = 1


@dataclass(frozen=True, slots=True)
class Model:
    factory: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    techniques: Mapping[str, Technique]
    batches: tuple[int, ...]
    # For a machine without a GPU: does everything run?
    tiny: str = ""
    tiny_inputs: Mapping[str, Tensor] | None = None


# Mean and deviation of red, green and blue.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = {"penstock.dtype": "fp16"}
LAST = {**HALF, "penstock.memory_format": "channels_last"}
GRAPHS = {"penstock.cuda_graphs": "on"}
FUSED = {**HALF, "penstock.fuse": "convolutions"}
COMPILED = {**LAST, "penstock.compile": "default"}
GRAPHED = {**HALF, **GRAPHS}
BF16 = {"penstock.dtype": "bf16"}


def fed(name: str, technique: Technique) -> dict[str, Technique]:
    """A technique as the host may feed it otherwise."""
    return {
        f"{name}, pageable": replace(technique, is_pinned=False, num_slots=1),
        f"{name}, one slot": replace(technique, num_slots=1),
        f"{name}, two copies": replace(technique, num_copies=2),
    }


def runs_on(technique: Technique, device: str) -> bool:
    """Some are of GPUs only."""
    is_of_gpus = technique.options.get("penstock.dtype") == "tf32"
    return device != "cpu" or not (is_of_gpus or "penstock.fp8" in technique.options)


FUSED_GRAPHED = Technique({**FUSED, **GRAPHS}, "FP16")
# The first is what answers are compared with. max-autotune is left out: it compiles for minutes.
FOR_IMAGES = {
    "fp32 eager": Technique({}),
    "fp32 without tf32": Technique({"penstock.dtype": "fp32"}),
    "fp16 eager": Technique(HALF, "FP16"),
    "bf16 eager": Technique(BF16, "FP16"),
    "fp16 channels-last": Technique(LAST, "FP16"),
    "fp16 channels-last, graphs": Technique({**LAST, **GRAPHS}, "FP16"),
    "fp16 fused": Technique(FUSED, "FP16"),
    "fp16 fused, graphs": FUSED_GRAPHED,
    "bf16 fused, graphs": Technique({**FUSED, **GRAPHS, **BF16}, "FP16"),
    "fp16 compile": Technique(COMPILED, "FP16"),
    "fp16 compile, graphs": Technique({**COMPILED, **GRAPHS}, "FP16"),
    **fed("fp16 fused, graphs", FUSED_GRAPHED),
}
# Of the same length all: nothing to pack.
FOR_PATCHES = {
    "fp32 eager": Technique({}),
    "tf32 eager": Technique({"penstock.dtype": "tf32"}),
    "fp16 eager": Technique(HALF, "FP16"),
    "bf16 eager": Technique(BF16, "FP16"),
    "fp16 graphs": Technique(GRAPHED, "FP16"),
    "bf16 graphs": Technique({**BF16, **GRAPHS}, "FP16"),
    "fp16 compile": Technique({**HALF, "penstock.compile": "default"}, "FP16"),
    "fp16 compile, graphs": Technique({**GRAPHED, "penstock.compile": "default"}, "FP16"),
    **fed("fp16 graphs", Technique(GRAPHED, "FP16")),
}


class Bottleneck(nn.Module):
    def __init__(self, channels: int, middle: int, stride: int, is_first: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, 4 * middle, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * middle)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if is_first:
            conv = nn.Conv2d(channels, 4 * middle, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(4 * middle))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, blocks: tuple[int, ...], width: int = 64, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        layers, channels = [], width
        for stage, depth in enumerate(blocks):
            for block in range(depth):
                middle = width << stage
                stride = 2 if stage and not block else 1
                layers.append(Bottleneck(channels, middle, stride, is_first=not block))
                channels = 4 * middle
        self.layers = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, image):
        x = self.maxpool(self.relu(self.bn1(self.conv1(image))))
        return {"scores": self.fc(torch.flatten(self.avgpool(self.layers(x)), 1))}


class EncoderLayer(nn.Module):
    """Norms before attention and before the two products."""

    def __init__(self, width: int, num_heads: int, inner: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.first_norm, self.last_norm = nn.LayerNorm(width, 1e-6), nn.LayerNorm(width, 1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        heads = self.qkv(self.first_norm(x)).unflatten(2, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.outer(functional.gelu(self.inner(self.last_norm(x))))


class VisionTransformer(nn.Module):
    """Patches of an image as tokens, one more in front that the classes are read from."""

    def __init__(self, image: int, patch: int, width: int, num_heads: int, depth: int) -> None:
        super().__init__()
        num_tokens = (image // patch) ** 2 + 1
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, num_tokens, width))
        layers = (EncoderLayer(width, num_heads, 4 * width) for _ in range(depth))
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width, 1e-6)
        self.head = nn.Linear(width, 1000)

    def forward(self, image):
        patches = self.patches(image).flatten(2).transpose(1, 2)
        first = self.first.expand(image.shape[0], -1, -1)
        x = torch.cat((first, patches), 1) + self.positions
        return {"scores": self.head(self.norm(self.layers(x))[:, 0])}


class FromBytes(nn.Module):
    """Images as decoders give them, a byte for each colour, normalised on the device."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        mean, deviation = torch.tensor(IMAGENET).reshape(2, 1, 3, 1, 1)
        self.register_buffer("scale", 1 / (255 * deviation))
        self.register_buffer("shift", -mean / deviation)

    def forward(self, image):
        # Channels last, as they came; in the precision of the buffers.
        return self.model(image.permute(0, 3, 1, 2) * self.scale + self.shift)


@torch.no_grad()
def _trained(module: nn.Module, seed: int = 7) -> nn.Module:
    """Weights and statistics of the sizes that training leaves; the last convolution of a block
    counts less, or sums would grow from block to block."""
    generator = torch.Generator().manual_seed(seed)
    for name, each in module.named_modules():
        if isinstance(each, nn.Conv2d):
            fan = each.in_channels * each.kernel_size[0] * each.kernel_size[1]
            each.weight.normal_(0, (2 / fan) ** 0.5, generator=generator)
            if each.bias is not None:
                each.bias.zero_()
        elif isinstance(each, nn.BatchNorm2d):
            low = 0.25 if name.endswith("bn3") else 0.75
            each.weight.uniform_(low, low + 0.5, generator=generator)
            each.bias.normal_(0, 0.1, generator=generator)
            each.running_mean.normal_(0, 0.1, generator=generator)
            each.running_var.uniform_(0.75, 1.25, generator=generator)
        elif isinstance(each, nn.Linear):
            each.weight.normal_(0, 0.02, generator=generator)
            each.bias.zero_()
        elif isinstance(each, nn.LayerNorm):
            each.weight.uniform_(0.75, 1.25, generator=generator)
            each.bias.normal_(0, 0.1, generator=generator)
        elif isinstance(each, VisionTransformer):
            each.first.normal_(0, 0.02, generator=generator)
            each.positions.normal_(0, 0.02, generator=generator)
    return module.eval()


def resnet50() -> nn.Module:
    return _trained(ResNet((3, 4, 6, 3)))


def resnet_tiny() -> nn.Module:
    return _trained(ResNet((2, 1), width=32))


def vit_b() -> nn.Module:
    return _trained(VisionTransformer(image=224, patch=16, width=768, num_heads=12, depth=12))


def vit_tiny() -> nn.Module:
    return _trained(VisionTransformer(image=32, patch=8, width=64, num_heads=2, depth=2))


def resnet50_bytes() -> nn.Module:
    return FromBytes(resnet50()).eval()


def resnet_tiny_bytes() -> nn.Module:
    return FromBytes(resnet_tiny()).eval()


MODELS: dict[str, Model] = {
    "resnet50": Model(
        "resnet50",
        {"image": Tensor("FP32", (3, 224, 224))},
        {"scores": Tensor("FP32", (1000,))},
        FOR_IMAGES,
        (1, 32, 256),
        "resnet_tiny",
        {"image": Tensor("FP32", (3, 32, 32))},
    ),
    "vit_b": Model(
        "vit_b",
        {"image": Tensor("FP32", (3, 224, 224))},
        {"scores": Tensor("FP32", (1000,))},
        FOR_PATCHES,
        (1, 32, 256),
        "vit_tiny",
        {"image": Tensor("FP32", (3, 32, 32))},
    ),
}
