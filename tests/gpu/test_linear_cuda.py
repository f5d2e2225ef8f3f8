"""Linear layers in FP8, in FP32 and with integer weights on a real GPU: kernels against FP32,
models under CUDA graphs, and packed encoders of ONNX files; `make test-gpu`. Without one:
tests/kernels and tests/backends/test_torch_linear.py."""

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.backends import Batch, backend
from penstock.config import BatchPolicy, ModelConfig
from penstock.types import TensorSpec

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
pytest.importorskip("triton")

from linear_models import MLP, SHAPE, TRANSFORMER, write_module, write_onnx  # noqa: E402
from packable import SOURCE, USUAL, texts, write  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from penstock.backends.onnx_import import contrib  # noqa: E402
from penstock.kernels import encoder, weight_only_gemm  # noqa: E402
from penstock.kernels.fp8_linear import E4m3Linear, Fp8Input, QuantisedRows  # noqa: E402
from penstock.kernels.gemm import open_multiplier  # noqa: E402
from penstock.kernels.integer_weights import quantise_weight  # noqa: E402

has_fp8 = pytest.mark.skipif(
    torch.cuda.get_device_capability() < (8, 9), reason="the GPU has no FP8"
)
TYPES = [torch.float16, torch.bfloat16]
FP8 = {"penstock.fp8": "rowwise", "penstock.dtype": "bf16", "penstock.cuda_graphs": "on"}


def relative(found, wanted) -> float:
    found, wanted = found.detach().double().cpu(), wanted.detach().double().cpu()
    return float((found - wanted).norm() / wanted.norm())


def dequantised(found: QuantisedRows):
    return found.values.float() * found.scales


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 64), (37, 768), (5000, 1024), (300, 3072)])
@pytest.mark.parametrize("largest", [None, 20.0])
@pytest.mark.parametrize("kind", ["plain", "gelu", "norm"])
def test_inputs_are_quantised(dtype, num_rows, width, largest, kind):
    torch.manual_seed(0)
    x = (3 * torch.randn(num_rows, width, device="cuda")).to(dtype)
    norm = torch.nn.LayerNorm(width).cuda().to(dtype) if kind == "norm" else None
    quantiser = Fp8Input(norm, "gelu" if kind == "gelu" else "", largest).cuda()
    wanted = {"plain": lambda y: y, "gelu": F.gelu, "norm": norm or F.gelu}[kind](x).float()
    assert relative(dequantised(quantiser(x)), wanted) < 0.04


def test_a_norm_without_bias():
    x = torch.randn(9, 96, device="cuda").half()
    norm = torch.nn.LayerNorm(96, bias=False).cuda().half()
    scales = torch.empty(9, 1, device="cuda")
    _, small = encoder.norm_rows(x, norm, scales)
    assert relative(small.float() * scales, norm(x)) < 0.04


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_rows", [1, 197, 8192])
def test_a_norm_of_a_sum(dtype, num_rows):
    x, residual = torch.randn(2, 3, num_rows, 768, device="cuda").to(dtype)
    norm = torch.nn.LayerNorm(768).cuda().to(dtype)
    total, given = Fp8Input(norm).cuda()(x, residual)
    assert torch.equal(total, x + residual)
    assert relative(dequantised(given), norm(total).flatten(0, 1)) < 0.04


@has_fp8
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_rows", [1, 17, 197, 4096])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_in_fp8(dtype, num_rows, has_bias):
    torch.manual_seed(1)
    linear = torch.nn.Linear(768, 3072, bias=has_bias).cuda()
    x = torch.randn(num_rows, 768, device="cuda")
    found = E4m3Linear(linear.to(dtype))(x.to(dtype))
    assert found.dtype == dtype
    assert relative(found, linear.float()(x)) < 0.05


@has_fp8
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_rows", [17, 197, 4096])
def test_a_residual_is_added_by_the_gemm(dtype, num_rows):
    torch.manual_seed(1)
    linear = torch.nn.Linear(3072, 768).cuda()
    x, residual = (torch.randn(num_rows, each, device="cuda") for each in (3072, 768))
    layer = E4m3Linear(linear.to(dtype))
    multiplier = open_multiplier(torch.device("cuda"), Path("absent"))
    layer.product.multiplier = multiplier
    layer(x.to(dtype), residual.to(dtype))
    multiplier.tune()
    found = layer(x.to(dtype), residual.to(dtype))
    assert multiplier.num_timed == 1 and not multiplier.problems
    assert relative(found, linear.float()(x) + residual) < 0.05
    assert relative(found - residual.to(dtype), linear(x)) < 0.06


def config_of(path: Path, shape, out, **options: str) -> ModelConfig:
    return ModelConfig(
        "m", "1", "pytorch", str(path), (TensorSpec("x", "FP32", shape),),
        (TensorSpec("y", "FP32", out),), 16, BatchPolicy(16, is_dynamic=True), device="cuda",
        options=options,
    )  # fmt: skip


def answer(config: ModelConfig, x):
    runner = backend("pytorch")(config)
    # The first tunes, the next captures, the last replays.
    for _ in range(3):
        (found,) = runner.start(Batch({"x": x}, len(x))).wait()
    return torch.from_numpy(found["y"].copy()), runner.built()


