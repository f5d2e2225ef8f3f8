"""A profile made of plain numbers, on a device of round numbers."""

import pytest
from made_operators import product, sum_of_two

from penstock.profiling import roofline
from penstock.profiling.results import (
    Bucket,
    GpuSpan,
    GpuTime,
    Kernel,
    Peaks,
    Profile,
)
from penstock.profiling.roofline import Measured


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
