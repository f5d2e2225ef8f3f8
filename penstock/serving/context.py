"""What all parts of one served model share, and how they log."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from penstock.config import ModelConfig
from penstock.serving.called_models import Callees
from penstock.serving.metrics import ModelMetrics
from penstock.serving.plan import Planner
from penstock.serving.quotas import QueueShares, Quotas
from penstock.serving.regions import NO_REGIONS, RegionTable


class Saturation:
    """A clock that runs only while no instance is idle, as at the start. The difference of two
    readings is the part of the time between them in which nothing could have been started: it
    separates waiting for an instance from waiting for a batch to fill."""

    __slots__ = ("_base_s", "is_saturated")

    def __init__(self, now: float) -> None:
        self.is_saturated = True
        # Accumulated time; while the clock runs, minus the time at which it started.
        self._base_s = -now

    def at(self, now: float) -> float:
        return self._base_s + now if self.is_saturated else self._base_s

    def note(self, is_saturated: bool, now: float) -> None:
        if is_saturated is not self.is_saturated:
            self.is_saturated = is_saturated
            self._base_s += -now if is_saturated else now


@dataclass(frozen=True, slots=True)
class ModelContext:
    """`shares` are entered at admission and left with the answer. `saturation` is noted where
    instances become idle or busy, and read at admission."""

    config: ModelConfig
    clock: Callable[[], float]
    metrics: ModelMetrics
    planner: Planner
    quotas: Quotas
    shares: QueueShares
    saturation: Saturation
    # Set if workers also serve other shards: whether the one of an instance seems to have nothing
    # to do. A hint: if it is wrong, a batch is formed too early, or claimed first.
    sees_idle: Callable[[int], bool] | None = None
    # For how long all its slots have been busy with the batches that they run; a hint, too.
    busy_s: Callable[[int], float] = lambda index: 0.0
    # Memory that clients have registered.
    regions: RegionTable = NO_REGIONS
    # How many batches it has run for all shards. Also a hint; not a number if it is unknown.
    num_batches: Callable[[int], float] = lambda index: math.nan
    # The models that its code can call; None: none.
    callees: Callees | None = None


def log_about(
    log: logging.Logger, level: int, config: ModelConfig, text: str, *values: object, **more: object
) -> None:
    """Log a line about a version of a model; `more` are additional labels."""
    extra = {**config.labels, **more}
    log.log(level, f"%s/%s{text}", config.name, config.version, *values, extra=extra)
