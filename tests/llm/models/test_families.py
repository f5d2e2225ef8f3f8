"""Which families are served, and what their configurations and weights are called."""

import numpy as np
import pytest

pytest.importorskip("torch")

import tiny_llm as tiny

from penstock.errors import ConfigError
from penstock.llm.models.families import FAMILIES, LLAMA, QWEN3, family_of
from penstock.llm.models.rope import Rope

GGUF = {
    "llama.block_count": 30,
    "llama.embedding_length": 576,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.feed_forward_length": 1536,
    "llama.context_length": 8192,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 1e5,
    "tokenizer.ggml.tokens": ["a"] * 49152,
}


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("LlamaForCausalLM", "llama"),
        ("llama", "llama"),
        ("MistralForCausalLM", "mistral"),
        ("Qwen2ForCausalLM", "qwen2"),
        ("qwen2", "qwen2"),
        ("Qwen3ForCausalLM", "qwen3"),
        ("Phi3ForCausalLM", "phi3"),
        ("MixtralForCausalLM", "mixtral"),
        ("Qwen3MoeForCausalLM", "qwen3moe"),
        ("qwen3moe", "qwen3moe"),
        ("Gemma2ForCausalLM", "gemma2"),
        ("gemma2", "gemma2"),
        ("Gemma3ForCausalLM", "gemma3"),
        ("gemma3", "gemma3"),
        ("GPT2LMHeadModel", "gpt2"),
        ("gpt2", "gpt2"),
        ("OPTForCausalLM", "opt"),
    ],
)
def test_by_architecture(architecture, name):
    assert family_of(architecture).name == name


def test_others_are_refused_with_those_that_there_are():
    with pytest.raises(
        ConfigError, match=r"'GemmaForCausalLM' is not served; expected one of GPT2"
    ):
        family_of("GemmaForCausalLM")


def test_no_architecture_is_of_two_families():
    names = [name for family in FAMILIES for name in family.architectures]
    assert len(set(names)) == len(names)


def test_a_configuration():
    shape = LLAMA.shape_of_config(tiny.CONFIG)
    assert (shape.num_layers, shape.width, shape.group, shape.head_size) == (2, 24, 3, 8)
    assert shape.is_tied and not shape.has_qk_norm and not shape.has_qkv_bias


def test_heads_have_their_share_of_the_width_unless_told():
    values = {key: value for key, value in tiny.CONFIG.items() if key != "head_dim"}
    assert LLAMA.shape_of_config(values).head_size == 4


def test_a_gguf_file():
    shape = LLAMA.shape_of_gguf(GGUF)
    assert (shape.head_size, shape.vocabulary, shape.rope) == (64, 49152, Rope(1e5))


@pytest.mark.parametrize("key", ["llama.block_count", "llama.attention.head_count"])
def test_what_is_missing_is_named(key):
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        LLAMA.shape_of_gguf({name: value for name, value in GGUF.items() if name != key})


@pytest.mark.parametrize(
    ("key", "value"), [("mlp_bias", True), ("hidden_act", "gelu"), ("use_sliding_window", True)]
)
def test_what_is_not_computed_here_is_refused(key, value):
    with pytest.raises(ConfigError, match=f"{key} is {value!r}; expected"):
        LLAMA.shape_of_config({**tiny.CONFIG, key: value})


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "fp8", "bitsandbytes"])
def test_quantised_checkpoints_are_refused_by_their_method(method):
    values = {**tiny.CONFIG, "quantization_config": {"quant_method": method}}
    with pytest.raises(ConfigError, match=f"quantised by '{method}' are not served; expected unq"):
        LLAMA.shape_of_config(values)


