"""Energy of the processor packages, from the kernel's RAPL counters.

They are in /sys/class/powercap, for root only on most machines, and missing on virtual ones.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

ZONES = Path("/sys/class/powercap")


class CpuEnergy:
    """Counts joules since it was made. For one thread."""

    def __init__(self, zones: Path = ZONES) -> None:
        self._zones = [
            zone
            for zone in sorted(zones.glob("intel-rapl:*"))
            if _text(zone / "name")[:8] == "package-"
        ]
        self._last = {zone: _number(zone / "energy_uj") for zone in self._zones}
        self._microjoules = 0

    def read(self) -> float | None:
        """Return the joules of all packages since the start; None if they cannot be read."""
        is_read = False
        for zone in self._zones:
            now, last = _number(zone / "energy_uj"), self._last[zone]
            self._last[zone] = now
            if now is None or last is None:
                continue
            is_read = True
            # The counter starts again from 0 at this value.
            span = _number(zone / "max_energy_range_uj") or 0
            self._microjoules += now - last if now >= last else now - last + span
        return self._microjoules / 1e6 if is_read else None


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""
