"""Memory that a client shares with a server of this machine."""

import errno
import gc
import os
import re

import numpy as np
import pytest

from penstock.processes.shared_memfd import ALIGNMENT, SharedMemfd, aligned, is_local
from penstock.wire.region_keys import memfd_name, parse_memfd_key


def opened(memfd: SharedMemfd) -> int:
    """Its descriptor, as a server finds it."""
    key = parse_memfd_key(memfd.key)
    assert key.pid == os.getpid()
    assert memfd_name(key.token) in os.readlink(f"/proc/self/fd/{key.fd}")
    return key.fd


def test_data_is_appended_at_aligned_offsets():
    memfd = SharedMemfd()
    empty = np.zeros(0, np.uint8).data
    parts = [b"abc", empty, bytes(range(ALIGNMENT)), np.arange(10, dtype=np.uint8).data]
    offsets = [memfd.append(part) for part in parts]
    assert offsets == [0, ALIGNMENT, ALIGNMENT, 2 * ALIGNMENT]
    assert memfd.nbytes == 3 * ALIGNMENT == os.fstat(opened(memfd)).st_size
    for offset, part in zip(offsets, parts, strict=True):
        assert os.pread(opened(memfd), len(part), offset) == part
    memfd.close()


def test_mapped_memory_is_the_files_and_outlives_its_descriptor():
    memfd = SharedMemfd()
    view = memfd.grow(4096)
    view[:5] = b"hello"
    assert os.pread(opened(memfd), 5, 0) == b"hello"
    memfd.close()
    assert view[:5] == b"hello"


def test_a_sealed_memfd_keeps_its_size_and_can_be_written():
    memfd = SharedMemfd()
    memfd.append(b"x" * ALIGNMENT)
    memfd.seal()
    for size in (0, 2 * ALIGNMENT):
        with pytest.raises(PermissionError):
            os.ftruncate(opened(memfd), size)
    with pytest.raises(PermissionError):
        memfd.append(b"y")
    assert os.pwrite(opened(memfd), b"z", 0) == 1
    memfd.close()


def test_names_differ_and_descriptors_end_with_their_object():
    first, second = SharedMemfd(), SharedMemfd()
    assert first.name != second.name and first.key != second.key
    assert re.fullmatch(r"penstock-client-[0-9a-f]{16}", first.name)
    fd = opened(first)
    del first
    gc.collect()
    with pytest.raises(OSError) as caught:
        os.fstat(fd)
    assert caught.value.errno == errno.EBADF
    second.close()
    second.close()


def test_offsets_are_rounded_up():
    assert [aligned(each) for each in (0, 1, ALIGNMENT, ALIGNMENT + 1)] == [
        0,
        ALIGNMENT,
        ALIGNMENT,
        2 * ALIGNMENT,
    ]


def test_addresses_of_this_machine_are_local():
    assert is_local("127.0.0.1", 8000) and is_local("localhost", 1)
    # TEST-NET-1: no machine has it.
    assert not is_local("192.0.2.1", 8000)
    assert not is_local("no-such-host.invalid", 80)
