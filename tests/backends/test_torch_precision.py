"""What `penstock.dtype` says of TF32 is what torch is told; it has the settings without a GPU."""

import warnings
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytorch = pytest.importorskip("penstock.backends.pytorch")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    allowed = torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = allowed


@pytest.mark.parametrize(
    ("dtype", "rounded"),
    [
        ("", "convolutions"),
        ("fp16", "convolutions"),
        ("fp32", "off"),
        ("tf32", "matrices,convolutions"),
    ],
)
def test_it_is_said_and_read_back_whatever_was_before(dtype: str, rounded: str) -> None:
    for before in ("tf32", "fp32", ""):
        pytorch.set_precision(before)
        pytorch.set_precision(dtype)
        assert pytorch.rounded() == rounded


def test_what_a_model_sets_itself_is_seen() -> None:
    pytorch.set_precision("")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert pytorch.rounded() == "matrices,convolutions"


def test_the_compiler_s_advice_is_not_heard() -> None:
    pytorch.set_precision("")
    # As Inductor says it; an error here unless it is passed over.
    warnings.warn("TensorFloat32 tensor cores for float32 ... not enabled.", stacklevel=1)
    with pytest.raises(UserWarning):
        warnings.warn("something else", stacklevel=1)
