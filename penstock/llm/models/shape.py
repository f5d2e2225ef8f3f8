"""Sizes of a decoder, and what is particular to its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.llm.models.rope import Rope

if TYPE_CHECKING:
    from penstock.llm.models.layer import LayerKind


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """How the tokens of a layer see others."""

    # How many tokens a token sees, itself included; 0: all before it.
    window: int = 0
    # Scores x become cap x tanh(x / cap); 0: they stay.
    cap: float = 0.0


# Every token sees all before it.
PLAIN = AttentionForm()


@dataclass(frozen=True, slots=True)
class Experts:
    """Sizes of a mixture of experts, in place of the linear layers behind attention."""

    num: int
    # Experts of each token.
    num_used: int
    inner: int
    # The weights of a token's experts are scaled to a sum of 1.
    is_normalised: bool = True


@dataclass(frozen=True, slots=True)
class DecoderShape:
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    inner: int
    vocabulary: int
    max_length: int
    epsilon: float
    rope: Rope
    layer: LayerKind
    # The output head shares the embeddings.
    is_tied: bool
    # RMSNorm on each head of queries and keys.
    has_qk_norm: bool = False
    # Biases of the linear layers before attention, and of the one behind it.
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    # Embeddings of positions, which are added to those of tokens.
    has_positions: bool = False
    # Window of each layer, 0 for none; empty: no layer has one.
    windows: tuple[int, ...] = ()
    # RoPE of the layers with a window, where it differs.
    local_rope: Rope | None = None
    # Caps of attention scores and of logits; 0: none.
    score_cap: float = 0.0
    logit_cap: float = 0.0
    # Factors of embeddings, and of queries beside 1 / sqrt(head size).
    embedding_factor: float = 1.0
    query_factor: float = 1.0
    # Name of the activation between the linear layers behind attention.
    activation: str = "silu"
    experts: Experts | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                [f"{self.num_heads} heads are not a multiple of {self.num_kv_heads} of keys"]
            )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_parameters(self) -> int:
        heads = self.head_size * (2 * self.num_heads + 2 * self.num_kv_heads)
        fed = 3 * self.width * self.inner
        if self.experts is not None:
            fed = self.experts.num * self.width * (3 * self.experts.inner + 1)
        elif not self.layer.is_gated:
            fed = 2 * self.width * self.inner
        tables = self.vocabulary * self.width * (1 if self.is_tied else 2)
        return self.num_layers * (self.width * heads + fed) + tables

    def attention_form(self, layer: int) -> AttentionForm:
        return AttentionForm(self.windows[layer] if self.windows else 0, self.score_cap)

    def rope_of_layer(self, layer: int) -> Rope:
        is_local = self.local_rope is not None and bool(self.windows[layer])
        return self.local_rope if is_local and self.local_rope else self.rope
