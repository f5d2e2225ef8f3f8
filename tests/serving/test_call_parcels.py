"""Tensors of calls: in the frame if they are small, otherwise in a segment of their own."""

import os

import numpy as np
import pytest

from penstock.errors import BackendFailed
from penstock.serving.call_parcels import INLINE_BYTES, pack, unpack
from penstock.types import from_array, to_array


@pytest.mark.parametrize("count", [1, INLINE_BYTES // 8, INLINE_BYTES // 8 + 1, 1 << 18])
def test_tensors_of_any_size_arrive(count: int):
    values = np.arange(count, dtype=np.int64)
    texts = np.array([[b"", b"\xff"], [b"x" * 9, b"y"]], object)
    packed = pack([from_array("v", "INT64", values), from_array("t", "BYTES", texts)])
    assert bool(packed.fds) is (packed.parcel.offset is not None) is (count * 8 > INLINE_BYTES - 99)
    # The other process gets descriptors of its own.
    tensors = unpack(packed.parcel, [os.dup(fd) for fd in packed.fds])
    packed.close()
    found = {tensor.name: to_array(tensor) for tensor in tensors}
    np.testing.assert_array_equal(found["v"], values)
    np.testing.assert_array_equal(found["t"], texts)


def test_a_call_may_have_no_tensors():
    assert unpack(pack([]).parcel, []) == []


def test_memory_that_is_too_small_is_an_error():
    packed = pack([from_array("v", "INT64", np.zeros(1 << 15, np.int64))])
    (fd,) = packed.fds
    os.ftruncate(fd, 64)
    with pytest.raises(BackendFailed, match="cannot be mapped"):
        unpack(packed.parcel, [os.dup(fd)])
