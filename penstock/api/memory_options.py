"""`--model-memory`: how much memory the models that are loaded on demand may have together."""

from __future__ import annotations

import re

from penstock.config import ModelMemoryLimit

DEFAULT = "80%"
LIMIT = re.compile(r"(?P<number>\d{1,18}(\.\d{1,6})?)\s*(?P<unit>%|B|[KMGT]iB|[kMGT]B)")
UNITS = {
    "B": 1,
    **{f"{name}iB": 1024**power for power, name in enumerate("KMGT", 1)},
    **{f"{name}B": 1000**power for power, name in enumerate("kMGT", 1)},
}
MAX_BYTES = 1 << 50


def read_model_memory(text: str) -> tuple[ModelMemoryLimit, list[str]]:
    """Return the limit, and what is wrong."""
    flag = f"--model-memory {text}"
    match = LIMIT.fullmatch(text.strip())
    if match is None:
        wanted = "expected a size or a share of each device's memory, for example 8GiB or 60%"
        return ModelMemoryLimit(), [f"{flag}: {wanted}"]
    number, unit = float(match["number"]), match["unit"]
    if unit == "%":
        if 0 < number <= 100:
            return ModelMemoryLimit(share=number / 100), []
        return ModelMemoryLimit(), [f"{flag}: expected a share above 0% and up to 100%"]
    num_bytes = round(number * UNITS[unit])
    if 0 < num_bytes <= MAX_BYTES:
        return ModelMemoryLimit(num_bytes), []
    return ModelMemoryLimit(), [f"{flag}: expected a size above 0 and up to 1024 TiB"]
