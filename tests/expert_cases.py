"""Tokens and the experts that a router has chosen for them, and the same in FP32."""

import torch
from torch.nn import functional as F


def experts_case(num_tokens, num_experts, num_used, width, inner, dtype, device="cpu"):
    """Arguments of `run_experts`."""
    torch.manual_seed(8)
    x = torch.randn(num_tokens, width)
    gate_up = torch.randn(num_experts, 2 * inner, width) * width**-0.5
    down = torch.randn(num_experts, width, inner) * inner**-0.5
    likely = torch.rand(num_tokens, num_experts)
    shares, chosen = likely.topk(num_used, 1)
    floats = [each.to(device, dtype) for each in (x, gate_up, down, shares)]
    return *floats[:3], chosen.to(device), floats[3]


def one_by_one(x, gate_up, down, chosen, shares) -> torch.Tensor:
    x, gate_up, down, shares = (each.float() for each in (x, gate_up, down, shares))
    found = torch.zeros_like(x)
    for token, experts in enumerate(chosen.tolist()):
        for place, expert in enumerate(experts):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            found[token] += shares[token, place] * (down[expert] @ (F.silu(gate) * up))
    return found
