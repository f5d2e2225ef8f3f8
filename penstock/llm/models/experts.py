"""Mixture of experts: each token goes through the few experts that a router chooses for it. One
expert after the other in plain torch; all together by a grouped GEMM on GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.packed_encoder import uses_kernels
from penstock.llm.models.feed import SwiGlu, make_swiglu, swiglu_sizes
from penstock.llm.models.int4 import FixedRowsLinear
from penstock.llm.models.layer import MakeLinear, Place
from penstock.llm.models.linear import AnyLinear, Linear
from penstock.llm.models.shape import Experts


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of all experts in two tensors, for the kernel: [experts, gate and up, width] and
    [experts, width, inner]."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    sizes: Experts
    router: AnyLinear
    experts: Sequence[SwiGlu] | ExpertWeights
    # Tokens that each expert has computed.
    load: Tensor

    @property
    def linears(self) -> Sequence[AnyLinear]:
        if isinstance(self.experts, ExpertWeights):
            return ()
        return [each for expert in self.experts for each in expert.linears]

    def __call__(self, x: Tensor, is_there: Tensor | None = None) -> Tensor:
        """Return [tokens, width]. Tokens that are not there are left out of the load."""
        shares, chosen = self._route(x)
        flat = chosen.flatten()
        counted = torch.ones_like(flat)
        if is_there is not None:
            counted = is_there[:, None].expand(chosen.shape).flatten().to(flat.dtype)
        self.load.scatter_add_(0, flat, counted)
        if isinstance(self.experts, ExpertWeights):
            from penstock.kernels import grouped_gemm

            weights = self.experts.gate_up, self.experts.down
            return grouped_gemm.run_experts(x, *weights, chosen, shares)
        found = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            tokens, place = (chosen == number).nonzero(as_tuple=True)
            own = self.experts[number](x[tokens]) * shares[tokens, place, None]
            found.index_add_(0, tokens, own)
        return found

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each token, and the share of each: [tokens, experts]."""
        likely = self.router(x).float().softmax(1)
        shares, chosen = likely.topk(self.sizes.num_used, 1)
        if self.sizes.is_normalised:
            shares = shares / shares.sum(1, keepdim=True)
        return shares.to(x.dtype), chosen


class ExpertLoad:
    """How many tokens each expert has computed, in all layers together."""

    def __init__(self, loads: Sequence[Tensor]) -> None:
        self._loads = loads
        self._taken = self._totals()

    def take(self) -> tuple[int, ...]:
        """Return the tokens since the last time; empty without experts. Does not wait for steps in
        flight, whose tokens may come with the next time."""
        before, self._taken = self._taken, self._totals()
        return tuple(now - then for now, then in zip(self._taken, before, strict=True))

    def _totals(self) -> list[int]:
        if not self._loads:
            return []
        found: list[int] = torch.stack(list(self._loads)).sum(0).tolist()
        return found


def expert_sizes(experts: Experts, width: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts.num, width)}
    for number in range(experts.num):
        found |= swiglu_sizes(f"mlp.experts.{number}", width, experts.inner)
    return found


def make_experts(experts: Experts, prefix: str, place: Place, linear: MakeLinear) -> ExpertLayer:
    weight = place(f"{prefix}.gate.weight")
    # A token's experts must not depend on the batch.
    router = Linear(weight, None) if weight.is_cuda else FixedRowsLinear(weight, None)
    prefixes = [f"{prefix}.experts.{number}" for number in range(experts.num)]
    load = torch.zeros(experts.num, dtype=torch.int64, device=weight.device)
    if uses_kernels(weight):
        return ExpertLayer(experts, router, _make_weights(experts, prefixes, place), load)
    own = [make_swiglu(each, place, linear) for each in prefixes]
    return ExpertLayer(experts, router, own, load)


def _make_weights(experts: Experts, prefixes: Sequence[str], place: Place) -> ExpertWeights:
    first = [f"{each}.{name}_proj.weight" for each in prefixes for name in ("gate", "up")]
    gate_up = place(*first).unflatten(0, (experts.num, 2 * experts.inner))
    down = place(*(f"{each}.down_proj.weight" for each in prefixes))
    return ExpertWeights(gate_up, down.unflatten(0, (experts.num, -1)))
