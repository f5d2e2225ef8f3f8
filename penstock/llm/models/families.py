"""Families of language models, one file each: what their configurations and weights are called.

All of them are decoders of one kind (`decoder`), so a family says which `Shape` a configuration
means and under which names its weights lie in safetensors and in GGUF files. `FAMILIES` is all that
others ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from penstock.errors import ConfigError
from penstock.llm.models import llama, qwen3
from penstock.llm.models.shape import Shape
from penstock.types import Array

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    # From config.json of Hugging Face, and from a GGUF file's metadata.
    shape_of_config: Callable[[Config], Shape]
    shape_of_gguf: Callable[[Config], Shape]
    # Weights by the decoder's names, in a GGUF file's.
    gguf_names: Callable[[Shape], Mapping[str, str]]
    # A weight of a GGUF file as the decoder has it.
    from_gguf: Callable[[str, Array, Shape], Array]
    # Architectures, as a config.json and a GGUF file have them.
    architectures: tuple[str, ...] = field(default=())


def _family(module: ModuleType) -> Family:
    return Family(
        module.NAME,
        module.shape_of_config,
        module.shape_of_gguf,
        module.gguf_names,
        module.from_gguf,
        module.ARCHITECTURES,
    )


FAMILIES = (_family(llama), _family(qwen3))


def family_of(architecture: str) -> Family:
    """ConfigError with those that there are."""
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    known = ", ".join(sorted(name for family in FAMILIES for name in family.architectures))
    raise ConfigError([f"architecture '{architecture}' is not served; expected one of {known}"])
