"""Operator times of PyTorch: real modules under its profiler."""

import pytest

from penstock.optimizer.profile import torch_times
from penstock.optimizer.profile.times import Timed
from penstock.optimizer.profile.work import Shaped, work_of

torch = pytest.importorskip("torch")


def profiled(module, *shape: int) -> Timed:
    tensor = torch.randn(shape)

    def run() -> None:
        with torch.inference_mode():
            module(tensor)

    return torch_times.timed(run, 3, "fp32", is_cuda=False)


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
