"""SwiGLU: the linear layers behind attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from penstock.llm.models.layer import MakeLinear, Place, make_linear
from penstock.llm.models.linear import AnyLinear


@dataclass(frozen=True, slots=True)
class SwiGlu:
    gate_up: AnyLinear
    down: AnyLinear

    @property
    def linears(self) -> Sequence[AnyLinear]:
        return self.gate_up, self.down

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, 1)
        return self.down(F.silu(gate).mul_(up))


def swiglu_sizes(prefix: str, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, width),
        f"{prefix}.up_proj.weight": (inner, width),
        f"{prefix}.down_proj.weight": (width, inner),
    }


def make_swiglu(prefix: str, place: Place, linear: MakeLinear) -> SwiGlu:
    gate_up = make_linear([f"{prefix}.gate_proj", f"{prefix}.up_proj"], place, linear)
    return SwiGlu(gate_up, make_linear([f"{prefix}.down_proj"], place, linear))
