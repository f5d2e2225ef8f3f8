"""Many copies from pinned memory to a GPU by one call of CUDA's driver.

A copy by torch takes about 8 us of a worker's interpreter, which for images of 150 kB is as long as
the GPU computes. Drivers before CUDA 12.8 have no such call; there, each copy is a call.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from penstock.backends.cuda_ipc import open_driver

# The source is read in the order of the stream, as by other copies.
IN_STREAM_ORDER = 1


class _Attributes(ctypes.Structure):
    """A CUmemcpyAttributes; hints on locations are for managed memory."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


def copy_together(
    targets: NDArray[np.int64], sources: NDArray[np.int64], sizes: NDArray[np.int64], stream: int
) -> None:
    """Copy from these addresses of the host to those of the device, in the current context."""
    driver = open_driver()
    if driver is None:
        raise RuntimeError("this machine has no GPU driver")
    handle = ctypes.c_void_p(stream)
    if hasattr(driver, "cuMemcpyBatchAsync"):
        failed = ctypes.c_size_t()
        first = ctypes.c_size_t(0)
        how = _Attributes(source_order=IN_STREAM_ORDER)
        lists = [each.ctypes.data_as(ctypes.c_void_p) for each in (targets, sources, sizes)]
        status = driver.cuMemcpyBatchAsync(
            *lists,
            ctypes.c_size_t(len(sizes)),
            ctypes.pointer(how),
            ctypes.pointer(first),
            ctypes.c_size_t(1),
            ctypes.pointer(failed),
            handle,
        )
    else:
        status = 0
        for target, source, size in zip(targets, sources, sizes, strict=True):
            status = status or driver.cuMemcpyHtoDAsync_v2(
                ctypes.c_uint64(int(target)),
                ctypes.c_void_p(int(source)),
                ctypes.c_size_t(int(size)),
                handle,
            )
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.pointer(text))
        told = (text.value or b"unknown error").decode(errors="replace")
        raise RuntimeError(f"copies of {len(sizes)} inputs to the GPU: {told}")
