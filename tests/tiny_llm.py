"""A language model that is small enough to be computed by hand, in plain torch and all at once."""

import json

import torch
from safetensors.torch import save_file

from penstock.llm import messages
from penstock.llm.cache import attend_alone
from penstock.llm.checkpoint import made_up
from penstock.llm.models.decoder import Decoder
from penstock.llm.models.families import family_of
from penstock.llm.models.weights import weight_sizes

MAX_LENGTH = 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
QWEN2 = {**CONFIG, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**CONFIG, "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
GEMMA = {
    **CONFIG, "num_hidden_layers": 3, "hidden_act": "gelu_pytorch_tanh", "sliding_window": 7,
    "query_pre_attn_scalar": 6,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
}  # fmt: skip
# Layers that differ from Llama's: windows, caps, other norms, embedded positions, experts.
OTHERS = {
    "windows": {**CONFIG, "architectures": ["MistralForCausalLM"], "sliding_window": 9},
    "gemma2": {
        **GEMMA, "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma3": {
        **GEMMA, "architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 2,
        "rope_local_base_freq": 100.0,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 24, "n_head": 3,
        "n_positions": 128, "vocab_size": 50,
    },
    "experts": {**CONFIG, "architectures": ["Qwen3MoeForCausalLM"], **EXPERTS},
}  # fmt: skip


def config_file(folder, **changes):
    path = folder / "config.json"
    # Llama's, unless it is a whole configuration.
    own = {} if "n_embd" in changes else CONFIG
    path.write_text(json.dumps({**own, **changes}))
    return path


def weights_of(folder, **changes) -> dict[str, torch.Tensor]:
    """Larger ones than models begin with, so that tokens differ much in likelihood."""
    checkpoint = made_up(config_file(folder, **changes))
    found = {name: checkpoint.weight(name) for name in weight_sizes(checkpoint.shape)}
    return {
        name: each * 12 if each.ndim > 1 else each + 0.1 * torch.randn(each.shape)
        for name, each in found.items()
    }


def write_folder(folder, **changes) -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    weights = weights_of(folder, **changes)
    save_file(in_files(folder, weights), folder / "model.safetensors")
    return weights


def in_files(folder, weights) -> dict[str, torch.Tensor]:
    """The same weights as the family's files have them."""
    config = json.loads((folder / "config.json").read_text())
    family, shape = family_of(config["architectures"][0]), made_up(folder / "config.json").shape
    parts: dict[str, list] = {}
    for name, place in family.file_places(shape).items():
        own = weights[name] - 1 if family.has_low_norms and "norm" in name else weights[name]
        parts.setdefault(place.name, []).append((place, own.t() if place.is_transposed else own))
    found = {}
    for name, several in parts.items():
        axis = 1 if several[0][0].is_transposed else 0
        ordered = [own for _, own in sorted(several, key=lambda each: each[0].start)]
        found[name] = torch.cat(ordered, axis).contiguous()
    return found


def decoder_of(folder, config, dtype=torch.float32, quantised="") -> Decoder:
    torch.manual_seed(4)
    weights = weights_of(folder, **config)
    shape = made_up(folder / "config.json").shape
    return Decoder(shape, weights.__getitem__, "cpu", dtype, quantised)


def continued_alone(decoder: Decoder, prompt, num_tokens) -> list[int]:
    """Greedily, with all tokens computed anew for each; tests/llm/models compares decoders with
    transformers."""
    tokens, attend = list(prompt), attend_alone(decoder.shape)
    with torch.inference_mode():
        for _ in range(num_tokens):
            hidden = decoder.hidden(torch.tensor(tokens), torch.arange(len(tokens)), attend)
            tokens.append(int(decoder.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def by_hand(weights, config, tokens) -> torch.Tensor:
    """Logits of all positions, in FP64."""
    weights = {name: each.double() for name, each in weights.items()}
    size, heads = config["head_dim"], config["num_attention_heads"]
    kv_heads, epsilon = config["num_key_value_heads"], config["rms_norm_eps"]
    x = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
    length = len(tokens)

    def rms_norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * weight

    def rope(x):
        angles = torch.arange(length)[:, None] * config["rope_theta"] ** (
            -torch.arange(0, size, 2, dtype=torch.float64) / size
        )
        first, second = x[..., : size // 2], x[..., size // 2 :]
        cosine, sine = angles.cos(), angles.sin()
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)

    for number in range(config["num_hidden_layers"]):

        def weight(name, number=number):
            return weights[f"model.layers.{number}.{name}.weight"]

        y = rms_norm(x, weight("input_layernorm"))
        answers = []
        for head in range(heads):
            kv = head // (heads // kv_heads)
            q = y @ weight("self_attn.q_proj")[head * size : (head + 1) * size].t()
            k, v = (
                y @ weight(f"self_attn.{each}_proj")[kv * size : (kv + 1) * size].t()
                for each in "kv"
            )
            if f"model.layers.{number}.self_attn.q_norm.weight" in weights:
                q, k = (
                    rms_norm(q, weight("self_attn.q_norm")),
                    rms_norm(k, weight("self_attn.k_norm")),
                )
            scores = rope(q) @ rope(k).t() / size**0.5
            scores += torch.full((length, length), float("-inf")).triu(1).double()
            answers.append(scores.softmax(-1) @ v)
        x = x + torch.cat(answers, -1) @ weight("self_attn.o_proj").t()
        y = rms_norm(x, weight("post_attention_layernorm"))
        gate, up = y @ weight("mlp.gate_proj").t(), y @ weight("mlp.up_proj").t()
        x = x + (gate * gate.sigmoid() * up) @ weight("mlp.down_proj").t()
    x = rms_norm(x, weights["model.norm.weight"])
    return x @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).t()


def continued(weights, config, prompt, num_tokens) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(by_hand(weights, config, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def settings_of(folder, **changes) -> messages.EngineSettings:
    fields = {
        "path": str(folder), "device": "cpu", "dtype": "float32", "num_threads": 1,
        "block_size": 4, "cache_bytes": 1 << 20, "max_sequences": 4, "max_tokens": 16,
        "max_length": MAX_LENGTH, "max_waiting": 8,
    }  # fmt: skip
    return messages.EngineSettings(**{**fields, **changes})