@has_fp8
@pytest.mark.parametrize("kind", ["module.py", "model.onnx"])
def test_a_model_in_fp8_under_cuda_graphs(tmp_path: Path, kind):
    write_model = write_module if kind == "module.py" else write_onnx
    path = write_model(tmp_path, TRANSFORMER)
    x = np.random.default_rng(0).standard_normal((16, *SHAPE)).astype(np.float32)
    wanted, _ = answer(config_of(path, SHAPE, (10,)), x)
    found, built = answer(config_of(path, SHAPE, (10,), **FP8), x)
    assert 0 < relative(found, wanted) < 0.08
    assert built["fp8"].startswith("12 of 13 linear layers")
    assert built["fp8_inputs"] == "6 shared or fused"
    assert int(built["cuda_graphs"]) > 0
    assert built["products_timed"] != "0 forms"


@pytest.mark.parametrize("kind", ["module.py", "model.onnx"])
def test_layers_in_fp32_hold_what_fp16_does_not(tmp_path: Path, kind):
    source = MLP.replace("FACTOR = 1", "FACTOR = 1e7")
    is_code = kind == "module.py"
    path = write_module(tmp_path, source) if is_code else write_onnx(tmp_path, source, (64,))
    names = "middle,back" if is_code else "layer_1,layer_2"
    x = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    wanted, _ = answer(config_of(path, (64,), (64,)), x)
    half = {"penstock.dtype": "fp16", "penstock.cuda_graphs": "on"}
    broken, _ = answer(config_of(path, (64,), (64,), **half), x)
    assert not broken.isfinite().all()
    found, _ = answer(config_of(path, (64,), (64,), **half, **{"penstock.keep_fp32": names}), x)
    assert relative(found, wanted) < 5e-3


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_rows", [1, 7, 16, 40, 64])
@pytest.mark.parametrize(("depth", "width"), [(4096, 4096), (4096, 14336), (320, 50)])
def test_products_with_integer_weights(dtype, bits, num_rows, depth, width):
    torch.manual_seed(2)
    weight = quantise_weight(torch.randn(width, depth, device="cuda") / depth**0.5, bits)
    x = torch.randn(num_rows, depth, device="cuda").to(dtype)
    bias = torch.randn(width, device="cuda").to(dtype)
    found = weight_only_gemm.multiply(x, weight, bias)
    wanted = F.linear(x.double(), weight.matrix(torch.float64), bias.double())
    assert relative(found, wanted) < (2e-3 if dtype == torch.float16 else 1e-2)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 32, 128])
def test_matmul_nbits(bits, group):
    torch.manual_seed(3)
    depth, width = 256, 96
    packed = torch.randint(0, 256, (width, depth // group, group * bits // 8), dtype=torch.uint8)
    scales = torch.rand(width, depth // group)
    x = torch.randn(3, depth)
    shape = {"K": depth, "N": width, "bits": bits, "block_size": group}
    wanted = contrib.matmul_nbits(x, packed, scales, **shape)
    found = contrib.matmul_nbits(x.half().cuda(), packed.cuda(), scales.half().cuda(), **shape)
    assert relative(found, wanted) < 3e-3


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_model_with_integer_weights(tmp_path: Path, kind):
    path = write_module(tmp_path, TRANSFORMER)
    x = np.random.default_rng(0).standard_normal((8, *SHAPE)).astype(np.float32)
    wanted, _ = answer(config_of(path, SHAPE, (10,)), x)
    options = {"penstock.weights": kind, "penstock.dtype": "bf16", "penstock.cuda_graphs": "on"}
    found, built = answer(config_of(path, SHAPE, (10,), **options), x)
    assert 0 < relative(found, wanted) < (0.03 if kind == "int8" else 0.25)
    assert built["weights"].startswith(f"{kind}: 4 of 13")


def encoder_file(folder: Path) -> ModelConfig:
    """The encoder of tests/packable.py, as an ONNX file."""
    settings = {**USUAL, "width": 128, "inner": 256, "heads": 4, "output": "tokens"}
    config = write(folder, **{k: settings[k] for k in ("width", "inner", "heads", "output")})
    space: dict[str, object] = {}
    exec(SOURCE.format(**settings), space)
    from safetensors.torch import load_file

    module = space["factory"]().eval()
    module.load_state_dict(load_file(folder / "model.safetensors"))

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, ids, mask):
            return self.module(ids, mask)["y"]

    names, sizes = ["input_ids", "attention_mask"], {0: "n", 1: "s"}
    given = tuple(torch.from_numpy(each) for each in texts((9, 4), 16).values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Plain(), given, str(folder / "model.onnx"), dynamo=False, opset_version=17,
            input_names=names, output_names=["y"],
            dynamic_axes={name: sizes for name in (*names, "y")},
        )  # fmt: skip
    return replace(config, artifact=str(folder / "model.onnx"), device="cuda")


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp8", marks=has_fp8)])
def test_the_encoder_of_an_onnx_file_is_packed(tmp_path: Path, precision):
    config = encoder_file(tmp_path)
    inputs = texts((32, 1, 7, 20))
    plain = backend("pytorch")(config)
    (wanted,) = plain.start(Batch(inputs, 4)).wait()
    options = {"penstock.pack": "tokens", "penstock.dtype": "bf16", "penstock.cuda_graphs": "on"}
    options |= {"penstock.fp8": "rowwise"} if precision == "fp8" else {}
    config = replace(config, options=options)
    runner = backend("pytorch")(config)
    for _ in range(3):
        (found,) = runner.start(Batch(inputs, 4)).wait()
    assert runner.built()["pack"] == "tokens: 2 layers"
    assert ("fp8" in runner.built()) == (precision == "fp8")
    is_token = inputs["attention_mask"] != 0
    one, other = (torch.from_numpy(each["y"][is_token].copy()) for each in (found, wanted))
    assert 0 < relative(one, other) < (0.03 if precision == "bf16" else 0.1)
