"""Wait for what another task or process does, for as long as a busy machine may need.

A condition that is never met fails after a minute; one that is met costs no more than a turn.
"""

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 60.0


async def until(condition: Callable[[], object]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends, "it did not happen"
        await asyncio.sleep(0.001)


def wait_until(condition: Callable[[], object]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.01)