# By family: settings that change what it computes, and what is told of them.
REFUSED = [
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; expected 'gelu_py"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("gemma2", {"layer_types": ["full_attention", "chunked"]}, "layer_types has 'chunked'"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    (
        "gpt2",
        {"activation_function": "mish"},
        "activation_function is 'mish'; expected gelu, gelu_",
    ),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx is True"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is False; expected True"),
    ("opt", {"word_embed_proj_dim": 8}, "word_embed_proj_dim is 8; expected 24"),
    ("opt", {"enable_bias": False}, "enable_bias is False"),
    ("mixtral", {"num_experts_per_tok": 9}, "9 experts for each token; expected at most 4"),
    ("mixtral", {"num_local_experts": None}, "num_local_experts is missing"),
    ("qwen3moe", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]"),
    ("qwen3moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2; expected 1"),
    ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "has 'sliding_attention'"),
    (
        "qwen2",
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types has 'sliding_attention' without a sliding_window in use",
    ),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types is .*; expected a list of 2 names"),
]


@pytest.mark.parametrize(("name", "changes", "problem"), REFUSED)
def test_what_a_family_does_not_compute_is_refused(name, changes, problem):
    values = {
        **tiny.CONFIG, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 8, "ffn_dim": 40, "n_layer": 2, "n_embd": 24, "n_head": 3,
        "n_positions": 128, **changes,
    }  # fmt: skip
    (family,) = [each for each in FAMILIES if each.name == name]
    if name.startswith("gemma"):
        values = {"hidden_act": None, **{k: v for k, v in values.items() if k != "hidden_act"}}
    with pytest.raises(ConfigError, match=problem):
        family.shape_of_config(values)


def test_rope_of_a_gguf_file():
    scaled = {**GGUF, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert LLAMA.shape_of_gguf(scaled).rope == Rope(1e5, "linear", 4.0)
    with pytest.raises(ConfigError, match="rope of type 'longrope'; expected none, linear or yarn"):
        LLAMA.shape_of_gguf({**GGUF, "llama.rope.scaling.type": "longrope"})


@pytest.mark.parametrize("key", ["rope.dimension_count", "attention.sliding_window"])
def test_settings_of_a_gguf_file_that_are_not_computed_are_refused(key):
    with pytest.raises(ConfigError, match=f"llama.{key} is 32; expected"):
        LLAMA.shape_of_gguf({**GGUF, f"llama.{key}": 32})
    whole = {**GGUF, "llama.rope.dimension_count": 64}
    assert LLAMA.shape_of_gguf(whole) == LLAMA.shape_of_gguf(GGUF)


def test_every_weight_has_a_name_in_gguf():
    shape = LLAMA.shape_of_config(tiny.CONFIG)
    names = {name: place.name for name, place in LLAMA.gguf_places(shape).items()}
    assert names["model.layers.1.mlp.down_proj.weight"] == "blk.1.ffn_down.weight"
    assert len(set(names.values())) == len(names) == 2 + 2 * 9


def test_pairs_that_lie_together_in_gguf_are_half_a_head_apart_here():
    shape = LLAMA.shape_of_config(tiny.CONFIG)
    # One column; the rows of a head are numbered.
    ours = np.arange(48)[:, None]
    theirs = ours.reshape(6, 2, 4).swapaxes(1, 2).reshape(48, 1)
    name = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_array_equal(LLAMA.from_gguf(name, theirs, shape), ours)
    other = "model.layers.0.self_attn.v_proj.weight"
    np.testing.assert_array_equal(LLAMA.from_gguf(other, theirs, shape), theirs)


def test_heads_are_of_128_unless_told_and_normalised():
    values = {key: value for key, value in tiny.QWEN3.items() if key != "head_dim"}
    shape = QWEN3.shape_of_config(values)
    assert shape.head_size == 128 and shape.has_qk_norm and not shape.is_tied


def test_norms_have_names_in_gguf_and_weights_lie_as_they_are():
    shape = QWEN3.shape_of_config(tiny.QWEN3)
    names = QWEN3.gguf_places(shape)
    assert names["model.layers.0.self_attn.k_norm.weight"].name == "blk.0.attn_k_norm.weight"
    assert names["lm_head.weight"].name == "output.weight"
    values = np.arange(6).reshape(3, 2)
    found = QWEN3.from_gguf("model.layers.0.self_attn.q_proj.weight", values, shape)
    np.testing.assert_array_equal(found, values)
