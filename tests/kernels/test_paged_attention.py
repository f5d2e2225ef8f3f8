"""Attention over blocks, interpreted, against plain torch; in FP16, since the interpreter takes
BF16 for integers. With a GPU the real one is tested in tests/gpu."""

import os

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    pytest.skip("tests/gpu has the real kernels", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from paged_cases import a_case, plain  # noqa: E402

from penstock.kernels import paged_attention  # noqa: E402

GROUPS = [(1, 2), (3, 1), (4, 2)]


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize(("group", "num_kv_heads"), GROUPS)
def test_one_token_sees_its_own_sequence(group, num_kv_heads, size, splits):
    case = a_case([(70, 1), (1, 1), (0, 1), (131, 1)], group, num_kv_heads, size)
    out = torch.full_like(case.queries, float("nan"))
    batch_table = case.batch_table
    paged_attention.attend_one(
        case.queries, case.paged, batch_table[:, 1], batch_table[:, 2], out, splits
    )
    torch.testing.assert_close(out.float(), plain(case), atol=4e-3, rtol=0)


@pytest.mark.parametrize("block_size", [4, 16, 128])
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize(("group", "num_kv_heads"), GROUPS)
def test_parts_of_prompts_see_what_came_before(group, num_kv_heads, size, block_size):
    """Beginnings, parts in the middle, and whole prompts longer than a line."""
    case = a_case([(150, 150), (90, 20), (65, 64), (3, 2)], group, num_kv_heads, size, block_size)
    out = torch.full_like(case.queries, float("nan"))
    paged_attention.attend_many(case.queries, case.paged, case.lines, out)
    torch.testing.assert_close(out.float(), plain(case), atol=4e-3, rtol=0)


# Windows shorter than a tile, as long as one, and longer than some sequences.
FORMS = [(5, 0.0), (64, 0.0), (100, 2.0), (0, 1.5)]


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("window", "cap"), FORMS)
def test_one_token_sees_its_window_with_capped_scores(window, cap, splits):
    sequences = [(70, 1), (1, 1), (0, 1), (131, 1), (300, 1)]
    case = a_case(sequences, 3, 1, 32, window=window, cap=cap)
    out = torch.full_like(case.queries, float("nan"))
    batch_table = case.batch_table
    paged_attention.attend_one(
        case.queries, case.paged, batch_table[:, 1], batch_table[:, 2], out, splits
    )
    torch.testing.assert_close(out.float(), plain(case), atol=4e-3, rtol=0)


@pytest.mark.parametrize(("window", "cap"), FORMS)
def test_prompts_see_their_windows_with_capped_scores(window, cap):
    case = a_case([(150, 150), (290, 20), (65, 64), (3, 2)], 2, 2, 16, window=window, cap=cap)
    out = torch.full_like(case.queries, float("nan"))
    paged_attention.attend_many(case.queries, case.paged, case.lines, out)
    torch.testing.assert_close(out.float(), plain(case), atol=4e-3, rtol=0)


def test_queries_may_lie_among_other_things():
    case = a_case([(40, 1), (9, 1)], 2, 2, 16)
    wide = torch.randn(2, 8, 16, dtype=torch.float16)
    wide[:, :4] = case.queries
    out = torch.empty_like(case.queries)
    batch_table = case.batch_table
    paged_attention.attend_one(
        wide[:, :4], case.paged, batch_table[:, 1], batch_table[:, 2], out, 1
    )
    torch.testing.assert_close(out.float(), plain(case), atol=4e-3, rtol=0)


def test_large_scores_do_not_overflow():
    case = a_case([(100, 1), (80, 1)], 2, 2, 32)
    case.queries.mul_(60)
    out = torch.empty_like(case.queries)
    for splits in (1, 8):
        batch_table = case.batch_table
        paged_attention.attend_one(
            case.queries, case.paged, batch_table[:, 1], batch_table[:, 2], out, splits
        )
        torch.testing.assert_close(out.float(), plain(case), atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("num_tokens", "splits"), [(1, 64), (2, 64), (16, 16), (64, 4), (132, 1), (256, 1)]
)
def test_few_tokens_are_cut_into_more_parts(num_tokens, splits):
    assert paged_attention.num_splits(num_tokens, 8) == splits
