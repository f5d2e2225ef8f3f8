"""cuBLASLt called by hand, on a real GPU: every algorithm against FP32, under CUDA graphs, and how
a packed model chooses; `make test-gpu`. Without one: tests/kernels/test_cublaslt.py."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
pytest.importorskip("triton")

from packable import answer, texts, write  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from penstock.backends import backend  # noqa: E402
from penstock.kernels import cublaslt  # noqa: E402
from penstock.kernels.cublaslt import E4M3, GemmForm, Operands  # noqa: E402
from penstock.kernels.gemm import Gemm, open_multiplier  # noqa: E402

has_fp8 = pytest.mark.skipif(
    torch.cuda.get_device_capability() < (9, 0), reason="scales by row need a Hopper"
)
MINILM = {"width": 384, "inner": 1536, "layers": 2, "heads": 12}
OPTIONS = {"penstock.pack": "tokens", "penstock.cuda_graphs": "on", "penstock.dtype": "bf16"}


@pytest.fixture(scope="module")
def products():
    return cublaslt.open_products(torch.device("cuda:0"))


def relative(found, wanted) -> float:
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm())


def operands(num_rows, depth, width, dtype):
    torch.manual_seed(0)
    sizes = ((num_rows, depth), (width, depth), (width,))
    return Operands(*(torch.randn(each, device="cuda", dtype=dtype) for each in sizes))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_gelu", [False, True])
@pytest.mark.parametrize("num_rows", [1, 100, 4224])
def test_every_algorithm_gives_what_fp32_gives(products, dtype, has_gelu, num_rows):
    given = operands(num_rows, 256, 512, dtype)
    form = GemmForm(num_rows, 256, 512, dtype, dtype, has_gelu)
    wanted = given.x.float() @ given.weight.float().t() + given.bias.float()
    wanted = F.gelu(wanted) if has_gelu else wanted
    num = products.num_algorithms(form, given)
    assert num > 0 or num_rows == 1
    for number in range(num):
        assert relative(products.multiply(form, given, number), wanted) < 6e-3


def test_a_form_that_it_does_not_have_has_no_algorithm(products):
    form = GemmForm(8, 15, 16, torch.bfloat16, torch.bfloat16)
    given = operands(8, 15, 16, torch.bfloat16)
    for number in range(products.num_algorithms(form, given)):
        wanted = given.x.float() @ given.weight.float().t() + given.bias.float()
        assert relative(products.multiply(form, given, number), wanted) < 6e-3


def small(given):
    x, weight = (each.mul(20).clamp(-448, 448).to(E4M3) for each in (given.x, given.weight))
    return x, weight, given.bias


@has_fp8
@pytest.mark.parametrize("scaling", ["one", "rows"])
def test_e4m3_is_scaled(products, scaling):
    x, weight, bias = small(operands(272, 256, 512, torch.bfloat16))
    counts = (272, 512) if scaling == "rows" else (1, 1)
    scales = [(torch.rand(count, device="cuda") + 0.5) / 20 for count in counts]
    given = Operands(x, weight, bias, *scales)
    form = GemmForm(272, 256, 512, E4M3, torch.bfloat16, scaling=scaling)
    wanted = x.float() @ weight.float().t() * scales[0][:, None] * scales[1][None, :] + bias.float()
    num = products.num_algorithms(form, given)
    assert num > 0
    for number in range(num):
        assert relative(products.multiply(form, given, number), wanted) < 1e-2


@has_fp8
def test_gelu_to_e4m3(products):
    x, weight, bias = small(operands(272, 256, 512, torch.bfloat16))
    scale, factor = torch.full((1,), 0.01, device="cuda"), torch.full((1,), 30.0, device="cuda")
    given = Operands(x, weight, bias, scale, scale, factor)
    form = GemmForm(272, 256, 512, E4M3, E4M3, True, "one")
    wanted = F.gelu(x.float() @ weight.float().t() * 1e-4 + bias.float())
    num = products.num_algorithms(form, given)
    assert num > 0
    for number in range(num):
        found = products.multiply(form, given, number)
        assert found.dtype == E4M3 and relative(found.float() / 30, wanted) < 4e-2


@has_fp8
def test_what_is_too_large_for_e4m3_becomes_the_largest(products):
    x, weight, bias = small(operands(272, 256, 512, torch.bfloat16))
    one, factor = torch.ones(1, device="cuda"), torch.full((1,), 1e4, device="cuda")
    given = Operands(x, weight, bias, one, one, factor)
    form = GemmForm(272, 256, 512, E4M3, E4M3, True, "one")
    found = products.multiply(form, given, 0).float()
    assert not found.isnan().any() and float(found.max()) == 448


def test_a_graph_holds_it(products):
    given = operands(100, 256, 512, torch.bfloat16)
    form = GemmForm(100, 256, 512, torch.bfloat16, torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        products.multiply(form, given, 0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = products.multiply(form, given, 0)
    for seed in range(2):
        torch.manual_seed(seed)
        given.x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        wanted = given.x.float() @ given.weight.float().t() + given.bias.float()
        assert relative(found, wanted) < 6e-3


def test_a_multiplier_chooses_once(tmp_path):
    given = operands(4224, 256, 512, torch.bfloat16)
    form = GemmForm(4224, 256, 512, torch.bfloat16, torch.bfloat16)
    asked = Gemm(form, given, lambda x: torch.addmm(given.bias, x, given.weight.t()))
    first = open_multiplier(torch.device("cuda:0"), tmp_path)
    wanted = first.run(asked)
    first.tune()
    assert first.num_timed == 1 and relative(first.run(asked), wanted) < 6e-3
    for name, content in first.files().items():
        (tmp_path / name).write_bytes(content)
    second = open_multiplier(torch.device("cuda:0"), tmp_path)
    second.run(asked)
    second.tune()
    assert second.num_timed == 0 and second.files() == first.files()


def test_a_packed_model_chooses_at_load_and_a_second_start_times_nothing(tmp_path: Path):
    config = write(tmp_path / "m", **MINILM)
    served = replace(config, device="cuda", options=OPTIONS)
    plain = backend("pytorch")(config)
    inputs = texts((32, 1, 7, 20))
    wanted = answer(plain, inputs)
    for is_second in (False, True):
        runner = backend("pytorch")(served)
        for _ in range(2):
            gap = np.abs(answer(runner, inputs) - wanted).max() / np.abs(wanted).max()
            assert gap < 6e-2
        built = runner.built()
        assert "by" in built["products"] and "without_cuda_graph" not in built
        assert (built["products_timed"] == "0 forms") == is_second
        for name, content in runner.compiled().items():
            Path(config.artifact).with_name(name).write_bytes(content)
        runner.settle()
        answer(runner, texts((32,) * 16))
        assert runner.built()["products_timed"] == built["products_timed"]
        runner.close()
