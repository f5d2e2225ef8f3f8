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
