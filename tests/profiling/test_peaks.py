"""Peaks are measured once and remembered; how high they are is the machine's business."""

import json

import pytest

from penstock.profiling import peaks
from penstock.profiling.peaks import Try, peaks_of, rates


def test_every_peak_is_a_number_above_zero(peaks_cache) -> None:
    found = peaks_of("cpu", 1, peaks_cache)
    assert {"fp32", "int8"} <= found.flops.keys()
    numbers = [*found.flops.values(), found.bytes_per_s, found.cache_bytes_per_s, found.launch_s]
    assert all(number > 0 for number in numbers)
    assert found.num_threads == 1
    assert found.device


@pytest.fixture
def quick(monkeypatch) -> None:
    """Nothing is measured."""
    monkeypatch.setattr(peaks, "rates", lambda tries: dict.fromkeys(tries, 2.0))
    monkeypatch.setattr(peaks, "COPY_BYTES", 1 << 16)


@pytest.mark.usefixtures("quick")
def test_a_second_question_is_answered_from_the_cache(tmp_path) -> None:
    peaks_of("cpu", 1, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bytes_per_s": 12345.0}))
    assert peaks_of("cpu", 1, tmp_path).bytes_per_s == 12345


def test_what_was_disturbed_is_not_remembered(tmp_path, monkeypatch) -> None:
    def disturbed(tries: dict[str, Try]) -> dict[str, float]:
        tries["fp32"].rounds_s += [1.0, 2.0, 1.0]
        return dict.fromkeys(tries, 2.0)

    monkeypatch.setattr(peaks, "rates", disturbed)
    monkeypatch.setattr(peaks, "COPY_BYTES", 1 << 16)
    assert peaks_of("cpu", 1, tmp_path).bytes_per_s == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_a_broken_cache_is_measured_anew(tmp_path) -> None:
    first = peaks_of("cpu", 1, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text("{")
    assert peaks_of("cpu", 1, tmp_path) == first
    assert first.launch_s == 0.5


@pytest.mark.usefixtures("quick")
def test_threads_and_library_have_peaks_of_their_own(tmp_path) -> None:
    pytest.importorskip("torch")
    for num_threads, is_torch in ((1, False), (2, False), (2, True), (2, True)):
        peaks_of("cpu", num_threads, tmp_path, is_torch=is_torch)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.usefixtures("quick")
def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    assert peaks_of("cpu", 1, tmp_path / "file").bytes_per_s == 2


def test_the_best_of_all_rounds_counts(monkeypatch) -> None:
    clock = FakeClock([0.5, 0.2, 0.4, 0.3])
    monkeypatch.setattr(peaks.time, "perf_counter", clock)
    assert rates({"a": Try(clock.work, 10.0)}, round_s=0.1) == {"a": pytest.approx(50)}


def test_what_fails_has_no_rate() -> None:
    def fail() -> None:
        raise RuntimeError("no such instruction")

    assert rates({"a": Try(fail, 1.0)}, round_s=0.0) == {}


class FakeClock:
    """Each call of `work` takes the next time."""

    def __init__(self, durations: list[float]) -> None:
        self.now = 0.0
        self._durations = durations
        self._num_calls = 0

    def __call__(self) -> float:
        return self.now

    def work(self) -> None:
        self.now += self._durations[self._num_calls % len(self._durations)]
        self._num_calls += 1


@pytest.mark.parametrize("datatype", ["fp32", "tf32", "fp16", "bf16", "fp8", "int8"])
def test_products_of_gpus_run_or_there_is_none(datatype: str) -> None:
    """On a processor, which may lack some; the precision of FP32 is then as it was."""
    torch = pytest.importorskip("torch")
    run = peaks.cuda_product("cpu", datatype, 32)
    assert run is not None or datatype in ("fp8", "int8")
    if run is not None:
        run()
    assert torch.get_float32_matmul_precision() == "highest"
