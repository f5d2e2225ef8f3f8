"""The families that are served. Those like Llama share its layers, and are here."""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.llm.models.family import QKV, ModelFamily
from penstock.llm.models.gemma import GEMMA2, GEMMA3
from penstock.llm.models.gpt2 import GPT2
from penstock.llm.models.mixtures import MIXTRAL, QWEN3_MOE, experts_of_gguf
from penstock.llm.models.opt import OPT

# Also models of the same architecture, such as SmolLM2 and TinyLlama; in GGUF files also Mistral
# and Mixtral.
LLAMA = ModelFamily(
    "llama",
    ("LlamaForCausalLM", "llama"),
    has_adjacent_pairs=True,
    of_gguf=experts_of_gguf,
)
MISTRAL = ModelFamily("mistral", ("MistralForCausalLM",), windows="all")
# Also Qwen2.5.
QWEN2 = ModelFamily("qwen2", ("Qwen2ForCausalLM", "qwen2"), has_qkv_bias=True, windows="late")
# Dense models.
QWEN3 = ModelFamily(
    "qwen3", ("Qwen3ForCausalLM", "qwen3"), has_qk_norm=True, head_size=128, windows="late"
)
# Also Phi-3.5 and Phi-4.
PHI3 = ModelFamily(
    "phi3",
    ("Phi3ForCausalLM",),
    windows="all",
    joined={
        "self_attn.qkv_proj": QKV,
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
)
FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, MIXTRAL, QWEN3_MOE, GEMMA2, GEMMA3, GPT2, OPT)


def family_of(architecture: str) -> ModelFamily:
    """Return the family of an architecture; raise ConfigError if there is none."""
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    known = ", ".join(sorted(name for family in FAMILIES for name in family.architectures))
    raise ConfigError([f"architecture '{architecture}' is not served; expected one of {known}"])
