"""Packed encoders on a real GPU: kernels against FP32, under CUDA graphs, and in FP8;
`make test-gpu`. Without one: tests/kernels and tests/backends/test_torch_packing.py."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.backends import backend
from penstock.config import ModelConfig
from penstock.serving.proof import prove
from penstock.serving.warmups import warm_up_all

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
pytest.importorskip("triton")

from packable import answer, texts, write  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from penstock.backends import torch_packing  # noqa: E402
from penstock.backends.pytorch import load_module  # noqa: E402
from penstock.kernels import encoder, layout, varlen  # noqa: E402
from penstock.kernels.packed_encoder import (  # noqa: E402
    BLOCK,
    LinearInput,
    PackedFp8Linear,
    PackedLinear,
    lay_out,
    plain_layout,
    quantise_input,
    to_fp8,
)
from penstock.kernels.packed_encoder import padded_attention as plain_attention  # noqa: E402

has_fp8 = pytest.mark.skipif(
    torch.cuda.get_device_capability() < (8, 9), reason="the GPU has no FP8"
)
PACKED = {"penstock.pack": "tokens", "penstock.cuda_graphs": "on"}
# The shapes of all-MiniLM-L6-v2.
MINILM = {"width": 384, "inner": 1536, "layers": 6, "heads": 12}


def relative(found, wanted) -> float:
    found, wanted = found.double().cpu(), wanted.double().cpu()
    return float((found - wanted).norm() / wanted.norm())


def a_layout(lengths, length: int, spare: int = 0):
    mask = torch.arange(length)[None, :] < torch.tensor(lengths)[:, None]
    return lay_out(mask.cuda(), sum(lengths) + spare)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("spare", [0, 1000])
def test_layout(dtype, spare):
    torch.manual_seed(0)
    mask = (torch.rand(200, 384) < torch.rand(200, 1)).to(dtype)
    num_tokens = int((mask != 0).sum()) + spare
    wanted = plain_layout(mask, num_tokens)
    for one, other in zip(layout.lay_out(mask.cuda(), num_tokens, BLOCK), wanted, strict=True):
        assert one.is_cuda and torch.equal(one.cpu(), other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("lengths", [(384, 1, 177, 64, 0, 65), (1,), (129,) * 40])
def test_attention(dtype, size, lengths):
    torch.manual_seed(0)
    lines = a_layout(lengths, 384, spare=100)
    total = sum(lengths)
    qkv = torch.randn(total + 100, 3 * 4 * size, device="cuda", dtype=dtype)
    found = varlen.attend(qkv, lines.blocks, 4)[:total]
    wanted = plain_attention(qkv.float(), lines, 4)[:total]
    assert relative(found, wanted) < 5e-3


@has_fp8
def test_attention_in_e4m3():
    blocks = a_layout((384, 1, 177, 64), 384).blocks
    qkv = torch.randn(626, 3 * 256, device="cuda", dtype=torch.bfloat16)
    inverse = torch.full((1,), 100.0, device="cuda")
    found = varlen.attend(qkv, blocks, 4, inverse)
    assert found.dtype == torch.float8_e4m3fn
    wanted = varlen.attend(qkv, blocks, 4)
    assert relative(found.float() / 100, wanted) < 4e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 384), (5000, 384), (4096, 1024), (77, 768)])
def test_add_norm(dtype, num_rows, width):
    norm = torch.nn.LayerNorm(width, 1e-12, device="cuda", dtype=dtype)
    norm.weight.data += 0.2 * torch.randn_like(norm.weight)
    norm.bias.data += 0.2 * torch.randn_like(norm.bias)
    one, other = (torch.randn(num_rows, width, device="cuda", dtype=dtype) for _ in range(2))
    with torch.no_grad():
        found, small = encoder.add_norm(one, other, norm)
        shapes = ((width,), norm.weight.float(), norm.bias.float(), 1e-12)
        wanted = F.layer_norm(one.float() + other.float(), *shapes)
    assert small is None and relative(found, wanted) < 5e-3


@has_fp8
def test_add_norm_in_e4m3():
    norm = torch.nn.LayerNorm(768, device="cuda", dtype=torch.bfloat16)
    one = torch.randn(300, 768, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        found, small = encoder.add_norm(one, one, norm, torch.full((1,), 50.0, device="cuda"))
    assert relative(small.float() / 50, found) < 4e-2


@pytest.mark.parametrize(("is_fast", "most"), [(False, 5e-3), (True, 6e-3)])
def test_gelu(is_fast, most):
    x = 2 * torch.randn(333, 1111, device="cuda", dtype=torch.bfloat16)
    wanted = F.gelu(x.float())
    assert relative(encoder.gelu(x, is_fast=is_fast), wanted) < most


@has_fp8
def test_gelu_in_e4m3():
    x = 2 * torch.randn(333, 1024, device="cuda", dtype=torch.bfloat16)
    x[0, 0] = 1000.0
    inverse = torch.full((1,), 40.0, device="cuda")
    found = encoder.gelu(x, inverse, is_fast=True).float() / 40
    assert float(found[0, 0]) == pytest.approx(448 / 40)
    found[0, 0] = x[0, 0] = 0
    assert relative(found, F.gelu(x.float())) < 5e-2


@has_fp8
def test_a_product_in_fp8_with_outlier_channels():
    torch.manual_seed(1)
    weight = torch.randn(512, 256, device="cuda")
    weight[7] *= 1000
    bias = torch.randn(512, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(333, 256, device="cuda")
    product = PackedFp8Linear(PackedLinear(weight, bias), float(x.abs().max()))
    found = product(LinearInput(to_fp8(x, product.inverse)), a_layout((333,), 333))
    wanted = x @ weight.t() + bias
    gaps = (found.float() - wanted).norm(dim=0) / wanted.norm(dim=0)
    assert float(gaps.max()) < 0.06


@has_fp8
@pytest.mark.parametrize(("num_rows", "width"), [(1, 384), (5000, 384), (4099, 1024), (77, 768)])
def test_add_norm_by_row(num_rows, width):
    norm = torch.nn.LayerNorm(width, device="cuda", dtype=torch.bfloat16)
    one = torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)
    scales = torch.full((num_rows, 1), float("nan"), device="cuda")
    with torch.no_grad():
        found, small = encoder.add_norm(one, one, norm, scales=scales)
    largest = found.float().abs().amax(1, keepdim=True)
    assert torch.allclose(scales, largest / 448, rtol=1e-2)
    assert relative(small.float() * scales, found) < 4e-2


@has_fp8
@pytest.mark.parametrize("has_gelu", [False, True])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 96), (5000, 1024), (4097, 4096)])
def test_rows_in_e4m3(num_rows, width, has_gelu):
    x = 2 * torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)
    x *= torch.logspace(-2, 2, num_rows, device="cuda")[:, None]
    scales = torch.full((num_rows, 1), float("nan"), device="cuda")
    small = encoder.quantise_rows(x, scales, has_gelu=has_gelu, is_fast=True)
    wanted = F.gelu(x.float()) if has_gelu else x.float()
    gaps = (small.float() * scales - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(gaps.max()) < 6e-2


@has_fp8
def test_a_product_in_fp8_by_row():
    torch.manual_seed(1)
    weight = torch.randn(512, 256, device="cuda")
    bias = torch.zeros(512, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(333, 256, device="cuda", dtype=torch.bfloat16)
    x *= torch.logspace(-3, 3, 333, device="cuda")[:, None]
    product = PackedFp8Linear(PackedLinear(weight, bias), None)
    found = product(quantise_input(x, product.scaling), a_layout((333,), 333))
    wanted = x.float() @ weight.t()
    gaps = (found.float() - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(gaps.max()) < 0.06


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return write(tmp_path / "m", **MINILM)


@pytest.mark.parametrize(("dtype", "most"), [("fp32", 2e-3), ("fp16", 2e-2), ("bf16", 6e-2)])
def test_packed_under_graphs_gives_what_the_cpu_gives(config, dtype, most):
    options = PACKED | {"penstock.dtype": dtype}
    runner = backend("pytorch")(replace(config, device="cuda", options=options))
    plain = backend("pytorch")(config)
    for seed in range(3):
        for lengths in ((32, 1, 7, 20), (32,) * 16, (5,), (1,) * 9):
            inputs = texts(lengths, seed=seed)
            wanted = answer(plain, inputs)
            gap = np.abs(answer(runner, inputs) - wanted).max() / np.abs(wanted).max()
            assert gap < most
    built = runner.built()
    assert built["pack"] == "tokens: 6 layers"
    assert int(built["cuda_graphs"]) >= 4 and "without_cuda_graph" not in built


def test_all_that_comes_was_captured_while_loading(config):
    served = replace(config, device="cuda", options=PACKED | {"penstock.dtype": "bf16"})
    served = replace(served, tolerance=0.05)
    runner = backend("pytorch")(served)
    proof = prove(served, runner)
    assert (proof.unbatched, proof.unpadded) == ("", "")
    warm_up_all(served, runner, proof)
    before = runner.built()["cuda_graphs"]
    for lengths in ((32,) * 16, (20,) * 16, (9, 30, 4, 2), (5,), (31,)):
        answer(runner, texts(lengths))
    assert runner.built()["cuda_graphs"] == before


def test_full_batches_of_a_budget_fill_a_graph_of_their_own(config):
    plain = backend("pytorch")(config)
    policy = replace(config.batching, max_tokens=200)
    served = replace(config, device="cuda", options=PACKED | {"penstock.dtype": "bf16"})
    served = replace(served, tolerance=0.05, batching=policy)
    runner = backend("pytorch")(served)
    proof = prove(served, runner)
    assert (proof.unbatched, proof.unpadded) == ("", "")
    warm_up_all(served, runner, proof)
    before = int(runner.built()["cuda_graphs"])
    for lengths in ((20,) * 10, (32,) * 6, (12,) * 16, (9, 30, 4, 2), (31,)):
        inputs = texts(lengths)
        wanted = answer(plain, inputs)
        assert np.abs(answer(runner, inputs) - wanted).max() / np.abs(wanted).max() < 6e-2
    assert int(runner.built()["cuda_graphs"]) == before
    # A request that is larger than a batch.
    answer(runner, texts((32,) * 16))
    assert int(runner.built()["cuda_graphs"]) == before + 1


@pytest.mark.parametrize("kind", ["Bert", "DistilBert"])
def test_hugging_face_under_graphs(config, kind):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 120,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 256,
    }
    names = ("vocab_size", "dim", "n_layers", "n_heads", "hidden_dim")
    if kind == "DistilBert":
        sizes = dict(zip(names, sizes.values(), strict=True))
    source = (
        f"from transformers import {kind}Config, {kind}ForSequenceClassification\n"
        f"def factory():\n"
        f"    return {kind}ForSequenceClassification({kind}Config(**{sizes}))\n"
    )
    Path(config.artifact).write_text(source)
    torch.manual_seed(0)
    classes = getattr(transformers, f"{kind}ForSequenceClassification")
    module = classes(getattr(transformers, f"{kind}Config")(**sizes))
    from safetensors.torch import save_file

    save_file(module.state_dict(), Path(config.artifact).with_name("model.safetensors"))
    (output,) = config.outputs
    config = replace(config, outputs=(replace(output, name="logits", shape=(2,)),))
    options = PACKED | {"penstock.dtype": "bf16"}
    runner = backend("pytorch")(replace(config, device="cuda", options=options))
    plain = backend("pytorch")(config)
    inputs = texts((32, 1, 7, 20))
    from penstock.backends import Batch

    for _ in range(2):
        found, wanted = (
            next(iter(each.start(Batch(inputs, 4)).wait()))["logits"].copy()
            for each in (runner, plain)
        )
        assert np.abs(found - wanted).max() < 3e-2
    assert "without_cuda_graph" not in runner.built()
    assert runner.built()["pack"] == "tokens: embeddings, 2 layers"


@has_fp8
def test_fp8_under_graphs_is_near(config):
    loaded = load_module(config)

    def call(inputs):
        return loaded.module(**inputs)

    packing = torch_packing.pack(loaded.module, call, config)
    given = [
        {name: torch.from_numpy(each) for name, each in texts((32, 20, 3), seed=seed).items()}
        for seed in range(4)
    ]
    ranges = torch_packing.calibrated(packing, call, given)
    loaded.close()
    Path(config.artifact).with_name("fp8.json").write_text(json.dumps(ranges))
    options = PACKED | {"penstock.dtype": "bf16", "penstock.fp8": "fp8.json"}
    runner = backend("pytorch")(replace(config, device="cuda", options=options))
    assert runner.built()["fp8"] == "24 of 24 products"
    assert runner.built()["fp8_gelu"].endswith(": 6 layers")
    plain = backend("pytorch")(config)
    for lengths in ((32, 1, 7, 20), (32,) * 16, (32, 1, 7, 20)):
        inputs = texts(lengths)
        found, wanted = answer(runner, inputs), answer(plain, inputs)
        assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 0.15
    assert "without_cuda_graph" not in runner.built()


@has_fp8
def test_fp8_by_row_under_graphs_is_near(config):
    options = PACKED | {"penstock.dtype": "bf16", "penstock.fp8": "rowwise"}
    runner = backend("pytorch")(replace(config, device="cuda", options=options))
    assert runner.built()["fp8"] == "24 of 24 products, each token by its own range"
    plain = backend("pytorch")(config)
    for lengths in ((32, 1, 7, 20), (32,) * 16, (32, 1, 7, 20)):
        inputs = texts(lengths)
        found, wanted = answer(runner, inputs), answer(plain, inputs)
        assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 0.15
    assert "without_cuda_graph" not in runner.built()


def test_which_gelu_runs_is_told(config):
    """In BF16 what a rounded product costs is more than the form with tanh does."""
    options = PACKED | {"penstock.dtype": "bf16"}
    runner = backend("pytorch")(replace(config, device="cuda", options=options))
    assert runner.built()["gelu"].startswith("with tanh: ")
    runner = backend("pytorch")(replace(config, device="cuda", options=PACKED))
    assert "gelu" not in runner.built()
