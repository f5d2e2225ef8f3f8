"""Default datatype on CPUs for models whose files already have four-bit weights.

Four bits are several times faster than float32. When such a model is loaded, the distance between
its next-token distributions in `int4` and in float32 is measured on the model itself; `int4` is
chosen if that distance is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.llm.cache import attend_alone
from penstock.llm.gguf import GgufFile, TensorEntry
from penstock.llm.messages import EngineSettings
from penstock.llm.models.decoder import Decoder

FLOAT, SMALL = "float32", "int4"
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
# Mean over positions, in nats; same as the default of `penstock optimize`.
MAX_KL = 0.02
# Number of positions at which distributions are compared.
NUM_TOKENS, SEED = 48, 5
# Memory needed, as a multiple of the weights in float32.
SPARE = 1.25
Open = Callable[[EngineSettings], Decoder]


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    settings: EngineSettings
    decoder: Decoder
    # For the log; empty if there was no choice.
    reason: str = ""


def choose(settings: EngineSettings, open_decoder: Open) -> DtypeChoice:
    """Return the decoder, and its settings with the chosen datatype."""
    if not settings.is_dtype_free or not is_four_bits(Path(settings.path)):
        return DtypeChoice(settings, open_decoder(settings))
    small = msgspec.structs.replace(settings, dtype=SMALL)
    if not _fits(Path(settings.path)):
        reason = f"{SMALL}, not compared: memory does not hold the model in {FLOAT}"
        return DtypeChoice(small, open_decoder(small), reason)
    wide = msgspec.structs.replace(settings, dtype=FLOAT)
    # One after the other: memory may hold only one.
    wanted = _logprobs(open_decoder(wide))
    decoder = open_decoder(small)
    distance = divergence(wanted, _logprobs(decoder))
    told = f"next-token KL {distance:.2g} nats from {FLOAT}, limit {MAX_KL:g}"
    if distance <= MAX_KL:
        return DtypeChoice(small, decoder, f"{SMALL} ({told}); penstock.dtype {FLOAT} is slower")
    del decoder
    return DtypeChoice(wide, open_decoder(wide), f"{FLOAT} ({told} for {SMALL}, which is faster)")


def is_four_bits(path: Path) -> bool:
    """Return whether most weights of a GGUF file have four bits."""
    if path.suffix != ".gguf":
        return False
    with GgufFile(path) as file:
        tables = [entry for entry in file.tensors.values() if len(entry.shape) > 1]
        small = [entry for entry in tables if entry.format.name in FOUR_BITS]
        return 2 * sum(map(_size, small)) > sum(map(_size, tables))


def divergence(wanted: Tensor, found: Tensor) -> float:
    """Return the mean KL divergence of distributions, each a row of logprobs."""
    return float(F.kl_div(found, wanted, reduction="batchmean", log_target=True))


def _size(entry: TensorEntry) -> int:
    return math.prod(entry.shape)


def _fits(path: Path) -> bool:
    with GgufFile(path) as file:
        needed = 4 * SPARE * sum(map(_size, file.tensors.values()))
    return bool(needed < psutil.virtual_memory().available)


def _logprobs(decoder: Decoder) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    count = min(NUM_TOKENS, decoder.shape.max_length)
    tokens = torch.randint(decoder.shape.vocabulary, (count,), generator=generator)
    with torch.inference_mode():
        hidden = decoder.hidden(tokens, torch.arange(count), attend_alone(decoder.shape))
        return decoder.logits(hidden).float().log_softmax(1)
