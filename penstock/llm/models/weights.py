"""Weights of a decoder: their names and sizes in files, and the layers made of them.

Names are Hugging Face's. Queries, keys and values are one linear layer, and so are gate and up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.llm.models.fp8 import fp8_linear
from penstock.llm.models.int4 import int4_linear
from penstock.llm.models.int8 import int8_linear
from penstock.llm.models.linear import AnyLinear, Linear
from penstock.llm.models.shape import DecoderShape

Weights = Callable[[str], Tensor]
MakeLinear = Callable[[Tensor, Tensor | None], AnyLinear]
# Linear layers by their datatype; "": that of the other layers.
LINEARS: Mapping[str, MakeLinear] = {
    "": Linear,
    "fp8": fp8_linear,
    "int8": int8_linear,
    "int4": int4_linear,
}
EMBEDDINGS, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    first_norm: Tensor
    qkv: AnyLinear
    out: AnyLinear
    # For queries and for keys.
    head_norms: tuple[Tensor, Tensor] | None
    last_norm: Tensor
    gate_up: AnyLinear
    down: AnyLinear


def make_layer(
    shape: DecoderShape, prefix: str, place: Callable[..., Tensor], linear: MakeLinear
) -> DecoderLayer:
    attention = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
    norms = None
    if shape.has_qk_norm:
        norms = tuple(place(f"{prefix}.self_attn.{name}_norm.weight") for name in "qk")

    def make(*parts: str, has_bias: bool = False) -> AnyLinear:
        bias = place(*(f"{part}.bias" for part in parts)) if has_bias else None
        return linear(place(*(f"{part}.weight" for part in parts)), bias)

    return DecoderLayer(
        place(f"{prefix}.input_layernorm.weight"),
        make(*attention, has_bias=shape.has_qkv_bias),
        make(f"{prefix}.self_attn.o_proj", has_bias=shape.has_out_bias),
        None if norms is None else (norms[0], norms[1]),
        place(f"{prefix}.post_attention_layernorm.weight"),
        make(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"),
        make(f"{prefix}.mlp.down_proj"),
    )


def make_rope_table(shape: DecoderShape) -> Tensor:
    """Return the RoPE table [positions, 2, half a head]: cosines and sines."""
    frequencies = torch.tensor(shape.rope.frequencies(shape.head_size), dtype=torch.float64)
    angles = torch.arange(shape.max_length, dtype=torch.float64)[:, None] * frequencies
    table = torch.stack([angles.cos(), angles.sin()], 1)
    return (table * torch.tensor(shape.rope.magnitudes(shape.head_size))).float()


def weight_sizes(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights, by their names in files."""
    width, queries = shape.width, shape.num_heads * shape.head_size
    keys = shape.num_kv_heads * shape.head_size
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, queries),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (shape.inner, width),
        "mlp.up_proj.weight": (shape.inner, width),
        "mlp.down_proj.weight": (width, shape.inner),
    }
    if shape.has_qk_norm:
        layer |= {f"self_attn.{name}_norm.weight": (shape.head_size,) for name in "qk"}
    if shape.has_qkv_bias:
        layer |= {
            f"self_attn.{name}_proj.bias": (size,)
            for name, size in zip("qkv", (queries, keys, keys), strict=True)
        }
    if shape.has_out_bias:
        layer["self_attn.o_proj.bias"] = (width,)
    found: dict[str, tuple[int, ...]] = {EMBEDDINGS: (shape.vocabulary, width), NORM: (width,)}
    if not shape.is_tied:
        found[HEAD] = shape.vocabulary, width
    for number in range(shape.num_layers):
        found |= {f"model.layers.{number}.{name}": size for name, size in layer.items()}
    return found
