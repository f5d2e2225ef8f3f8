"""The parts of the whole sequence that need a real GPU: priorities, streams, ranges, profiles of
steps, and batches up to what memory holds; `make test-gpu`."""

import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from served_builds import read

from penstock.backends import Batch, Runner, backend
from penstock.optimizer.gpu_sessions import GpuSession, WarmSpare

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(300),
]

REPEATED = """
import torch
from torch import nn


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear({width}, {width})

    def forward(self, x):
        for _ in range({num_layers}):
            x = torch.tanh(self.layer(x))
        return x


factory = Repeated
"""
# Kernels whose blocks take every thread of the GPU, so that others wait for their turn. Matmuls
# leave room for small kernels beside them. Inputs are small, because copies know no priority.
FULL = """
import torch
from torch import nn


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear({width}, {width})

    def forward(self, x):
        wide = x.repeat(1, (1 << 22) // {width})
        for _ in range({num_layers}):
            wide = torch.tanh(wide)
        return wide[:, :{width}] + self.layer.bias


factory = Repeated
"""
# A row takes 16 MiB for each of its copies; the process may have a hundredth of an H200.
HUNGRY = """
import torch
from torch import nn


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear({width}, {width})
        torch.cuda.set_per_process_memory_fraction({num_layers} / 1e4)

    def forward(self, x):
        wide = self.layer(x).repeat(1, (1 << 22) // {width})
        return (wide * 2)[:, :{width}]


factory = Repeated
"""


def written(
    root: Path,
    width: int,
    num_layers: int,
    max_batch: int = 8,
    code: str = REPEATED,
    **options: str,
):
    version = root / "net" / "1"
    version.mkdir(parents=True)
    (version / "module.py").write_text(code.format(width=width, num_layers=num_layers))
    torch.manual_seed(1)
    layer = torch.nn.Linear(width, width)
    weights = {f"layer.{name}": each for name, each in layer.state_dict().items()}
    safetensors.save_file(weights, version / "model.safetensors")
    given = "".join(
        f'parameters {{ key: "penstock.{key}" value {{ string_value: "{text}" }} }}\n'
        for key, text in options.items()
    )
    (root / "net" / "config.pbtxt").write_text(
        f'backend: "pytorch" max_batch_size: {max_batch} dynamic_batching {{ }}\n'
        f'input {{ name: "x" data_type: TYPE_FP32 dims: {width} }}\n'
        f'output {{ name: "y" data_type: TYPE_FP32 dims: {width} }}\n'
        f"instance_group {{ kind: KIND_GPU gpus: 0 }}\n{given}"
    )
    return read(root / "net")


def opened(build, num_instances: int = 2) -> Runner:
    return backend("pytorch")(build.config.on(["cuda:0"] * num_instances))


def drawn(build, num_rows: int, seed: int = 1) -> Batch:
    shape = (num_rows, *build.config.inputs[0].shape)
    rows = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return Batch({"x": rows}, num_rows)


def answer(execution) -> np.ndarray:
    (outputs,) = execution.wait()
    return outputs["y"].copy()


# Priorities.


@pytest.mark.parametrize("priority", ["high", "normal", "low"])
def test_the_priority_is_that_of_the_stream(tmp_path: Path, priority: str) -> None:
    runner = opened(written(tmp_path, 64, 2, stream_priority=priority))
    built = runner.built()
    assert built["stream_priority"] == priority
    assert built["mps"].partition(":")[0] in ("on", "off", "unknown")
    runner.close()


def p99_ms(quick: Runner, heavy: Runner, row: Batch, rows: Batch) -> float:
    """Of one row, while the other model computes batches back to back."""
    is_over = threading.Event()

    def saturate() -> None:
        begun = deque([heavy.start(rows)])
        while not is_over.is_set():
            begun.append(heavy.start(rows))
            list(begun.popleft().wait())
        list(begun.popleft().wait())

    for _ in range(3):
        list(quick.start(row).wait())
        list(heavy.start(rows).wait())
    thread = threading.Thread(target=saturate)
    thread.start()
    try:
        time.sleep(0.3)
        found = []
        for _ in range(300):
            began = time.perf_counter()
            list(quick.start(row).wait())
            found.append(1e3 * (time.perf_counter() - began))
            time.sleep(0.001)
    finally:
        is_over.set()
        thread.join()
    return float(np.percentile(found, 99))


