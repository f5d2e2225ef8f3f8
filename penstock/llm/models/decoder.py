"""The decoder of all families: pre-norm layers of attention and SwiGLU.

It computes hidden states of the concatenated tokens of any sequences; `Attend` knows which tokens
see each other, and stores keys and values. `weights` makes the layers.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.llm.models.shape import DecoderShape
from penstock.llm.models.weights import (
    EMBEDDINGS,
    HEAD,
    LINEARS,
    NORM,
    DecoderLayer,
    Weights,
    make_layer,
    make_rope_table,
)
from penstock.llm.settings import ON_CPUS


class Attend(Protocol):
    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from queries [tokens, heads, size]; store keys and values."""


class Decoder:
    def __init__(
        self,
        shape: DecoderShape,
        weights: Weights,
        device: str,
        dtype: torch.dtype,
        quantised: str = "",
    ) -> None:
        """`weights` returns each weight by name, in any type, and is called once for each. Linear
        layers run in `quantised`: "fp8", "int8" or "int4"; the output head runs in INT8 beside the
        last two. Embeddings and everything between linear layers keep `dtype`."""
        self.shape = shape
        self.device, self.dtype = torch.device(device), dtype
        # Whether activations are rounded to fewer bits than FP32.
        self.rounds = bool(quantised) or dtype != torch.float32

        def place(*names: str) -> Tensor:
            parts = [weights(name).to(self.device, dtype) for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        self.embeddings = place(EMBEDDINGS)
        linear = LINEARS[quantised]
        self.layers = [
            make_layer(shape, f"model.layers.{n}", place, linear) for n in range(shape.num_layers)
        ]
        self.norm = place(NORM)
        head = self.embeddings if shape.is_tied else place(HEAD)
        is_packed = quantised in ON_CPUS
        self._logits = LINEARS["int8" if is_packed else ""](head, None)
        # Packed weights replace the original ones.
        self._head = None if is_packed else head
        self.rope_table = make_rope_table(shape).to(self.device)

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the final hidden states, [tokens, width], after the last RMSNorm."""
        x = F.embedding(tokens, self.embeddings)
        rope_table = widen(self.rope_table[positions])
        for number, layer in enumerate(self.layers):
            x = x + self._attended(number, layer, x, rope_table, attend)
            x = x + self._fed(layer, x)
        return self._norm(x, self.norm)

    @property
    def head(self) -> Tensor:
        """Weights of the output head; not available when packed."""
        assert self._head is not None
        return self._head

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits(hidden)

    def _attended(
        self, number: int, layer: DecoderLayer, x: Tensor, rope_table: Tensor, attend: Attend
    ) -> Tensor:
        shape = self.shape
        heads = layer.qkv(self._norm(x, layer.first_norm))
        heads = heads.unflatten(1, (-1, shape.head_size))
        sizes = [shape.num_heads, shape.num_kv_heads]
        both, values = heads.split([sum(sizes), shape.num_kv_heads], 1)
        if layer.head_norms is not None:
            parts = zip(both.split(sizes, 1), layer.head_norms, strict=True)
            both = torch.cat([self._norm(part, norm) for part, norm in parts], 1)
        queries, keys = rope(both, rope_table).split(sizes, 1)
        mixed = attend(number, queries, keys, values)
        return layer.out(mixed.flatten(1))

    def _fed(self, layer: DecoderLayer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._norm(x, layer.last_norm)).chunk(2, 1)
        return layer.down(F.silu(gate).mul_(up))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.shape.epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Apply RMSNorm in FP32, as the models were trained."""
    wide = x.float()
    wide = wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return weight * wide.to(x.dtype)


def widen(rope_table: Tensor) -> Tensor:
    """Expand rows of the RoPE table from half heads to whole heads, once for all layers."""
    cosines, sines = rope_table.unbind(1)
    wide = torch.cat([cosines, cosines, -sines, sines], 1)
    return wide.unflatten(1, (2, -1))


def rope(heads: Tensor, wide_table: Tensor) -> Tensor:
    """Apply RoPE to [tokens, heads, size]; the two halves of a head form the pairs."""
    wide = heads.float()
    found = wide * wide_table[:, :1] + wide.roll(heads.shape[2] // 2, 2) * wide_table[:, 1:]
    return found.to(heads.dtype)
