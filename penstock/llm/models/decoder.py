"""The decoder of all families: pre-norm layers of attention and SwiGLU.

It computes hidden states of the concatenated tokens of any sequences; `Attend` knows which tokens
see each other, and stores keys and values. Weight names are Hugging Face's. Queries, keys and
values are one linear layer, and so are gate and up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.llm.models.int4 import int4_linear
from penstock.llm.models.int8 import int8_linear
from penstock.llm.models.linear import AnyLinear, Linear, fp8_linear
from penstock.llm.models.shape import DecoderShape

Weights = Callable[[str], Tensor]
MakeLinear = Callable[[Tensor, Tensor | None], AnyLinear]
ON_CPU: Mapping[str, MakeLinear] = {"int8": int8_linear, "int4": int4_linear}
EMBEDDINGS, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class Attend(Protocol):
    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from queries [tokens, heads, size]; store keys and values."""


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


class Decoder:
    def __init__(
        self,
        shape: DecoderShape,
        weights: Weights,
        device: str,
        dtype: torch.dtype,
        *,
        is_fp8: bool = False,
        on_cpu: str = "",
    ) -> None:
        """`weights` returns each weight by name, in any type, and is called once for each.
        `is_fp8`: linear layers except the output head run in FP8. `on_cpu`: they run in "int8" or
        "int4", the head in INT8. Embeddings and everything between linear layers keep `dtype`."""
        self.shape = shape
        self.device, self.dtype = torch.device(device), dtype
        # Whether activations are rounded to fewer bits than FP32.
        self.rounds = is_fp8 or bool(on_cpu) or dtype != torch.float32

        def place(*names: str) -> Tensor:
            parts = [weights(name).to(self.device, dtype) for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        self.embeddings = place(EMBEDDINGS)
        linear: MakeLinear = Linear
        if is_fp8 or on_cpu:
            linear = fp8_linear if is_fp8 else ON_CPU[on_cpu]
        self.layers = [
            _layer(shape, f"model.layers.{n}", place, linear) for n in range(shape.num_layers)
        ]
        self.norm = place(NORM)
        head = self.embeddings if shape.is_tied else place(HEAD)
        of_logits: MakeLinear = int8_linear if on_cpu else Linear
        self._logits = of_logits(head, None)
        # Packed weights replace the original ones.
        self._head = None if on_cpu else head
        self.rope_table = _rope_table(shape).to(self.device)

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


def _layer(
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
        make(*attention, has_bias=shape.has_bias),
        make(f"{prefix}.self_attn.o_proj", has_bias=shape.has_bias),
        None if norms is None else (norms[0], norms[1]),
        place(f"{prefix}.post_attention_layernorm.weight"),
        make(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"),
        make(f"{prefix}.mlp.down_proj"),
    )


def _rope_table(shape: DecoderShape) -> Tensor:
    """Return the RoPE table [positions, 2, half a head]: cosines and sines."""
    frequencies = torch.tensor(shape.rope.frequencies(shape.head_size), dtype=torch.float64)
    angles = torch.arange(shape.max_length, dtype=torch.float64)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], 1).float()


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
    if shape.has_bias:
        layer |= {
            f"self_attn.{name}_proj.bias": (size,)
            for name, size in zip("qkvo", (queries, keys, keys, width), strict=True)
        }
    found: dict[str, tuple[int, ...]] = {EMBEDDINGS: (shape.vocabulary, width), NORM: (width,)}
    if not shape.is_tied:
        found[HEAD] = shape.vocabulary, width
    for number in range(shape.num_layers):
        found |= {f"model.layers.{number}.{name}": size for name, size in layer.items()}
    return found
