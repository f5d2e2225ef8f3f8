"""What one model holds at the moment, as plain numbers that shards report and scrapes add up."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class ModelGauges:
    """Shared memory that GPUs copy from and to, and its part that requests hold; entries of the
    response cache, and their bytes; sequences with a slot, and those that wait for one."""

    pinned_bytes: int = 0
    pinned_used_bytes: int = 0
    num_cache_entries: int = 0
    cache_bytes: int = 0
    num_sequences: int = 0
    num_waiting_sequences: int = 0

    def plus(self, other: ModelGauges) -> ModelGauges:
        return ModelGauges(*map(sum, zip(astuple(self), astuple(other), strict=True)))


NO_GAUGES = ModelGauges()
