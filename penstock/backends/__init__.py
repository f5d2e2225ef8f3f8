"""Backends: the contract of Runner, which runs a model's file, and the list of backend modules.

A backend is one module with a function `load(config) -> Runner`. It is imported on first use, so a
missing library affects only models that need it. It runs inside a worker and may block, crash or
leak there. `tests/suites/backend.py` is the contract as tests; a new backend inherits it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar, overload

import numpy as np

from penstock.config import ENSEMBLE, ModelConfig
from penstock.errors import ConfigError
from penstock.types import Array, Parameter, TensorSpec

# Each is a module of this folder.
NAMES = ("null", "onnxruntime", "openvino", "preprocess", "python", "pytorch", "tensorrt")
# What `pip install` needs for them.
PACKAGES: Mapping[str, str] = {
    "openvino": '"penstock[openvino]"',
    "pytorch": '"penstock[torch]"',
    "tensorrt": '"penstock[torch]" tensorrt',
}
# File in a version's folder: the compiled model.
COMPILED = "compiled.bin"
# Key in `Runner.built` of the peak GPU memory of a runner, in bytes, without the driver's overhead
# for each process. A version's evidence has the same key.
GPU_MEMORY = "gpu_memory_bytes"
# Key of the reason why a model that may use a GPU runs on the CPU.
GPU_FALLBACK = "gpu_fallback"

NO_ENSEMBLE = (
    "an ensemble runs nothing itself: its steps are other models of the repository; give one of "
    "them, or serve the repository and give the server's URL"
)
Outputs = Mapping[str, Array]
T = TypeVar("T")


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
        """Names of the requested outputs; empty means all."""

    @property
    def length(self) -> int:
        """Length of its padded axes without padding; 0: nothing is padded."""


class Responder(Protocol):
    """Takes the responses to one request of a decoupled model, in any thread, also after `start`
    has returned. A model that drops it before the final one has failed the request."""

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for responses any more; the final one is still due."""

    def send(
        self,
        answer: Outputs | Exception | None,
        *,
        is_final: bool,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        """Send a response with some of the outputs, or an error; None: there is none, which only
        makes sense with `is_final`. Waits while there is no memory for it. BackendFailed if it is
        wrong, or if the final one was sent before."""


class JoinedRows(Mapping[str, Array]):
    """Inputs whose rows are in several pieces of memory. Each input is joined when it is read for
    the first time, in its `room` if it has one."""

    def __init__(
        self, pieces: Sequence[Mapping[str, Array]], room: Mapping[str, Array] | None = None
    ) -> None:
        self._pieces = pieces
        self._room = room or {}
        self._joined: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        if name not in self._joined:
            parts = [piece[name] for piece in self._pieces]
            joined = np.concatenate(parts, out=self._room.get(name))
            if joined.dtype != np.object_:
                joined.flags.writeable = False
            self._joined[name] = joined
        return self._joined[name]

    def __contains__(self, name: object) -> bool:
        return name in self._pieces[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces[0])

    def __len__(self) -> int:
        return len(self._pieces[0])


class PinnedTensor(NamedTuple):
    """A tensor in pinned memory: at an offset of `view`, which the CPU must not read."""

    view: memoryview
    offset: int
    nbytes: int
    address: int


class PlacedPieces(Sequence[Mapping[str, Array]]):
    """Pieces in pinned memory, one a request, with their addresses: a device copies all at once,
    without an array for each. `counts` are their rows, `forms` the types and shapes of one row."""

    def __init__(
        self,
        places: Mapping[str, Sequence[PinnedTensor]],
        counts: Sequence[int],
        forms: Mapping[str, tuple[np.dtype[np.generic], tuple[int, ...]]],
    ) -> None:
        self.places = places
        self.counts = counts
        self.forms = forms

    def __len__(self) -> int:
        return len(self.counts)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Array]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Array]]: ...

    def __getitem__(
        self, index: int | slice
    ) -> Mapping[str, Array] | Sequence[Mapping[str, Array]]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        piece: dict[str, Array] = {}
        for name, places in self.places.items():
            view, offset, nbytes, _ = places[index]
            dtype, shape = self.forms[name]
            values: Array = np.frombuffer(view[offset : offset + nbytes], dtype)
            values.flags.writeable = False
            piece[name] = values.reshape(self.counts[index], *shape)
        return piece


@dataclass(slots=True)
class Batch:
    """Stacked inputs by name. The arrays are read-only views, valid until `wait` is exhausted."""

    inputs: Mapping[str, Array]
    num_rows: int
    requests: Sequence[BatchRequest] = ()
    # Runs of rows, in order, that `inputs` joins when they are read; empty: `inputs` are in one
    # piece. A runner that copies its inputs anyway copies them from here.
    pieces: Sequence[Mapping[str, Array]] = ()
    # For the responses to each of `requests`, if the runner is decoupled.
    responders: Sequence[Responder] = ()

    @classmethod
    def of(
        cls,
        pieces: Sequence[Mapping[str, Array]],
        num_rows: int,
        requests: Sequence[BatchRequest] = (),
        room: Mapping[str, Array] | None = None,
    ) -> Batch:
        """Return the batch of one or more pieces, which are joined in the `room`, if any."""
        if len(pieces) == 1:
            return cls(pieces[0], num_rows, requests)
        return cls(JoinedRows(pieces, room), num_rows, requests, pieces)

    @property
    def all_pieces(self) -> Sequence[Mapping[str, Array]]:
        return self.pieces or (self.inputs,)

    def without(self, names: Collection[str]) -> Batch:
        """Return the batch without these inputs."""
        pieces = [
            {name: values for name, values in piece.items() if name not in names}
            for piece in self.all_pieces
        ]
        return Batch.of(pieces, self.num_rows, self.requests)

    def by_request(self, answers: Sequence[T]) -> list[Sequence[T]]:
        """Return the answers to the rows of each request; all together without `requests`."""
        found, first = [], 0
        for count in [part.num_rows for part in self.requests] or [self.num_rows]:
            found.append(answers[first : first + count])
            first += count
        return found


