"""Where tokens lie, by the kernel (interpreted) and by plain torch."""

import os

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    pytest.skip("tests/gpu has the real kernels", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from penstock.kernels import layout  # noqa: E402
from penstock.kernels.packed_encoder import BLOCK, plain_layout  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("lengths", [(130, 1, 65), (0, 128, 0, 64), (7,), (130,) * 5])
@pytest.mark.parametrize("spare", [0, 70])
def test_the_kernel_finds_what_torch_finds(dtype, lengths, spare):
    mask = (torch.arange(130)[None, :] < torch.tensor(lengths)[:, None]).to(dtype)
    num_tokens = sum(lengths) + spare
    for found, wanted in zip(
        layout.lay_out(mask, num_tokens, BLOCK), plain_layout(mask, num_tokens), strict=True
    ):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)


def test_masks_with_holes():
    torch.manual_seed(0)
    mask = (torch.rand(6, 100) < 0.4).long()
    num_tokens = int(mask.sum()) + 3
    for found, wanted in zip(
        layout.lay_out(mask, num_tokens, BLOCK), plain_layout(mask, num_tokens), strict=True
    ):
        assert torch.equal(found, wanted)
