"""Whether what is to be loaded fits the GPUs' memory: needs and GPUs to a plan. Pure.

A plan is made before anything is loaded, so a need is mostly an estimate and says so. What is
loaded already is not in it: the driver no longer counts that as free. A reload has the old version
and the new one loaded at the same time, so it needs room for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from penstock.devices import Gpu

# What one model brings to a GPU beyond its weights: the driver's context with its kernels, and
# activations with the libraries' workspaces. Rather too little than too much: a model that is
# refused though it would fit is worse than one that fails when it loads.
CONTEXT_BYTES = 512 << 20
WORKSPACE_BYTES = 256 << 20
# Of a GPU that is too small.
MAX_NAMED = 5

Source = Literal["configured", "evidence", "estimated"]


@dataclass(frozen=True, slots=True)
class Need:
    """What one worker takes of a GPU's memory, and who says so."""

    num_bytes: int
    source: Source


@dataclass(frozen=True, slots=True)
class Share:
    """The workers of one version on one GPU: one for all its instances there, or one for each."""

    model: str
    version: str
    device: str
    num_workers: int
    need: Need
    # Of the model there; more than workers where these have several slots. 0: as many as workers.
    num_instances: int = 0

    @property
    def num_bytes(self) -> int:
        return self.num_workers * self.need.num_bytes


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """One GPU, with what is to be loaded onto it, the largest first."""

    gpu: Gpu
    shares: tuple[Share, ...]
    reserve_bytes: int

    @property
    def needed_bytes(self) -> int:
        return sum(share.num_bytes for share in self.shares)

    @property
    def room_bytes(self) -> int:
        return max(0, self.gpu.free_bytes - self.reserve_bytes)

    @property
    def fits(self) -> bool:
        """True where nothing is asked of it, and where it does not tell its size."""
        return not self.shares or not self.gpu.total_bytes or self.needed_bytes <= self.room_bytes


def make_plan(shares: Sequence[Share], gpus: Sequence[Gpu], reserve: float) -> tuple[GpuPlan, ...]:
    """Each GPU with its shares. `reserve` is the share of its memory that is kept back."""
    return tuple(
        GpuPlan(
            gpu,
            tuple(
                sorted(
                    (share for share in shares if share.device == gpu.device),
                    key=lambda share: -share.num_bytes,
                )
            ),
            round(reserve * gpu.total_bytes),
        )
        for gpu in gpus
    )


def shortages(plan: Sequence[GpuPlan]) -> list[str]:
    """What does not fit, GPU by GPU, in sentences; none: everything does."""
    return [_shortage(each) for each in plan if not each.fits]


def _shortage(plan: GpuPlan) -> str:
    gpu = plan.gpu
    named = "; ".join(told(share) for share in plan.shares[:MAX_NAMED])
    if len(plan.shares) > MAX_NAMED:
        named += f"; and {len(plan.shares) - MAX_NAMED} smaller ones"
    used = gib(gpu.total_bytes - gpu.free_bytes)
    return (
        f"GPU {gpu.index} ({gpu.name}): {gib(plan.needed_bytes)} of memory would be needed and "
        f"{gib(plan.room_bytes)} can be had ({gib(gpu.total_bytes)}, of which {used} in use and "
        f"{gib(plan.reserve_bytes)} kept back). Largest: {named}. Spread them with "
        "instance_group.gpus, serve fewer, give what an instance really takes as "
        "parameters.penstock.gpu_memory_bytes, or keep less back with --gpu-memory-reserve"
    )


def told(share: Share) -> str:
    count = f"{share.num_workers} x " if share.num_workers > 1 else ""
    each = gib(share.need.num_bytes)
    if share.num_instances > share.num_workers:
        each += f" for {share.num_instances} instances"
    return f"{share.model}/{share.version} {count}{each} ({share.need.source})"


def gib(num_bytes: int) -> str:
    if num_bytes < 1 << 30:
        return f"{num_bytes / (1 << 20):.0f} MiB"
    return f"{num_bytes / (1 << 30):.1f} GiB"
