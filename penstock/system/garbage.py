"""The garbage collector of long-lived processes."""

from __future__ import annotations

import gc

# For processes that serve. Requests leave no cycles, so collections find nothing; but with the
# default of 700 objects, some hundred requests in flight start them all the time: 2 % of the core's
# CPU time with 512 connections.
SERVING = (50_000, 20, 100)


def freeze(thresholds: tuple[int, int, int] | None = None) -> None:
    """Exclude what exists now from later collections: they scan only new objects, so they are
    short. `thresholds` are those of `gc.set_threshold`, from now on. Call it again after changes
    that leave much behind."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    if thresholds is not None:
        gc.set_threshold(*thresholds)
