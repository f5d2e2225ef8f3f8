"""The driver is a fake here; tests/gpu/test_regions_cuda.py has a real one."""

import ctypes

import numpy as np
import pytest

from penstock.backends import cuda_copies


class OldDriver:
    """Copies within this process, one at a time."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.num_calls = 0

    def cuMemcpyHtoDAsync_v2(self, target, source, size, stream) -> int:
        self.num_calls += 1
        assert stream.value == 77
        if not self.status:
            ctypes.memmove(target.value, source.value, size.value)
        return self.status

    def cuGetErrorString(self, status, text) -> None:
        text.contents.value = b"invalid argument"


class Driver(OldDriver):
    """Copies many by one call."""

    def cuMemcpyBatchAsync(
        self, targets, sources, sizes, count, how, first, num_ways, failed, stream
    ) -> int:
        self.num_calls += 1
        assert stream.value == 77 and num_ways.value == 1 and first.contents.value == 0
        assert how.contents.source_order == cuda_copies.IN_STREAM_ORDER and not how.contents.flags
        lists = [
            (ctypes.c_int64 * count.value).from_address(each.value)
            for each in (targets, sources, sizes)
        ]
        for target, source, size in zip(*lists, strict=True) if not self.status else ():
            ctypes.memmove(target, source, size)
        return self.status


def copied(monkeypatch, driver: OldDriver | None) -> np.ndarray:
    monkeypatch.setattr(cuda_copies, "open_driver", lambda: driver)
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    sizes = np.array([10, 5, 20])
    to = target.ctypes.data + np.array([0, 10, 15])
    cuda_copies.copy_together(to, source.ctypes.data + np.array([50, 7, 0]), sizes, 77)
    return target


@pytest.mark.parametrize(("driver", "num_calls"), [(Driver(), 1), (OldDriver(), 3)])
def test_each_place_is_copied(monkeypatch, driver: OldDriver, num_calls: int) -> None:
    expected = [*range(50, 60), *range(7, 12), *range(20)]
    assert copied(monkeypatch, driver).tolist() == expected + [0] * 65
    assert driver.num_calls == num_calls


@pytest.mark.parametrize("driver", [Driver(1), OldDriver(1)])
def test_an_error_says_what_the_driver_said(monkeypatch, driver: OldDriver) -> None:
    with pytest.raises(RuntimeError, match="copies of 3 inputs to the GPU: invalid argument"):
        copied(monkeypatch, driver)


def test_a_machine_without_a_driver_is_named(monkeypatch) -> None:
    with pytest.raises(RuntimeError, match="no GPU driver"):
        copied(monkeypatch, None)
