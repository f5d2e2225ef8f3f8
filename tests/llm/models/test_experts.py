"""Mixtures of experts in plain torch: which experts a token goes through, and what is counted."""

import pytest

torch = pytest.importorskip("torch")

from expert_cases import experts_case, one_by_one  # noqa: E402

from penstock.llm.models.experts import expert_sizes, make_experts  # noqa: E402
from penstock.llm.models.linear import Linear  # noqa: E402
from penstock.llm.models.shape import Experts  # noqa: E402

WIDTH, INNER = 12, 8


@pytest.mark.parametrize("is_normalised", [False, True])
def test_each_token_goes_through_its_most_likely_experts(is_normalised):
    experts = Experts(5, 2, INNER, is_normalised)
    torch.manual_seed(2)
    weights = {name: torch.randn(size) for name, size in expert_sizes(experts, WIDTH).items()}

    def place(*names, is_wide=False):
        return torch.cat([weights[name] for name in names])

    layer = make_experts(experts, "mlp", place, Linear)
    x = torch.randn(7, WIDTH)
    likely = (x @ weights["mlp.gate.weight"].t()).softmax(1)
    shares, chosen = likely.topk(2, 1)
    if is_normalised:
        shares = shares / shares.sum(1, keepdim=True)
    numbers = range(5)
    names = [f"mlp.experts.{n}.{part}_proj.weight" for n in numbers for part in ("gate", "up")]
    gate_up = place(*names).unflatten(0, (5, -1))
    down = torch.stack([weights[f"mlp.experts.{n}.down_proj.weight"] for n in numbers])
    torch.testing.assert_close(layer(x), one_by_one(x, gate_up, down, chosen, shares))
    assert layer.load.tolist() == chosen.flatten().bincount(minlength=5).tolist()
    layer(x, torch.arange(7) < 3)
    assert int(layer.load.sum()) == 2 * (7 + 3), "tokens that are not there are not counted"
    assert len(layer.linears) == 10


def test_a_case_has_each_expert_of_a_token_once():
    *_, chosen, _ = experts_case(9, 6, 3, 8, 4, torch.float32)
    assert all(len(set(each)) == 3 for each in chosen.tolist())
