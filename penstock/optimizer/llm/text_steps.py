"""Options that may raise a language model's throughput: datatypes that its engine supports, and
batching limits. Pure: measurements decide which of them pay."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.config import CPU
from penstock.llm.messages import EngineSettings
from penstock.llm.settings import ON_CPUS, ON_GPUS
from penstock.optimizer.candidates import Skip, Stage, Step
from penstock.optimizer.machine import Machine
from penstock.slo import Latency, Slo

DTYPE, PACE, TOKENS, SEQUENCES = "dtype", "pace", "step-tokens", "sequences"
# Datatypes with fewer bits are quantised.
HALF = 16
# CPU instructions per datatype (one suffices); without them the CPU emulates it.
NEEDED = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "fphp"),
}
# Smaller steps spend most of their time outside matmuls; larger ones delay decoding sequences.
LEAST_TOKENS, MOST_TOKENS = 32, 32_768
LEAST_SEQUENCES, MOST_SEQUENCES = 4, 1024


# Directions to change a setting, each a ladder: a step is tried only if the previous paid.
Knob = Sequence[Sequence[Step]]


def stage_of(step: Step) -> Stage:
    if step.pass_name != DTYPE:
        return "batching"
    return "precision" if bits_of(step.settings["dtype"]) >= HALF else "quantise"


def bits_of(dtype: str) -> int:
    """Parse the bits out of the name; 32 without a number."""
    found = re.search(r"[0-9]+", dtype)
    return int(found[0]) if found else 32


def dtype_offers(
    dtypes: Sequence[str], settings: EngineSettings, machine: Machine, *, is_exhaustive: bool
) -> tuple[list[Step], list[Skip]]:
    """Return the datatypes narrower than the original's, widest first; and those skipped because
    this device gains nothing from them."""
    offers: list[Step] = []
    skipped: list[Skip] = []
    own = bits_of(settings.dtype)
    narrower = [each for each in dtypes if each != "auto" and bits_of(each) < own]
    for dtype in sorted(narrower, key=lambda each: -bits_of(each)):
        step = Step(DTYPE, {"dtype": dtype})
        reason = _nothing_to_gain(dtype, settings.device, machine)
        if reason and not (is_exhaustive and dtype in NEEDED):
            skipped.append(Skip(DTYPE, reason, step))
        else:
            offers.append(step)
    return offers, skipped


def _nothing_to_gain(dtype: str, device: str, machine: Machine) -> str:
    if device != CPU:
        return "only CPUs multiply in it" if dtype in ON_CPUS else ""
    if dtype in ON_GPUS:
        return "only GPUs multiply in it"
    needed = NEEDED.get(dtype, ())
    if needed and not set(needed) & set(machine.isa):
        return f"this CPU has no instructions for it (one of {', '.join(needed)})"
    return ""


def tpot_limit_ms(slo: Slo) -> float | None:
    """Return the tightest limit per token after the first, whatever its statistic."""
    limits = [
        term.limit_s
        for term in slo.terms
        if isinstance(term, Latency) and term.metric in ("tpot", "itl")
    ]
    return min(limits) * 1e3 if limits else None


def serving_offers(settings: EngineSettings, slo: Slo) -> list[Knob]:
    """Return pacing, step size and sequence count as knobs. A step holds at least one token of each
    sequence, so the bounds keep the two compatible."""
    found: list[Knob] = []
    limit_ms = tpot_limit_ms(slo)
    if limit_ms is not None and settings.tpot_s is None:
        found.append([[Step(PACE, {"tpot_ms": f"{limit_ms:g}"})]])
    tokens, sequences = settings.max_tokens, settings.max_sequences
    fewest = max(LEAST_TOKENS, sequences)
    sizes = [[2 * tokens, 4 * tokens], [tokens // 2, tokens // 4]]
    found.append(_knob(TOKENS, "max_num_batched_tokens", sizes, (fewest, MOST_TOKENS)))
    # Step sizes are tuned first and may have shrunk to a quarter.
    most = min(MOST_SEQUENCES, max(sequences, tokens // 4))
    sizes = [[2 * sequences, 4 * sequences], [sequences // 2, sequences // 4]]
    found.append(_knob(SEQUENCES, "max_num_seqs", sizes, (LEAST_SEQUENCES, most)))
    return found


def _knob(name: str, setting: str, ways: Sequence[Sequence[int]], within: tuple[int, int]) -> Knob:
    return [
        [Step(name, {setting: str(value)}) for value in way if within[0] <= value <= within[1]]
        for way in ways
    ]
