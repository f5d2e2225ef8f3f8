"""Layers of Llama and families like it: RMSNorm before attention, and before SwiGLU or a mixture of
experts.

Queries, keys and values are one linear layer, and so are gate and up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.llm.models.experts import ExpertLayer, expert_sizes, make_experts
from penstock.llm.models.feed import SwiGlu, make_swiglu, swiglu_sizes
from penstock.llm.models.layer import (
    AttendHere,
    LayerKind,
    MakeLinear,
    Place,
    attention_sizes,
    make_out,
    make_qkv,
)
from penstock.llm.models.linear import AnyLinear
from penstock.llm.models.norms import Norm, RmsNorm, rms_norm
from penstock.llm.models.rope import rotate
from penstock.llm.models.shape import DecoderShape


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    shape: DecoderShape
    first_norm: Tensor
    qkv: AnyLinear
    out: AnyLinear
    # For queries and for keys.
    head_norms: tuple[Tensor, Tensor] | None
    last_norm: Tensor
    feed: SwiGlu | ExpertLayer

    @property
    def linears(self) -> Sequence[AnyLinear]:
        return self.qkv, self.out, *self.feed.linears

    def __call__(self, x: Tensor, rope_rows: Tensor, attend: AttendHere) -> Tensor:
        x = x + self._attended(x, rope_rows, attend)
        return x + self.feed(self._norm(x, self.last_norm))

    def _attended(self, x: Tensor, rope_rows: Tensor, attend: AttendHere) -> Tensor:
        shape = self.shape
        heads = self.qkv(self._norm(x, self.first_norm))
        heads = heads.unflatten(1, (-1, shape.head_size))
        sizes = [shape.num_heads, shape.num_kv_heads]
        both, values = heads.split([sum(sizes), shape.num_kv_heads], 1)
        if self.head_norms is not None:
            parts = zip(both.split(sizes, 1), self.head_norms, strict=True)
            both = torch.cat([self._norm(part, norm) for part, norm in parts], 1)
        queries, keys = rotate(both, rope_rows).split(sizes, 1)
        return self.out(attend(queries, keys, values).flatten(1))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.shape.epsilon)


def _sizes(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    found = {
        "input_layernorm.weight": (shape.width,),
        "post_attention_layernorm.weight": (shape.width,),
        **attention_sizes(shape),
    }
    if shape.experts is not None:
        return found | expert_sizes(shape.experts, shape.width)
    return found | swiglu_sizes("mlp", shape.width, shape.inner)


def _make(shape: DecoderShape, prefix: str, place: Place, linear: MakeLinear) -> DecoderLayer:
    norms = None
    if shape.has_qk_norm:
        queries, keys = (place(f"{prefix}.self_attn.{name}_norm.weight") for name in "qk")
        norms = queries, keys
    return DecoderLayer(
        shape,
        place(f"{prefix}.input_layernorm.weight"),
        make_qkv(shape, prefix, place, linear),
        make_out(shape, prefix, place, linear),
        norms,
        place(f"{prefix}.post_attention_layernorm.weight"),
        _make_feed(shape, f"{prefix}.mlp", place, linear),
    )


def _make_feed(
    shape: DecoderShape, prefix: str, place: Place, linear: MakeLinear
) -> SwiGlu | ExpertLayer:
    if shape.experts is not None:
        return make_experts(shape.experts, prefix, place, linear)
    return make_swiglu(prefix, place, linear)


def _norm(shape: DecoderShape, name: str, place: Place) -> Norm:
    return RmsNorm(place(f"{name}.weight"), shape.epsilon)


SWIGLU = LayerKind(_sizes, _make, _norm)
