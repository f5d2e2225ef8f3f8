"""The Execution of a backend that computes in `start`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.backends import Batch, Outputs, PerRequest


@dataclass(slots=True)
class Finished:
    outputs: Outputs | PerRequest
    prepare_s: float = 0.0
    finish_s: float = 0.0

    def wait(self) -> Iterable[Outputs | PerRequest]:
        return (self.outputs,)


def finish(batch: Batch, answers: Sequence[Outputs | Exception], *times: float) -> Finished:
    """Return the answers to the requests of a batch. Without `requests` there is one, which is
    raised if it is an error."""
    if batch.requests:
        return Finished(PerRequest(answers), *times)
    (answer,) = answers
    if isinstance(answer, Exception):
        raise answer
    return Finished(answer, *times)
