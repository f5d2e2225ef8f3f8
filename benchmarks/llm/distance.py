"""How far our types are from FP32: all tokens of prompts at once, without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.llm.checkpoint import open_checkpoint
from penstock.llm.models.decoder import Decoder

TYPES = {
    "bf16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.float32, "quantised": "int8"},
    "int4": {"dtype": torch.float32, "quantised": "int4"},
}


def distances(path: Path, prompts: Sequence[Sequence[int]]) -> dict[str, dict[str, float]]:
    """Of each type, means over all positions: the divergence of its probabilities from those of
    FP32, and how often the most likely token is the same."""
    exact = _logprobs(path, prompts, dtype=torch.float32)
    found = {}
    for name, options in TYPES.items():
        other = _logprobs(path, prompts, **options)
        divergences = (exact.exp() * (exact - other)).sum(1)
        found[name] = {
            "divergence": float(divergences.mean()),
            "largest": float(divergences.max()),
            "same": float((exact.argmax(1) == other.argmax(1)).float().mean()),
            "positions": len(exact),
        }
    return found


def _logprobs(path: Path, prompts: Sequence[Sequence[int]], **options: object) -> Tensor:
    checkpoint = open_checkpoint(path)
    try:
        decoder = Decoder(checkpoint.shape, checkpoint.weight, "cpu", **options)  # type: ignore[arg-type]
    finally:
        checkpoint.close()
    with torch.inference_mode():
        return torch.cat([_of_prompt(decoder, tokens) for tokens in prompts])


def _of_prompt(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    hidden = decoder.hidden(torch.tensor(tokens), torch.arange(len(tokens)), _attended)
    return decoder.logits(hidden).float().log_softmax(1)


def _attended(_: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    parts = (each.transpose(0, 1)[None] for each in (queries, keys, values))
    mixed = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
    return mixed[0].transpose(0, 1)
