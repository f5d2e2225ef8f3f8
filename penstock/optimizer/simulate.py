"""What a serving configuration would do, from measured batch times: the real batchers on a fake
clock. Pure. Used to order candidates and never to accept one."""

from __future__ import annotations

import msgspec

from penstock.config import ModelConfig
from penstock.slo import Slo


class TimeTable(msgspec.Struct):
    """How long batches take, measured with all instances computing at once.

    `seconds[bucket][rows]`; bucket is a padded length, or 0 for models without padding."""

    num_instances: int
    num_threads: int
    seconds: dict[int, dict[int, float]]
    # Of one instance, loaded and warm.
    memory_bytes: int = 0
    load_s: float = 0.0


class Prediction(msgspec.Struct):
    rate: float
    p50_s: float
    p99_s: float
    goodput: float  # share of requests answered in time
    rows_per_batch: float
    utilisation: float


def predict(
    table: TimeTable, config: ModelConfig, slo: Slo, rate: float, lengths: dict[int, float]
) -> Prediction:
    """`lengths` is the share of requests by bucket; {0: 1.0} without padding."""
    raise NotImplementedError


def max_rate(table: TimeTable, config: ModelConfig, slo: Slo, lengths: dict[int, float]) -> float:
    """The highest rate at which the SLO's latency terms hold in simulation; 0 if at none."""
    raise NotImplementedError
