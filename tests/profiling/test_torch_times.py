"""Operator times of PyTorch: real modules under its profiler."""

from types import SimpleNamespace

import pytest

from penstock.profiling import torch_times
from penstock.profiling.gpu_timeline import RUN
from penstock.profiling.work import Shaped, Timed, work_of

torch = pytest.importorskip("torch")


def profiled(module, *shape: int) -> Timed:
    tensor = torch.randn(shape)

    def run() -> None:
        with torch.inference_mode():
            module(tensor)

    return torch_times.timed(run, 3, "fp32")


def flops_of(found: Timed, kind: str) -> list[float | None]:
    return [
        work_of(each.kind, each.inputs, each.outputs).flops
        for each in found.operators
        if each.kind == kind
    ]


def test_a_linear_layer_is_a_product_with_weights() -> None:
    found = profiled(torch.nn.Linear(64, 32), 8, 64)
    product = next(each for each in found.operators if each.kind == "MatMul" and each.inputs)
    assert work_of(product.kind, product.inputs, product.outputs).flops == 2 * 8 * 64 * 32
    assert product.weight_bytes == 64 * 32 * 4
    assert product.seconds > 0
    assert flops_of(found, "MatMul") == [2 * 8 * 64 * 32]
    assert found.profiled_s > 0


def test_calls_with_the_same_shapes_are_one_line() -> None:
    twice = torch.nn.Sequential(torch.nn.GELU(), torch.nn.GELU())
    found = profiled(twice, 8, 64)
    (line,) = [each for each in found.operators if each.kind == "Gelu"]
    assert (line.num_calls, line.outputs) == (2, (Shaped("fp32", (8, 64)),))


@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolution_knows_its_output(groups) -> None:
    module = torch.nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=groups)
    found = profiled(module, 2, 4, 9, 9)
    assert 2 * (2 * 8 * 5 * 5) * (4 // groups * 9) in flops_of(found, "Conv")


def test_attention_is_counted() -> None:
    def attend(tensor):
        return torch.nn.functional.scaled_dot_product_attention(tensor, tensor, tensor)

    found = profiled(attend, 2, 4, 10, 16)
    assert 4 * (2 * 4 * 10 * 16) * 10 in flops_of(found, "MultiHeadAttention")


def test_events_are_in_the_trace() -> None:
    found = profiled(torch.nn.Softmax(-1), 8, 64)
    assert {event.kind for event in found.events} >= {"Softmax"}
    assert min(event.start_s for event in found.events) == 0


def test_runs_are_found_in_a_real_trace() -> None:
    """As it is on a machine without a GPU: everything but what one would have done."""
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU]) as watched:
        for _ in range(3):
            with record_function(RUN):
                torch.ones(8).sum()
    found = torch_times.trace_of(watched)
    assert found.spans == []
    assert len(found.runs) == 3
    assert found.runs[0][0] == 0
    assert all(begin < end for begin, end in found.runs)


def made_event(name: str, shapes: list, device_us: float, *kernels: tuple[str, float]):
    return SimpleNamespace(
        name=f"aten::{name}",
        input_shapes=shapes,
        concrete_inputs=[],
        time_range=SimpleNamespace(start=0.0, end=device_us),
        self_device_time_total=device_us,
        kernels=[SimpleNamespace(name=name, duration=us) for name, us in kernels],
    )


def test_on_a_gpu_the_time_is_that_of_kernels() -> None:
    product = made_event("mm", [[8, 64], [64, 32]], 40.0, ("gemm", 40.0))
    launcher = made_event("linear", [[8, 64]], 0.0)
    found = torch_times.read([launcher, product] * 2, 2, 1e-3, "fp32", is_cuda=True)
    (line,) = found.operators
    assert (line.kind, line.seconds, line.datatype) == ("MatMul", pytest.approx(40e-6), "fp32")
    assert torch_times.launched_s([launcher, product] * 2, 2) == {"gemm": pytest.approx(40e-6)}


def test_products_that_are_rounded_are_counted_against_their_own_peak() -> None:
    product = made_event("mm", [[8, 64], [64, 32]], 40.0)
    for rounded, datatype in (("matrices,convolutions", "tf32"), ("convolutions", "fp32")):
        found = torch_times.read([product], 1, 1e-3, "fp32", is_cuda=True, rounded=rounded)
        assert found.operators[0].datatype == datatype
    half = torch_times.read([product], 1, 1e-3, "fp16", is_cuda=True, rounded="matrices")
    assert half.operators[0].datatype == "fp16"
