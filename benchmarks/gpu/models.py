"""The models of the GPU benchmarks in plain torch, with random weights of the true shapes, and what
is measured of each. This file is also their `module.py`: a version holds a copy of it.

A new model is a factory and a row of MODELS; `engines.py` compares the networks of NETWORKS.
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
    # From the ONNX file with Q/DQ nodes.
    is_int8: bool = False
    # Loaded for each batch size by itself, as compilers do best; only the smallest and the largest.
    is_fixed: bool = False
    # Time limit of the process in seconds; 0: the default.
    limit_s: float = 0.0
    # Number of clients that the model is served to, in batches of at most `max_batch` rows; 0: it
    # is not served.
    num_clients: int = 0
    max_batch: int = 0


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
    tiny_outputs: Mapping[str, Tensor] | None = None


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


# Served: rows of a batch, and clients for each of them: one waits while the other is answered.
MAX_BATCH, CLIENTS_A_ROW = 64, 2
# Tuning, torch.compile and max-autotune take longer than other rows.
TUNING_S, COMPILE_S, AUTOTUNE_S = 240.0, 300.0, 420.0


def served(name: str, technique: Technique, max_batch: int = MAX_BATCH) -> dict[str, Technique]:
    """A technique as a server runs it, without and with dynamic batching."""
    technique = replace(technique, num_clients=CLIENTS_A_ROW * max_batch)
    return {
        f"{name}, served one by one": replace(technique, max_batch=1),
        f"{name}, served in batches": replace(technique, max_batch=max_batch),
    }


def compiled(options: Mapping[str, str]) -> dict[str, Technique]:
    """torch.compile for one batch size at a time, which is faster than code for all of them."""
    technique = Technique(options, "FP16", is_fixed=True, limit_s=COMPILE_S)
    return {
        "fp16 compile": technique,
        "fp16 compile, graphs": replace(technique, options={**options, **GRAPHS}),
    }


def autotuned(options: Mapping[str, str]) -> dict[str, Technique]:
    options = {**options, **GRAPHS, "penstock.compile": "max-autotune"}
    technique = Technique(options, "FP16", is_fixed=True, limit_s=AUTOTUNE_S)
    return {"fp16 max-autotune, graphs": technique}


def for_images(fuse: str, max_batch: int = MAX_BATCH) -> dict[str, Technique]:
    """Return the techniques for a convolutional network, served in batches of at most `max_batch`
    rows. Answers are compared with those of the first."""
    fused = {**HALF, "penstock.fuse": fuse}
    graphed = Technique({**fused, **GRAPHS}, "FP16")
    last_graphed = Technique({**LAST, **GRAPHS}, "FP16")
    return {
        "fp32 eager": Technique({}),
        "fp32 without tf32": Technique({"penstock.dtype": "fp32"}),
        "fp16 eager": Technique(HALF, "FP16"),
        "bf16 eager": Technique(BF16, "FP16"),
        "fp16 channels-last": Technique(LAST, "FP16"),
        "fp16 channels-last, graphs": last_graphed,
        **compiled(COMPILED),
        "fp16 fused": Technique(fused, "FP16", limit_s=TUNING_S),
        "fp16 fused, graphs": graphed,
        "int8 fused, graphs": Technique({**fused, **GRAPHS}, is_int8=True, limit_s=TUNING_S),
        **fed("fp16 fused, graphs", graphed),
        **served("fp16 channels-last, graphs", last_graphed, max_batch),
    }


FOR_RESNET = {
    **for_images("convolutions"),
    "bf16 fused, graphs": Technique({**FUSED, **GRAPHS, **BF16}, "FP16"),
    **autotuned(LAST),
}
# Gates and depthwise layers are fused with the rest.
FOR_IMAGES = for_images("on")
# Of the same length all: nothing to pack.
FOR_PATCHES = {
    "fp32 eager": Technique({}),
    "tf32 eager": Technique({"penstock.dtype": "tf32"}),
    "fp16 eager": Technique(HALF, "FP16"),
    "bf16 eager": Technique(BF16, "FP16"),
    "fp16 graphs": Technique(GRAPHED, "FP16"),
    "bf16 graphs": Technique({**BF16, **GRAPHS}, "FP16"),
    **compiled({**HALF, "penstock.compile": "default"}),
    "fp16 fused transformer": Technique({**HALF, "penstock.fuse": "transformer"}, "FP16"),
    "fp16 fused transformer, graphs": Technique(
        {**GRAPHED, "penstock.fuse": "transformer"}, "FP16"
    ),
    # Fusion leaves the linear layers alone, and chooses the kernel of attention.
    "fp8 by row, graphs": Technique(
        {**GRAPHED, "penstock.fp8": "rowwise", "penstock.fuse": "transformer"}, "FP16"
    ),
    **fed("fp16 graphs", Technique(GRAPHED, "FP16")),
    **served("fp16 graphs", Technique(GRAPHED, "FP16")),
    **autotuned(HALF),
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


class ConvNorm(nn.Sequential):
    """A convolution, batch norm and an activation."""

    def __init__(
        self,
        channels: int,
        out: int,
        size: int = 1,
        stride: int = 1,
        groups: int = 1,
        act: type[nn.Module] | None = nn.SiLU,
    ) -> None:
        conv = nn.Conv2d(channels, out, size, stride, size // 2, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(out), *([act(inplace=True)] if act else []))


class SqueezeExcitation(nn.Module):
    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, hidden, 1), nn.Conv2d(hidden, channels, 1)

    def forward(self, x):
        mean = functional.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.excite(functional.silu(self.squeeze(mean))))


class InvertedResidual(nn.Module):
    """A block of MobileNetV2 (ReLU6) or EfficientNet (SiLU and a gate): wide, depthwise, narrow."""

    def __init__(
        self, channels: int, out: int, wide: int, size: int, stride: int, act: type[nn.Module]
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        if wide != channels:
            layers.append(ConvNorm(channels, wide, act=act))
        layers.append(ConvNorm(wide, wide, size, stride, wide, act))
        if act is nn.SiLU:
            layers.append(SqueezeExcitation(wide, max(1, channels // 4)))
        layers.append(ConvNorm(wide, out, act=None))
        self.layers = nn.Sequential(*layers)
        self.is_residual = stride == 1 and channels == out

    def forward(self, x):
        return x + self.layers(x) if self.is_residual else self.layers(x)


# Factor, channels, blocks, stride and window of each stage.
MOBILENET_V2 = (
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 32, 3, 2, 3), (6, 64, 4, 2, 3),
    (6, 96, 3, 1, 3), (6, 160, 3, 2, 3), (6, 320, 1, 1, 3),
)  # fmt: skip
EFFICIENTNET_B0 = (
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3),
)  # fmt: skip


class MobileNetwork(nn.Module):
    def __init__(
        self, stages: tuple[tuple[int, ...], ...], act: type[nn.Module], last: int = 1280
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [ConvNorm(3, 32, 3, 2, act=act)]
        channels = 32
        for factor, out, depth, first, size in stages:
            for block in range(depth):
                stride = 1 if block else first
                layers.append(InvertedResidual(channels, out, factor * channels, size, stride, act))
                channels = out
        self.layers = nn.Sequential(*layers, ConvNorm(channels, last, act=act))
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(last, 1000))

    def forward(self, image):
        x = functional.adaptive_avg_pool2d(self.layers(image), 1)
        return {"scores": self.head(torch.flatten(x, 1))}


class ConvNextBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, 1e-6)
        self.inner, self.outer = (
            nn.Linear(channels, 4 * channels),
            nn.Linear(4 * channels, channels),
        )
        self.scale = nn.Parameter(torch.full((channels, 1, 1), 0.3))

    def forward(self, x):
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.outer(functional.gelu(self.inner(y))).permute(0, 3, 1, 2)
        return x + self.scale * y


class ChannelNorm(nn.Module):
    """Layer norm over the channels of images."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, 1e-6)

    def forward(self, x):
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    def __init__(self, widths: tuple[int, ...], depths: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelNorm(widths[0])]
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            if stage:
                layers += [
                    ChannelNorm(widths[stage - 1]),
                    nn.Conv2d(widths[stage - 1], width, 2, 2),
                ]
            layers += [ConvNextBlock(width) for _ in range(depth)]
        self.layers = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(widths[-1], 1e-6), nn.Linear(widths[-1], 1000)

    def forward(self, image):
        return {"scores": self.head(self.norm(self.layers(image).mean((2, 3))))}


