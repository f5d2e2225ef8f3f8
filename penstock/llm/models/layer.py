"""What every kind of layer has in common: how it is made and what a decoder calls.

`swiglu`, `gemma` and `gpt2` have the kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.llm.models.linear import AnyLinear
from penstock.llm.models.norms import Norm
from penstock.llm.models.shape import DecoderShape

Sizes = Mapping[str, tuple[int, ...]]
MakeLinear = Callable[[Tensor, Tensor | None], AnyLinear]
# From queries [tokens, heads, size], keys and values of one layer to what attention makes of them.
AttendHere = Callable[[Tensor, Tensor, Tensor], Tensor]


class Place(Protocol):
    def __call__(self, *names: str, is_wide: bool = False) -> Tensor:
        """Return weights on the device, joined by rows, in the decoder's type or in FP32."""


class AnyLayer(Protocol):
    @property
    def linears(self) -> Sequence[AnyLinear]: ...

    def __call__(self, x: Tensor, rope_rows: Tensor, attend: AttendHere) -> Tensor:
        """Return the hidden states behind this layer, [tokens, width]."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A kind of layers. `sizes` are the shapes of a layer's weights by name, of which `make` makes
    the one whose weights begin with a prefix; `norm` makes the norm behind the last layer."""

    sizes: Callable[[DecoderShape], Sizes]
    make: Callable[[DecoderShape, str, Place, MakeLinear], AnyLayer]
    norm: Callable[[DecoderShape, str, Place], Norm]
    # Whether two linear layers, gate and up, are multiplied before the last one.
    is_gated: bool = True
    # Whether norms have a bias.
    has_norm_bias: bool = False


def attention_sizes(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of attention."""
    width, queries = shape.width, shape.num_heads * shape.head_size
    keys = shape.num_kv_heads * shape.head_size
    found: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, queries),
    }
    if shape.has_qk_norm:
        found |= {f"self_attn.{name}_norm.weight": (shape.head_size,) for name in "qk"}
    if shape.has_qkv_bias:
        found |= {
            f"self_attn.{name}_proj.bias": (size,)
            for name, size in zip("qkv", (queries, keys, keys), strict=True)
        }
    if shape.has_out_bias:
        found["self_attn.o_proj.bias"] = (width,)
    return found


def make_qkv(shape: DecoderShape, prefix: str, place: Place, linear: MakeLinear) -> AnyLinear:
    parts = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
    return make_linear(parts, place, linear, has_bias=shape.has_qkv_bias)


def make_out(shape: DecoderShape, prefix: str, place: Place, linear: MakeLinear) -> AnyLinear:
    part = f"{prefix}.self_attn.o_proj"
    return make_linear([part], place, linear, has_bias=shape.has_out_bias)


def make_linear(
    parts: Sequence[str], place: Place, linear: MakeLinear, *, has_bias: bool = False
) -> AnyLinear:
    """Make one linear layer of several in a file."""
    bias = place(*(f"{part}.bias" for part in parts)) if has_bias else None
    return linear(place(*(f"{part}.weight" for part in parts)), bias)


def split_heads(qkv: Tensor, shape: DecoderShape) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [tokens, heads, size]."""
    sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    queries, keys, values = qkv.unflatten(1, (-1, shape.head_size)).split(sizes, 1)
    return queries, keys, values
