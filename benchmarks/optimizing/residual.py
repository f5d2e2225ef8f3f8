"""A small residual network with "same" padding computed from the shape of its input, as ported
from TensorFlow, trained for a minute on scikit-learn's digits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

SIDE = 64
WIDTHS = (16, 32, 64)
CLASSES = 10
EPOCHS = 4
BATCH = 64
SEED = 11


class Conv2dSame(nn.Conv2d):
    """The padding depends on the input, so that tracing leaves its arithmetic in the graph."""

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]

        def total(size: int) -> int:
            # A stride leaves out what a smaller kernel does not need.
            return ((size + stride - 1) // stride - 1) * stride + max(kernel, stride) - size

        high, wide = total(x.shape[-2]), total(x.shape[-1])
        pads = [wide // 2, wide - wide // 2, high // 2, high - high // 2]
        return functional.conv2d(functional.pad(x, pads), self.weight, self.bias, self.stride)


class Block(nn.Module):
    def __init__(self, channels: tuple[int, int], stride: int) -> None:
        super().__init__()
        self.first = Conv2dSame(*channels, 3, stride, bias=False)
        self.second = Conv2dSame(channels[1], channels[1], 3, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels[1]) for _ in range(2))
        is_same = stride == 1 and channels[0] == channels[1]
        self.shortcut = nn.Identity() if is_same else Conv2dSame(*channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norms[0](self.first(x)))
        added: Tensor = self.norms[1](self.second(inner)) + self.shortcut(x)
        return functional.relu(added)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Conv2dSame(3, WIDTHS[0], 3, 2)
        pairs = zip((WIDTHS[0], *WIDTHS), WIDTHS, strict=False)
        self.blocks = nn.Sequential(*(Block(pair, 1 + (pair[0] != pair[1])) for pair in pairs))
        self.head = nn.Linear(WIDTHS[-1], CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        found: Tensor = self.blocks(functional.relu(self.stem(image)))
        logits: Tensor = self.head(found.mean((2, 3)))
        return logits


def images() -> tuple[np.ndarray, np.ndarray]:
    """The digits as images [n, 3, 64, 64], with a tint of their own, and their labels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    small = torch.tensor(found.images / 16, dtype=torch.float32)[:, None]
    large = functional.interpolate(small, SIDE, mode="bilinear")
    random = np.random.default_rng(SEED)
    tints = random.uniform(0.5, 1.0, (len(large), 3, 1, 1)).astype(np.float32)
    noise = random.normal(scale=0.05, size=(len(large), 3, SIDE, SIDE)).astype(np.float32)
    return large.numpy() * tints + noise, found.target.astype(np.int64)


def trained(inputs: np.ndarray, labels: np.ndarray) -> Residual:
    torch.manual_seed(SEED)
    module = Residual()
    optimiser = torch.optim.Adam(module.parameters(), 2e-3)
    for _ in range(EPOCHS):
        for part in torch.randperm(len(inputs)).split(BATCH):
            optimiser.zero_grad()
            answer = module(torch.tensor(inputs[part]))
            functional.cross_entropy(answer, torch.tensor(labels[part])).backward()
            optimiser.step()
    return module.eval()