class CrossStage(nn.Module):
    """Half of the channels go through bottlenecks, and all that is on the way is joined."""

    def __init__(self, channels: int, out: int, depth: int, is_residual: bool = True) -> None:
        super().__init__()
        half = out // 2
        self.first = ConvNorm(channels, out)
        self.pairs = nn.ModuleList(
            nn.Sequential(ConvNorm(half, half, 3), ConvNorm(half, half, 3)) for _ in range(depth)
        )
        self.last = ConvNorm((2 + depth) * half, out)
        self.is_residual = is_residual

    def forward(self, x):
        parts = list(self.first(x).chunk(2, 1))
        for pair in self.pairs:
            made = pair(parts[-1])
            parts.append(parts[-1] + made if self.is_residual else made)
        return self.last(torch.cat(parts, 1))


class PoolPyramid(nn.Module):
    """The same window once, twice and three times (SPPF)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = ConvNorm(channels, channels // 2)
        self.pool = nn.MaxPool2d(5, 1, 2)
        self.last = ConvNorm(2 * channels, channels)

    def forward(self, x):
        parts = [self.first(x)]
        for _ in range(3):
            parts.append(self.pool(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Detector(nn.Module):
    """A YOLO-like network: a backbone, a neck up and down, and a head on three scales."""

    def __init__(self, width: int = 32, num_out: int = 144) -> None:
        super().__init__()
        one, two, three, four, five = (width << power for power in range(5))
        self.early = nn.Sequential(
            ConvNorm(3, one, 3, 2), ConvNorm(one, two, 3, 2), CrossStage(two, two, 1),
            ConvNorm(two, three, 3, 2), CrossStage(three, three, 2),
        )  # fmt: skip
        self.middle = nn.Sequential(ConvNorm(three, four, 3, 2), CrossStage(four, four, 2))
        self.late = nn.Sequential(
            ConvNorm(four, five, 3, 2), CrossStage(five, five, 1), PoolPyramid(five)
        )
        self.grow = nn.Upsample(scale_factor=2)
        self.up_four = CrossStage(five + four, four, 1, is_residual=False)
        self.up_three = CrossStage(four + three, three, 1, is_residual=False)
        self.shrink_three = ConvNorm(three, three, 3, 2)
        self.down_four = CrossStage(three + four, four, 1, is_residual=False)
        self.shrink_four = ConvNorm(four, four, 3, 2)
        self.down_five = CrossStage(four + five, five, 1, is_residual=False)
        self.heads = nn.ModuleList(
            nn.Sequential(ConvNorm(each, three, 3), nn.Conv2d(three, num_out, 1))
            for each in (three, four, five)
        )

    def forward(self, image):
        three = self.early(image)
        four = self.middle(three)
        five = self.late(four)
        four = self.up_four(torch.cat((self.grow(five), four), 1))
        three = self.up_three(torch.cat((self.grow(four), three), 1))
        four = self.down_four(torch.cat((self.shrink_three(three), four), 1))
        five = self.down_five(torch.cat((self.shrink_four(four), five), 1))
        maps = zip(self.heads, (three, four, five), strict=True)
        return {"boxes": torch.cat([head(each).flatten(2) for head, each in maps], 2)}


class DiffusionBlock(nn.Module):
    """A residual block of a diffusion UNet, and a transformer layer over its pixels."""

    def __init__(self, channels: int, out: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList((nn.GroupNorm(32, channels), nn.GroupNorm(32, out)))
        self.convs = nn.ModuleList(
            (nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1))
        )
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()
        self.first_norm, self.last_norm = nn.LayerNorm(out), nn.LayerNorm(out)
        self.query, self.key, self.value = (nn.Linear(out, out, bias=False) for _ in range(3))
        self.joined = nn.Linear(out, out)
        self.inner, self.outer = nn.Linear(out, 4 * out), nn.Linear(4 * out, out)

    def forward(self, x):
        y = self.convs[0](functional.silu(self.norms[0](x)))
        y = self.convs[1](functional.silu(self.norms[1](y)))
        x = self.skip(x) + y
        tokens = x.flatten(2).transpose(1, 2)
        tokens = tokens + self._attend(self.first_norm(tokens))
        tokens = tokens + self.outer(functional.gelu(self.inner(self.last_norm(tokens))))
        return tokens.transpose(1, 2).unflatten(2, x.shape[2:])

    def _attend(self, x):
        heads = [
            layer(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        mixed = functional.scaled_dot_product_attention(*heads)
        return self.joined(mixed.transpose(1, 2).flatten(2))


class DiffusionStack(nn.Module):
    """Blocks of a diffusion UNet on two scales, on the way down and up again."""

    def __init__(self, width: int, num_heads: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.first = nn.Conv2d(4, width, 3, padding=1)
        self.before = DiffusionBlock(width, width, num_heads)
        self.down = nn.Conv2d(width, width, 3, 2, 1)
        self.inside = nn.Sequential(
            DiffusionBlock(width, 2 * width, num_heads), DiffusionBlock(2 * width, width, num_heads)
        )
        self.up = nn.Upsample(scale_factor=2)
        self.after = DiffusionBlock(2 * width, width, num_heads)
        self.norm, self.last = nn.GroupNorm(32, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, latent):
        x = self.before(self.first(latent))
        inside = self.up(self.inside(self.down(x)))
        x = self.after(torch.cat((x, inside), 1))
        return {"noise": self.last(functional.silu(self.norm(x)))}


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
            fan = each.in_channels // each.groups * each.kernel_size[0] * each.kernel_size[1]
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
            if each.bias is not None:
                each.bias.zero_()
        elif isinstance(each, nn.LayerNorm | nn.GroupNorm):
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


def mobilenet_v2() -> nn.Module:
    return _trained(MobileNetwork(MOBILENET_V2, nn.ReLU6))


def mobilenet_tiny() -> nn.Module:
    return _trained(MobileNetwork(MOBILENET_V2[:2], nn.ReLU6, 64))


def efficientnet_b0() -> nn.Module:
    return _trained(MobileNetwork(EFFICIENTNET_B0, nn.SiLU))


def efficientnet_tiny() -> nn.Module:
    return _trained(MobileNetwork(EFFICIENTNET_B0[:3], nn.SiLU, 64))


def convnext_t() -> nn.Module:
    return _trained(ConvNext((96, 192, 384, 768), (3, 3, 9, 3)))


def convnext_tiny() -> nn.Module:
    return _trained(ConvNext((16, 32), (1, 2)))


def detector() -> nn.Module:
    return _trained(Detector())


def detector_tiny() -> nn.Module:
    return _trained(Detector(8, 16))


def unet() -> nn.Module:
    return _trained(DiffusionStack(320, 5, 64))


def unet_tiny() -> nn.Module:
    return _trained(DiffusionStack(32, 2, 8))


@dataclass(frozen=True, slots=True)
class Network:
    """A kind of network: factories of the true one and of a tiny one, the shape of one input of
    each, and a small and a large batch."""

    factory: str
    tiny: str
    shape: tuple[int, ...]
    tiny_shape: tuple[int, ...]
    batches: tuple[int, int]


NETWORKS: dict[str, Network] = {
    "ResNet-50": Network("resnet50", "resnet_tiny", (3, 224, 224), (3, 32, 32), (1, 256)),
    "MobileNetV2": Network("mobilenet_v2", "mobilenet_tiny", (3, 224, 224), (3, 32, 32), (1, 256)),
    "EfficientNet-B0": Network(
        "efficientnet_b0", "efficientnet_tiny", (3, 224, 224), (3, 32, 32), (1, 256)
    ),
    "ConvNeXt-T": Network("convnext_t", "convnext_tiny", (3, 224, 224), (3, 32, 32), (1, 128)),
    "ViT-B/16": Network("vit_b", "vit_tiny", (3, 224, 224), (3, 32, 32), (1, 128)),
    "YOLO-like": Network("detector", "detector_tiny", (3, 640, 640), (3, 64, 64), (1, 32)),
    "diffusion UNet": Network("unet", "unet_tiny", (4, 64, 64), (4, 8, 8), (2, 16)),
}
MODELS: dict[str, Model] = {
    "resnet50": Model(
        "resnet50",
        {"image": Tensor("FP32", (3, 224, 224))},
        {"scores": Tensor("FP32", (1000,))},
        FOR_RESNET,
        (1, 32, 256),
        "resnet_tiny",
        {"image": Tensor("FP32", (3, 32, 32))},
    ),
    "vit_b": Model(
        "vit_b",
        {"image": Tensor("FP32", (3, 224, 224))},
        {"scores": Tensor("FP32", (1000,))},
        FOR_PATCHES,
        (1, 32, 128),
        "vit_tiny",
        {"image": Tensor("FP32", (3, 32, 32))},
    ),
    "efficientnet_b0": Model(
        "efficientnet_b0",
        {"image": Tensor("FP32", (3, 224, 224))},
        {"scores": Tensor("FP32", (1000,))},
        FOR_IMAGES,
        (1, 256),
        "efficientnet_tiny",
        {"image": Tensor("FP32", (3, 32, 32))},
    ),
    "mobilenet_v2": Model(
        "mobilenet_v2",
        {"image": Tensor("FP32", (3, 224, 224))},
        {"scores": Tensor("FP32", (1000,))},
        FOR_IMAGES,
        (1, 256),
        "mobilenet_tiny",
        {"image": Tensor("FP32", (3, 32, 32))},
    ),
    "detector": Model(
        "detector",
        {"image": Tensor("FP32", (3, 640, 640))},
        {"boxes": Tensor("FP32", (144, 8400))},
        # A row and its answer are 7 MB.
        for_images("on", max_batch=16),
        (1, 32),
        "detector_tiny",
        {"image": Tensor("FP32", (3, 64, 64))},
        {"boxes": Tensor("FP32", (16, 84))},
    ),
}
