"""Watches the inputs of one model for drift: reads the version's evidence, and logs alarms.

`DriftWatch` is the core's; workers read the same evidence. Decides nothing itself: `drift` does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.config import ModelConfig
from penstock.repository import manifest as manifests
from penstock.serving.context import log_about
from penstock.serving.drift import DriftMonitor, InputDrift
from penstock.serving.input_statistics import ReferenceQuantity, references
from penstock.wire.frames import Sketched

log = logging.getLogger("penstock.drift")


def read_references(config: ModelConfig) -> list[ReferenceQuantity]:
    """Return what the version's evidence says about the inputs of this worker; nothing without
    evidence. ConfigError if it cannot be read."""
    # The inputs of a batch that is not rows are not looked at.
    if not config.manifest or config.joins_requests:
        return []
    manifest = manifests.read(Path(config.manifest).parent)
    return [] if manifest is None else references(config, manifest.evidence)


class DriftWatch:
    """Belongs to the core's event loop."""

    def __init__(self, config: ModelConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._monitor = DriftMonitor(read_references(config))

    @property
    def states(self) -> Sequence[InputDrift]:
        return self._monitor.states

    @property
    def notes(self) -> Sequence[str]:
        """Notes for `penstock explain`."""
        return self._monitor.notes

    @property
    def alarms(self) -> Sequence[str]:
        return self._monitor.alarms

    def hear(self, sketched: Sketched) -> None:
        """Take what a worker has counted; log alarms that begin or end."""
        for each in self._monitor.add(sketched, self._clock()):
            if each.is_alarm:
                text, level = f"inputs have drifted: {each.text}", logging.WARNING
            else:
                text, level = f"input '{each.tensor}' is as in the evidence again", logging.INFO
            log_about(log, level, self._config, ": %s", text, tensor=each.tensor)
