"""Reads `--cache-config CACHE,SETTING=VALUE`, in Triton's form. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.config import CacheConfig

LOCAL = "local"
KINDS = (LOCAL,)
SIZE = "size"
# Smaller caches hold no answer.
MIN_BYTES = 1024
EXAMPLE = "for example local,size=104857600"


def read_cache_config(given: Sequence[str]) -> tuple[CacheConfig, list[str]]:
    """Return the configuration and what is wrong with the settings; later ones override."""
    config, problems = CacheConfig(), list[str]()
    for text in given:
        kind, _, setting = text.partition(",")
        name, _, value = setting.partition("=")
        flag = f"--cache-config {text}"
        if kind not in KINDS:
            problems.append(f"{flag}: '{kind}' is not one of {', '.join(KINDS)}; {EXAMPLE}")
        elif name != SIZE:
            problems.append(f"{flag}: '{name}' is no setting of {kind}; {EXAMPLE}")
        elif not value.isdecimal() or not value.isascii() or not MIN_BYTES <= int(value) < 1 << 63:
            problems.append(f"{flag}: '{value}'; expected bytes, at least {MIN_BYTES}")
        else:
            config = replace(config, max_bytes=int(value))
    return config, problems
