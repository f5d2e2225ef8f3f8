"""The binding against a fake library that reads the same memory; tests/gpu has the real one."""

import gc
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from fake_cublaslt import FakeCublasLt  # noqa: E402
from fake_gpu import FakeGpu  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from penstock.backends.torch_cuda import Pipeline  # noqa: E402
from penstock.kernels import cublaslt  # noqa: E402
from penstock.kernels.cublaslt import E4M3, GemmForm, Operands, Products, Unavailable  # noqa: E402


def aligned(tensor):
    """On a CPU, tensors begin anywhere."""
    room = torch.empty(tensor.numel() * tensor.element_size() + 512, dtype=torch.uint8)
    begin = -room.data_ptr() % cublaslt.ALIGNMENT
    used = room[begin : begin + tensor.numel() * tensor.element_size()]
    return used.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def operands(num_rows=5, depth=16, width=24, dtype=torch.float16):
    torch.manual_seed(0)
    sizes = ((num_rows, depth), (width, depth), (width,))
    x, weight, bias = (aligned(torch.randn(each).to(dtype)) for each in sizes)
    return Operands(x, weight, bias)


@pytest.mark.parametrize("has_gelu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_product_with_bias_and_gelu(has_gelu, dtype):
    products = Products(FakeCublasLt(), "cpu")
    given = operands(dtype=dtype)
    form = GemmForm(5, 16, 24, dtype, dtype, has_gelu)
    assert products.num_algorithms(form, given) == 3
    wanted = given.x.float() @ given.weight.float().t() + given.bias.float()
    wanted = F.gelu(wanted, approximate="tanh") if has_gelu else wanted
    for number in range(3):
        found = products.multiply(form, given, number)
        assert found.dtype == dtype and torch.allclose(found.float(), wanted, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("scaling", ["one", "rows"])
def test_e4m3_is_scaled(scaling):
    products = Products(FakeCublasLt(), "cpu")
    given = operands()
    counts = (5, 24) if scaling == "rows" else (1, 1)
    scales = [torch.rand(count) + 0.5 for count in counts]
    x, weight = (aligned(each.to(E4M3)) for each in (given.x, given.weight))
    given = Operands(x, weight, given.bias, *scales)
    found = products.multiply(GemmForm(5, 16, 24, E4M3, torch.float16, scaling=scaling), given, 0)
    wanted = x.float() @ weight.float().t() * scales[0][:, None] * scales[1][None, :]
    assert torch.allclose(found.float(), wanted + given.bias.float(), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_residual_is_added(dtype):
    products, given = Products(FakeCublasLt(), "cpu"), operands(dtype=dtype)
    residual = aligned(torch.randn(5, 24).to(dtype))
    form = GemmForm(5, 16, 24, dtype, dtype, has_residual=True)
    found = products.multiply(form, replace(given, residual=residual), 0)
    wanted = given.x.float() @ given.weight.float().t() + given.bias.float() + residual.float()
    assert torch.allclose(found.float(), wanted, rtol=1e-2, atol=4e-2)
    assert str(form).endswith(", residual")
    plain = products.multiply(GemmForm(5, 16, 24, dtype, dtype), given, 0)
    assert torch.allclose(plain.float(), wanted - residual.float(), rtol=1e-2, atol=4e-2)


def test_gelu_to_e4m3_is_multiplied_before_it_is_rounded():
    products = Products(FakeCublasLt(), "cpu")
    given = operands()
    x, weight = (aligned(each.to(E4M3)) for each in (given.x, given.weight))
    one, factor = torch.ones(1), torch.full((1,), 20.0)
    given = Operands(x, weight, given.bias, one, one, factor)
    found = products.multiply(GemmForm(5, 16, 24, E4M3, E4M3, True, "one"), given, 0)
    wanted = F.gelu(x.float() @ weight.float().t() + given.bias.float(), approximate="tanh")
    assert found.dtype == E4M3
    assert torch.allclose(found.float() / 20, wanted, rtol=0.07, atol=1e-3)


def test_each_product_has_its_own_bias():
    products = Products(FakeCublasLt(), "cpu")
    one, form = operands(), GemmForm(5, 16, 24, torch.float16, torch.float16)
    before = products.multiply(form, one, 0)
    other = Operands(one.x, one.weight, aligned(one.bias + 1))
    assert torch.allclose(products.multiply(form, other, 0), before + 1, atol=2e-2)
    assert torch.equal(products.multiply(form, one, 0), before)


def test_what_it_does_not_have_is_no_algorithm():
    products = Products(FakeCublasLt(), "cpu")
    form = GemmForm(5, 13, 24, torch.float16, torch.float16)
    given = operands(depth=13)
    assert products.num_algorithms(form, given) == 0
    with pytest.raises(Unavailable, match="no algorithm 0 among 0"):
        products.multiply(form, given, 0)


def test_its_handle_is_given_back():
    library = FakeCublasLt()
    products = Products(library, "cpu")
    assert library.destroyed == 0
    del products
    gc.collect()
    assert library.destroyed == 1


def test_an_error_is_told():
    class Failing(FakeCublasLt):
        def cublasLtMatmul(self, *arguments):
            return 13

    products = Products(Failing(), "cpu")
    with pytest.raises(Unavailable, match="cublasLtMatmul gives status 13 .CUBLAS_STATUS_EXEC"):
        products.multiply(GemmForm(5, 16, 24, torch.float16, torch.float16), operands(), 0)


def test_what_finds_no_memory_is_tried_once_more():
    """As a batch is where one of torch's own libraries finds none."""

    class Full(FakeCublasLt):
        statuses = [3]

        def cublasLtMatmul(self, *arguments):
            return self.statuses.pop() if self.statuses else super().cublasLtMatmul(*arguments)

    products, given, gpu = Products(Full(), "cpu"), operands(), FakeGpu()
    form = GemmForm(5, 16, 24, torch.float16, torch.float16)
    pipeline = Pipeline(gpu, lambda _: {"y": products.multiply(form, given, 0)}, 1, False)
    (found,) = pipeline.start([{"x": torch.zeros(5, 1)}], 5, 5).wait()
    wanted = given.x.float() @ given.weight.float().t() + given.bias.float()
    assert torch.allclose(torch.from_numpy(found["y"]).float(), wanted, rtol=1e-2, atol=2e-2)
    assert gpu.num_shrinks == 1


def test_without_a_gpu_there_is_none():
    with pytest.raises(Unavailable, match="'cpu' is no NVIDIA GPU"):
        cublaslt.open_products(torch.device("cpu"))


def test_a_library_that_is_absent_or_of_another_version(monkeypatch):
    monkeypatch.setattr("torch.version.cuda", "13.0")

    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", absent)
    with pytest.raises(Unavailable, match=r"libcublasLt\.so\.13: .*cannot open"):
        cublaslt.open_products(torch.device("cuda:0"))

    class Call:
        def __call__(self):
            return 120_803

    class Library:
        cublasLtGetVersion = Call()

    monkeypatch.setattr("ctypes.CDLL", lambda name: Library())
    with pytest.raises(Unavailable, match="is version 120803; expected one of 13"):
        cublaslt.open_products(torch.device("cuda:0"))
