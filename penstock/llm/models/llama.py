"""Llama and models of the same architecture, such as SmolLM2 and TinyLlama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.llm.models.shape import DecoderShape, Reader, Rope, rope_of_config
from penstock.types import Array

NAME = "llama"
ARCHITECTURES = ("LlamaForCausalLM", "llama")
LABEL = "config.json"
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


def shape_of_config(values: Mapping[str, Any]) -> DecoderShape:
    reader = Reader(values, LABEL)
    width, num_heads = reader.whole("hidden_size"), reader.whole("num_attention_heads")
    rope = rope_of_config(values, LABEL)
    sizes: dict[str, Any] = dict(
        num_layers=reader.whole("num_hidden_layers"),
        width=width,
        num_heads=num_heads,
        num_kv_heads=reader.whole("num_key_value_heads", num_heads),
        head_size=reader.whole("head_dim", width // num_heads),
        inner=reader.whole("intermediate_size"),
        vocabulary=reader.whole("vocab_size"),
        max_length=reader.whole("max_position_embeddings"),
        epsilon=reader.real("rms_norm_eps", 1e-6),
        rope=rope,
        is_tied=reader.flag("tie_word_embeddings", False),
        has_bias=reader.flag("attention_bias", False),
    )
    for key, served in UNSERVED.items():
        if values.get(key, served) != served:
            reader.problems.append(f"{LABEL}: {key} is {values[key]!r}; expected {served!r}")
    reader.check()
    return DecoderShape(**sizes)


def shape_of_gguf(values: Mapping[str, Any], prefix: str = "llama") -> DecoderShape:
    reader = Reader(values, "GGUF")
    width, num_heads = (
        reader.whole(f"{prefix}.{key}") for key in ("embedding_length", "attention.head_count")
    )
    tokens = values.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, list) else None
    sizes: dict[str, Any] = dict(
        num_layers=reader.whole(f"{prefix}.block_count"),
        width=width,
        num_heads=num_heads,
        num_kv_heads=reader.whole(f"{prefix}.attention.head_count_kv", num_heads),
        head_size=reader.whole(f"{prefix}.attention.key_length", width // num_heads),
        inner=reader.whole(f"{prefix}.feed_forward_length"),
        vocabulary=reader.whole(f"{prefix}.vocab_size", num_tokens),
        max_length=reader.whole(f"{prefix}.context_length"),
        epsilon=reader.real(f"{prefix}.attention.layer_norm_rms_epsilon"),
        rope=_rope_of_gguf(reader, values, prefix),
        # A separate output head is found among the tensors later.
        is_tied=True,
    )
    reader.check()
    return DecoderShape(**sizes)


def _rope_of_gguf(reader: Reader, values: Mapping[str, Any], prefix: str) -> Rope:
    theta = reader.real(f"{prefix}.rope.freq_base", 10_000.0)
    kind = values.get(f"{prefix}.rope.scaling.type", "none")
    if kind == "linear":
        return Rope(theta, "linear", reader.real(f"{prefix}.rope.scaling.factor"))
    if kind != "none":
        reader.problems.append(f"GGUF: rope of type {kind!r}; expected none or linear")
    return Rope(theta)


def from_gguf(name: str, values: Array, shape: DecoderShape) -> Array:
    """Return a weight in the decoder's layout: GGUF files of this family store RoPE pairs next to
    each other, the decoder half a head apart."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return values
    pairs = values.reshape(-1, shape.head_size // 2, 2, values.shape[1])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def gguf_names(shape: DecoderShape) -> dict[str, str]:
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if not shape.is_tied:
        names["lm_head.weight"] = "output.weight"
    for number in range(shape.num_layers):
        for name, other in OF_LAYERS.items():
            names[f"model.layers.{number}.{name}"] = f"blk.{number}.{other}"
    return names
