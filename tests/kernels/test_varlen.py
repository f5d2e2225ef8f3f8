"""The attention kernel, interpreted, against plain torch; in FP16, since the interpreter takes
BF16 for integers. With a GPU the real one is tested in tests/gpu."""

import os

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    pytest.skip("tests/gpu has the real kernels", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from penstock.kernels import varlen  # noqa: E402
from penstock.kernels.packed_encoder import lay_out, padded_attention  # noqa: E402


@pytest.mark.parametrize("lengths", [(130, 1, 65), (64, 128), (7,), (3, 0, 70)])
@pytest.mark.parametrize("size", [16, 32, 64])
def test_every_query_looks_at_its_own_sequence(lengths, size):
    torch.manual_seed(2)
    width, total = 2 * size, sum(lengths)
    mask = (torch.arange(130)[None, :] < torch.tensor(lengths)[:, None]).long()
    layout = lay_out(mask, total + 5)
    qkv = torch.randn(total + 5, 3 * width, dtype=torch.float16)
    found = varlen.attend(qkv, layout.blocks, 2)[:total]
    wanted = padded_attention(qkv.float(), layout, 2)[:total]
    assert torch.allclose(found.float(), wanted, atol=4e-3)


def test_large_scores_do_not_overflow():
    mask = torch.ones(1, 100)
    layout = lay_out(mask, 100)
    qkv = 60 * torch.randn(100, 96, dtype=torch.float16)
    found = varlen.attend(qkv, layout.blocks, 1)
    wanted = padded_attention(qkv.float(), layout, 1)
    assert torch.allclose(found.float(), wanted, rtol=1e-2, atol=0.5)
