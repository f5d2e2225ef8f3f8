"""How a file becomes something that runs: the Backend and Runner contract, and where each lives.

A backend is one module with a function `load(config) -> Runner`, imported on first use so that an
absent library only hurts whoever asks for it. It runs inside a worker and may block, crash or leak
there. `tests/suites/backend.py` is the contract as tests; a new backend inherits it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.types import Array, Parameter, TensorSpec

MODULES: Mapping[str, str] = {
    "null": "penstock.backends.null",
    "onnxruntime": "penstock.backends.onnxruntime",
    "openvino": "penstock.backends.openvino",
    "python": "penstock.backends.python",
    "pytorch": "penstock.backends.pytorch",
}
# What `pip install "penstock[...]"` adds for them.
EXTRAS: Mapping[str, str] = {"openvino": "openvino", "pytorch": "torch"}
PROCESSING = "penstock.backends.processing"
# In a version's folder: what was compiled of it before; which implementations were chosen for its
# convolutions, and the kernels among them, compiled.
COMPILED = "compiled.bin"
CHOICES, KERNELS = "fusion.json", "fusion.bin"
# Under this name `Runner.built` says, in bytes, what it has taken of its GPU's memory at most; what
# the driver takes for any process is not in it. A version's evidence has the same.
GPU_MEMORY = "gpu_memory_bytes"

Outputs = Mapping[str, Array]


class BatchRequest(Protocol):
    """One request of a batch, for runners with `needs_requests`."""

    @property
    def id(self) -> str: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def parameters(self) -> Mapping[str, Parameter]: ...
    @property
    def outputs(self) -> Sequence[str]:
        """The outputs asked for by name; empty means all."""

    @property
    def length(self) -> int:
        """How long its padded axes are without padding; 0: nothing is padded."""


class Batch:
    """Stacked inputs by name. The arrays are read-only views, valid until `wait` is exhausted."""

    __slots__ = ("inputs", "num_rows", "requests")

    def __init__(
        self, inputs: Mapping[str, Array], num_rows: int, requests: Sequence[BatchRequest] = ()
    ) -> None:
        self.inputs = inputs
        self.num_rows = num_rows
        self.requests = requests


@dataclass(frozen=True, slots=True)
class PerRequest:
    """Answers of a runner that keeps requests apart: one for each of `Batch.requests`, in their
    order, each with shapes of its own; an exception fails only its request."""

    answers: Sequence[Outputs | Exception]


class Execution(Protocol):
    @property
    def prepare_s(self) -> float:
        """The part of `start` that made the model's inputs out of what was sent."""

    @property
    def finish_s(self) -> float:
        """The part of `start` that made the answer out of the model's outputs."""

    def wait(self) -> Iterable[Outputs | PerRequest]:
        """The answers to the batch: one for most models, none or several for decoupled ones.
        Shapes may be unknown until now. Raises what the model raised."""


class Finished:
    """The execution of a backend that computes in `start`."""

    __slots__ = ("_outputs", "finish_s", "prepare_s")

    def __init__(
        self, outputs: Outputs | PerRequest, prepare_s: float = 0.0, finish_s: float = 0.0
    ) -> None:
        self._outputs = outputs
        self.prepare_s = prepare_s
        self.finish_s = finish_s

    def wait(self) -> Iterable[Outputs | PerRequest]:
        return (self._outputs,)


class Runner(Protocol):
    """A loaded model on its device. One thread calls it."""

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """As the file declares them, batch dimension included; empty if it does not say."""

    @property
    def outputs(self) -> Sequence[TensorSpec]: ...

    @property
    def needs_requests(self) -> bool:
        """True when `Batch.requests` must be filled in. Such a model is code that may act on what
        it sees, so it runs real requests only and is not warmed up with zeros."""

    @property
    def keeps_rows_apart(self) -> bool:
        """True when no row can influence another's answer, by the way it is made; otherwise that is
        tried out at load."""

    @property
    def runs_ahead(self) -> bool:
        """True when `start` only begins a batch, so that several are on their way at once: as many
        as the model has instances on the device. `wait` is then another thread's call."""

    def built(self) -> Mapping[str, str]:
        """What was really made of the options, read back from the library."""

    def start(self, batch: Batch) -> Execution: ...

    def close(self) -> None: ...


@runtime_checkable
class PinsMemory(Protocol):
    """A runner whose device copies from memory that it has been told of."""

    def pin(self, memory: memoryview) -> None:
        """Batches will lie in this memory, as long as the runner lives."""


@runtime_checkable
class Rehearses(Protocol):
    """A runner for which zeros of a shape are not all there is to be warmed up."""

    def rehearsals(self, batch: Batch) -> Iterable[Batch]:
        """What to run instead of this batch of zeros; the one that takes longest comes last."""


@runtime_checkable
class FillsUp(Protocol):
    """A runner that runs more rows than were sent, where that is a size it is ready for."""

    def stop_filling(self) -> None:
        """Rows influence each other: from now on only those that were sent."""


@runtime_checkable
class MayBeLost(Protocol):
    """A runner whose device may be of no use to this process any more after an error."""

    def is_lost(self) -> bool: ...


@runtime_checkable
class KeepsCompiled(Protocol):
    """A runner that compiles or tries out when it is loaded, and need not the next time."""

    def compiled(self) -> Mapping[str, bytes]:
        """Files for the version's folder, by name; those that are there already among them."""


@runtime_checkable
class WatchesMemory(Protocol):
    """A runner that looks after what it takes of its device."""

    def settle(self) -> None:
        """Everything is warm: what it has taken by now is what it needs."""

    @property
    def restart_reason(self) -> str:
        """Why a new worker should take the place of this one; empty: none should."""


class LoadRunner(Protocol):
    def __call__(self, config: ModelConfig, /) -> Runner: ...


def backend(name: str) -> LoadRunner:
    """Loads models of a backend, with the functions around them. ConfigError names what is
    missing."""
    load = _load_function(name)

    def load_whole(config: ModelConfig, /) -> Runner:
        if not config.is_processed:
            return load(config)
        runner: Runner = importlib.import_module(PROCESSING).load(config, load)
        return runner

    return load_whole


def _load_function(name: str) -> LoadRunner:
    module_name = MODULES.get(name)
    if module_name is None:
        known = ", ".join(sorted(MODULES))
        raise ConfigError([f"backend: '{name}' is not known; expected one of {known}"])
    try:
        load: LoadRunner = importlib.import_module(module_name).load
    except ModuleNotFoundError as error:
        problem = f"backend: '{name}' needs the package '{error.name}', which is not installed"
        if name in EXTRAS:
            problem += f'; pip install "penstock[{EXTRAS[name]}]" brings it'
        raise ConfigError([problem]) from error
    return load
