"""Clients' memory in a worker: copies that a truncated file cannot crash, and pinned pages."""

import contextlib
import fcntl
import os
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.errors import InvalidRequest
from penstock.serving.worker_regions import MIN_PINNED_BYTES, WorkerRegions
from penstock.wire import frames

SIZE = 4 * MIN_PINNED_BYTES
BYTES = np.dtype("u1")


class Device:
    """What is pinned, as a GPU's runner is told."""

    def __init__(self, takes: bool = True) -> None:
        self.takes = takes
        self.pinned: list[int] = []

    def pin(self, memory: memoryview) -> bool:
        if self.takes:
            self.pinned.append(len(memory))
        return self.takes

    def unpin(self, memory: memoryview) -> None:
        self.pinned.remove(len(memory))


@pytest.fixture(params=[False, True], ids=["file", "sealed"])
def is_sealed(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def regions() -> Iterator[WorkerRegions]:
    made = WorkerRegions(lambda memory: False, lambda memory: None)
    yield made
    made.close_all()


def data(nbytes: int = SIZE) -> bytes:
    return np.random.default_rng(nbytes).bytes(nbytes)


def region(is_sealed: bool, offset: int = 0, number: int = 1) -> tuple[frames.MapRegion, int]:
    """A region of SIZE bytes, and a descriptor for its worker."""
    fd = os.memfd_create("client", os.MFD_ALLOW_SEALING)
    os.write(fd, bytes(offset) + data())
    if is_sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return frames.MapRegion(number, "r", offset, SIZE, is_sealed), fd


def num_open() -> int:
    """Count descriptors of clients' files; others may come and go."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += "memfd:client" in os.readlink(f"/proc/self/fd/{number}")
    return count


def span(offset: int, nbytes: int, number: int = 1) -> frames.RegionSpan:
    return frames.RegionSpan("x", number, offset, nbytes)


@pytest.mark.parametrize("offset", [0, 64, 4096, 5000])
def test_what_is_read_and_written_is_at_its_place(
    regions: WorkerRegions, is_sealed: bool, offset: int
):
    frame, fd = region(is_sealed, offset)
    own = os.dup(fd)
    regions.open(frame, [fd], 7)
    target = memoryview(bytearray(1000))
    regions.read(span(333, 1000), target)
    assert bytes(target) == data()[333:1333]
    regions.write(span(SIZE - 9, 9), b"123456789")
    regions.write(span(0, 100), b"short")
    assert os.pread(own, 9, offset + SIZE - 9) == b"123456789"
    assert os.pread(own, 6, offset) == b"short" + data()[5:6]
    with pytest.raises(InvalidRequest, match="output 'x' .4 bytes. should be at least 5"):
        regions.write(span(0, 4), b"12345")
    with pytest.raises(InvalidRequest, match="do not fit"):
        regions.read(span(0, 8), memoryview(bytearray(9)))
    os.close(own)


def test_a_truncated_file_is_an_error_and_no_crash(regions: WorkerRegions):
    frame, fd = region(is_sealed=False)
    own = os.dup(fd)
    regions.open(frame, [fd], 7)
    os.ftruncate(own, 5000)
    target = memoryview(bytearray(4096))
    regions.read(span(0, 4096), target)
    for offset in (4096, 8192, SIZE - 4096):
        with pytest.raises(InvalidRequest, match="'r': its file is shorter"):
            regions.read(span(offset, 4096), target)
        with pytest.raises(InvalidRequest, match="shorter"):
            regions.write(span(offset, 4096), bytes(4096))
    assert os.fstat(own).st_size == 5000
    os.close(own)


def test_a_file_that_is_truncated_before_it_is_mapped_is_no_crash():
    device = Device()
    regions = WorkerRegions(device.pin, device.unpin, device=0)
    frame, fd = region(is_sealed=False)
    os.ftruncate(fd, 100)
    regions.open(frame, [fd], 7)
    assert regions.pinned(span(0, SIZE), BYTES) is None and not device.pinned
    with pytest.raises(InvalidRequest, match="shorter"):
        regions.read(span(0, 4096), memoryview(bytearray(4096)))
    regions.close_all()


def test_several_shards_share_a_region_and_the_last_closes_it(regions: WorkerRegions):
    before = num_open()
    frame, fd = region(is_sealed=True)
    regions.open(frame, [fd], 7)
    regions.open(frame, [os.dup(fd)], 8)
    regions.open(frame, [os.dup(fd)], 9)
    regions.close(1, 7)
    regions.close_link(8)
    regions.close(99, 8)
    target = memoryview(bytearray(8))
    regions.read(span(0, 8), target)
    assert bytes(target) == data()[:8] and len(regions) == 1
    regions.close_link(9)
    assert not len(regions) and num_open() == before


class TestPinned:
    def test_the_device_copies_large_tensors_from_the_clients_pages(self, is_sealed: bool):
        device = Device()
        regions = WorkerRegions(device.pin, device.unpin, device=0)
        frame, fd = region(is_sealed)
        own = os.dup(fd)
        regions.open(frame, [fd], 7)
        assert device.pinned == [SIZE]
        values = regions.pinned(span(MIN_PINNED_BYTES, MIN_PINNED_BYTES), BYTES)
        assert values.tobytes() == data()[MIN_PINNED_BYTES : 2 * MIN_PINNED_BYTES]
        assert not values.flags.writeable
        os.pwrite(own, b"new", MIN_PINNED_BYTES)
        assert values[:3].tobytes() == b"new", "it is the client's memory, not a copy"
        assert regions.pinned(span(0, MIN_PINNED_BYTES - 1), BYTES) is None, "too small"
        assert regions.pinned(span(3, MIN_PINNED_BYTES), BYTES) is None, "not aligned"
        del values
        regions.close(1, 7)
        assert not device.pinned
        os.close(own)

    def test_memory_that_a_batch_still_refers_to_is_unpinned_and_forgotten(self):
        device = Device()
        regions = WorkerRegions(device.pin, device.unpin, device=0)
        frame, fd = region(is_sealed=True)
        regions.open(frame, [fd], 7)
        values = regions.pinned(span(0, SIZE), BYTES)
        regions.close(1, 7)
        assert not device.pinned and values.tobytes() == data()

    @pytest.mark.parametrize("takes", [False, True])
    def test_what_is_not_pinned_is_read(self, takes: bool):
        device = Device(takes)
        regions = WorkerRegions(device.pin, device.unpin, device=None if takes else 0)
        frame, fd = region(is_sealed=False)
        regions.open(frame, [fd], 7)
        assert regions.pinned(span(0, SIZE), BYTES) is None and not device.pinned
        target = memoryview(bytearray(SIZE))
        regions.read(span(0, SIZE), target)
        assert bytes(target) == data()
        regions.close_all()


def test_gpu_memory_needs_a_model_on_that_gpu(regions: WorkerRegions):
    regions.open(frames.MapRegion(1, "g", 0, 64, handle=bytes(64), device=1), [], 7)
    with pytest.raises(InvalidRequest, match="on GPU 1, and the model runs on a CPU"):
        regions.read(span(0, 8), memoryview(bytearray(8)))
    with pytest.raises(InvalidRequest, match="GPU 1"):
        regions.write(span(0, 8), bytes(8))
    regions.close(1, 7)
