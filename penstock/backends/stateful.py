"""A model whose requests are steps of sequences: its control inputs and its implicit states.

The server's core decides which requests run together and gives each live sequence of this worker a
slot (`serving.sequences`). Here the model gets what clients do not send: START, READY, END and
CORRID, and the state that it gave for the sequence's last request. With direct batching a request's
row is its slot, and slots without a request are rows of zeros that are not READY. States live and
end with the worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from penstock.backends import Batch, Execution, LoadRunner, Outputs, PerRequest, Runner
from penstock.backends.finished import Finished
from penstock.config import ModelConfig, SequenceControl, SequenceState
from penstock.errors import BackendFailed, ConfigError
from penstock.types import DATATYPES, Array, Parameter, Tensor, shape_fits, to_array
from penstock.wire.frames import RequestPart

ID, START, END = "sequence_id", "sequence_start", "sequence_end"
States: TypeAlias = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Row:
    """What one row of a batch is to its sequence; `number` counts the requests of the batch, and is
    negative for a slot without one."""

    number: int
    part: RequestPart
    id: Parameter = 0
    is_start: bool = False
    is_end: bool = False
    is_ready: bool = True

    @classmethod
    def from_part(cls, number: int, part: RequestPart) -> Row:
        if part.slot < 0:
            # A warm-up request: a sequence of its own.
            return cls(number, part, is_start=True, is_end=True)
        given = part.parameters
        is_start, is_end = bool(given.get(START)), bool(given.get(END))
        return cls(number, part, given.get(ID, 0), is_start, is_end)


class Stateful(Runner):
    """The runner of a model, with control inputs and states around it. Computes in `start`."""

    needs_requests = True
    # Which rows share a batch is part of what the model was written for.
    keeps_rows_apart = True

    def __init__(self, config: ModelConfig, inner: Runner) -> None:
        assert config.sequences is not None
        self.inner = inner
        self.inputs, self.outputs = inner.inputs, inner.outputs
        self._config = config
        self._policy = policy = config.sequences
        self._has_batch = config.max_batch_size > 0
        self._shown = {spec.name for spec in config.outputs}
        self._initial = {state.input: read_initial(state) for state in policy.states}
        # By slot: the sequence's id, and its states by the names of the inputs.
        self._slots: dict[int, tuple[Parameter, States]] = {}

    def built(self) -> Mapping[str, str]:
        return self.inner.built()

    def start(self, batch: Batch) -> Execution:
        parts = [part for part in batch.requests if isinstance(part, RequestPart)]
        rows = [Row.from_part(number, part) for number, part in enumerate(parts)]
        answers: list[Outputs | Exception] = [BackendFailed("the sequence was lost")] * len(rows)
        parameters: dict[int, Mapping[str, Parameter]] = {}
        groups: dict[object, list[tuple[Row, States]]] = {}
        for row in rows:
            states = self._states(row)
            if states is not None:
                shapes = tuple(values.shape for values in states.values())
                groups.setdefault(shapes, []).append((row, states))
        # States of different shapes cannot share a batch.
        for group in groups.values():
            for row, answer in self._run(batch, group, parameters):
                answers[row.number] = self._keep(row, answer)
        return Finished(PerRequest(answers, parameters))

    def close(self) -> None:
        self._slots.clear()
        self.inner.close()

    def compiled(self) -> Mapping[str, bytes]:
        return self.inner.compiled()

    def settle(self) -> None:
        self.inner.settle()

    @property
    def restart_reason(self) -> str:
        return self.inner.restart_reason

    def is_lost(self) -> bool:
        return self.inner.is_lost()

    def _states(self, row: Row) -> States | None:
        """Return the states that a request gets; None if its sequence has none here."""
        if not self._policy.states or row.is_start:
            return self._initial
        held = self._slots.get(row.part.slot)
        return held[1] if held is not None and held[0] == row.id else None

    def _run(
        self,
        batch: Batch,
        group: Sequence[tuple[Row, States]],
        parameters: dict[int, Mapping[str, Parameter]],
    ) -> list[tuple[Row, Outputs | Exception]]:
        """Run requests whose states have the same shapes; return each with the model's answer, in
        the order of the model's batch. `parameters` gets those of the answers."""
        rows = self._placed([row for row, _ in group])
        states = {row.number: states for row, states in group}
        empty = {name: np.zeros_like(values) for name, values in group[0][1].items()}
        inputs = {
            name: self._take(values, [row.number for row in rows])
            for name, values in batch.inputs.items()
        }
        for control in self._policy.controls:
            inputs[control.input] = self._control(control, rows)
        for name in self._initial:
            inputs[name] = self._stack([states.get(row.number, empty)[name] for row in rows])
        for values in inputs.values():
            values.flags.writeable = False
        try:
            (answer,) = self.inner.start(Batch(inputs, len(rows), self._parts(rows))).wait()
        except Exception as error:  # Any exception of the model is answered.
            return [(row, error) for row, _ in group]
        if isinstance(answer, PerRequest):
            if len(answer.answers) != len(rows):
                text = f"{len(answer.answers)} answers to {len(rows)} requests"
                return [(row, BackendFailed(f"the model gave {text}")) for row, _ in group]
            each = answer.answers
            told = {rows[index].number: own for index, own in answer.parameters.items()}
            parameters |= {number: own for number, own in told.items() if number >= 0}
        else:
            each = [self._row(answer, index, len(rows)) for index in range(len(rows))]
        return [pair for pair in zip(rows, each, strict=True) if pair[0].number >= 0]

    def _placed(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of the model's batch."""
        if not self._policy.is_direct or not self._has_batch or rows[0].part.slot < 0:
            return list(rows)
        by_slot = {row.part.slot: row for row in rows}
        empty = Row(-1, RequestPart("", 1), is_ready=False)
        return [by_slot.get(slot, empty) for slot in range(max(by_slot) + 1)]

    def _parts(self, rows: Sequence[Row]) -> list[RequestPart]:
        """Return the requests as the model sees them: its states are always asked for."""
        kept = [state.output for state in self._policy.states]
        return [
            RequestPart(
                row.part.id,
                row.part.num_rows,
                outputs=tuple(dict.fromkeys((*row.part.outputs, *kept)))
                if row.part.outputs
                else (),
                parameters=row.part.parameters,
                slot=row.part.slot,
            )
            for row in rows
        ]

    def _take(self, values: Array, numbers: Sequence[int]) -> Array:
        """Return the rows of an input in the order of the model's batch."""
        if not self._has_batch:
            return values.view()
        taken = values[[max(0, number) for number in numbers]]
        for index, number in enumerate(numbers):
            if number < 0:
                taken[index] = b"" if values.dtype == np.object_ else 0
        return taken

    def _control(self, control: SequenceControl, rows: Sequence[Row]) -> Array:
        dtype = DATATYPES[control.datatype].numpy
        made: list[object]
        match control.kind:
            case "CORRID":
                made = [_id_value(row.id, control.datatype) for row in rows]
            case "START":
                made = [control.false_true[row.is_start] for row in rows]
            case "END":
                made = [control.false_true[row.is_end] for row in rows]
            case "READY":
                made = [control.false_true[row.is_ready] for row in rows]
        values = np.array(made, dtype)
        return values.reshape(-1, 1) if self._has_batch else values

    def _stack(self, values: Sequence[Array]) -> Array:
        return np.stack(values) if self._has_batch else values[0].view()

    def _row(self, outputs: Outputs, index: int, num_rows: int) -> Outputs | Exception:
        if not self._has_batch:
            return outputs
        for name, values in outputs.items():
            if len(values) != num_rows:
                text = f"output '{name}': {len(values)} rows, expected {num_rows}"
                return BackendFailed(text)
        return {name: values[index : index + 1] for name, values in outputs.items()}

    def _keep(self, row: Row, answer: Outputs | Exception) -> Outputs | Exception:
        """Keep the states of an answer for the next request, and return what clients see of it. An
        error leaves the states as they were."""
        if isinstance(answer, Exception):
            return answer
        try:
            states = {state.input: self._state(state, answer) for state in self._policy.states}
        except BackendFailed as error:
            return error
        if row.is_end:
            self._slots.pop(row.part.slot, None)
        elif row.part.slot >= 0:
            self._slots[row.part.slot] = row.id, states
        return {name: values for name, values in answer.items() if name in self._shown}

    def _state(self, state: SequenceState, answer: Outputs) -> Array:
        values = answer.get(state.output)
        where = f"state '{state.output}'"
        if values is None:
            raise BackendFailed(f"{where}: the model gave no such output")
        own = values[0, ...] if self._has_batch else values
        dtype = DATATYPES[state.datatype].numpy
        if own.dtype != dtype and (dtype != np.object_ or own.dtype.kind not in "SU"):
            raise BackendFailed(f"{where}: numpy {own.dtype}, expected {dtype}")
        if not shape_fits(own.shape, state.shape):
            shapes = f"shape {list(own.shape)}, expected {list(state.shape)}"
            raise BackendFailed(f"{where}: {shapes}")
        return np.array(own, dtype)


def read_initial(state: SequenceState) -> Array:
    """Return what the first request of a sequence gets. ConfigError if the file does not fit."""
    shape = state.initial_shape
    if not state.file:
        if state.datatype == "BYTES":
            return np.full(shape, b"", np.object_)
        return np.zeros(shape, DATATYPES[state.datatype].numpy)
    path = Path(state.folder) / state.file
    try:
        data = path.read_bytes()
        return np.array(to_array(Tensor(state.input, state.datatype, shape, data)))
    except (OSError, ValueError) as error:
        where = f"sequence_batching.state: initial state '{state.file}'"
        expected = f"expected {state.datatype} values of shape {list(shape)}"
        raise ConfigError(f"{where}: {error}; {expected}") from None


def _id_value(id: Parameter, datatype: str) -> object:
    if datatype == "BYTES":
        return id.encode() if isinstance(id, str) else b""
    return id if isinstance(id, int) else 0


def load(config: ModelConfig, load_model: LoadRunner) -> Runner:
    """Load a model of sequences."""
    return Stateful(config, load_model(config.in_sequences))
