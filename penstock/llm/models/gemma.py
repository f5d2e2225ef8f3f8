"""Gemma 2 and 3 (text): layers with a window between those without, scaled embeddings and queries,
and in Gemma 2 caps on scores and logits.
"""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.llm.models.family import FULL, SLIDING, ModelFamily
from penstock.llm.models.geglu import GEGLU
from penstock.llm.models.reader import Reader
from penstock.llm.models.rope import Rope, rope_of_config
from penstock.llm.models.shape import DecoderShape

GELU = "gelu_pytorch_tanh"
# Local RoPE of Gemma 3 unless told.
LOCAL_THETA = 10_000.0
# Layers of the 27B models, whose queries are scaled otherwise in GGUF files.
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
WINDOW, LOCAL = "attention.sliding_window", "rope_local_base_freq"


def _of_config(reader: Reader, shape: DecoderShape) -> DecoderShape:
    is_third = shape.has_qk_norm
    period = reader.whole("sliding_window_pattern", 6) if is_third else 2
    kinds = reader.names("layer_types", shape.num_layers, (FULL, SLIDING))
    window = reader.whole("sliding_window", 4096)
    caps = {name: reader.values.get(f"{name}_logit_softcapping") for name in ("attn", "final")}
    scale = reader.real("query_pre_attn_scalar", 256)
    if is_third:
        # transformers reads it but caps nothing.
        reader.accept({"attn_logit_softcapping": None})
    shape = _complete(shape, kinds, window, period, scale)
    return replace(
        shape,
        local_rope=_local_rope(reader, shape.head_size) if is_third else None,
        score_cap=reader.real("attn_logit_softcapping") if caps["attn"] else 0.0,
        logit_cap=reader.real("final_logit_softcapping") if caps["final"] else 0.0,
    )


def _local_rope(reader: Reader, head_size: int) -> Rope:
    if SLIDING in reader.part("rope_parameters"):
        return rope_of_config(reader, head_size, LOCAL_THETA, SLIDING)
    return Rope(reader.real(LOCAL, LOCAL_THETA))


def _of_gguf(reader: Reader, shape: DecoderShape) -> DecoderShape:
    name = "gemma3" if shape.has_qk_norm else "gemma2"
    period = reader.whole(f"{name}.{WINDOW}_pattern", 6 if shape.has_qk_norm else 2)
    window = reader.whole(f"{name}.{WINDOW}", 4096)
    is_27b = shape.num_layers == LAYERS_OF_27B[name]
    scale = shape.width / shape.num_heads if is_27b else shape.head_size
    shape = _complete(shape, [], window, period, scale)
    if name == "gemma3":
        theta = reader.real(f"{name}.rope.freq_base_swa", LOCAL_THETA)
        return replace(shape, local_rope=Rope(theta))
    caps = [reader.real(f"{name}.{each}_logit_softcapping") for each in ("attn", "final")]
    return replace(shape, score_cap=caps[0], logit_cap=caps[1])


def _complete(
    shape: DecoderShape, kinds: list[str], window: int, period: int, scale: float
) -> DecoderShape:
    """Add the windows, all but every `period`-th layer's unless `kinds` says more, and the factors
    of embeddings and queries."""
    numbers = range(1, shape.num_layers + 1)
    kinds = kinds or [SLIDING if number % period else FULL for number in numbers]
    return replace(
        shape,
        windows=tuple(window if kind == SLIDING else 0 for kind in kinds),
        embedding_factor=math.sqrt(shape.width),
        query_factor=math.sqrt(shape.head_size / scale),
    )


def _family(name: str, architecture: str, has_qk_norm: bool, theta: float) -> ModelFamily:
    return ModelFamily(
        name,
        (architecture, name),
        GEGLU,
        served={
            "hidden_activation": GELU,
            "hidden_act": GELU,
            "use_bidirectional_attention": False,
        },
        of_config=_of_config,
        of_gguf=_of_gguf,
        has_qk_norm=has_qk_norm,
        windows="own",
        gguf_names={
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
        has_low_norms=True,
        head_size=256,
        theta=theta,
        is_tied=True,
    )


GEMMA2 = _family("gemma2", "Gemma2ForCausalLM", False, 10_000.0)
GEMMA3 = _family("gemma3", "Gemma3ForCausalLM", True, 1_000_000.0)
