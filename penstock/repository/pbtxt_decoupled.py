"""Decoupled models in config.pbtxt (`model_transaction_policy`): which are, and what they exclude.

Python models may say it in their code instead: `set_model_transaction_policy`, or a generator.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.config import LLM, ModelConfig
from penstock.repository.pbtxt_fields import Proto

PATH = "model_transaction_policy.decoupled"
# What a file has whose `auto_complete_config` may say it.
CALL = b"set_model_transaction_policy"


def read(message: Proto) -> bool:
    return bool(message.model_transaction_policy.decoupled)


def may_say_so(message: Proto, backend: str, artifact: Path) -> bool:
    """Whether a Python model's code has to be asked, because config.pbtxt does not say."""
    if backend != "python" or message.HasField("model_transaction_policy"):
        return False
    try:
        return CALL in artifact.read_bytes()
    except OSError:
        return False  # Loading it says why.


def describe(message: Proto, config: ModelConfig) -> None:
    if config.is_decoupled:
        message.model_transaction_policy.decoupled = True


def conflicts(config: ModelConfig, *, is_cached: bool) -> Iterator[tuple[str, str]]:
    """Yield the paths that do not go with a decoupled model, and why."""
    if not config.is_decoupled or config.backend == LLM:
        return
    if config.backend != "python":
        yield PATH, f"models of backend '{config.backend}' answer once; only 'python' can be"
    if config.is_processed or config.padding is not None:
        yield PATH, "not supported with functions around the model, or with padding"
    if config.has_views:
        yield PATH, "not supported with reshape, ragged inputs, batch_input or batch_output"
    if config.sequences is not None:
        yield PATH, "not supported with sequence_batching"
    if is_cached:
        yield "response_cache", "a decoupled model has any number of responses"


def warnings(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield fields without effect on a decoupled model."""
    if config.is_decoupled and config.batching.preserve_ordering:
        yield "dynamic_batching.preserve_ordering", "responses of a decoupled model leave at once"
