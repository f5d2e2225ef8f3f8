"""How the core and a shard talk about one model.

The core has the model's workers (`ModelHost`), a shard has its requests (`Model`). Of a language
model the core has the engine, and a shard the generations (`EnginePart`). With one shard,
both are on one event loop and call each other directly. Messages are frames of `wire.frames`, so
shards in processes of their own can send them.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.serving.called_models import Callees
from penstock.serving.elsewhere import NOTHING_ELSEWHERE, Elsewhere
from penstock.serving.regions import NO_REGIONS, RegionTable
from penstock.wire import frames


class ModelPart(Protocol):
    """A shard's part of a model, as the core calls it."""

    @property
    def is_idle(self) -> bool:
        """Whether it has no requests and no sequences; of another process, the page says more."""

    @property
    def last_answered(self) -> float:
        """When a worker last answered it; of another process, the page says more."""

    def open_model(self, proved: frames.ModelProved) -> None:
        """Accept requests from now on."""

    def load_failed(self, problems: Sequence[str]) -> None: ...

    def set_worker(self, worker: frames.SetWorker, sock: socket.socket) -> None:
        """Use a ready worker; takes over the socket to it."""

    def died(self, died: frames.Died) -> None:
        """Answer with `CoreLink.lost`; `verdict` follows."""

    def verdict(self, verdict: frames.Verdict) -> None: ...

    def set_quarantine(self, quarantine: frames.SetQuarantine) -> None: ...

    def set_reason(self, reason: str) -> None:
        """Note why the last worker ended."""

    def may_try(self) -> None:
        """A suspect may run now; see `CoreLink.may_try`."""

    def scaled(self, scaled: frames.Scaled) -> None:
        """Hear how many instances there should be."""

    def resized(self, resized: frames.Resized) -> None:
        """Hear of another number of instances, before the workers that are added."""

    def vacate(self, index: int) -> bool:
        """Begin no sequence on this instance; return whether it has none."""

    def occupy(self, index: int) -> None:
        """Use an instance again that was to be vacated."""

    def tick(self) -> None:
        """Do periodic work."""


class CoreLink(Protocol):
    """The core, as a shard's part of a model calls it."""

    def lost(self, lost: frames.Lost) -> None: ...

    def answered(self) -> None:
        """Report the first answer since a death with which requests were lost."""

    def may_try(self, is_patient: bool) -> bool:
        """Return whether a suspect may run now, which may kill its worker. If not, the core calls
        `ModelPart.may_try` when it may. Only one part may at a time, until its `tried`."""

    def tried(self) -> None:
        """Report that a suspect has ended, or that there is none any more."""

    def hung(self, index: int, life: int) -> None:
        """Report that a worker takes too long over a batch."""

    def left(self, index: int, life: int) -> None:
        """Report that a leaving worker has answered everything."""

    def report(self, load: frames.PartLoad) -> None:
        """Report the load of a model that is scaled."""

    def wake(self) -> None:
        """Report that a request waits, and that there is no instance."""


class EnginePart(Protocol):
    """A shard's part of a language model, as the core calls it."""

    def set_engine(self, engine: frames.SetEngine, sock: socket.socket) -> None:
        """Use a ready engine; takes over the socket to it."""

    def engine_ended(self, ended: frames.EngineEnded) -> None: ...


class EngineCore(Protocol):
    """The core, as a shard's part of a language model calls it."""

    def engine_hung(self, life: int, silent_s: float) -> None:
        """Report that the engine said nothing for so long."""


@dataclass(frozen=True, slots=True)
class ShardSetup:
    """What a model needs to know to be one of several shards' parts. `core` is in another process,
    which has the workers and started them already; None: the workers are started here. `sees_idle`,
    `busy_s` and `num_batches` as in `ModelContext`; `elsewhere` is what others have queued."""

    core: CoreLink | None = None
    sees_idle: Callable[[int], bool] | None = None
    elsewhere: Elsewhere = NOTHING_ELSEWHERE
    num_batches: Callable[[int], float] = lambda index: math.nan
    # Memory that clients have registered.
    regions: RegionTable = NO_REGIONS
    busy_s: Callable[[int], float] = lambda index: 0.0
    # The models that its code can call; None: none.
    callees: Callees | None = None


ONLY_SHARD = ShardSetup()
