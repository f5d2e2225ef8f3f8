"""Layers of Gemma 2 and 3: norms before and after attention and GeGLU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from penstock.llm.models.feed import make_swiglu, swiglu_sizes
from penstock.llm.models.layer import (
    AttendHere,
    LayerKind,
    MakeLinear,
    Place,
    attention_sizes,
    make_out,
    make_qkv,
    split_heads,
)
from penstock.llm.models.linear import AnyLinear
from penstock.llm.models.norms import Norm, WideRmsNorm
from penstock.llm.models.rope import rotate
from penstock.llm.models.shape import DecoderShape

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True)
class GemmaLayer:
    shape: DecoderShape
    norms: Sequence[Norm]
    qkv: AnyLinear
    out: AnyLinear
    head_norms: Sequence[Norm]
    gate_up: AnyLinear
    down: AnyLinear

    @property
    def linears(self) -> Sequence[AnyLinear]:
        return self.qkv, self.out, self.gate_up, self.down

    def __call__(self, x: Tensor, rope_rows: Tensor, attend: AttendHere) -> Tensor:
        before, after, before_feed, after_feed = self.norms
        queries, keys, values = split_heads(self.qkv(before(x)), self.shape)
        if self.head_norms:
            queries, keys = self.head_norms[0](queries), self.head_norms[1](keys)
        queries = rotate(queries * self.shape.query_factor, rope_rows)
        mixed = attend(queries, rotate(keys, rope_rows), values)
        x = x + after(self.out(mixed.flatten(1)))
        gate, up = self.gate_up(before_feed(x)).chunk(2, 1)
        return x + after_feed(self.down(F.gelu(gate, approximate="tanh").mul_(up)))


def _sizes(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {f"{name}.weight": (shape.width,) for name in NORMS}
    return found | attention_sizes(shape) | swiglu_sizes("mlp", shape.width, shape.inner)


def _make(shape: DecoderShape, prefix: str, place: Place, linear: MakeLinear) -> GemmaLayer:
    heads = [f"self_attn.{name}_norm" for name in "qk"] if shape.has_qk_norm else []
    feed = make_swiglu(f"{prefix}.mlp", place, linear)
    return GemmaLayer(
        shape,
        [_norm(shape, f"{prefix}.{name}", place) for name in NORMS],
        make_qkv(shape, prefix, place, linear),
        make_out(shape, prefix, place, linear),
        [_norm(shape, f"{prefix}.{name}", place) for name in heads],
        feed.gate_up,
        feed.down,
    )


def _norm(shape: DecoderShape, name: str, place: Place) -> Norm:
    return WideRmsNorm(place(f"{name}.weight", is_wide=True), shape.epsilon)


GEGLU = LayerKind(_sizes, _make, _norm)
