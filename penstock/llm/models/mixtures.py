"""Families like Llama with mixtures of experts: Mixtral and Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace

from penstock.llm.models.family import ModelFamily
from penstock.llm.models.reader import Reader
from penstock.llm.models.shape import DecoderShape, Experts


def _mixtral_of_config(reader: Reader, shape: DecoderShape) -> DecoderShape:
    reader.accept({"router_jitter_noise": 0.0})
    num, used = reader.whole("num_local_experts"), reader.whole("num_experts_per_tok", 2)
    return _with_experts(reader, shape, Experts(num, used, shape.inner))


def _qwen3_of_config(reader: Reader, shape: DecoderShape) -> DecoderShape:
    # Layers without experts are not served.
    reader.accept({"decoder_sparse_step": 1, "mlp_only_layers": []})
    # transformers writes the second since version 5.
    key = "num_experts" if "num_experts" in reader.values else "num_local_experts"
    num, used = reader.whole(key), reader.whole("num_experts_per_tok")
    inner, is_normalised = (
        reader.whole("moe_intermediate_size"),
        reader.flag("norm_topk_prob", False),
    )
    return _with_experts(reader, shape, Experts(num, used, inner, is_normalised))


def experts_of_gguf(reader: Reader, shape: DecoderShape) -> DecoderShape:
    """Read the experts of a GGUF file, if it has any."""
    prefix = reader.values.get("general.architecture", "llama")
    num = reader.values.get(f"{prefix}.expert_count")
    if not num:
        return shape
    inner = reader.whole(f"{prefix}.expert_feed_forward_length", shape.inner)
    used = reader.whole(f"{prefix}.expert_used_count")
    experts = Experts(reader.whole(f"{prefix}.expert_count"), used, inner)
    return _with_experts(reader, shape, experts)


def _with_experts(reader: Reader, shape: DecoderShape, experts: Experts) -> DecoderShape:
    if experts.num_used > experts.num:
        reader.problems.append(
            f"{reader.label}: {experts.num_used} experts for each token; expected at most "
            f"{experts.num}"
        )
    return replace(shape, experts=experts)


# Its GGUF files say llama.
MIXTRAL = ModelFamily(
    "mixtral",
    ("MixtralForCausalLM",),
    of_config=_mixtral_of_config,
    windows="all",
    renames=(
        ("mlp.", "block_sparse_moe."),
        (".gate_proj", ".w1"),
        (".up_proj", ".w3"),
        (".down_proj", ".w2"),
    ),
    theta=1e6,
)
QWEN3_MOE = ModelFamily(
    "qwen3moe",
    ("Qwen3MoeForCausalLM", "qwen3moe"),
    of_config=_qwen3_of_config,
    of_gguf=experts_of_gguf,
    has_qk_norm=True,
    windows="late",
)
