"""Reads `--rate-limit-resource NAME:COUNT[:DEVICE]`, in Triton's form. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config import EACH_GPU
from penstock.serving.rate_pool import ResourceKey

OFF, EXECUTION_COUNT = "off", "execution_count"
MODES = (OFF, EXECUTION_COUNT)
EACH_DEVICE = ""
MAX_COUNT = 1 << 31


def read_resources(mode: str, given: Sequence[str]) -> tuple[dict[ResourceKey, int], list[str]]:
    """Return the counts by resource and device, and what is wrong; later ones override. Without a
    device, a count is that of each device and of a global resource."""
    found: dict[ResourceKey, int] = {}
    problems: list[str] = []
    for text in given:
        flag = f"--rate-limit-resource {text}"
        name, *numbers = text.split(":")
        if not name or len(numbers) not in (1, 2):
            problems.append(f"{flag}: expected NAME:COUNT or NAME:COUNT:DEVICE, for example R1:4:0")
        elif not all(each.isdecimal() and each.isascii() for each in numbers):
            problems.append(f"{flag}: expected numbers after the name, for example R1:4:0")
        elif not 0 < int(numbers[0]) < MAX_COUNT:
            problems.append(f"{flag}: count {numbers[0]}; expected 1 to {MAX_COUNT - 1}")
        else:
            device = f"{EACH_GPU}:{int(numbers[1])}" if len(numbers) == 2 else EACH_DEVICE
            found[ResourceKey(name, device)] = int(numbers[0])
    if given and mode == OFF:
        problems.append("--rate-limit-resource: needs --rate-limit execution_count")
    return found, problems
