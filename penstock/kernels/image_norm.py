"""Group norm of images, with an addition by channel before it and an activation after it, run by
the fastest implementation. torch's kernel for GPUs copies channels-last images twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from penstock.kernels import has_triton
from penstock.kernels.activation import Activation
from penstock.kernels.convolution import (
    IMAGE_RANK,
    MAX_OFFSET,
    REFERENCE,
    TOLERANCE,
    Run,
    TunedLayer,
    Tuner,
    last,
)


class ImageNorm(TunedLayer):
    """Group norm. `added`, [batch, channels, 1, 1], is added to the images first. `is_by_group`:
    weight and bias are numbers for each group."""

    def __init__(
        self,
        num_groups: int,
        weight: torch.nn.Parameter | None,
        bias: torch.nn.Parameter | None,
        epsilon: float,
        activation: Activation | None,
        tuner: Tuner | None,
        is_by_group: bool = False,
    ) -> None:
        super().__init__(tuner)
        self.is_by_group = is_by_group
        self.num_groups, self.epsilon = num_groups, epsilon
        self.weight, self.bias = weight, bias
        self.activation = activation

    def forward(self, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        if torch.compiler.is_compiling() or not self._is_known(x, added):
            return self._plain(x, added)
        return self.chosen.run(x, added, self._plain)

    def _is_known(self, x: torch.Tensor, added: torch.Tensor | None) -> bool:
        if x.ndim != IMAGE_RANK:
            return False
        is_by_channel = added is None or added.shape == (*x.shape[:2], 1, 1)
        return is_by_channel and (added is None or added.dtype == x.dtype)

    def key(self, x: torch.Tensor, added: torch.Tensor | None) -> str:
        sizes, dtype = "x".join(map(str, x.shape)), str(x.dtype).removeprefix("torch.")
        # torch's kernel, and ours, copy images that lie otherwise.
        is_last = x.is_contiguous(memory_format=torch.channels_last)
        steps = ["channels_last"] * is_last + ["added"] * (added is not None)
        steps += [name for name in ("weight", "bias") if getattr(self, name) is not None]
        steps += ["by_group"] * self.is_by_group
        steps += [] if self.activation is None else [str(self.activation)]
        return " ".join((f"group_norm {sizes} {dtype} groups {self.num_groups}", *steps))

    def implementations(self, x: torch.Tensor, added: torch.Tensor | None) -> dict[str, Run]:
        found: dict[str, Run] = {REFERENCE: self._plain}
        if not has_triton() or x.dtype not in TOLERANCE or not 0 < x.numel() <= MAX_OFFSET:
            return found
        from penstock.kernels import group_norm

        size = x.shape[1] // self.num_groups
        if size <= group_norm.MAX_SIZE:
            found["triton in parts"] = partial(self._by_kernel, group_norm.in_parts)
            if size * x.shape[2] * x.shape[3] <= group_norm.MAX_WHOLE:
                found["triton whole"] = partial(self._by_kernel, group_norm.whole)
        return found

    def _plain(self, x: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
        x = x if added is None else x + added
        y = functional.group_norm(x, self.num_groups, *self._weights(x), self.epsilon)
        return y if self.activation is None else self.activation(y)

    def _weights(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return weight and bias of each channel."""
        weight, bias = self.weight, self.bias
        size = x.shape[1] // self.num_groups
        if not self.is_by_group or size == 1:
            return weight, bias
        assert weight is not None and bias is not None
        return weight.repeat_interleave(size), bias.repeat_interleave(size)

    def _by_kernel(
        self, kernel: Callable[..., torch.Tensor], x: torch.Tensor, added: torch.Tensor | None
    ) -> torch.Tensor:
        from penstock.kernels.group_norm import GroupNormForm

        form = GroupNormForm(self.num_groups, self.epsilon, *self._weights(x), self.activation)
        return kernel(last(x), form, None if added is None else added.flatten(1).contiguous())
