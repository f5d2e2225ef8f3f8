"""Inputs of one generator process in memory that it shares with a server on the same machine.

Inputs are placed before the load starts. Then the memory is registered, once, and requests name
places in it. It is unregistered at the end; if this process is killed, the server does that itself.
Knows nothing of samples and of how requests are written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence

from penstock.benchmark.targets.http_messages import Url
from penstock.errors import ConfigError
from penstock.processes.shared_memfd import SharedMemfd, is_local
from penstock.types import Buffer, RegionPlace, TensorSpec
from penstock.wire.region_keys import EXTENSION
from penstock.wire.v2_client import encode_region, region_path

REGISTER_TIMEOUT_S = 10.0
# The conductor kills generators that take more than 5 s to end.
UNREGISTER_TIMEOUT_S = 2.0

# Sends a body to a path, with a time limit; ConfigError if the server refuses.
AskRegion = Callable[[str, bytes, float], Awaitable[None]]


class SharedInputs:
    """One region under a name of its own."""

    def __init__(self) -> None:
        try:
            self._memfd = SharedMemfd()
        except OSError as error:
            raise ConfigError([f"--shared-memory: no memory could be made: {error}"]) from None
        self._is_sealed = self._is_registered = False

    def check(self, inputs: Sequence[TensorSpec]) -> None:
        """Raise ConfigError for inputs that cannot be shared."""
        text = "BYTES cannot be sent through shared memory; leave out --shared-memory"
        problems = [f"input '{spec.name}': {text}" for spec in inputs if spec.datatype == "BYTES"]
        if problems:
            raise ConfigError(problems)

    def place(self, data: Buffer) -> RegionPlace:
        """Copy a tensor to the memory, before it is registered; ConfigError if there is none."""
        assert not self._is_sealed, "inputs are placed before the first `open`"
        try:
            offset = self._memfd.append(data)
        except OSError as error:
            size = f"{self._memfd.nbytes + len(data):,} bytes"
            text = f"--shared-memory: no memory for {size} of inputs: {error}"
            raise ConfigError([f"{text}; lower --batch-size or --processes"]) from None
        return RegionPlace(self._memfd.name, offset, len(data))

    async def register(self, ask: AskRegion) -> None:
        """Register the memory, unless it is. ConfigError if the server refuses."""
        if self._is_registered:
            return
        if not self._is_sealed:
            self._memfd.seal()
            self._is_sealed = True
        body = encode_region(self._memfd.key, self._memfd.nbytes)
        # An answer that does not come in time may still be followed by the registration.
        self._is_registered = True
        await ask(region_path(self._memfd.name, "register"), body, REGISTER_TIMEOUT_S)

    async def unregister(self, ask: AskRegion) -> None:
        """Unregister the memory, if it is registered and the server still answers."""
        if self._is_registered:
            self._is_registered = False
            with contextlib.suppress(ConfigError):
                await ask(region_path(self._memfd.name, "unregister"), b"", UNREGISTER_TIMEOUT_S)


def support_problem(url: Url, extensions: Sequence[str]) -> str:
    """Describe why a server cannot share memory with this process; empty if it can."""
    where = f"{url.origin}: --shared-memory"
    if not is_local(url.host, url.port):
        text = "needs a server on this machine, and this address is another one's"
        return f"{where} {text}; run the bench beside the server, or leave the flag out"
    if EXTENSION in extensions:
        return ""
    if "system_shared_memory" in extensions:
        text = "needs a Penstock server; this one shares memory by files in /dev/shm only"
        return f"{where} {text}; leave the flag out"
    text = "is not allowed by the server; start it with: penstock serve MODEL --shared-memory"
    return f"{where} {text}"
