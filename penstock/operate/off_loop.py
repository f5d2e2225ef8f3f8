"""Work on the repository away from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from penstock.errors import ConfigError, InvalidRequest

Result = TypeVar("Result")


async def off_loop(work: Callable[[], Result]) -> Result:
    """Run on a thread. What is wrong with the repository or the evidence is an InvalidRequest: the
    operator asked for something that cannot be done."""
    try:
        return await asyncio.to_thread(work)
    except ConfigError as error:
        raise InvalidRequest(str(error)) from None
