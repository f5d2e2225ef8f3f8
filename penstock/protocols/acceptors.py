"""Steers new connections to some of the shards, as `serving.accept_policy` decides.

The listeners of a port are a group that shares it (SO_REUSEPORT); a classic BPF program on the
group chooses one of them for each connection. It needs no privileges and can be replaced at any
time. It returns the listener's index: the core keeps all listeners open, so that a shard's death
does not change it. Where the kernel refuses the program, all shards accept. Connections are never
handed over: clients are asked to connect again (`listener.Listener.move`). Belongs to the core's
event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence

from penstock.serving.accept_policy import AcceptorUse, AcceptPolicy
from penstock.serving.shared_page import SharedPage

log = logging.getLogger("penstock.shards")

TICK_S = 0.25
# A shard that has shown nothing for this long gets no new connections.
SILENT_S = 2.0

# From linux/socket.h and linux/filter.h.
SO_ATTACH_REUSEPORT_CBPF = 51
LOAD_RANDOM = (0x20, 0, 0, 0xFFFFF000 + 56)  # BPF_LD | BPF_W | BPF_ABS, SKF_AD_RANDOM
MODULO, RETURN, SKIP_UNLESS = 0x94, 0x06, 0x15


def steer(listener: socket.socket, targets: Sequence[int]) -> None:
    """Let these listeners of the group get the next connections, in equal shares. OSError if the
    kernel does not allow it."""
    program = [LOAD_RANDOM, (MODULO, 0, 0, len(targets))]
    for index, target in enumerate(targets[:-1]):
        program += [(SKIP_UNLESS, 0, 1, index), (RETURN, 0, 0, target)]
    program.append((RETURN, 0, 0, targets[-1]))
    code = b"".join(struct.pack("HBBI", *each) for each in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("H6xQ", len(program), ctypes.addressof(buffer))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, described)


class Acceptors:
    """`groups`: the listeners of each port, in the order of the shards. `move` asks a shard to send
    clients away."""

    def __init__(
        self,
        groups: Sequence[Sequence[socket.socket]],
        page: SharedPage,
        move: Callable[[int, int], None],
        accepts_all: bool = False,
    ) -> None:
        self._groups = groups
        self._page = page
        self._move = move
        self._policy = AcceptPolicy(len(groups[0]), accepts_all)
        # Time, CPU time and use of each shard when it was last read.
        self._seen: dict[int, tuple[float, float, float]] = {}
        self._targets: tuple[int, ...] = ()
        self.accepting: tuple[int, ...] = ()
        self._is_allowed = True
        self.tick(time.monotonic())

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick(time.monotonic())

    def tick(self, now: float) -> None:
        """Decide; also called when a shard has died, so that the others get its next clients."""
        if not self._is_allowed:
            return
        before = len(self.accepting)
        decision = self._policy.decide(now, self._read(now))
        self.accepting = decision.accepting
        if decision.targets != self._targets:
            self._steer(decision.targets)
        for shard, count in decision.moves.items():
            self._move(shard, count)
        if before and len(self.accepting) != before:
            log.info("%d shards accept connections now; before, %d", len(self.accepting), before)

    def _steer(self, targets: tuple[int, ...]) -> None:
        try:
            for group in self._groups:
                steer(group[0], targets)
        except OSError as error:
            self._is_allowed = False
            self._policy.accepts_all = True
            self.accepting = tuple(range(len(self._groups[0])))
            why = os.strerror(error.errno) if error.errno else str(error)
            log.warning("all shards accept connections at all rates: steering them fails (%s)", why)
            for group in self._groups:
                # Some ports may have a program; without one, connections are spread by hash.
                with contextlib.suppress(OSError):
                    steer(group[0], self.accepting)
            return
        self._targets = targets

    def _read(self, now: float) -> dict[int, AcceptorUse]:
        """Return what the shards that live show. Values may be wrong; they only guide."""
        uses = {}
        for shard, beat in enumerate(self._page.beats()):
            if not 0 <= now - beat.at < SILENT_S:
                self._seen.pop(shard, None)
                continue
            at, cpu_s, busy = self._seen.get(shard, (beat.at, beat.cpu_s, 0.0))
            if beat.at > at:
                busy = min(1.0, max(0.0, (beat.cpu_s - cpu_s) / (beat.at - at)))
            self._seen[shard] = (beat.at, beat.cpu_s, busy)
            uses[shard] = AcceptorUse(busy, beat.num_clients, beat.num_moving)
        return uses
