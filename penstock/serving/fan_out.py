"""One request as many: its tensors are divided into rows, each row is a request, and the outputs
of all rows are joined in their order. Pure; `ensemble_run` sends the requests."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config import FanOutLimits
from penstock.errors import BackendFailed, TooLarge
from penstock.repository.ensemble_parameters import LIMIT
from penstock.repository.ensemble_rules import adapt_shape
from penstock.types import Buffer, Tensor, TensorSpec, num_elements

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class SplitInput:
    """A tensor in `count` parts of the same `shape`; each part goes to so many rows that all rows
    have one. One part is the whole tensor, for all rows."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    count: int
    data: Buffer


class FanOut:
    """The rows of one request: which of them is sent next, and the outputs that came.

    Invariant: each row is sent once, in order, and at most `max_in_flight` of them have been sent
    and not answered.
    """

    __slots__ = ("_bounds", "_inputs", "_is_own", "_max_in_flight", "_num_answered", "_num_sent",
                 "_outputs", "is_sending", "lead", "num_rows")  # fmt: skip

    def __init__(
        self, inputs: Sequence[SplitInput], lead: tuple[int, ...], max_in_flight: int
    ) -> None:
        """`lead` are the first dimensions of the joined outputs; their product is the number of
        rows."""
        self._inputs = list(inputs)
        self._bounds = [_find_bounds(each) for each in inputs]
        self._max_in_flight = max_in_flight
        self._num_sent = self._num_answered = 0
        self._is_own = False
        self.lead = lead
        self.num_rows = num_elements(lead)
        # By output: datatype, shape of a row, and the rows.
        self._outputs: dict[str, tuple[str, tuple[int, ...], list[bytes]]] = {}
        # Set by the sender: an answer that comes during `submit` sends nothing by itself.
        self.is_sending = False

    @property
    def is_complete(self) -> bool:
        return self._num_answered == self.num_rows

    def next_row(self) -> int | None:
        """Return the row to send now; None: all are sent, or enough are in flight."""
        row = self._num_sent
        if row == self.num_rows or row - self._num_answered >= self._max_in_flight:
            return None
        self._num_sent += 1
        return row

    def row(self, row: int, *, has_batch: bool) -> list[Tensor]:
        """Return views of the inputs of a row, for a model with or without a batch dimension."""
        tensors: list[Tensor] = []
        for each, bounds in zip(self._inputs, self._bounds, strict=True):
            part = row * each.count // self.num_rows
            data = memoryview(each.data)[bounds[part] : bounds[part + 1]]
            shape = (1, *each.shape) if has_batch else each.shape
            tensors.append(Tensor(each.name, each.datatype, shape, data))
        return tensors

    def keep(self) -> None:
        """Copy what is still to be sent: the inputs are valid during this call only."""
        if self._is_own or self._num_sent == self.num_rows:
            return
        self._is_own = True
        self._inputs = [
            SplitInput(each.name, each.datatype, each.shape, each.count, bytes(each.data))
            for each in self._inputs
        ]

    def take(self, row: int, outputs: Sequence[Tensor], *, has_batch: bool) -> None:
        """Copy the outputs of a row. BackendFailed if those of other rows have other shapes."""
        for each in outputs:
            shape = each.shape[1:] if has_batch else each.shape
            if has_batch and each.shape[:1] != (1,):
                raise BackendFailed(
                    f"output '{each.name}' has shape {list(each.shape)} for one row"
                )
            known = self._outputs.get(each.name)
            if known is None:
                known = each.datatype, shape, [b""] * self.num_rows
                self._outputs[each.name] = known
            elif known[:2] != (each.datatype, shape):
                raise BackendFailed(
                    f"output '{each.name}' has shape {list(shape)} for row {row} and "
                    f"{list(known[1])} for another; rows are joined if they have the same"
                )
            known[2][row] = bytes(each.data)
        self._num_answered += 1

    def join(self, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Return the outputs of all rows. Without a row, they have the dimensions of `specs`, and 0
        for variable ones."""
        if self.num_rows:
            return [
                Tensor(name, datatype, (*self.lead, *shape), b"".join(rows))
                for name, (datatype, shape, rows) in self._outputs.items()
            ]
        return [
            Tensor(each.name, each.datatype, (*self.lead, *(max(0, n) for n in each.shape)), b"")
            for each in specs
        ]


def _find_bounds(tensor: SplitInput) -> Sequence[int]:
    """Return where each part of a buffer begins, and the end of the last one."""
    count, end = tensor.count, len(tensor.data)
    if tensor.datatype != "BYTES":
        size = end // max(1, count)
        return range(0, count * size + 1, size) if size else (0,) * (count + 1)
    elements, bounds, position = num_elements(tensor.shape), [0], 0
    for _ in range(count):
        for _ in range(elements):
            position += 4 + _LENGTH.unpack_from(tensor.data, position)[0]
        bounds.append(position)
    return bounds


def split_rows(
    inputs: Sequence[tuple[TensorSpec, Tensor, bool]], limits: FanOutLimits, *, has_batch: bool
) -> FanOut:
    """Divide the inputs of a step: each is the member's input, the tensor, and whether each row of
    it is a request. `has_batch`: tensors have a batch dimension before their rows."""
    leads = {
        tensor.name: _find_lead(spec, tensor, has_batch=has_batch)
        for spec, tensor, is_split in inputs
        if is_split
    }
    (first, lead), *others = leads.items()
    for name, other in others:
        if other != lead:
            text = f"'{first}' has {lead[-1]} and '{name}' has {other[-1]} rows; expected the same"
            raise BackendFailed(text)
    num_rows = num_elements(lead)
    if num_rows > limits.max_rows:
        raise TooLarge(f"'{first}' has {num_rows} rows; at most {limits.max_rows} ({LIMIT})")
    parts: list[SplitInput] = []
    for spec, tensor, is_split in inputs:
        shape, count = tensor.shape, 1
        if is_split:
            shape, count = shape[len(shape) - len(spec.shape) :], num_rows
        elif has_batch:
            shape, count = shape[1:], shape[0]
        else:
            shape = adapt_shape(shape, spec, has_batch=False)
        parts.append(SplitInput(spec.name, tensor.datatype, shape, count, tensor.data))
    return FanOut(parts, lead, limits.max_in_flight)


def split_batch(tensors: Sequence[Tensor]) -> FanOut:
    """Divide a batched request into requests of one row."""
    num_rows = tensors[0].shape[0]
    parts = [SplitInput(t.name, t.datatype, t.shape[1:], num_rows, t.data) for t in tensors]
    return FanOut(parts, (num_rows,), num_rows)


def _find_lead(spec: TensorSpec, tensor: Tensor, *, has_batch: bool) -> tuple[int, ...]:
    """Return the dimensions of a tensor before those of one row."""
    lead = tensor.shape[: max(0, len(tensor.shape) - len(spec.shape))]
    if not has_batch and len(lead) == 2 and lead[0] == 1:
        lead = lead[1:]
    if len(lead) != 1 + has_batch:
        expected = ["*"] * (1 + has_batch) + [str(size) for size in spec.shape]
        text = f"expected [{', '.join(expected)}], as input '{spec.name}' is of each row"
        raise BackendFailed(f"'{tensor.name}' has shape {list(tensor.shape)}; {text}")
    return lead
