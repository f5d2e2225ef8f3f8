"""A small encoder as a model's folder, a place where peaks are kept, and a profile made of plain
numbers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import helper, numpy_helper
from optimizer.profile.made_operators import product, sum_of_two

from penstock.optimizer.profile import roofline
from penstock.optimizer.profile.results import (
    Bucket,
    GpuSpan,
    GpuTime,
    Kernel,
    Peaks,
    Profile,
)
from penstock.optimizer.profile.roofline import Measured

WIDTH = 64
MakeFolder = Callable[[Path], Path]


@pytest.fixture(scope="session")
def write_encoder(write_onnx) -> MakeFolder:
    """A product with weights, a bias, an Erf and a Softmax, on any rows and lengths."""

    def write(path: Path) -> Path:
        random = np.random.default_rng(5)
        weights = random.standard_normal((WIDTH, WIDTH)).astype(np.float32)
        nodes = [
            helper.make_node("MatMul", ["x", "w"], ["a"], name="/encoder/layer.3/dense/MatMul"),
            helper.make_node("Add", ["a", "b"], ["c"], name="/encoder/layer.3/dense/Add"),
            helper.make_node("Erf", ["c"], ["d"], name="/encoder/layer.3/Erf"),
            helper.make_node("Softmax", ["d"], ["y"], name="/head/Softmax"),
        ]
        return write_onnx(
            path,
            nodes,
            {"x": ("FP32", ("n", "s", WIDTH))},
            {"y": ("FP32", ("n", "s", WIDTH))},
            [
                numpy_helper.from_array(weights, "w"),
                numpy_helper.from_array(weights[0], "b"),
            ],
        )

    return write


@pytest.fixture
def encoder(tmp_path, write_encoder) -> Path:
    write_encoder(tmp_path / "models" / "encoder" / "1" / "model.onnx")
    return tmp_path / "models" / "encoder"


@pytest.fixture(scope="session")
def peaks_cache(tmp_path_factory) -> Path:
    """Measured once for all tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def peaks() -> Peaks:
    """A device of round numbers: 100 GFLOP/s, four times that in INT8, 10 GB/s, 1 us a launch."""
    return Peaks(
        device="a test",
        num_threads=2,
        flops={"fp32": 100e9, "int8": 400e9},
        bytes_per_s=10e9,
        launch_s=1e-6,
    )


@pytest.fixture
def profile(peaks) -> Profile:
    """20 ms of which 16 ms are a product at about two thirds of the peak."""
    operators = roofline.judged(
        [product("/encoder/layer.0/dense/MatMul", 16e-3), sum_of_two("<b>sum</b>", 3e-3)], peaks
    )
    buckets = [Bucket("decode", 1e-3), Bucket("queue", 3e-3), Bucket("compute", 20e-3)]
    measured = Measured(operators, peaks, 20e-3, buckets, 512, 512)
    steps = roofline.next_steps(measured)
    return Profile(
        model="encoder",
        backend="onnxruntime",
        batch="512 rows of x 1024",
        num_runs=7,
        total_s=measured.total_s,
        profiled_s=21e-3,
        operators=operators,
        peaks=peaks,
        buckets=buckets,
        bound=roofline.bound_of(measured),
        findings=roofline.findings(measured),
        recommendation=roofline.verdict(measured, steps),
        ceiling=steps[0].ceiling,
        steps=steps,
        headroom=roofline.headroom(measured),
    )


@pytest.fixture
def gpu() -> GpuTime:
    """A batch of 10 ms: copied in for 1 ms, two kernels with 2 ms between them, half a ms out."""
    return GpuTime(
        kernels=[Kernel("gemm<128>", 5e-3, 1.0), Kernel("relu", 1e-3, 1.0)],
        num_kernels=2,
        busy_s=6e-3,
        gap_s=2e-3,
        copy_in_s=1e-3,
        copy_out_s=0.5e-3,
        hidden=0.0,
        timeline=[
            GpuSpan("Memcpy HtoD", "in", 13, 0.0, 1e-3, 4096),
            GpuSpan("gemm<128>", "compute", 7, 1e-3, 6e-3),
            GpuSpan("Memcpy DtoH", "out", 17, 9e-3, 0.5e-3, 64),
        ],
    )
