"""Engine settings from a model's configuration. Parameters have vLLM's names where there is one."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping
from pathlib import Path

from penstock.config import CPU, LLM, ModelConfig
from penstock.errors import ConfigError
from penstock.llm.messages import EngineSettings
from penstock.llm.tool_formats import REASONING_PARSERS, TOOL_PARSERS
from penstock.repository.layout import GGUF

PREFIX = "penstock."
# KV cache on a CPU.
DEFAULT_CACHE_BYTES = 1 << 30
DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8", "int8", "int4")
# Datatypes for GPUs only, and for CPUs only.
ON_GPUS, ON_CPUS = ("fp8",), ("int8", "int4")
# Longer than any model: the model's own length applies.
LONGEST = 1 << 24

# Packages that the engine and the renderer import.
PACKAGES = ("torch", "tokenizers")
# Default, least and largest value.
NUMBERS: Mapping[str, tuple[float, float, float]] = {
    # Larger blocks make block tables shorter, smaller ones share more of prompts.
    "block_size": (16, 1, 256),
    # 0: 1 GiB on a CPU, the free memory on a GPU. More for longer and more concurrent sequences.
    "kv_cache_bytes": (0, 0, 1 << 50),
    # Tokens of a sequence, prompt included. Lower it if memory cannot hold the model's length.
    "max_model_len": (LONGEST, 2, LONGEST),
    # Tokens of a step: more for prefill throughput, fewer for time per token.
    "max_num_batched_tokens": (0, 1, 1 << 24),
    # Sequences that run at a time: more for throughput, fewer for time per token.
    "max_num_seqs": (0, 1, 1 << 16),
    # Tokens drafted for a sequence in a step, at most; 0: none. For texts that repeat themselves.
    "num_speculative_tokens": (0, 0, 32),
    # Queue limit; further requests are refused.
    "max_waiting": (1024, 1, 1 << 20),
    # Threads of the engine; fewer if other processes need cores.
    "threads": (0, 1, 1024),
    # Seconds that the chat template and tokenizer may take for a request, and 20 us more for each
    # character. Raise it for slow templates or machines.
    "text_timeout_s": (5, 0.1, 3600),
    # Latency targets: time to first token, and time per output token. They limit prefill chunks and
    # drive admission control.
    "ttft_ms": (0, 0.001, 1e9),
    "tpot_ms": (0, 0.001, 1e9),
}
FLAGS = ("random_weights", "parse_special_tokens", "follow_links")
# How answers are read: families of calls of tools, and reasoning.
PARSERS = {"tool_parser": TOOL_PARSERS, "reasoning_parser": REASONING_PARSERS}
TEXTS = ("dtype", *PARSERS, *FLAGS)
# Defaults (on a CPU, on a GPU).
MAX_SEQUENCES, MAX_TOKENS = (16, 256), (256, 8192)


def settings_of(config: ModelConfig) -> EngineSettings:
    """Return the settings; raise ConfigError with all problems."""
    problems: list[str] = []
    numbers = {name: _number(config, name, problems) for name in NUMBERS}
    dtype = config.options.get(f"{PREFIX}dtype", "auto")
    if dtype not in DTYPES:
        problems.append(f"parameters.{PREFIX}dtype: '{dtype}'; expected {', '.join(DTYPES)}")
    others_only = ON_GPUS if config.device == CPU else ON_CPUS
    if dtype in others_only:
        kind = "GPUs" if config.device == CPU else "CPUs"
        others = ", ".join(each for each in DTYPES if each not in others_only)
        problems.append(
            f"parameters.{PREFIX}dtype: '{dtype}' is for {kind}, and this model is on "
            f"'{config.device}'; expected one of {others}"
        )
    flags = {name: _flag(config, name, problems) for name in FLAGS}
    parsers = {name: _parser(config, name, problems) for name in PARSERS}
    if config.num_instances > 1:
        problems.append(
            f"instance_group: {config.num_instances} instances; expected one: an engine takes all "
            "requests together"
        )
    place = 0 if config.device == CPU else 1
    max_sequences = int(numbers["max_num_seqs"]) or MAX_SEQUENCES[place]
    max_tokens = int(numbers["max_num_batched_tokens"]) or max(MAX_TOKENS[place], max_sequences)
    if max_tokens < max_sequences:
        problems.append(
            f"parameters.{PREFIX}max_num_batched_tokens: {max_tokens}; expected at least "
            f"{max_sequences}, a token for each of {PREFIX}max_num_seqs"
        )
    if problems:
        raise ConfigError(problems)
    return EngineSettings(
        path=str(path_of(config)),
        device=config.device,
        dtype=dtype if dtype != "auto" else ("float32", "bfloat16")[place],
        num_threads=int(numbers["threads"]) or config.num_cores or len(os.sched_getaffinity(0)),
        block_size=int(numbers["block_size"]),
        cache_bytes=int(numbers["kv_cache_bytes"]),
        max_sequences=max_sequences,
        max_tokens=max_tokens,
        max_length=int(numbers["max_model_len"]),
        max_waiting=int(numbers["max_waiting"]),
        ttft_s=numbers["ttft_ms"] / 1e3 or None,
        tpot_s=numbers["tpot_ms"] / 1e3 or None,
        is_made_up=flags["random_weights"],
        parses_special=flags["parse_special_tokens"],
        max_drafted=int(numbers["num_speculative_tokens"]),
        is_dtype_free=dtype == "auto" and config.device == CPU,
        text_timeout_s=numbers["text_timeout_s"],
        manifest=config.manifest,
        checksums=config.checksums,
        hang_s=config.hang_s,
        tool_parser=parsers["tool_parser"],
        reasoning_parser=parsers["reasoning_parser"],
    )


def path_of(config: ModelConfig) -> Path:
    """Return the GGUF file or Hugging Face folder; for random weights the configuration file."""
    artifact = Path(config.artifact)
    is_alone = config.options.get(f"{PREFIX}random_weights") == "true"
    return artifact if artifact.suffix == GGUF or is_alone else artifact.parent


def _flag(config: ModelConfig, name: str, problems: list[str]) -> bool:
    given = config.options.get(f"{PREFIX}{name}", "false")
    if given not in ("true", "false"):
        problems.append(f"parameters.{PREFIX}{name}: '{given}'; expected true or false")
    return given == "true"


def _parser(config: ModelConfig, name: str, problems: list[str]) -> str:
    given = config.options.get(f"{PREFIX}{name}", "auto")
    if given not in PARSERS[name]:
        expected = ", ".join(PARSERS[name])
        problems.append(f"parameters.{PREFIX}{name}: '{given}'; expected {expected}")
    return given


def _number(config: ModelConfig, name: str, problems: list[str]) -> float:
    (default, least, most), key = NUMBERS[name], f"{PREFIX}{name}"
    given = config.options.get(key)
    if given is None:
        return default
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    is_time = name.endswith(("_ms", "_s"))
    if not least <= value <= most or not (is_time or value.is_integer()):
        what = "a number" if is_time else "a whole number"
        problems.append(f"parameters.{key}: '{given}'; expected {what} from {least:g} to {most:g}")
        return default
    return value


def check_packages() -> None:
    """ConfigError if a package is missing, before a process starts that could only fail."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            problem = f"backend: '{LLM}' needs the package '{package}', which is not installed"
            raise ConfigError([f'{problem}; pip install "penstock[llm]" brings it'])
