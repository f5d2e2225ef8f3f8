"""Experts of a mixture in one GEMM, interpreted, against one expert after the other; in FP16, since
the interpreter takes BF16 for integers."""

import os

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    pytest.skip("tests/gpu has the real kernels", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from expert_cases import experts_case, one_by_one  # noqa: E402

from penstock.kernels import grouped_gemm  # noqa: E402


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_used", "width", "inner"),
    [(1, 4, 2, 32, 48), (9, 3, 1, 40, 24), (33, 8, 3, 64, 80), (70, 2, 2, 72, 64)],
)
def test_the_sum_of_the_experts_of_each_token(num_tokens, num_experts, num_used, width, inner):
    case = experts_case(num_tokens, num_experts, num_used, width, inner, torch.float16)
    torch.testing.assert_close(
        grouped_gemm.run_experts(*case).float(), one_by_one(*case), atol=4e-3, rtol=4e-3
    )


def test_experts_without_tokens_are_not_computed():
    x, gate_up, down, chosen, shares = experts_case(5, 6, 2, 32, 16, torch.float16)
    chosen = chosen % 2
    gate_up[2:], down[2:] = float("nan"), float("nan")
    case = x, gate_up, down, chosen, shares
    found = grouped_gemm.run_experts(*case).float()
    torch.testing.assert_close(found, one_by_one(*case), atol=4e-3, rtol=4e-3)
