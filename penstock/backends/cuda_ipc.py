"""GPU memory of another process, by its cudaIpcMemHandle_t, through the driver's library.

A client registers such memory; a worker on the same GPU copies tensors from and to it. The handle
is opened on first use, in the primary context of the device, which all libraries share.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np

from penstock.errors import InvalidRequest

LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """A CUipcMemHandle, which is passed by value. Its bytes are no text: zeros do not end it."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


@cache
def open_driver() -> ctypes.CDLL | None:
    """Return the driver's library; None without one."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
    here, there = ctypes.c_void_p, ctypes.c_uint64
    library.cuMemcpyDtoH_v2.argtypes = [here, there, ctypes.c_size_t]
    library.cuMemcpyHtoD_v2.argtypes = [there, here, ctypes.c_size_t]
    library.cuMemGetAddressRange_v2.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
    library.cuIpcCloseMemHandle.argtypes = [ctypes.c_uint64]
    library.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
    return library


class GpuRegion:
    """Memory on the GPU `device`, as the machine numbers them. Every error is the client's."""

    def __init__(self, handle: bytes, nbytes: int, device: int) -> None:
        self._handle = handle
        self._nbytes = nbytes
        self._device = device
        self._address: int | None = None

    def read(self, offset: int, target: memoryview, own_device: int | None) -> None:
        """Copy to memory of the host; `own_device` is the GPU of this process."""
        address = self._open(own_device) + offset
        where = np.frombuffer(target, np.uint8).ctypes.data
        self._call("cuMemcpyDtoH_v2", where, address, target.nbytes)

    def write(self, offset: int, data: memoryview, own_device: int | None) -> None:
        address = self._open(own_device) + offset
        where = np.frombuffer(data, np.uint8).ctypes.data
        self._call("cuMemcpyHtoD_v2", address, where, data.nbytes)

    def close(self) -> None:
        """Unmap the memory, if it was opened."""
        library, address = open_driver(), self._address
        if library is not None and address is not None:
            self._address = None
            library.cuIpcCloseMemHandle(address)

    def _open(self, own_device: int | None) -> int:
        """Return the address of the memory here."""
        if own_device != self._device:
            here = "a CPU" if own_device is None else f"GPU {own_device}"
            text = f"the memory is on GPU {self._device}, and the model runs on {here}"
            raise InvalidRequest(f"CUDA shared memory: {text}")
        self._enter()
        if self._address is None:
            address = ctypes.c_uint64()
            handle = _Handle.from_buffer_copy(self._handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, LAZY_PEER_ACCESS)
            self._address = address.value
            self._check_size(address.value)
        return self._address

    def _enter(self) -> None:
        """Make the primary context of the device current in this thread, as CUDA's runtime does.
        The model's runner keeps that context."""
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _check_size(self, address: int) -> None:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        left = base.value + size.value - address
        if left < self._nbytes:
            self.close()
            text = f"{self._nbytes} bytes were registered, but {left} are allocated"
            raise InvalidRequest(f"CUDA shared memory: {text}")

    def _call(self, name: str, *arguments: object) -> None:
        library = open_driver()
        if library is None:
            raise InvalidRequest("CUDA shared memory: this machine has no GPU driver")
        status = int(getattr(library, name)(*arguments))
        if status:
            text = ctypes.c_char_p()
            library.cuGetErrorString(status, ctypes.byref(text))
            told = (text.value or b"unknown error").decode(errors="replace")
            raise InvalidRequest(f"CUDA shared memory: {name.split('_')[0]}: {told}")
