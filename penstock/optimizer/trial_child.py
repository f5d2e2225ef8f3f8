"""Child process of a trial: loads one Runner, as a worker does, and answers `trials` over a socket.

Started as `python -m penstock.optimizer.trial_child FD PARENT`; exits when the socket closes and
dies with its parent. Messages are MessagePack with a length prefix; tensors are in wire format.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import psutil

from penstock.backends import GPU_MEMORY, Batch, Execution, Outputs, PerRequest, Runner, backend
from penstock.backends.processing import model_in
from penstock.config import CPU, ModelConfig
from penstock.errors import BackendFailed, ConfigError, PenstockError
from penstock.optimizer import facts
from penstock.optimizer.candidates import Build, Candidate
from penstock.optimizer.facts import Facts
from penstock.processes import framing
from penstock.processes.start import begin_life
from penstock.profiling import gpu_timeline, torch_times
from penstock.profiling.results import StepTime
from penstock.serving.executor import checked
from penstock.serving.proof import prove
from penstock.serving.warmups import warm_up_all
from penstock.types import Array, TensorSpec
from penstock.wire.frames import Proof, RequestPart
from penstock.wire.v2_client import Values

MAX_ERROR_CHARS = 4096
# Minimum number of runs per point; fewer if one run takes very long.
MIN_RUNS = 5
MIN_LONG_RUNS = 3
LONG_RUN_S = 0.3
log = logging.getLogger("penstock.trial")


class PrepareTrial(msgspec.Struct, tag="prepare"):
    """Import the backend; nothing is loaded yet."""

    backend: str


class LoadTrial(msgspec.Struct, tag="load"):
    config: ModelConfig


class Inspect(msgspec.Struct, tag="inspect"):
    """Inspect the build whose config was loaded."""

    candidate: Candidate
    folder: str


class Compute(msgspec.Struct, tag="compute"):
    """Run stacked inputs; a single row without batch dimension if the model has none."""

    inputs: list[Values]
    num_rows: int
    # Length of each row before padding; 0, or empty: it was not padded.
    lengths: list[int] = []


class Hold(Compute, tag="hold"):
    """Keep this batch for `Measure`, and warm it up."""


class Measure(msgspec.Struct, tag="measure"):
    """Run the held batch for this long, with this many in flight (0: as instances)."""

    duration_s: float
    num_slots: int = 0


class WatchBatch(msgspec.Struct, tag="watch"):
    """Run the held batch under the profiler of the GPU. Later measurements need a new process."""

    num_runs: int


class Keep(msgspec.Struct, tag="keep"):
    """Run all batch sizes once, and write compiled code and kernel choices to this folder."""

    folder: str


class Package(msgspec.Struct, tag="package"):
    """Compile a PyTorch module ahead of time into this file; it is not loaded for anything else."""

    config: ModelConfig
    path: str


class BuildPlan(msgspec.Struct, tag="plan"):
    """Build a TensorRT plan from an ONNX file; nothing is loaded for anything else."""

    source: str
    target: str
    device: str
    # Smallest, usual and largest shape of each input with variable sizes.
    profile: dict[str, tuple[list[int], list[int], list[int]]]
    allows_tf32: bool
    # File with measurements of earlier builds; it is written anew.
    timing_cache: str


Question = (
    PrepareTrial
    | LoadTrial
    | Inspect
    | Compute
    | Hold
    | Measure
    | WatchBatch
    | Keep
    | Package
    | BuildPlan
)


class TrialDone(msgspec.Struct, tag="done"):
    """It is prepared, held or packaged; there is nothing to return."""


class TrialLoaded(msgspec.Struct, tag="loaded"):
    proof: Proof
    load_s: float


class Inspected(msgspec.Struct, tag="inspected"):
    facts: Facts


class Computed(msgspec.Struct, tag="computed"):
    """Outputs of each row, without the batch dimension."""

    rows: list[list[Values]]


class TrialMeasured(msgspec.Struct, tag="measured"):
    seconds: list[float]
    # Growth of the process since before the model was loaded; on a GPU, the memory used there.
    memory_bytes: int
    # Share of the time in which a batch was computed; None: the runner does not say.
    busy: float | None = None


class BatchWatched(msgspec.Struct, tag="watched"):
    """None: the profiler told of no kernel."""

    time: StepTime | None


class Kept(msgspec.Struct, tag="kept"):
    num_bytes: int


class TrialFailed(msgspec.Struct, tag="failed"):
    problems: list[str]
    is_config: bool = False


Answer = (
    TrialDone
    | TrialLoaded
    | Inspected
    | Computed
    | TrialMeasured
    | BatchWatched
    | Kept
    | TrialFailed
)


class Trial:
    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._before_bytes = psutil.Process().memory_info().rss
        began = time.perf_counter()
        self._runner: Runner = backend(config.backend)(config)
        self.load_s = time.perf_counter() - began
        self._batch: Batch | None = None
        self.proof = prove(_batched(config), self._runner)

    def inspect(self, question: Inspect) -> Facts:
        build = Build(question.candidate, Path(question.folder), self._config)
        found = facts.file_facts(build)
        if self._config.engine == "onnxruntime" and self._config.device == CPU:
            options = dict(self._config.options)
            found.optimised_operators = facts.optimised_operators(build.artifact, options)
        found.built = dict(self._runner.built())
        found.batching_problem = self.proof.unbatched
        found.padding_problem = self.proof.unpadded
        return found

    def compute(self, question: Compute) -> list[list[Values]]:
        answer = self._run(_batch_of(question))
        if isinstance(answer, PerRequest):
            return [row for each in answer.answers for row in self._rows(each, 1)]
        return self._rows(answer, question.num_rows)

    def _rows(self, answer: Outputs | Exception, num_rows: int) -> list[list[Values]]:
        """Return the outputs of each row, without the batch dimension if the model has one."""
        if isinstance(answer, Exception):
            raise answer
        specs = self._config.outputs
        found = {spec.name: checked(self._config, spec, answer, num_rows) for spec in specs}
        if self._config.max_batch_size == 0:
            return [_values(specs, found)]
        return [
            _values(specs, {name: array[row, ...] for name, array in found.items()})
            for row in range(num_rows)
        ]

    def hold(self, question: Hold) -> None:
        self._batch = _batch_of(question)
        began = time.perf_counter()
        self._run(self._batch)
        if time.perf_counter() - began < LONG_RUN_S:
            self._run(self._batch)

    def measure(self, question: Measure) -> TrialMeasured:
        assert self._batch is not None, "nothing is held"
        seconds: list[float] = []
        computed_s = 0.0
        began = now = time.perf_counter()
        # As many batches in flight as instances: each takes the time between two completions, times
        # the number that share the device.
        asked = question.num_slots or self._config.num_instances
        num_slots = asked if self._runner.runs_ahead else 1
        begun = deque(self._runner.start(self._batch) for _ in range(num_slots - 1))
        min_runs = MIN_RUNS
        while now - began < question.duration_s or len(seconds) < min_runs:
            begun.append(self._runner.start(self._batch))
            _only(first := begun.popleft())
            computed_s += getattr(first, "compute_s", 0.0)
            before, now = now, time.perf_counter()
            seconds.append(num_slots * (now - before))
            min_runs = MIN_LONG_RUNS if seconds[0] > LONG_RUN_S else MIN_RUNS
        busy = computed_s / (now - began)
        while begun:
            _only(begun.popleft())
        return TrialMeasured(seconds, self._memory_bytes, min(1.0, busy) if computed_s else None)

    def watch(self, question: WatchBatch) -> StepTime | None:
        batch = self._batch
        assert batch is not None, "nothing is held"
        gpu = torch_times.gpu_time(lambda: self._run(batch), question.num_runs)
        return None if gpu is None else gpu_timeline.step_time(gpu, batch.num_rows)

    @property
    def _memory_bytes(self) -> int:
        on_gpu = self._runner.built().get(GPU_MEMORY, "") if self._config.device != CPU else ""
        if on_gpu.isdigit():
            return int(on_gpu)
        grown: int = psutil.Process().memory_info().rss - self._before_bytes
        return max(0, grown)

    def keep(self, folder: str) -> int:
        """Write compiled files and return their size, which is 0 without any."""
        warm_up_all(self._config, self._runner, self.proof)
        files = model_in(self._runner).compiled()
        for name, content in files.items():
            path = Path(folder) / name
            # It may be a hard link to another build's file.
            path.unlink(missing_ok=True)
            path.write_bytes(content)
        return sum(map(len, files.values()))

    def _run(self, batch: Batch) -> Outputs | PerRequest:
        return _only(self._runner.start(batch))


def package(question: Package) -> None:
    from penstock.backends.pytorch import load_module
    from penstock.optimizer.torch_export import to_package

    loaded = load_module(question.config)
    try:
        to_package(loaded, question.config, Path(question.path))
    finally:
        loaded.close()


def build_plan(question: BuildPlan) -> None:
    # First, as it says what is missing.
    backend("tensorrt")
    from penstock.backends import tensorrt

    tensorrt.build_plan(
        Path(question.source),
        Path(question.target),
        device=question.device,
        profiles=[question.profile] if question.profile else [],
        allows_tf32=question.allows_tf32,
        timing_cache=Path(question.timing_cache),
    )


def _only(execution: Execution) -> Outputs | PerRequest:
    answers = list(execution.wait())
    if len(answers) != 1:
        raise BackendFailed(f"expected one answer to the batch, the model gave {len(answers)}")
    return answers[0]


def _batch_of(question: Compute) -> Batch:
    """Make a batch in which each row is a request."""
    inputs = {each.name: each.array() for each in question.inputs}
    for array in inputs.values():
        array.flags.writeable = False  # As in requests.
    lengths = question.lengths or [0] * question.num_rows
    return Batch(inputs, question.num_rows, [RequestPart("", 1, length=each) for each in lengths])


def _batched(config: ModelConfig) -> ModelConfig:
    """Enable batching, so that it is checked for every model with a batch dimension."""
    if config.max_batch_size < 2:
        return config
    return replace(config, batching=replace(config.batching, is_dynamic=True))


def _values(specs: Sequence[TensorSpec], found: Mapping[str, Array]) -> list[Values]:
    return [Values.of(spec.name, spec.datatype, np.asarray(found[spec.name])) for spec in specs]


@dataclass(slots=True)
class Child:
    """Handles one request at a time."""

    sock: socket.socket
    trial: Trial | None = None

    def serve(self) -> None:
        decoder = msgspec.msgpack.Decoder(Question)
        while (data := framing.receive(self.sock)) is not None:
            try:
                answer = self._answer(decoder.decode(data))
            except ConfigError as error:
                answer = TrialFailed(list(error.problems), is_config=True)
            except PenstockError as error:
                answer = TrialFailed([str(error)[:MAX_ERROR_CHARS]])
            except Exception as error:  # Anything a model raises is reported.
                log.error("the model raised %s", type(error).__name__, exc_info=error)
                answer = TrialFailed([f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]])
            framing.send(self.sock, msgspec.msgpack.encode(answer))

    def _answer(self, question: Question) -> Answer:
        match question:
            case PrepareTrial():
                backend(question.backend)
                return TrialDone()
            case LoadTrial():
                self.trial = Trial(question.config)
                return TrialLoaded(self.trial.proof, self.trial.load_s)
            case Package():
                package(question)
                return TrialDone()
            case BuildPlan():
                build_plan(question)
                return TrialDone()
        assert self.trial is not None, "nothing is loaded"
        return _of_trial(self.trial, question)


def _of_trial(
    trial: Trial, question: Inspect | Hold | Compute | WatchBatch | Keep | Measure
) -> Answer:
    match question:
        case Inspect():
            return Inspected(trial.inspect(question))
        case Hold():
            trial.hold(question)
            return TrialDone()
        case Compute():
            return Computed(trial.compute(question))
        case WatchBatch():
            return BatchWatched(trial.watch(question))
        case Keep():
            return Kept(trial.keep(question.folder))
        case Measure():
            return trial.measure(question)


def main() -> None:
    sock = begin_life()
    if sock is None:
        return
    # Never write to a model's folder.
    sys.dont_write_bytecode = True
    Child(sock).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit would hang in libraries that cannot end their threads.
    os._exit(0)


if __name__ == "__main__":
    main()
