"""The Execution of a backend that computes in `start`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.backends import Outputs, PerRequest


@dataclass(slots=True)
class Finished:
    outputs: Outputs | PerRequest
    prepare_s: float = 0.0
    finish_s: float = 0.0

    def wait(self) -> Iterable[Outputs | PerRequest]:
        return (self.outputs,)