# Enough blocks for many waves: a priority decides who comes next, not who is interrupted.
NUM_HEAVY = 16


def test_a_model_of_high_priority_does_not_wait_for_one_of_low(tmp_path: Path) -> None:
    """In one process; between processes it takes MPS (benchmarks/gpu/sharing.py)."""
    found = {}
    for high, low in (("normal", "normal"), ("high", "low")):
        graphs = {"cuda_graphs": "on"}
        small = written(tmp_path / high, 512, 16, stream_priority=high, **graphs)
        large = written(
            tmp_path / f"{low}2", 256, 50, NUM_HEAVY, FULL, stream_priority=low, **graphs
        )
        quick, heavy = opened(small), opened(large)
        rows = drawn(large, NUM_HEAVY)
        found[high] = p99_ms(quick, heavy, drawn(small, 1), rows)
        quick.close()
        heavy.close()
    print(f"p99 of one row: {found['normal']:.2f} ms with equal priorities, {found['high']:.2f} ms")
    assert found["high"] < 0.7 * found["normal"]


# Streams.


def test_batches_on_several_streams_give_their_own_answers(tmp_path: Path) -> None:
    build = written(tmp_path, 256, 8, cuda_graphs="on", streams="2")
    plain = written(tmp_path / "plain", 256, 8)
    runner, other = opened(build, 4), opened(plain, 1)
    assert runner.built()["streams"] == "2"
    begun: deque[tuple[int, object]] = deque()
    found: dict[int, np.ndarray] = {}
    for seed in range(40):
        begun.append((seed, runner.start(drawn(build, 1 + seed % 8, seed))))
        if len(begun) == 4:
            place, execution = begun.popleft()
            found[place] = answer(execution)
    for place, execution in begun:
        found[place] = answer(execution)
    for seed, values in found.items():
        expected = answer(other.start(drawn(plain, 1 + seed % 8, seed)))
        np.testing.assert_allclose(values, expected, atol=1e-3)


def batches_per_s(runner: Runner, batch: Batch, num_slots: int) -> float:
    for _ in range(2 * num_slots):
        list(runner.start(batch).wait())
    begun = deque(runner.start(batch) for _ in range(num_slots - 1))
    began = time.perf_counter()
    for _ in range(400):
        begun.append(runner.start(batch))
        list(begun.popleft().wait())
    rate = 400 / (time.perf_counter() - began)
    for each in begun:
        list(each.wait())
    return rate


def test_streams_fill_a_gpu_that_small_kernels_leave_idle(tmp_path: Path) -> None:
    one = written(tmp_path / "one", 256, 400, cuda_graphs="on")
    two = written(tmp_path / "two", 256, 400, cuda_graphs="on", streams="2")
    rates = [batches_per_s(opened(build, 4), drawn(build, 1), 4) for build in (one, two)]
    print(f"{rates[0]:.0f} batches/s on one stream, {rates[1]:.0f} on two")
    assert rates[1] > 1.2 * rates[0]


# NVTX.


def test_ranges_are_pushed_and_popped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[str] = []
    push = torch.cuda.nvtx.range_push
    monkeypatch.setattr(
        torch.cuda.nvtx, "range_push", lambda text: (pushed.append(text), push(text))
    )
    build = written(tmp_path, 64, 2, nvtx="on")
    runner = opened(build, 1)
    answer(runner.start(drawn(build, 3)))
    assert runner.built()["nvtx"] == "net"
    assert [each.partition(": ")[2] for each in pushed[-4:]] == [
        "batch of 4 on slot 0",
        "copy in",
        "compute",
        "copy out",
    ]


