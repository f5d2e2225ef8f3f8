"""Every family beside transformers on small random configurations, in FP32 on the CPU: logits, and
512 tokens that transformers generates greedily."""

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.nn import functional as F  # noqa: E402

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
NUM_TOKENS = 512


def make_model(kind: str, changes: dict):
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, each in model.named_parameters():
            # Larger than before training, so that tokens differ much in likelihood.
            each.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def attend(layer, queries, keys, values):
    parts = (each.transpose(0, 1)[None] for each in (queries, keys, values))
    mixed = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
    return mixed[0].transpose(0, 1)


def logits_of(folder, tokens):
    checkpoint = open_checkpoint(folder)
    decoder = Decoder(checkpoint.shape, checkpoint.weight, "cpu", torch.float32)
    checkpoint.close()
    with torch.no_grad():
        hidden = decoder.hidden(tokens, torch.arange(len(tokens)), attend)
        return decoder.logits(hidden), checkpoint.shape


def test_every_family_has_a_case():
    named = {f"{kind}ForCausalLM" for kind, _ in CASES.values()}
    assert all(named & set(family.architectures) for family in FAMILIES)


@pytest.mark.parametrize(("kind", "changes"), CASES.values(), ids=CASES)
def test_logits_and_greedy_tokens(tmp_path, kind, changes):
    model = make_model(kind, changes)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        f"{kind}ForCausalLM"
    ]
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


@pytest.mark.parametrize(
    ("kind", "changes", "limit"),
    [
        ("Mistral", {"sliding_window": 600}, 600),
        ("Mistral", {"sliding_window": 9999}, 640),
        ("Phi3", {"sliding_window": 100}, 100),
        ("Phi3", PHI4_MINI, 600),
        ("Qwen2", {"sliding_window": 100}, 640),
    ],
)
def test_contexts_end_where_attention_would_change(tmp_path, kind, changes, limit):
    make_model(kind, changes).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.close()
    assert checkpoint.shape.max_length == limit
