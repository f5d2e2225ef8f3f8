"""MobileNetV2 as a torch module, with the parameter names of torchvision's checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# expansion, channels, how often, stride of the first
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
FIRST, LAST, CLASSES = 32, 1280, 1000


def convolution(
    channels: tuple[int, int], kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(*channels, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(channels[1]),
        nn.ReLU6(inplace=True),
    )


class InvertedResidual(nn.Module):
    """Wide, depthwise, narrow again; added to its input where the shapes allow it."""

    def __init__(self, channels: tuple[int, int], expansion: int, stride: int) -> None:
        super().__init__()
        wide = channels[0] * expansion
        widen = [convolution((channels[0], wide), 1)] if expansion != 1 else []
        self.is_added = stride == 1 and channels[0] == channels[1]
        self.conv = nn.Sequential(
            *widen,
            convolution((wide, wide), 3, stride, groups=wide),
            nn.Conv2d(wide, channels[1], 1, bias=False),
            nn.BatchNorm2d(channels[1]),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.is_added else self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [convolution((3, FIRST), 3, 2)]
        width = FIRST
        for expansion, channels, count, first_stride in STAGES:
            for number in range(count):
                stride = first_stride if number == 0 else 1
                layers.append(InvertedResidual((width, channels), expansion, stride))
                width = channels
        self.features = nn.Sequential(*layers, convolution((width, LAST), 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(LAST, CLASSES))

    def forward(self, image: Tensor) -> Tensor:
        return self.classifier(self.features(image).mean([2, 3]))


def load(path: str) -> MobileNetV2:
    module = MobileNetV2()
    module.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return module.eval()
