"""RNN, GRU and LSTM in ONNX's form: a loop over time steps, one direction after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.backends.onnx_import import elementwise
from penstock.backends.onnx_import.values import OnnxOperator
from penstock.errors import ConfigError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": elementwise.elu,
    "hardsigmoid": elementwise.hard_sigmoid,
    "leakyrelu": elementwise.leaky_relu,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "softplus": elementwise.softplus,
    "softsign": torch.nn.functional.softsign,
    "tanh": torch.tanh,
    "thresholdedrelu": elementwise.thresholded_relu,
}
# Input tensors, states before a step, and what they give: the states after it.
TimeStep = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Inputs and attributes that the three operators have in common."""

    x: Tensor
    lengths: Tensor | None
    direction: str
    layout: int
    clip: float

    def bounded(self, x: Tensor) -> Tensor:
        return x.clamp(-self.clip, self.clip) if self.clip else x

    @property
    def is_reversed(self) -> list[bool]:
        return {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[
            self.direction
        ]

    def run(
        self, steps: Sequence[TimeStep], states: Sequence[Tensor | None], size: int
    ) -> tuple[Tensor, ...]:
        """Return the outputs of all steps, and the last states, in the layout that is asked for."""
        x = self.x.transpose(0, 1) if self.layout else self.x
        outputs, last = [], []
        for number, (step, is_reversed) in enumerate(zip(steps, self.is_reversed, strict=True)):
            first = tuple(
                x.new_zeros(x.shape[1], size) if each is None else self._initial(each, number)
                for each in states
            )
            found, state = self._run_one(x, step, first, is_reversed)
            outputs.append(found)
            last.append(state)
        every = torch.stack(outputs, 1)
        ends = [torch.stack(parts) for parts in zip(*last, strict=True)]
        if self.layout:
            return (every.permute(2, 0, 1, 3), *(each.transpose(0, 1) for each in ends))
        return (every, *ends)

    def _initial(self, state: Tensor, number: int) -> Tensor:
        return state[:, number] if self.layout else state[number]

    def _run_one(
        self, x: Tensor, step: TimeStep, states: tuple[Tensor, ...], is_reversed: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        times = range(len(x))
        outputs: list[Tensor] = [x] * len(x)
        for time in reversed(times) if is_reversed else times:
            after = step(x[time], states)
            if self.lengths is not None:
                is_there = (self.lengths.to(x.device) > time)[:, None]
                after = tuple(
                    torch.where(is_there, new, old) for new, old in zip(after, states, strict=True)
                )
                outputs[time] = torch.where(is_there, after[0], torch.zeros_like(after[0]))
            else:
                outputs[time] = after[0]
            states = after
        return torch.stack(outputs), states


def _biases(bias: Tensor | None, number: int, like: Tensor) -> tuple[Tensor, Tensor]:
    if bias is None:
        none = like.new_zeros(like.shape[1])
        return none, none
    one, other = bias[number].chunk(2)
    return one, other


def _functions(
    names: Sequence[str], default: Sequence[str], number: int
) -> list[Callable[[Tensor], Tensor]]:
    chosen = [each.lower() for each in names][number * len(default) :][: len(default)] or default
    if unknown := [each for each in chosen if each not in ACTIVATIONS]:
        raise ConfigError(f"activation {unknown[0]} of a recurrent layer is not supported")
    return [ACTIVATIONS[each] for each in chosen]


def rnn(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    state: Tensor | None = None,
    *,
    activations: Sequence[str] = (),
    clip: float = 0.0,
    direction: str = "forward",
    hidden_size: int = 0,
    layout: int = 0,
) -> tuple[Tensor, ...]:
    loop = Recurrence(x, lengths, direction, layout, clip)

    def make(number: int) -> TimeStep:
        (activate,) = _functions(activations, ("tanh",), number)
        one, other = _biases(bias, number, w)

        def step(now: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            total = now @ w[number].t() + states[0] @ r[number].t() + one + other
            return (activate(loop.bounded(total)),)

        return step

    return loop.run([make(n) for n in range(len(w))], [state], r.shape[-1])


def gru(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    state: Tensor | None = None,
    *,
    activations: Sequence[str] = (),
    clip: float = 0.0,
    direction: str = "forward",
    hidden_size: int = 0,
    layout: int = 0,
    linear_before_reset: int = 0,
) -> tuple[Tensor, ...]:
    loop = Recurrence(x, lengths, direction, layout, clip)
    size = r.shape[-1]

    def make(number: int) -> TimeStep:
        gate, activate = _functions(activations, ("sigmoid", "tanh"), number)
        one, other = _biases(bias, number, w)
        inner, hidden = w[number].t(), r[number].t()

        def step(now: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            (before,) = states
            given = now @ inner + one
            known = before @ hidden[:, : 2 * size] + other[: 2 * size]
            update, reset = gate(loop.bounded(given[:, : 2 * size] + known)).chunk(2, -1)
            last = hidden[:, 2 * size :], other[2 * size :]
            if linear_before_reset:
                memory = reset * (before @ last[0] + last[1])
            else:
                memory = (reset * before) @ last[0] + last[1]
            new = activate(loop.bounded(given[:, 2 * size :] + memory))
            return ((1 - update) * new + update * before,)

        return step

    return loop.run([make(n) for n in range(len(w))], [state], size)


def lstm(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    state: Tensor | None = None,
    cell: Tensor | None = None,
    peepholes: Tensor | None = None,
    *,
    activations: Sequence[str] = (),
    clip: float = 0.0,
    direction: str = "forward",
    hidden_size: int = 0,
    input_forget: int = 0,
    layout: int = 0,
) -> tuple[Tensor, ...]:
    if input_forget:
        raise ConfigError("LSTM: input_forget is not supported")
    loop = Recurrence(x, lengths, direction, layout, clip)
    return LstmLayer(w, r, bias, peepholes, activations).run(loop, state, cell)


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True)
class LstmLayer:
    """Weights of an LSTM, by direction."""

    w: Tensor
    r: Tensor
    bias: Tensor | None
    peepholes: Tensor | None
    activations: Sequence[str]
    # Applied to the state before each product.
    rounded: Callable[[Tensor], Tensor] = _same

    def run(
        self, loop: Recurrence, state: Tensor | None, cell: Tensor | None
    ) -> tuple[Tensor, ...]:
        steps = [self._step(loop, number) for number in range(len(self.w))]
        return loop.run(steps, [state, cell], self.r.shape[-1])

    def _step(self, loop: Recurrence, number: int) -> TimeStep:
        gate, enter, leave = _functions(self.activations, ("sigmoid", "tanh", "tanh"), number)
        one, other = _biases(self.bias, number, self.w)
        inner, hidden, biases = self.w[number].t(), self.r[number].t(), one + other
        if self.peepholes is None:
            peep_in = peep_out = peep_forget = loop.x.new_zeros(())
        else:
            peep_in, peep_out, peep_forget = self.peepholes[number].chunk(3)

        def step(now: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            before, memory = states
            parts = (now @ inner + self.rounded(before) @ hidden + biases).chunk(4, -1)
            entered = gate(loop.bounded(parts[0] + peep_in * memory))
            kept = gate(loop.bounded(parts[2] + peep_forget * memory))
            memory = kept * memory + entered * enter(loop.bounded(parts[3]))
            shown = gate(loop.bounded(parts[1] + peep_out * memory))
            return shown * leave(memory), memory

        return step


OPERATORS = {"GRU": OnnxOperator(gru), "LSTM": OnnxOperator(lstm), "RNN": OnnxOperator(rnn)}
