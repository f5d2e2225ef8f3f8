"""What all parts of one served model share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.config import ModelConfig
from penstock.serving.metrics import ModelMetrics
from penstock.serving.plan import Planner
from penstock.serving.quotas import QueueShares, Quotas
from penstock.serving.saturation import Saturation


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
