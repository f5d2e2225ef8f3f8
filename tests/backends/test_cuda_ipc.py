"""GPU memory of other processes, without a GPU: `tests/gpu/test_regions_cuda.py` has one."""

import ctypes

import pytest

from penstock.backends import cuda_ipc
from penstock.backends.cuda_ipc import GpuRegion
from penstock.errors import InvalidRequest


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    cuda_ipc.open_driver.cache_clear()
    yield
    cuda_ipc.open_driver.cache_clear()


def test_without_a_driver_it_says_so(no_driver: None):
    region = GpuRegion(bytes(64), 64, 0)
    with pytest.raises(InvalidRequest, match="no GPU driver"):
        region.read(0, memoryview(bytearray(8)), 0)
    region.close()


@pytest.mark.parametrize(("own", "named"), [(None, "a CPU"), (1, "GPU 1")])
def test_memory_of_another_device_is_refused(own: int | None, named: str):
    with pytest.raises(InvalidRequest, match=f"on GPU 0, and the model runs on {named}"):
        GpuRegion(bytes(64), 64, 0).write(0, memoryview(b"12345678"), own)


class RecordingDriver:
    """Takes every call; keeps the handle that was opened."""

    handle = b""

    def cuIpcOpenMemHandle_v2(self, address, handle, flags) -> int:
        self.handle = bytes(handle)
        return 0

    def cuMemGetAddressRange_v2(self, base, size, address) -> int:
        ctypes.cast(size, ctypes.POINTER(ctypes.c_size_t))[0] = 64
        return 0

    def __getattr__(self, name: str):
        return lambda *arguments: 0


def test_zeros_in_a_handle_do_not_end_it(monkeypatch: pytest.MonkeyPatch):
    driver = RecordingDriver()
    monkeypatch.setattr(cuda_ipc, "open_driver", lambda: driver)
    handle = b"\x01\x00\x02" + bytes(range(61))
    GpuRegion(handle, 64, 0).read(0, memoryview(bytearray(8)), 0)
    assert driver.handle == handle
