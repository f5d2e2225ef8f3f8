"""Model families, one file each: names of their configuration fields and weights.

All families share one `decoder`, so a family only maps a configuration to a `DecoderShape`, and
weight names of GGUF files to those of the decoder. `FAMILIES` is the public list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from penstock.errors import ConfigError
from penstock.llm.models import llama, qwen3
from penstock.llm.models.shape import DecoderShape
from penstock.types import Array

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelFamily:
    name: str
    # From config.json of Hugging Face, and from the metadata of a GGUF file.
    shape_of_config: Callable[[Config], DecoderShape]
    shape_of_gguf: Callable[[Config], DecoderShape]
    # GGUF names of weights, by the decoder's names.
    gguf_names: Callable[[DecoderShape], Mapping[str, str]]
    # Converts a weight from its GGUF layout to the decoder's.
    from_gguf: Callable[[str, Array, DecoderShape], Array]
    # Names of the architecture in config.json and in GGUF files.
    architectures: tuple[str, ...] = field(default=())


def _family(module: ModuleType) -> ModelFamily:
    return ModelFamily(
        module.NAME,
        module.shape_of_config,
        module.shape_of_gguf,
        module.gguf_names,
        module.from_gguf,
        module.ARCHITECTURES,
    )


FAMILIES = (_family(llama), _family(qwen3))


def family_of(architecture: str) -> ModelFamily:
    """Return the family of an architecture; raise ConfigError with the known ones if it has
    none."""
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    known = ", ".join(sorted(name for family in FAMILIES for name in family.architectures))
    raise ConfigError([f"architecture '{architecture}' is not served; expected one of {known}"])
