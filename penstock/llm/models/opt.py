"""OPT: the layers of GPT-2 with other names. GGUF has no such architecture."""

from __future__ import annotations

from penstock.llm.models.family import KEYS, ModelFamily
from penstock.llm.models.gpt2 import GPT, with_activation
from penstock.llm.models.reader import Reader
from penstock.llm.models.shape import DecoderShape


def _of_config(reader: Reader, shape: DecoderShape) -> DecoderShape:
    # OPT-350m embeds in another width, and has its norms behind the layers.
    reader.accept({"word_embed_proj_dim": shape.width})
    return with_activation(reader, shape, "relu")


OPT = ModelFamily(
    "opt",
    ("OPTForCausalLM",),
    GPT,
    keys={**KEYS, "inner": "ffn_dim", "num_kv_heads": KEYS["num_heads"]},
    epsilon_key="layer_norm_eps",
    epsilon=1e-5,
    served={
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
    },
    of_config=_of_config,
    has_qkv_bias=True,
    has_out_bias=True,
    has_positions=True,
    num_rows_before=2,
    renames=(
        ("model.", "model.decoder."),
        ("model.decoder.norm", "model.decoder.final_layer_norm"),
        ("input_layernorm", "self_attn_layer_norm"),
        ("post_attention_layernorm", "final_layer_norm"),
        ("self_attn.o_proj", "self_attn.out_proj"),
        ("mlp.up_proj", "fc1"),
        ("mlp.down_proj", "fc2"),
    ),
    optional_prefix="model.",
    is_tied=True,
)
