"""Registration of clients' memory: what is accepted, who sees it, and when it ends."""

import asyncio
import base64
import contextlib
import fcntl
import functools
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import pytest

from penstock.errors import InvalidRequest, Unsupported
from penstock.serving import region_registry
from penstock.serving.region_registry import MAX_OWN_REGIONS, MAX_REGIONS, RegionRegistry
from penstock.serving.regions import RegionTable
from penstock.system.devices import Gpu
from penstock.types import RegionPlace, Request, Tensor
from penstock.wire.region_keys import MemfdKey, memfd_name

KEY = b"key"
Test = Callable[..., Coroutine[object, object, None]]
SHRINK = fcntl.F_SEAL_SHRINK


def in_loop(test: Test) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@pytest.fixture
def shm_file() -> Iterator[Path]:
    path = Path("/dev/shm") / f"penstock-test-{secrets.token_hex(8)}"
    path.write_bytes(bytes(4096))
    yield path
    path.unlink(missing_ok=True)


def make() -> tuple[RegionTable, RegionRegistry]:
    table = RegionTable(is_allowed=True)
    return table, RegionRegistry(table)


def finds(table: RegionTable, name: str, caller: bytes = KEY) -> bool:
    request = Request(None, [Tensor("x", "UINT8", (1,), b"", RegionPlace(name, 0, 1))], 0.0)
    request.caller = caller
    with contextlib.suppress(InvalidRequest):
        return bool(table.lend(request).regions)
    return False


