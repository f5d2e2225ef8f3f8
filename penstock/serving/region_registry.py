"""Registration of clients' shared memory: names, keys and sizes checked, files opened, once for the
whole server.

A region is a file of `/dev/shm` by its key, as in Triton; or the sealed memfd of a running process
(`wire.region_keys`), which cannot be truncated and goes away with its process; or memory of a GPU.
Each belongs to the API key that registered it: other keys neither see nor use it. Only in the core,
on its event loop; shards get copies (`serving.regions`).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import fcntl
import itertools
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.errors import InvalidRequest, Unsupported
from penstock.serving.regions import Region, RegionTable, close_quietly
from penstock.serving.shards import Shards
from penstock.system.devices import read_gpus
from penstock.wire import frames
from penstock.wire.documented import CudaRegionRow, SystemRegionRow
from penstock.wire.region_keys import EXTENSION, PREFIX, memfd_name, parse_memfd_key

# Each takes a descriptor in every process of the server.
MAX_REGIONS = 256
# Of one API key; without keys, all clients are one.
MAX_OWN_REGIONS = 128
MAX_NAME = 200
FOLDER = Path("/dev/shm")
EXPECTED_KEY = f"expected the name of a file in {FOLDER}, of letters, digits and . _ -"
_KEY = re.compile(r"/?([A-Za-z0-9._-]{1,200})")
# cudaIpcMemHandle_t
HANDLE_BYTES = 64
MAX_BYTES = 1 << 62

Kind = Literal["system", "cuda"]


@dataclass(frozen=True, slots=True)
class Registered:
    """A region, with what its client said of it. `pid_fd` tells when the process that owns a memfd
    has exited."""

    region: Region
    kind: Kind
    key: str
    pid_fd: int | None = None

    def row(self) -> SystemRegionRow | CudaRegionRow:
        region, memory = self.region, self.region.memory
        if self.kind == "cuda":
            return CudaRegionRow(region.name, memory.device, region.nbytes)
        return SystemRegionRow(region.name, self.key, memory.offset, region.nbytes)


class RegionRegistry:
    """`table` is what requests of this process find; `shards` have copies."""

    def __init__(self, table: RegionTable, shards: Shards | None = None) -> None:
        self._table = table
        self._shards = shards
        self._registered: dict[tuple[bytes, str], Registered] = {}
        self._numbers = itertools.count(1)
        self._leaving: set[asyncio.Task[None]] = set()
        if shards is not None:
            shards.regions = lambda: [each.region for each in self._registered.values()]

    @property
    def is_allowed(self) -> bool:
        return self._table.is_allowed

    @property
    def extensions(self) -> tuple[str, ...]:
        """What the server's metadata says."""
        names = ("system_shared_memory", "cuda_shared_memory", EXTENSION)
        return names if self.is_allowed else ()

    def usage(self) -> dict[str, tuple[int, int]]:
        """Return the number of regions and their bytes, by kind; empty if they are not allowed."""
        found: dict[str, tuple[int, int]] = {}
        for kind in ("system", "cuda") if self.is_allowed else ():
            sizes = [r.region.nbytes for r in self._registered.values() if r.kind == kind]
            found[kind] = len(sizes), sum(sizes)
        return found

    async def register_system(
        self, caller: bytes, name: str, key: str, offset: int, nbytes: int
    ) -> None:
        self._check(caller, name)
        _check_range(offset, nbytes)
        opened = _open_memfd(key) if key.startswith(PREFIX) else _open_file(key)
        fd, pid_fd = opened
        try:
            size = os.fstat(fd).st_size
            if offset + nbytes > size:
                text = f"{nbytes} bytes at {offset} exceed its {size} bytes"
                raise InvalidRequest(f"shared memory key '{key}': {text}")
            memory = frames.MapRegion(next(self._numbers), name, offset, nbytes, _is_sealed(fd))
        except BaseException:
            close_quietly(fd)
            close_quietly(pid_fd)
            raise
        await self._add(frames.OpenRegion(caller, memory), fd, "system", key, pid_fd)

    async def register_cuda(
        self, caller: bytes, name: str, raw_handle: str, device: int, nbytes: int
    ) -> None:
        """`raw_handle` is base64."""
        self._check(caller, name)
        _check_range(0, nbytes)
        try:
            handle = base64.b64decode(raw_handle, validate=True)
        except (binascii.Error, ValueError):
            handle = b""
        if len(handle) != HANDLE_BYTES:
            text = f"expected {HANDLE_BYTES} bytes of a cudaIpcMemHandle_t in base64"
            raise InvalidRequest(f"CUDA shared memory region '{name}': raw_handle: {text}")
        gpus = await asyncio.to_thread(read_gpus)
        if not gpus:
            text = "this server has no GPU; use system shared memory"
            raise Unsupported(f"CUDA shared memory region '{name}': {text}")
        if not 0 <= device < len(gpus):
            text = f"device_id {device}: expected 0 to {len(gpus) - 1}"
            raise InvalidRequest(f"CUDA shared memory region '{name}': {text}")
        self._check(caller, name)
        number = next(self._numbers)
        memory = frames.MapRegion(number, name, 0, nbytes, handle=handle, device=device)
        await self._add(frames.OpenRegion(caller, memory), None, "cuda", "")

    async def unregister(self, caller: bytes, kind: Kind, name: str = "") -> None:
        """Unregister one region, if there is one of this name, or all of the caller. Requests that
        use it are still answered; no later one finds it."""
        self._check_allowed()
        await self._drop(
            [
                each
                for each in self._registered.values()
                if each.kind == kind and each.region.caller == caller
                if not name or each.region.name == name
            ]
        )

    def status(
        self, caller: bytes, kind: Kind, name: str = ""
    ) -> Sequence[SystemRegionRow | CudaRegionRow]:
        """Return one region of the caller, or all."""
        self._check_allowed()
        rows = [
            each.row()
            for each in self._registered.values()
            if each.kind == kind and each.region.caller == caller
        ]
        if name:
            rows = [row for row in rows if row.name == name]
            if not rows:
                what = "CUDA" if kind == "cuda" else kind
                text = f"Unable to find {what} shared memory region: '{name:.{MAX_NAME}}'"
                raise InvalidRequest(text)
        return rows

    def close(self) -> None:
        for task in self._leaving:
            task.cancel()
        for each in list(self._registered.values()):
            self._forget(each)

    async def _add(
        self,
        frame: frames.OpenRegion,
        fd: int | None,
        kind: Kind,
        key: str,
        pid_fd: int | None = None,
    ) -> None:
        region = self._table.open(frame, fd)
        registered = Registered(region, kind, key, pid_fd)
        self._registered[region.caller, region.name] = registered
        if pid_fd is not None:
            asyncio.get_running_loop().add_reader(pid_fd, self._owner_exited, registered)
        if self._shards is not None:
            await self._shards.open_region(region)

    async def _drop(self, dropped: Sequence[Registered]) -> None:
        for each in dropped:
            self._forget(each)
        if self._shards is not None and dropped:
            await self._shards.close_regions([each.region.number for each in dropped])

    def _forget(self, registered: Registered) -> None:
        region = registered.region
        if self._registered.pop((region.caller, region.name), None) is None:
            return
        if registered.pid_fd is not None:
            asyncio.get_running_loop().remove_reader(registered.pid_fd)
            os.close(registered.pid_fd)
        self._table.close(region.number)

    def _owner_exited(self, registered: Registered) -> None:
        """Unregister the memfd of a process that has exited, which frees its memory."""
        task = asyncio.get_running_loop().create_task(self._drop([registered]))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _check_allowed(self) -> None:
        if not self.is_allowed:
            text = "shared memory regions are not allowed by this server"
            raise Unsupported(f"{text}; start it with --shared-memory")

    def _check(self, caller: bytes, name: str) -> None:
        self._check_allowed()
        if not name or len(name) > MAX_NAME or not name.isprintable():
            text = f"expected 1 to {MAX_NAME} printable characters"
            raise InvalidRequest(f"shared memory region '{name:.40}': {text}")
        if (caller, name) in self._registered:
            text = "already in manager; unregister it first"
            raise InvalidRequest(f"shared memory region '{name}' {text}")
        num_own = sum(key == caller for key, _ in self._registered)
        if num_own >= MAX_OWN_REGIONS or len(self._registered) >= MAX_REGIONS:
            limits = f"at most {MAX_OWN_REGIONS} for one API key, and {MAX_REGIONS} in all"
            raise InvalidRequest(f"there are too many shared memory regions: {limits}")


