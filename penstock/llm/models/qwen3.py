"""Qwen3, dense: Llama's layers, with RMSNorm on each head of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.llm.models import llama
from penstock.llm.models.shape import DecoderShape
from penstock.types import Array

NAME = "qwen3"
ARCHITECTURES = ("Qwen3ForCausalLM", "qwen3")
NORMS = {
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
}


def shape_of_config(values: Mapping[str, Any]) -> DecoderShape:
    # Its heads are larger than width / number of heads.
    return replace(llama.shape_of_config({"head_dim": 128, **values}), has_qk_norm=True)


def shape_of_gguf(values: Mapping[str, Any]) -> DecoderShape:
    return replace(llama.shape_of_gguf(values, "qwen3"), has_qk_norm=True)


def from_gguf(name: str, values: Array, shape: DecoderShape) -> Array:
    return values


def gguf_names(shape: DecoderShape) -> dict[str, str]:
    names = llama.gguf_names(shape)
    for number in range(shape.num_layers):
        for name, other in NORMS.items():
            names[f"model.layers.{number}.{name}"] = f"blk.{number}.{other}"
    return names