def split_rows(stacked: Mapping[str, Array], num_rows: int) -> list[dict[str, Array]]:
    """Return the arrays of each row, without the batch dimension."""
    # The ellipsis keeps texts without dimensions as arrays.
    return [{name: values[n, ...] for name, values in stacked.items()} for n in range(num_rows)]


@dataclass(frozen=True, slots=True)
class PerRequest:
    """Answers of a runner that keeps requests apart: one for each of `Batch.requests`, in their
    order, each with its own shapes; an exception fails only its request. `parameters` are those of
    some answers, by their index."""

    answers: Sequence[Outputs | Exception]
    parameters: Mapping[int, Mapping[str, Parameter]] = field(default_factory=dict)


class Execution(Protocol):
    @property
    def prepare_s(self) -> float:
        """Seconds spent on the model's inputs: preprocessing, or the H2D copy."""

    @property
    def finish_s(self) -> float:
        """Seconds spent on the answer: postprocessing, or the D2H copy."""

    def wait(self) -> Iterable[Outputs | PerRequest]:
        """Return the one answer to the batch, or none if the runner is decoupled: then responses
        leave by `Batch.responders`. Shapes may be unknown until now. Raises the model's error."""


class Runner:
    """A loaded model on its device, called by one thread. The defaults are those of a model whose
    file declares no tensors and that computes in `start`."""

    # Tensors that the file declares, including the batch dimension.
    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()
    # Whether `Batch.requests` must be filled in. Such a model is code that may act on its inputs,
    # so it gets real requests only and is not warmed up with zeros.
    needs_requests = False
    # Whether `rehearsals` has inputs of its own, for a model that cannot be warmed up with zeros.
    has_own_rehearsals = False
    # Whether rows cannot influence each other's answers by construction; if not, that is tested at
    # load.
    keeps_rows_apart = False
    # Whether `start` only launches a batch, so that several are in flight at once: as many as the
    # model has instances on the device. Another thread then calls `wait`.
    runs_ahead = False
    # Whether requests have any number of responses, by `Batch.responders`; their inputs may be used
    # until the last of them. Such a runner is called by one thread, but not by the one that loads.
    is_decoupled = False

    def built(self) -> Mapping[str, str]:
        """Return the effective settings, read back from the library."""
        raise NotImplementedError

    def start(self, batch: Batch) -> Execution:
        raise NotImplementedError

    def close(self) -> None:
        """Free what the model holds."""

    def pin(self, memory: memoryview) -> None:
        """Register (pin) memory that will hold batches until it is unpinned, if the runner's
        device copies from such memory."""

    def pin_foreign(self, memory: memoryview) -> bool:
        """Pin memory of another process, which may make it unreadable for the CPU at any time.
        True: batches may have pieces in it, and only the device reads those."""
        return False

    def unpin(self, memory: memoryview) -> None:
        """Undo `pin` or `pin_foreign`, before the memory goes away. No batch uses it any more."""

    def rehearsals(self, batch: Batch) -> Iterable[Batch]:
        """Return the batches to warm up with, the slowest one last; `batch` is zeros of a shape."""
        return (batch,)

    def stop_filling(self) -> None:
        """Stop padding batches with extra rows, because rows influence each other."""

    def compiled(self) -> Mapping[str, bytes]:
        """Return files for the version's folder by name, with what was compiled or tuned at load,
        including those that are there already."""
        return {}

    def settle(self) -> None:
        """Take the present use of the device's memory as the baseline: all warm-up is done."""

    @property
    def restart_reason(self) -> str:
        """Why a new worker should replace this one; empty if none should."""
        return ""

    def is_lost(self) -> bool:
        """Whether an error has made the device unusable for this process."""
        return False


LoadRunner = Callable[[ModelConfig], Runner]


def backend(name: str) -> LoadRunner:
    """Return the function that loads models of a backend, with their pre- and postprocessing. Raise
    ConfigError naming what is missing."""
    if name == ENSEMBLE:
        raise ConfigError(NO_ENSEMBLE)
    if name not in NAMES:
        expected = f"expected one of {', '.join(NAMES)}"
        raise ConfigError(f"backend: '{name}' is not known; {expected}")
    try:
        load: LoadRunner = importlib.import_module(f"{__name__}.{name}").load
    except ModuleNotFoundError as error:
        problem = f"backend: '{name}' needs the package '{error.name}', which is not installed"
        if name in PACKAGES:
            problem += f"; pip install {PACKAGES[name]} brings it"
        raise ConfigError(problem) from error

    def load_model(config: ModelConfig) -> Runner:
        if config.sequences is not None:
            stateful: Runner = importlib.import_module(f"{__name__}.stateful").load(
                config, load_model
            )
            return stateful
        views = importlib.import_module(f"{__name__}.views")
        config = views.with_scalars(config)
        runner: Runner = views.load(config, load) if config.has_views else load(config)
        return runner

    def load_whole(config: ModelConfig) -> Runner:
        if not config.is_processed:
            return load_model(config)
        module = importlib.import_module(f"{__name__}.processing")
        runner: Runner = module.load(config, load_model)
        return runner

    return load_whole