PROFILED = """
import sys
from pathlib import Path
import numpy as np
from penstock.backends import Batch, backend
from penstock.repository import layout
config = layout.read(Path(sys.argv[1])).configs[-1]
runner = backend("pytorch")(config)
batch = Batch({"x": np.zeros((2, 64), np.float32)}, 2)
for _ in range(5):
    list(runner.start(batch).wait())
print(runner.built().get("nvtx", "no ranges"))
"""


@pytest.mark.skipif(shutil.which("nsys") is None, reason="Nsight Systems is not installed")
def test_nsight_sees_the_stages(tmp_path: Path) -> None:
    build = written(tmp_path, 64, 2)
    script = tmp_path / "profiled.py"
    script.write_text(PROFILED)
    report = tmp_path / "report"
    command = ["nsys", "profile", "--trace=cuda,nvtx", "-o", str(report), sys.executable]
    told = subprocess.run(
        [*command, str(script), str(build.folder)], capture_output=True, text=True, check=True
    )
    assert "no ranges" not in told.stdout
    stats = ["nsys", "stats", "--report", "nvtx_sum", f"{report}.nsys-rep"]
    found = subprocess.run(stats, capture_output=True, text=True, check=True).stdout
    assert "net: compute" in found and "net: copy in" in found


# The optimiser.


@pytest.fixture
def spare() -> Iterator[WarmSpare]:
    spare = WarmSpare()
    yield spare
    spare.close()


def test_sizes_are_halved_after_a_real_lack_of_memory(tmp_path: Path, spare: WarmSpare) -> None:
    # A fiftieth of the memory of an H200: about 2.8 GB.
    total = torch.cuda.get_device_properties(0).total_memory
    share = round(1e4 * (2.8e9 / total))
    build = written(tmp_path, 1024, share, 8, HUNGRY)
    rows = [{"x": row} for row in drawn(build, 32).inputs["x"]]
    session = GpuSession(build, (1, 4), spare)
    try:
        table = session.times(rows, (1, 4), longest_s=60.0)
        assert 8 <= table.max_rows < table.ran_out_at
        # The next size that was tried is a half of the one that did not fit, or smaller.
        assert table.max_rows <= table.ran_out_at // 2 or table.max_rows in (8, 32, 128)
        print(f"{table.max_rows} rows fit, {table.ran_out_at} did not")
        # Whoever is asked next is well.
        assert len(session.answers(rows[:4])) == 4
    finally:
        session.close()


def test_a_step_is_profiled_where_it_is_loaded(tmp_path: Path, spare: WarmSpare) -> None:
    found = {}
    for mode in ("off", "on"):
        build = written(tmp_path / mode, 512, 32, 16, cuda_graphs=mode)
        rows = [{"x": row} for row in drawn(build, 16).inputs["x"]]
        session = GpuSession(build, (2, 4), spare)
        try:
            table = session.times(rows, (1, 4))
            assert table.busy is not None and 0 < table.busy <= 1
            found[mode] = session.step_time(rows, 16)
        finally:
            session.close()
    for time_of in found.values():
        assert time_of is not None
        assert time_of.num_rows == 16 and time_of.num_kernels >= 64
        assert "matrix kernel" in time_of.layers
        assert time_of.busy_s > 0 and time_of.copy_in_s > 0
    # Graphs leave shorter gaps between kernels than launches from Python.
    assert found["on"].gap_s < found["off"].gap_s


def test_instances_with_streams_are_timed_in_a_process_of_their_own(tmp_path: Path) -> None:
    from penstock.optimizer import trials

    build = written(tmp_path, 256, 100, 8, cuda_graphs="on")
    build = replace(build, config=build.config.on(["cuda:0"]))
    rows = [{"x": row} for row in drawn(build, 8).inputs["x"]]
    table = trials.times(build, rows, 4, 4)
    assert table.num_instances == 4 and set(table.seconds[0]) >= {1, 8}