def num_open() -> int:
    """Count descriptors of clients' memory and processes; others may come and go."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{number}")
            count += any(word in link for word in ("penstock-", "pidfd", "/dev/shm"))
    return count


def make_memfd(seals: int = SHRINK) -> tuple[int, str]:
    token = secrets.token_hex(16)
    fd = os.memfd_create(memfd_name(token), os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd, token


@in_loop
async def test_a_file_is_registered_found_and_forgotten(shm_file: Path):
    before = num_open()
    table, registry = make()
    await registry.register_system(KEY, "r", f"/{shm_file.name}", 64, 1024)
    assert finds(table, "r") and registry.usage() == {"system": (1, 1024), "cuda": (0, 0)}
    (row,) = registry.status(KEY, "system")
    assert (row.name, row.key, row.offset, row.byte_size) == ("r", f"/{shm_file.name}", 64, 1024)
    await registry.register_system(KEY, "s", shm_file.name, 0, 4096)
    await registry.unregister(KEY, "system", "r")
    assert not finds(table, "r") and finds(table, "s")
    await registry.unregister(KEY, "cuda")
    assert finds(table, "s"), "it is of another kind"
    await registry.unregister(KEY, "system")
    assert not registry.status(KEY, "system") and num_open() == before


@in_loop
async def test_regions_belong_to_the_key_that_registered_them(shm_file: Path):
    table, registry = make()
    for caller in (b"", KEY, b"other"):
        await registry.register_system(caller, "r", shm_file.name, 0, 64)
    assert len(registry.status(b"other", "system")) == 1
    await registry.unregister(b"other", "system")
    assert finds(table, "r") and not finds(table, "r", b"other") and finds(table, "r", b"")
    registry.close()
    assert not finds(table, "r")


@pytest.mark.parametrize(
    ("key", "offset", "nbytes", "words"),
    [
        ("FILE", 0, 4097, "4097 bytes at 0 exceed its 4096 bytes"),
        ("FILE", 4096, 1, "exceed"),
        ("FILE", -1, 1, "offset -1"),
        ("FILE", 0, 0, "byte_size 0"),
        ("FILE", 1 << 63, 1, "got offset"),
        ("no-such-file", 0, 1, "Unable to open shared memory region: 'no-such-file'"),
        ("..", 0, 1, "Unable to open"),
        ("../etc/passwd", 0, 1, "expected the name of a file in /dev/shm"),
        ("/a/b", 0, 1, "expected the name of a file"),
        ("", 0, 1, "expected the name of a file"),
        ("a\0b", 0, 1, "expected the name of a file"),
        ("x" * 201, 0, 1, "expected the name of a file"),
        ("memfd:1:2", 0, 1, "expected memfd:PID:FD:TOKEN"),
    ],
)
@in_loop
async def test_wrong_keys_and_sizes_are_explained(
    shm_file: Path, key: str, offset: int, nbytes: int, words: str
):
    before = num_open()
    _, registry = make()
    with pytest.raises(InvalidRequest) as caught:
        await registry.register_system(KEY, "r", key.replace("FILE", shm_file.name), offset, nbytes)
    assert words in str(caught.value) and num_open() == before


@in_loop
async def test_links_pipes_and_files_of_others_are_refused(
    shm_file: Path, monkeypatch: pytest.MonkeyPatch
):
    _, registry = make()
    link, pipe = (shm_file.with_name(shm_file.name + end) for end in (".link", ".pipe"))
    try:
        link.symlink_to("/etc/passwd")
        os.mkfifo(pipe)
        with pytest.raises(InvalidRequest, match="Unable to open"):
            await registry.register_system(KEY, "r", link.name, 0, 1)
        with pytest.raises(InvalidRequest, match="expected a regular file"):
            await registry.register_system(KEY, "r", pipe.name, 0, 1)
    finally:
        link.unlink()
        pipe.unlink()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InvalidRequest, match="another user"):
        await registry.register_system(KEY, "r", shm_file.name, 0, 1)


@in_loop
async def test_names_are_taken_once_and_limited(shm_file: Path):
    _, registry = make()
    await registry.register_system(KEY, "r", shm_file.name, 0, 1)
    with pytest.raises(InvalidRequest, match="'r' already in manager"):
        await registry.register_system(KEY, "r", shm_file.name, 0, 1)
    for name in ("", "x" * 201, "a\nb"):
        with pytest.raises(InvalidRequest, match="printable"):
            await registry.register_system(KEY, name, shm_file.name, 0, 1)
    for number in range(1, MAX_OWN_REGIONS):
        await registry.register_system(KEY, str(number), shm_file.name, 0, 1)
    with pytest.raises(InvalidRequest, match="too many"):
        await registry.register_system(KEY, "more", shm_file.name, 0, 1)
    for number in range(MAX_REGIONS - MAX_OWN_REGIONS):
        await registry.register_system(b"%d" % number, "r", shm_file.name, 0, 1)
    with pytest.raises(InvalidRequest, match="too many"):
        await registry.register_system(b"another", "r", shm_file.name, 0, 1)
    registry.close()


@in_loop
async def test_a_sealed_memfd_is_registered_by_its_token():
    table, registry = make()
    fd, token = make_memfd()
    await registry.register_system(KEY, "r", str(MemfdKey(os.getpid(), fd, token)), 0, 4096)
    assert finds(table, "r")
    for key, words in (
        (MemfdKey(os.getpid(), fd, secrets.token_hex(16)), "no such memfd"),
        (MemfdKey(os.getpid(), 0, token), "no such memfd"),
        (MemfdKey(2**31 - 1, fd, token), "no such memfd"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            await registry.register_system(KEY, "s", str(key), 0, 1)
    unsealed, token = make_memfd(seals=0)
    with pytest.raises(InvalidRequest, match="F_SEAL_SHRINK"):
        await registry.register_system(KEY, "s", str(MemfdKey(os.getpid(), unsealed, token)), 0, 1)
    registry.close()
    os.close(fd)
    os.close(unsealed)


CHILD = """
import fcntl, os, sys
fd = os.memfd_create("penstock-" + sys.argv[1], os.MFD_ALLOW_SEALING)
os.ftruncate(fd, 4096)
fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
print(fd, flush=True)
sys.stdin.read()
"""


@in_loop
async def test_the_memfd_of_a_process_that_is_killed_is_unregistered():
    before, (table, registry) = num_open(), make()
    token = secrets.token_hex(16)
    command = [sys.executable, "-c", CHILD, token]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        key = MemfdKey(child.pid, int(child.stdout.readline()), token)
        await registry.register_system(KEY, "r", str(key), 0, 4096)
        assert finds(table, "r")
        child.kill()
        child.wait()
        async with asyncio.timeout(30):
            while finds(table, "r"):
                await asyncio.sleep(0.01)
    assert num_open() == before


class TestCuda:
    HANDLE = base64.b64encode(bytes(64)).decode()

    @in_loop
    async def test_without_a_gpu_it_says_so(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(region_registry, "read_gpus", lambda: ())
        with pytest.raises(Unsupported, match="this server has no GPU"):
            await make()[1].register_cuda(KEY, "g", self.HANDLE, 0, 64)

    @in_loop
    async def test_handles_and_devices_are_checked(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(region_registry, "read_gpus", lambda: (Gpu(0, "u", "n", 1, 1),))
        table, registry = make()
        for handle in ("", "?", base64.b64encode(bytes(63)).decode()):
            with pytest.raises(InvalidRequest, match="expected 64 bytes"):
                await registry.register_cuda(KEY, "g", handle, 0, 64)
        for device in (-1, 1):
            with pytest.raises(InvalidRequest, match="expected 0 to 0"):
                await registry.register_cuda(KEY, "g", self.HANDLE, device, 64)
        await registry.register_cuda(KEY, "g", self.HANDLE, 0, 64)
        (row,) = registry.status(KEY, "cuda", "g")
        assert (row.name, row.device_id, row.byte_size) == ("g", 0, 64)
        assert finds(table, "g") and not registry.status(KEY, "system")
        await registry.unregister(KEY, "cuda", "g")
        assert not finds(table, "g")


@in_loop
async def test_a_server_that_does_not_allow_it_says_how(shm_file: Path):
    registry = RegionRegistry(RegionTable())
    assert not registry.extensions and not registry.usage()
    with pytest.raises(Unsupported, match="--shared-memory"):
        await registry.register_system(KEY, "r", shm_file.name, 0, 1)
    with pytest.raises(Unsupported, match="--shared-memory"):
        await registry.unregister(KEY, "system")
    with pytest.raises(Unsupported, match="--shared-memory"):
        registry.status(KEY, "cuda")
