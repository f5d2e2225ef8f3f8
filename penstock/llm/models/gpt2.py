"""GPT-2, and its layers, which OPT has too: LayerNorm before attention and before two linear layers
with an activation between them. Every layer has biases, and positions are embedded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from penstock.llm.models.family import KEYS, QKV, ModelFamily
from penstock.llm.models.layer import (
    AttendHere,
    LayerKind,
    MakeLinear,
    Place,
    attention_sizes,
    make_linear,
    make_out,
    make_qkv,
    split_heads,
)
from penstock.llm.models.linear import AnyLinear
from penstock.llm.models.norms import LayerNorm, Norm
from penstock.llm.models.reader import Reader
from penstock.llm.models.shape import DecoderShape

NORMS = ("input_layernorm", "post_attention_layernorm")
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True, slots=True)
class GptLayer:
    shape: DecoderShape
    norms: Sequence[Norm]
    qkv: AnyLinear
    out: AnyLinear
    up: AnyLinear
    down: AnyLinear

    @property
    def linears(self) -> Sequence[AnyLinear]:
        return self.qkv, self.out, self.up, self.down

    def __call__(self, x: Tensor, rope_rows: Tensor, attend: AttendHere) -> Tensor:
        first, last = self.norms
        mixed = attend(*split_heads(self.qkv(first(x)), self.shape))
        x = x + self.out(mixed.flatten(1))
        activation = ACTIVATIONS[self.shape.activation]
        return x + self.down(activation(self.up(last(x))))


def _sizes(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    width, inner = shape.width, shape.inner
    found: dict[str, tuple[int, ...]] = {
        f"{name}.{kind}": (width,) for name in NORMS for kind in ("weight", "bias")
    }
    return (
        found
        | attention_sizes(shape)
        | {
            "mlp.up_proj.weight": (inner, width),
            "mlp.up_proj.bias": (inner,),
            "mlp.down_proj.weight": (width, inner),
            "mlp.down_proj.bias": (width,),
        }
    )


def _make(shape: DecoderShape, prefix: str, place: Place, linear: MakeLinear) -> GptLayer:
    up, down = (
        make_linear([f"{prefix}.mlp.{name}_proj"], place, linear, has_bias=True)
        for name in ("up", "down")
    )
    return GptLayer(
        shape,
        [_norm(shape, f"{prefix}.{name}", place) for name in NORMS],
        make_qkv(shape, prefix, place, linear),
        make_out(shape, prefix, place, linear),
        up,
        down,
    )


def _norm(shape: DecoderShape, name: str, place: Place) -> Norm:
    return LayerNorm(place(f"{name}.weight"), place(f"{name}.bias"), shape.epsilon)


GPT = LayerKind(_sizes, _make, _norm, is_gated=False, has_norm_bias=True)


def with_activation(reader: Reader, shape: DecoderShape, default: str) -> DecoderShape:
    found = reader.values.get("activation_function", default)
    if found not in ACTIVATIONS:
        expected = f"expected {', '.join(ACTIVATIONS)}"
        reader.problems.append(f"{reader.label}: activation_function is {found!r}; {expected}")
    return replace(shape, activation=str(found))


GPT2 = ModelFamily(
    "gpt2",
    ("GPT2LMHeadModel", "gpt2"),
    GPT,
    keys={
        **KEYS,
        "num_layers": "n_layer",
        "width": "n_embd",
        "num_heads": "n_head",
        "num_kv_heads": "n_head",
        "inner": "n_inner",
        "max_length": "n_positions",
    },
    epsilon_key="layer_norm_epsilon",
    epsilon=1e-5,
    gguf_epsilon_key="attention.layer_norm_epsilon",
    served={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    of_config=partial(with_activation, default="gelu_new"),
    of_gguf=partial(with_activation, default="gelu_new"),
    has_qkv_bias=True,
    has_out_bias=True,
    has_positions=True,
    renames=(
        ("model.layers.", "transformer.h."),
        ("model.embed_tokens", "transformer.wte"),
        ("model.embed_positions", "transformer.wpe"),
        ("model.norm", "transformer.ln_f"),
        ("input_layernorm", "ln_1"),
        ("post_attention_layernorm", "ln_2"),
        ("self_attn.o_proj", "attn.c_proj"),
        ("mlp.up_proj", "mlp.c_fc"),
        ("mlp.down_proj", "mlp.c_proj"),
    ),
    optional_prefix="transformer.",
    joined={"attn.c_attn": QKV},
    gguf_joined={"attn_qkv": QKV},
    is_transposed=True,
    is_tied=True,
)
