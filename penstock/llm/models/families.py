"""Model families: names of their configuration fields and weights.

All families share one `decoder`, so a family only maps a configuration to a `DecoderShape`, and
the decoder's weights to those of files, whose names and layout may differ. `FAMILIES` is the public
list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.llm.models.shape import DecoderShape, Reader, Rope, rope_of_config
from penstock.llm.models.weights import weight_sizes
from penstock.types import Array

LABEL = "config.json"
# Fields of a shape: their keys in config.json, and in GGUF files after the family's name.
KEYS = {
    "num_layers": ("num_hidden_layers", "block_count"),
    "width": ("hidden_size", "embedding_length"),
    "num_heads": ("num_attention_heads", "attention.head_count"),
    "num_kv_heads": ("num_key_value_heads", "attention.head_count_kv"),
    "head_size": ("head_dim", "attention.key_length"),
    "inner": ("intermediate_size", "feed_forward_length"),
    "vocabulary": ("vocab_size", "vocab_size"),
    "max_length": ("max_position_embeddings", "context_length"),
}
# Settings that are supported only with these values.
UNSERVED = {"mlp_bias": False, "hidden_act": "silu", "use_sliding_window": False}
# Weights of a layer: the decoder's names, which are Hugging Face's, and GGUF's.
OF_LAYERS = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
HEAD_NORMS = {
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
}
QKV_BIASES = {f"self_attn.{name}_proj.bias": f"attn_{name}.bias" for name in "qkv"}


@dataclass(frozen=True, slots=True)
class FilePlace:
    """A weight in a file: the rows from `start` on of the tensor with this name."""

    name: str
    start: int = 0


@dataclass(frozen=True, slots=True)
class ModelFamily:
    # Also the prefix of its keys in GGUF files.
    name: str
    # Names of the architecture in config.json and in GGUF files.
    architectures: tuple[str, ...]
    # RMSNorm on each head of queries and keys.
    has_qk_norm: bool = False
    # Whether queries, keys and values have a bias; None: config.json says so, for all of attention.
    has_qkv_bias: bool | None = None
    # Whether `sliding_window` of config.json always applies. Contexts are then limited to the
    # window, within which attention is the same.
    has_window: bool = False
    # Linear layers of files that are several of the decoder's, one after the other.
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Default of config.json; None: the width divided by the number of heads.
    head_size: int | None = None
    # GGUF files store RoPE pairs next to each other; the decoder has them half a head apart.
    has_adjacent_pairs: bool = False

    def shape_of_config(self, values: Mapping[str, object]) -> DecoderShape:
        reader = Reader(values, LABEL)
        is_tied = reader.flag("tie_word_embeddings", False)
        has_bias = reader.flag("attention_bias", False) and self.has_qkv_bias is None
        epsilon = reader.real("rms_norm_eps", 1e-6)
        for key, served in UNSERVED.items():
            if values.get(key, served) != served:
                reader.problems.append(f"{LABEL}: {key} is {values[key]!r}; expected {served!r}")
        sizes = _sizes(reader, {name: keys[0] for name, keys in KEYS.items()}, self.head_size)
        rope = rope_of_config(values, LABEL, sizes["head_size"])
        limits = [sizes["max_length"]]
        if self.has_window and values.get("sliding_window") is not None:
            limits.append(reader.whole("sliding_window"))
        if rope.kind == "longrope":
            limits.append(rope.original_length)
        reader.check()
        sizes["max_length"] = min(limits)
        return DecoderShape(
            **sizes,
            epsilon=epsilon,
            rope=rope,
            is_tied=is_tied,
            has_qk_norm=self.has_qk_norm,
            has_qkv_bias=has_bias or bool(self.has_qkv_bias),
            has_out_bias=has_bias,
        )

    def file_places(self, shape: DecoderShape) -> dict[str, FilePlace]:
        """Return where a Hugging Face file has each weight, by the decoder's names."""
        sizes = weight_sizes(shape)
        places = {name: FilePlace(name) for name in sizes}
        for number in range(shape.num_layers):
            for whole, parts in self.joined.items():
                start, prefix = 0, f"model.layers.{number}."
                for part in parts:
                    places[prefix + part] = FilePlace(prefix + whole, start)
                    start += sizes[prefix + part][0]
        return places

    def from_file(self, name: str, values: Tensor, shape: DecoderShape) -> Tensor:
        """Convert a weight from its layout in a Hugging Face file to the decoder's. If only a part
        of each head is rotated, that part begins both halves of a head here."""
        half, num_pairs = shape.head_size // 2, shape.rope.num_pairs(shape.head_size)
        if num_pairs == half or not name.endswith(("q_proj.weight", "k_proj.weight")):
            return values
        rotated, rest = torch.arange(2 * num_pairs), torch.arange(2 * num_pairs, 2 * half)
        order = torch.cat(
            [part for pair in zip(rotated.chunk(2), rest.chunk(2), strict=True) for part in pair]
        )
        return values.unflatten(0, (-1, shape.head_size))[:, order].flatten(0, 1)

    def shape_of_gguf(self, values: Mapping[str, object]) -> DecoderShape:
        reader, prefix = Reader(values, "GGUF"), self.name
        tokens = values.get("tokenizer.ggml.tokens")
        rope = _rope_of_gguf(reader, values, f"{prefix}.rope")
        epsilon = reader.real(f"{prefix}.attention.layer_norm_rms_epsilon")
        keys = {name: f"{prefix}.{keys[1]}" for name, keys in KEYS.items()}
        sizes = _sizes(reader, keys, None, len(tokens) if isinstance(tokens, list) else None)
        # A separate output head is found among the tensors later.
        return DecoderShape(
            **sizes,
            epsilon=epsilon,
            rope=rope,
            is_tied=True,
            has_qk_norm=self.has_qk_norm,
            has_qkv_bias=bool(self.has_qkv_bias),
            has_out_bias=False,
        )

    def gguf_names(self, shape: DecoderShape) -> dict[str, str]:
        """Return the GGUF names of weights, by the decoder's names."""
        names = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
        }
        if not shape.is_tied:
            names["lm_head.weight"] = "output.weight"
        of_layers = OF_LAYERS | (HEAD_NORMS if shape.has_qk_norm else {})
        of_layers |= QKV_BIASES if shape.has_qkv_bias else {}
        for number in range(shape.num_layers):
            for name, other in of_layers.items():
                names[f"model.layers.{number}.{name}"] = f"blk.{number}.{other}"
        return names

    def from_gguf(self, name: str, values: Array, shape: DecoderShape) -> Array:
        """Convert a weight from its GGUF layout to the decoder's."""
        if not self.has_adjacent_pairs or not name.endswith(("q_proj.weight", "k_proj.weight")):
            return values
        pairs = values.reshape(-1, shape.head_size // 2, 2, values.shape[1])
        return pairs.swapaxes(1, 2).reshape(values.shape)


def _sizes(
    reader: Reader, keys: Mapping[str, str], head_size: int | None, vocabulary: int | None = None
) -> dict[str, int]:
    """Read the sizes; raise ConfigError with all problems of the reader."""
    sizes = {name: reader.whole(keys[name]) for name in ("width", "num_heads")}
    defaults = {
        "num_kv_heads": sizes["num_heads"],
        "head_size": head_size or sizes["width"] // sizes["num_heads"],
        "vocabulary": vocabulary,
    }
    for name in keys.keys() - sizes.keys():
        sizes[name] = reader.whole(keys[name], defaults.get(name))
    reader.check()
    return sizes


def _rope_of_gguf(reader: Reader, values: Mapping[str, object], prefix: str) -> Rope:
    theta = reader.real(f"{prefix}.freq_base", 10_000.0)
    kind = values.get(f"{prefix}.scaling.type", "none")
    if kind == "linear":
        return Rope(theta, "linear", reader.real(f"{prefix}.scaling.factor"))
    if kind != "none":
        reader.problems.append(f"GGUF: rope of type {kind!r}; expected none or linear")
    return Rope(theta)


# Also models of the same architecture, such as SmolLM2 and TinyLlama.
LLAMA = ModelFamily("llama", ("LlamaForCausalLM", "llama"), has_adjacent_pairs=True)
# Its GGUF files say llama.
MISTRAL = ModelFamily("mistral", ("MistralForCausalLM",), has_window=True)
# Also Qwen2.5.
QWEN2 = ModelFamily("qwen2", ("Qwen2ForCausalLM", "qwen2"), has_qkv_bias=True)
# Dense models.
QWEN3 = ModelFamily("qwen3", ("Qwen3ForCausalLM", "qwen3"), has_qk_norm=True, head_size=128)
# Also Phi-3.5 and Phi-4.
PHI3 = ModelFamily(
    "phi3",
    ("Phi3ForCausalLM",),
    has_window=True,
    joined={
        "self_attn.qkv_proj.weight": tuple(f"self_attn.{each}_proj.weight" for each in "qkv"),
        "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    },
)
FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3)


def family_of(architecture: str) -> ModelFamily:
    """Return the family of an architecture; raise ConfigError if there is none."""
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    known = ", ".join(sorted(name for family in FAMILIES for name in family.architectures))
    raise ConfigError([f"architecture '{architecture}' is not served; expected one of {known}"])
