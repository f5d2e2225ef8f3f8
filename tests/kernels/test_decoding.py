"""What lies between the products of a language model, interpreted, against plain torch."""

import os

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    pytest.skip("tests/gpu has the real kernels", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from paged_cases import a_case  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from penstock.kernels import decoding  # noqa: E402
from penstock.llm import operations  # noqa: E402
from penstock.llm.models.norms import rms_norm  # noqa: E402
from penstock.llm.operations import Places  # noqa: E402


@pytest.mark.parametrize("width", [64, 96])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_add_norm(width, num_rows):
    torch.manual_seed(3)
    weight = 1 + 0.2 * torch.randn(width, dtype=torch.float16)
    added, residual = torch.randn(2, num_rows, width, dtype=torch.float16)
    found, total = decoding.add_norm(added, residual, weight, 1e-5)
    torch.testing.assert_close(total, added + residual)
    torch.testing.assert_close(found, rms_norm(added + residual, weight, 1e-5), atol=4e-3, rtol=0)
    found, total = decoding.add_norm(None, residual, weight, 1e-5)
    assert total is residual
    torch.testing.assert_close(found, rms_norm(residual, weight, 1e-5), atol=4e-3, rtol=0)


def test_add_norm_in_e4m3():
    """The interpreter rounds e4m3 worse than devices do, so there is room."""
    weight = torch.linspace(0.5, 3, 96, dtype=torch.float16)
    added, residual = torch.randn(2, 7, 96, dtype=torch.float16)
    scales = torch.full((7, 1), float("nan"))
    found, _ = decoding.add_norm(added, residual, weight, 1e-5, scales)
    wanted = rms_norm(added + residual, weight, 1e-5).float()
    torch.testing.assert_close(scales, wanted.abs().amax(1, keepdim=True) / 448, rtol=1e-2, atol=0)
    assert float((found.float() * scales - wanted).norm() / wanted.norm()) < 0.15


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("group", "num_kv_heads"), [(3, 1), (2, 4)])
@pytest.mark.parametrize("size", [16, 96])
def test_turn(size, group, num_kv_heads, has_norms):
    """A place without a token leaves everything as it was. Half of 96 is no power of two."""
    case = a_case([(9, 3), (0, 0), (20, 1)], group, num_kv_heads, size)
    places = Places(case.batch_table, 0, 1)
    torch.manual_seed(1)
    num_heads = group * num_kv_heads
    qkv = torch.randn(5, (num_heads + 2 * num_kv_heads) * size, dtype=torch.float16)
    norms = tuple(1 + 0.3 * torch.randn(2, size, dtype=torch.float16)) if has_norms else None
    angles = torch.rand(30, size // 2) * 6
    turns = torch.stack([angles.cos(), angles.sin()], 1)
    wanted, kept = qkv.clone(), [case.paged.keys.clone(), case.paged.values.clone()]
    operations.rope_to_cache(wanted, case.paged, places, turns, norms, 1e-5)
    wanted_kept = [case.paged.keys.clone(), case.paged.values.clone()]
    for target, before in zip((case.paged.keys, case.paged.values), kept, strict=True):
        target.copy_(before)
    found = qkv.clone()
    decoding.apply_rope(found, case.paged, turns, places.positions, places.rows, norms, 1e-5)
    is_there = case.batch_table[:, 1] >= 0
    queries = found[:, : num_heads * size]
    assert torch.equal(queries[~is_there], qkv[~is_there][:, : num_heads * size])
    close = {"atol": 4e-3, "rtol": 4e-3, "equal_nan": True}
    torch.testing.assert_close(queries[is_there], wanted[is_there][:, : num_heads * size], **close)
    for one, other in zip((case.paged.keys, case.paged.values), wanted_kept, strict=True):
        torch.testing.assert_close(one, other, **close)
    assert not torch.equal(case.paged.keys.nan_to_num(), kept[0].nan_to_num())


@pytest.mark.parametrize("shape", [(1, 16), (3, 2600)])
def test_gate(shape):
    x = 3 * torch.randn(shape, dtype=torch.float16)
    gate, up = x.chunk(2, 1)
    wanted = F.silu(gate.float()) * up.float()
    torch.testing.assert_close(decoding.gate(x).float(), wanted, atol=1e-2, rtol=2e-3)
    scales = torch.full((len(x), 1), float("nan"))
    small = decoding.gate(x, scales)
    assert small.dtype == torch.float8_e4m3fn
    assert float((small.float() * scales - wanted).norm() / wanted.norm()) < 0.15
