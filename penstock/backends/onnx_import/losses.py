"""Losses of the standard domain, which models exported with their loss have."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from penstock.backends.onnx_import.values import OnnxOperator

NOTHING = -100


def negative_log_likelihood(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = NOTHING,
    reduction: str = "mean",
) -> Tensor:
    return functional.nll_loss(
        x, target.long(), weight, ignore_index=ignore_index, reduction=reduction
    )


def softmax_cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = NOTHING,
    reduction: str = "mean",
    num_outputs: int,
) -> Tensor | tuple[Tensor, Tensor]:
    logs = torch.log_softmax(x, 1)
    loss = negative_log_likelihood(
        logs, target, weight, ignore_index=ignore_index, reduction=reduction
    )
    return (loss, logs) if num_outputs > 1 else loss


OPERATORS = {
    "NegativeLogLikelihoodLoss": OnnxOperator(negative_log_likelihood),
    "SoftmaxCrossEntropyLoss": OnnxOperator(softmax_cross_entropy),
}
