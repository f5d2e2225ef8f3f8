"""Every family beside transformers on small random configurations, in FP32 on the CPU: logits, and
512 tokens that transformers generates greedily."""

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402

from penstock.llm.cache import attend_alone  # noqa: E402
from penstock.llm.checkpoint import open_checkpoint  # noqa: E402
from penstock.llm.models.decoder import Decoder  # noqa: E402
from penstock.llm.models.families import FAMILIES  # noqa: E402

COMMON = {
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 97,
    "max_position_embeddings": 640,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.25, 1.5],
    "long_factor": [2.0, 3.0, 4.0],
}
PHI4_MINI = {
    "head_dim": 8,
    "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True,
    "rope_scaling": LONGROPE,
    "original_max_position_embeddings": 600,
    "max_position_embeddings": 9000,
}
CASES = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True}),
    "llama 3": ("Llama", {"rope_scaling": LLAMA3, "rope_theta": 5e5}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral with a window": ("Mistral", {"sliding_window": 600}),
    "qwen2": ("Qwen2", {}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "phi3": ("Phi3", {}),
    "phi4 mini": ("Phi3", PHI4_MINI),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 160}
QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1}
GEMMA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 40,
    "query_pre_attn_scalar": 20,
    # So low that they matter.
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 2.0,
}
GEMMA3 = {**GEMMA, "attn_logit_softcapping": None}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GPT2 = {
    "n_layer": 2,
    "n_embd": 48,
    "n_head": 6,
    "n_positions": 640,
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "max_position_embeddings": 640,
}
OPT = {"ffn_dim": 96, "word_embed_proj_dim": 48}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "head_dim": 16,
}
CASES |= {
    "mistral with a short window": ("Mistral", {"sliding_window": 100}),
    "qwen2 with windows": ("Qwen2", QWEN_WINDOWS),
    "qwen2 with yarn": ("Qwen2", {"rope_scaling": YARN, "max_position_embeddings": 160}),
    "qwen3 with yarn": ("Qwen3", {"head_dim": 16, "rope_scaling": YARN}),
    "gemma2": ("Gemma2", GEMMA),
    "gemma2 without caps": (
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": ("Gemma3", {**GEMMA3, "num_hidden_layers": 7}),
    "gemma3 with scaled rope": ("Gemma3", {**GEMMA3, "rope_parameters": GEMMA3_ROPE}),
    "gpt2": ("GPT2", GPT2),
    "gpt2 with relu": ("GPT2", {**GPT2, "activation_function": "relu", "n_inner": 40}),
    "opt": ("OPT", OPT),
    "mixtral": ("Mixtral", EXPERTS),
    "mixtral with a window": ("Mixtral", {**EXPERTS, "sliding_window": 100}),
    "qwen3 moe": ("Qwen3Moe", QWEN_EXPERTS),
    "qwen3 moe, normalised": ("Qwen3Moe", {**QWEN_EXPERTS, "norm_topk_prob": True}),
}
NUM_TOKENS = 512
TIED = ("Gemma2", "Gemma3", "GPT2", "OPT")
# transformers' names where they are not those of the architecture.
CONFIGS = {"Gemma3": "Gemma3Text"}
HEADS = {"GPT2": "GPT2LMHeadModel"}


def architecture_of(kind: str) -> str:
    return HEADS.get(kind, f"{kind}ForCausalLM")


def make_model(kind: str, changes: dict):
    torch.manual_seed(7)
    config = getattr(transformers, f"{CONFIGS.get(kind, kind)}Config")(**{**COMMON, **changes})
    model = getattr(transformers, architecture_of(kind))(config).float().eval()
    # Others leave out caps on scores.
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for name, each in model.named_parameters():
            # Larger than before training, so that tokens differ much in likelihood.
            is_factor = name.endswith("weight") and ("norm" in name or "ln_" in name)
            each.normal_(1.0 if is_factor else 0.0, 0.3)
            if kind in TIED and ("embed_tokens" in name or "wte" in name):
                # Else the head says each token again.
                each /= each.shape[1] ** 0.5
    return model


def logits_of(folder, tokens):
    checkpoint = open_checkpoint(folder)
    decoder = Decoder(checkpoint.shape, checkpoint.weight, "cpu", torch.float32)
    checkpoint.close()
    with torch.no_grad():
        attend = attend_alone(decoder.shape)
        hidden = decoder.hidden(tokens, torch.arange(len(tokens)), attend)
        return decoder.logits(hidden), checkpoint.shape


def test_every_family_has_a_case():
    named = {architecture_of(kind) for kind, _ in CASES.values()}
    assert all(named & set(family.architectures) for family in FAMILIES)


@pytest.mark.parametrize(("kind", "changes"), CASES.values(), ids=CASES)
def test_logits(tmp_path, kind, changes):
    """Of more tokens than windows and original lengths have."""
    model = make_model(kind, changes)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        architecture_of(kind)
    ]
    tokens = torch.randint(COMMON["vocab_size"], (200,))
    with torch.no_grad():
        wanted = model(tokens[None]).logits[0]
    assert wanted.std() > 0.2
    torch.testing.assert_close(logits_of(tmp_path, tokens)[0], wanted, rtol=1e-3, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "changes"), CASES.values(), ids=CASES)
def test_greedy_tokens(tmp_path, kind, changes):
    model = make_model(kind, changes)
    model.save_pretrained(tmp_path)
    prompt = torch.tensor([[3, 1, 4, 1, 5, 9]])
    with torch.no_grad():
        tokens = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
            min_new_tokens=NUM_TOKENS, max_new_tokens=NUM_TOKENS, eos_token_id=None,
        )[0]  # fmt: skip
        wanted = model(tokens[None]).logits[0]
    assert len(set(tokens.tolist())) > 20, "more than a loop of a few tokens"
    found, shape = logits_of(tmp_path, tokens)
    assert len(tokens) == len(prompt[0]) + NUM_TOKENS <= shape.max_length
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-3)
    assert found[len(prompt[0]) - 1 : -1].argmax(-1).tolist() == tokens[len(prompt[0]) :].tolist()


@pytest.mark.parametrize(("kind", "changes"), [("GPT2", GPT2), ("OPT", OPT)])
def test_names_may_begin_later(tmp_path, kind, changes):
    """As in the first checkpoints, which have masks too."""
    model = make_model(kind, changes)
    model.save_pretrained(tmp_path)
    prefix = {"GPT2": "transformer.", "OPT": "model."}[kind]
    weights = {name.removeprefix(prefix): each.clone() for name, each in model.state_dict().items()}
    weights["h.0.attn.bias" if kind == "GPT2" else "lm_head.weight"] = torch.ones(3)
    save_file(weights, tmp_path / "model.safetensors")
    tokens = torch.arange(40)
    with torch.no_grad():
        wanted = model(tokens[None]).logits[0]
    torch.testing.assert_close(logits_of(tmp_path, tokens)[0], wanted, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("kind", "changes", "limit"),
    [
        ("Mistral", {"sliding_window": 600}, 640),
        ("Phi3", PHI4_MINI, 600),
        ("Qwen2", {"rope_scaling": YARN, "max_position_embeddings": 160}, 640),
    ],
)
def test_contexts_end_where_attention_would_change(tmp_path, kind, changes, limit):
    make_model(kind, changes).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.close()
    assert checkpoint.shape.max_length == limit