def _check_range(offset: int, nbytes: int) -> None:
    if not 0 <= offset <= MAX_BYTES or not 0 < nbytes <= MAX_BYTES:
        text = f"got offset {offset} and byte_size {nbytes}; expected at least 0, and at least 1"
        raise InvalidRequest(f"shared memory: {text}")


def _open_file(key: str) -> tuple[int, None]:
    """Open a shared memory file by its key."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise InvalidRequest(f"shared memory key '{key:.40}': {EXPECTED_KEY}")
    # O_NOFOLLOW: a link could name any file.
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(FOLDER / match[1], flags)
    except OSError as error:
        text = f"Unable to open shared memory region: '{key}': {error.strerror}"
        raise InvalidRequest(text) from None
    try:
        _check_file(fd, key)
    except BaseException:
        os.close(fd)
        raise
    return fd, None


def _open_memfd(key: str) -> tuple[int, int]:
    """Open the sealed memfd of a running process, and a descriptor of that process. The name of the
    memfd has a secret token: who does not know it cannot open the memory of others."""
    parsed = parse_memfd_key(key)
    if parsed is None:
        raise InvalidRequest(f"shared memory key '{key:.80}': expected memfd:PID:FD:TOKEN")
    link, name = (
        f"/proc/{parsed.pid}/fd/{parsed.fd}",
        f"/memfd:{memfd_name(parsed.token)} (deleted)",
    )
    refusal = InvalidRequest(f"Unable to open shared memory region: '{key}': no such memfd")
    opened: list[int] = []
    try:
        opened.append(os.pidfd_open(parsed.pid))
        if os.readlink(link) != name:
            raise refusal
        opened.append(os.open(link, os.O_RDWR | os.O_CLOEXEC))
        # The process may have replaced it meanwhile.
        if os.readlink(f"/proc/self/fd/{opened[1]}") != name:
            raise refusal
        _check_file(opened[1], key)
        if not _is_sealed(opened[1]):
            raise InvalidRequest(f"shared memory key '{key}': expected a memfd with F_SEAL_SHRINK")
    except BaseException as error:
        for fd in opened:
            os.close(fd)
        if isinstance(error, OSError):
            raise refusal from None
        raise
    return opened[1], opened[0]


def _check_file(fd: int, key: str) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise InvalidRequest(f"shared memory key '{key}': expected a regular file")
    if found.st_uid != os.geteuid():
        text = "its file belongs to another user than the server"
        raise InvalidRequest(f"shared memory key '{key}': {text}")


def _is_sealed(fd: int) -> bool:
    """Whether a file can never shrink."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False
