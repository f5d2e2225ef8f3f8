"""Where tokens lie when a batch is packed, and that packing and padding undo each other."""

import pytest

torch = pytest.importorskip("torch")

from penstock.kernels.packed_encoder import BLOCK, add_norm, lay_out, packed, padded  # noqa: E402


def a_mask(lengths, length: int):
    return (torch.arange(length)[None, :] < torch.tensor(lengths)[:, None]).long()


def test_tokens_lie_in_the_order_of_rows_and_positions():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]])
    layout = lay_out(mask, 6)
    assert layout.places.tolist() == [0, 1, 7, 8, 9, 9]
    assert layout.is_token.tolist() == (mask == 1).tolist()


@pytest.mark.parametrize("lengths", [(5, 1, 200, 64), (200, 200), (1,), (65, 0, 128), (0, 0)])
@pytest.mark.parametrize("spare", [0, 1, 77])
def test_blocks_cover_every_token_once_and_know_its_sequence(lengths, spare):
    total = max(1, sum(lengths))
    layout = lay_out(a_mask(lengths, 200), total + spare)
    found = [[0, 0] for _ in range(total + spare)]
    count = [0] * (total + spare)
    for first, begin, end in layout.blocks.tolist():
        if end == 0:
            continue
        assert begin <= first < end
        for row in range(first, min(first + BLOCK, end)):
            count[row] += 1
            found[row] = [begin, end]
    wanted, at = [], 0
    for length in lengths:
        wanted += [[at, at + length]] * length
        at += length
    assert found[: len(wanted)] == wanted
    assert count == [1] * len(wanted) + [0] * (total + spare - len(wanted))


@pytest.mark.parametrize("spare", [0, 9])
def test_packing_and_padding_undo_each_other(spare):
    mask = a_mask((4, 1, 0, 7), 7)
    layout = lay_out(mask, 12 + spare)
    batch = torch.randn(4, 7, 3)
    back = padded(packed(batch, layout), layout)
    assert torch.equal(back, batch * mask[:, :, None])


def test_shapes_depend_on_the_batch_and_the_budget_alone():
    """As a graph, captured once, needs it."""
    one, other = (lay_out(a_mask(lengths, 90), 180) for lengths in ((90, 90), (1, 2)))
    for name in ("places", "is_token", "blocks", "ones"):
        assert getattr(one, name).shape == getattr(other, name).shape


def test_a_norm_without_bias_is_none_for_the_kernels(monkeypatch):
    monkeypatch.setattr("penstock.kernels.packed_encoder.uses_kernels", lambda x: True)
    norm = torch.nn.LayerNorm(8, bias=False)
    added, residual = torch.randn(3, 8), torch.randn(3, 8)
    x, taken = add_norm(added, residual, norm, None)
    assert torch.equal(x, norm(added + residual)) and taken.values is x
