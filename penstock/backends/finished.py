"""The Execution of a backend that computes in `start`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.backends import Batch, Outputs, PerRequest
from penstock.errors import InvalidRequest
from penstock.types import Parameter


@dataclass(slots=True)
class Finished:
    outputs: Outputs | PerRequest
    prepare_s: float = 0.0
    finish_s: float = 0.0

    def wait(self) -> Iterable[Outputs | PerRequest]:
        return (self.outputs,)


class Unanswered:
    """The execution of a decoupled runner, whose answers leave by `Batch.responders`."""

    prepare_s = finish_s = 0.0

    def wait(self) -> Iterable[Outputs | PerRequest]:
        return ()


def finish(
    batch: Batch,
    answers: Sequence[Outputs | Exception],
    *times: float,
    parameters: Sequence[Mapping[str, Parameter]] = (),
) -> Finished:
    """Return the answers to the requests of a batch, with their `parameters` if there are any.
    Without `requests` there is one, which is raised if it is an error."""
    if batch.requests:
        given = {index: each for index, each in enumerate(parameters) if each}
        return Finished(PerRequest(answers, given), *times)
    (answer,) = answers
    if isinstance(answer, Exception):
        raise answer
    return Finished(answer, *times)


def good_rows(rows: Sequence[Outputs | Exception]) -> list[Outputs] | Exception:
    """Return the rows of one request, or the first error among them. An error of one row of several
    says which one."""
    good: list[Outputs] = []
    for number, row in enumerate(rows):
        if isinstance(row, InvalidRequest) and len(rows) > 1:
            return InvalidRequest(f"row {number}: {row}", row.field, row.code)
        if isinstance(row, Exception):
            return row
        good.append(row)
    return good
