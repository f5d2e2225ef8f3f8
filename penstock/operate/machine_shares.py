"""Which part of the machine's price and energy each version bears. Pure.

The price is divided by the instances that are loaded, because they hold the machine whether they
compute or not. Energy is divided by the time that they computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from penstock.config import CPU

Key = TypeVar("Key", bound=Hashable)


def price_shares(devices: Mapping[Key, Sequence[str]]) -> dict[Key, float]:
    """Return the share of the machine's price by version, from the devices of its instances. Each
    GPU in use has the same share, and so have the instances on it; together the versions bear the
    whole price. Versions on the CPU bear it if no GPU is in use; otherwise they are left out."""
    on_gpu = {device for each in devices.values() for device in each if device != CPU}
    priced = on_gpu or {CPU}
    counts = Counter(device for each in devices.values() for device in each if device in priced)
    shares = {
        key: sum(1 / counts[device] / len(priced) for device in each if device in priced)
        for key, each in devices.items()
    }
    return {key: share for key, share in shares.items() if share}


def divide_energy(
    joules: Mapping[str, float], busy_s: Mapping[Key, float], devices: Mapping[Key, Sequence[str]]
) -> dict[Key, float]:
    """Return the joules of each version, from those of each device in the same time. A device's
    energy goes to the versions that computed on it, in proportion to their time; without any, to
    none. A version on several devices computed on each of its instances for the same time."""
    by_device: dict[str, dict[Key, float]] = {}
    for key, total_s in busy_s.items():
        for device in devices.get(key, ()):
            spans = by_device.setdefault(device, {})
            spans[key] = spans.get(key, 0.0) + total_s / len(devices[key])
    found: dict[Key, float] = {}
    for device, spans in by_device.items():
        total_s = sum(spans.values())
        for key, span_s in spans.items():
            if device in joules and total_s:
                found[key] = found.get(key, 0.0) + joules[device] * span_s / total_s
    return found
