"""TorchScript models (`torch.jit.save`): how their inputs and outputs are named.

An input is an argument of `forward` by its name, or by its position as in Triton: that at the end
of its name (`INPUT__0`), or else that in config.pbtxt. Outputs are told apart in the same way.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch.nn import Module

from penstock.config import ModelConfig
from penstock.errors import BackendFailed, ConfigError
from penstock.repository import torchscript_file
from penstock.units import quoted


class Argument(Protocol):
    """An argument of `forward`, as torch describes it."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> object: ...

    def has_default_value(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class CallOrder:
    """Inputs by position and by keyword."""

    positional: Sequence[str]
    keywords: Sequence[str]


class Script(Module):  # type: ignore[misc]
    """A program with its outputs by name."""

    def __init__(self, program: Module, outputs: Mapping[str, int]) -> None:
        super().__init__()
        self.program = program
        self._outputs = outputs

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Mapping[str, torch.Tensor]:
        answer = self.program(*inputs, **named)
        if isinstance(answer, Mapping):
            return answer
        answers = answer if isinstance(answer, tuple | list) else (answer,)
        missing = [name for name, place in self._outputs.items() if place >= len(answers)]
        if missing:
            raise BackendFailed(
                f"the model gave no output '{missing[0]}'; it gave {len(answers)} outputs"
            )
        return {name: answers[place] for name, place in self._outputs.items()}


def load(config: ModelConfig) -> tuple[Script, CallOrder]:
    """Load the program on the model's device. What torch's own reader finds in the file is checked
    first, as it decides what is unpickled."""
    path = Path(config.artifact)
    torchscript_file.check(path)
    torchscript_file.check_members(torch._C.PyTorchFileReader(str(path)).get_all_records())
    with warnings.catch_warnings():
        # It is deprecated, which the server says itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        program = torch.jit.load(path, map_location=config.device)
    arguments = program.forward.schema.arguments[1:]
    order = call_order(config, arguments)
    names = [spec.name for spec in config.outputs]
    places = dict(zip(names, torchscript_file.positions(names), strict=True))
    return Script(program.eval(), places), order


def call_order(config: ModelConfig, arguments: Sequence[Argument]) -> CallOrder:
    """Match the configured inputs with the arguments of `forward`."""
    names = [spec.name for spec in config.inputs]
    known = [argument.name for argument in arguments]
    takes = f"forward takes {quoted(known) or 'nothing'}; configured are {quoted(names)}"
    if set(names) <= set(known):
        given = dict(zip(names, names, strict=True))
        order = CallOrder((), names)
    else:
        places = torchscript_file.positions(names)
        if sorted(places) != list(range(len(places))) or len(places) > len(known):
            raise ConfigError(f"input: {takes}")
        given = {known[place]: name for place, name in zip(places, names, strict=True)}
        order = CallOrder([given[each] for each in known[: len(names)]], ())
    optional = {spec.name for spec in config.inputs if spec.is_optional}
    problems = [] if not _missing(arguments, given) else [f"input: {takes}"]
    problems += [
        f"input '{given[each.name]}': argument '{each.name}' of forward has no default value, so "
        "it cannot be optional"
        for each in arguments
        if given.get(each.name) in optional and not (order.keywords and each.has_default_value())
    ]
    problems += [
        f"input '{given[each.name]}': argument '{each.name}' of forward is of type {each.type}; "
        "expected a tensor"
        for each in arguments
        if each.name in given and not _takes_tensor(each)
    ]
    if problems:
        raise ConfigError(problems)
    return order


def _missing(arguments: Sequence[Argument], given: Mapping[str, str]) -> list[str]:
    needed = [each.name for each in arguments if not each.has_default_value()]
    return [name for name in needed if name not in given]


def _takes_tensor(argument: Argument) -> bool:
    return str(argument.type) in ("Tensor", "Optional[Tensor]")
