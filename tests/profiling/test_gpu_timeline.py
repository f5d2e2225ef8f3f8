"""What a GPU did, read from traces as torch's profiler writes them, made of round numbers."""

import pytest

from penstock.profiling import gpu_timeline
from penstock.profiling.gpu_timeline import RUN
from penstock.profiling.results import GpuTime, Kernel

MATRIX = "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_cublas"
HALF_WAY = 1e12  # Traces count from somewhere.


def event(cat: str, name: str, start_us: float, us: float, stream: int = 7, **args: object) -> dict:
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream,
        "ts": HALF_WAY + start_us, "dur": us, "args": {"stream": stream, **args},
    }  # fmt: skip


def run(start_us: float, us: float) -> dict:
    return event("user_annotation", RUN, start_us, us)


def kernel(start_us: float, us: float, name: str = MATRIX) -> dict:
    return event("kernel", name, start_us, us, grid=[1, 1, 1])


def copy_in(start_us: float, us: float) -> dict:
    return event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", start_us, us, 13, bytes=4096)


def copy_out(start_us: float, us: float) -> dict:
    return event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", start_us, us, 17, bytes=64)


def one_batch(start_us: float) -> list[dict]:
    """10 in, kernels of 20 with 30 between them, 5 out: 85 in all, and some more on the host."""
    return [
        run(start_us, 100),
        copy_in(start_us, 10),
        kernel(start_us + 10, 20),
        kernel(start_us + 60, 20, "triton_poi_fused_relu_0"),
        copy_out(start_us + 80, 5),
    ]


def trace(*events: dict) -> gpu_timeline.GpuTrace:
    host = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": HALF_WAY - 50, "dur": 9}
    named = {"ph": "M", "name": "process_name", "args": {"name": "python"}}
    shadow = event("gpu_user_annotation", RUN, 0, 1)
    return gpu_timeline.read({"traceEvents": [named, host, shadow, *events]})


def summary_of(*events: dict, **others: object) -> GpuTime:
    found = gpu_timeline.summary(trace(*events), **others)
    assert found is not None
    return found


def test_lanes_times_and_bytes_are_read() -> None:
    found = trace(*one_batch(0))
    assert [span.lane for span in found.spans] == ["in", "compute", "compute", "out"]
    assert found.spans[0].num_bytes == 4096
    assert [span.stream for span in found.spans] == [13, 7, 7, 17]
    assert found.spans[1].start_s == pytest.approx(10e-6)
    assert found.runs == [(0.0, pytest.approx(100e-6))]


def test_copies_within_the_gpu_take_its_time_as_kernels_do() -> None:
    inside = event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 5)
    assert [span.lane for span in trace(inside, event("gpu_memset", "Memset", 5, 1)).spans] == [
        "compute",
        "compute",
    ]


def test_a_run_is_what_began_inside_of_it() -> None:
    # What lies between the runs is nobody's: neither the wait nor a stray kernel.
    events = [*one_batch(0), kernel(150, 30), *one_batch(1000), *one_batch(2000)]
    found = summary_of(*events)
    assert (found.num_kernels, found.num_slots) == (2, 1)
    assert found.busy_s == pytest.approx(40e-6)
    assert found.gap_s == pytest.approx(30e-6)
    assert found.copy_in_s == pytest.approx(10e-6)
    assert found.copy_out_s == pytest.approx(5e-6)


def test_kernels_are_listed_by_name_the_longest_first() -> None:
    found = summary_of(*one_batch(0), *one_batch(1000), kernel(1090, 8))
    assert [(each.name, each.num_calls) for each in found.kernels] == [
        (MATRIX, 1.5),
        ("triton_poi_fused_relu_0", 1.0),
    ]
    assert found.kernels[0].seconds == pytest.approx(24e-6)


def test_kernels_of_two_streams_at_once_count_once() -> None:
    found = summary_of(run(0, 100), kernel(0, 50), event("kernel", "other", 20, 50, 9))
    assert found.busy_s == pytest.approx(70e-6)
    assert found.gap_s == pytest.approx(0)


def test_one_slot_hides_nothing() -> None:
    assert summary_of(*one_batch(0)).hidden == 0


def test_what_is_hidden_is_seen_where_several_are_on_their_way() -> None:
    together = trace(
        copy_in(0, 10), kernel(10, 100), copy_in(20, 10), copy_out(105, 10), kernel(110, 50)
    )  # fmt: skip
    found = summary_of(*one_batch(0), together=together, num_slots=2)
    # All of the second copy in, and all of the copy out: the next kernel follows at once.
    assert found.hidden == pytest.approx(20 / 30)
    assert len(found.timeline) == 5
    # Times are still those of batches by themselves.
    assert found.busy_s == pytest.approx(40e-6)


def test_without_copies_there_is_nothing_to_hide() -> None:
    assert summary_of(run(0, 10), kernel(1, 2)).hidden is None


def test_without_kernels_there_is_nothing_to_tell() -> None:
    assert gpu_timeline.summary(trace(run(0, 10), copy_in(1, 2))) is None
    assert gpu_timeline.summary(gpu_timeline.read({})) is None


def test_what_no_operator_launched_is_left_over() -> None:
    kernels = [Kernel(MATRIX, 4e-3, 8.0), Kernel("triton_red_fused_0", 1e-3, 2.0)]
    left = gpu_timeline.left_over(kernels, {MATRIX: 1e-3}, "fp16")
    assert [(each.name, each.kind, each.num_calls) for each in left] == [
        (MATRIX, "matrix kernel", 6),
        ("triton_red_fused_0", "fused kernel", 2),
    ]
    assert left[0].seconds == pytest.approx(3e-3)
    assert {each.datatype for each in left} == {"fp16"}
    assert gpu_timeline.left_over(kernels, {each.name: each.seconds for each in kernels}, "") == []


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT", "matrix kernel"),
        ("void cudnn::winograd_nonfused::conv(...)", "convolution kernel"),
        ("sm90_xmma_fprop_implicit_gemm_f16f16", "convolution kernel"),
        ("void pytorch_flash::flash_fwd_kernel<...>", "attention kernel"),
        ("Memcpy DtoD (Device -> Device)", "copy on the GPU"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other kernel"),
    ],
)
def test_names_say_what_kernels_do(name: str, family: str) -> None:
    assert gpu_timeline.family_of(name) == family


def test_a_step_is_told_by_kind_of_layer() -> None:
    kernels = [
        Kernel("sm90_xmma_fprop_implicit_gemm", 0.004, 20),
        Kernel("cudnn_convolve", 0.001, 2),
        Kernel("nvjet_tst_128x128", 0.003, 1),
        Kernel("elementwise", 0.0005, 9),
    ]
    found = gpu_timeline.step_time(GpuTime(kernels, 32, 0.008, 0.002, 0.0003, 0.0001), 64)
    assert list(found.layers) == ["convolution kernel", "matrix kernel", "other kernel"]
    assert found.layers["convolution kernel"] == pytest.approx(0.005)
    assert (found.num_rows, found.num_kernels, found.gap_s) == (64, 32, 0.002)
