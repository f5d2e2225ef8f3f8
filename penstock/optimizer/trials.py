"""Trials of a build in a separate process: a crash or leak is a result, not the end of the run.
Loads the same Runner as the server."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeVar

import msgspec
import numpy as np

from penstock.backends.gpu_memory import tells_of_no_memory
from penstock.config import CPU, ModelConfig
from penstock.errors import BackendFailed, ConfigError
from penstock.optimizer import trial_child as messages
from penstock.optimizer.batch_growth import LARGEST, BatchGrowth
from penstock.optimizer.candidates import Build
from penstock.optimizer.facts import Facts
from penstock.optimizer.shapes import with_instances
from penstock.optimizer.simulate import Row, TimeTable, fitted, length_of, row_lengths
from penstock.optimizer.time_plan import CutOff, TookTooLong
from penstock.processes import framing
from penstock.processes.tool import ToolProcess
from penstock.profiling.results import StepTime
from penstock.serving.padding import Crop, Pads, cropped
from penstock.system import devices
from penstock.types import Array, TensorSpec
from penstock.wire.frames import Proof
from penstock.wire.v2_client import Values

# Compilers take minutes; a model that is silent for this long hangs.
LOAD_TIMEOUT_S = 900.0
RUN_TIMEOUT_S = 300.0
# Answers that have already arrived are read, however late.
MIN_TIMEOUT_S = 0.1
# Rows per batch.
MAX_ROWS = 32
# Time to measure one point of T(b), the batch time by size.
POINT_S = 0.2
RUNG = 8
# Batches larger than configured are tried too, up to this size: larger batches may pay off.
LARGEST_RUNG = 32
# The same for GPUs, which smaller batches do not saturate; saturation lies between these sizes.
# Larger ones are tried as long as rows get cheaper (`batch_growth`).
LARGEST_ON_GPU = 256
MORE_ON_GPU = (32, 128)
# Inputs of one batch that are sent to a child, where it grows beyond that.
MAX_HELD_BYTES = 256 << 20
# Batches that would take longer are not run unless requested: their times are extrapolated.
MAX_BATCH_S = 1.0
# Batches under the profiler.
NUM_WATCHED = 5
# Lengths at which batches are timed; the second on a CPU with a small time budget.
MAX_LENGTHS, FEW_LENGTHS = 6, 3
A = TypeVar("A", bound=messages.Answer)
# Receives the number of rows done.
Told = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """Limits of a trial beyond the build's configuration and the check at load."""

    # Maximum rows per batch: the limit of the model's author, or 1 if real rows influence each
    # other. None: larger batches than configured may be tried.
    max_rows: int | None = None
    # False: padding changes the answers to real rows.
    may_pad: bool = True
    # Deadline of the last answer, by the monotonic clock.
    ends_at: float = math.inf
    # Answers that take longer than this in total are left out.
    stop_after_s: float = math.inf
    # Lengths at which batches are timed.
    max_lengths: int = MAX_LENGTHS


NO_LIMITS = TrialLimits()


def inspect(build: Build, ends_at: float = math.inf) -> Facts:
    """Load a build and read back what was built: `file_facts` and what only the loaded form knows.
    BackendFailed says why it cannot be loaded. TookTooLong after `ends_at`, by the monotonic clock;
    the same holds for `answers` and `times`."""
    with TrialProcess(build.config, ends_at=ends_at) as child:
        child.load()
        return inspected(child, build)


def inspected(child: TrialProcess, build: Build) -> Facts:
    child.send(messages.Inspect(build.candidate, str(build.folder)))
    return child.expect(messages.Inspected).facts


def keep_compiled(
    build: Build,
    timeout_s: float = LOAD_TIMEOUT_S,
    take: Callable[[ModelConfig], TrialProcess] | None = None,
) -> int:
    """Save compiled code and kernel choices in the version's folder, so that later loads on such a
    machine skip that work; return the size in bytes. TookTooLong after the timeout. `take` returns
    a child that was already started."""
    with (take or TrialProcess)(build.config) as child:
        child.timeout_s = timeout_s
        child.load(timeout_s)
        child.send(messages.Keep(str(build.version_folder)))
        return child.expect(messages.Kept).num_bytes


def compile_ahead(config: ModelConfig, path: Path, timeout_s: float) -> None:
    """Compile the module to an AOTInductor package in a separate process, which frees the memory of
    compiler and GPU when it ends. TookTooLong after the timeout."""
    with TrialProcess(config, timeout_s) as child:
        child.send(messages.Package(config, str(path)))
        child.expect(messages.TrialDone)


def build_plan(config: ModelConfig, question: messages.BuildPlan, timeout_s: float) -> None:
    """Build a TensorRT plan in a separate process. TookTooLong after the timeout."""
    with TrialProcess(config, timeout_s) as child:
        child.send(question)
        child.expect(messages.TrialDone)


def answers(
    build: Build, rows: Sequence[Row], told: Told | None = None, rules: TrialLimits = NO_LIMITS
) -> list[dict[str, Array]]:
    """Return one answer per row, computed as when served: batched if the model may be, padded to
    buckets and cropped if it is padded. So effects of a row's neighbours (per-batch ranges,
    padding) show. Rows with a leading 1 for the batch have it in their answers too."""
    with TrialProcess(build.config, ends_at=rules.ends_at) as child:
        child.rules = rules
        child.load()
        return answered(child, build, rows, told)


def answered(
    child: TrialProcess, build: Build, rows: Sequence[Row], told: Told | None = None
) -> list[dict[str, Array]]:
    """Compute answers by a loaded child; empty ones for rows that there is no time for."""
    config = build.config
    stop_at = time.monotonic() + child.rules.stop_after_s
    found: list[dict[str, Array]] = [{} for _ in rows]
    num_done = 0
    fitting = fitted(rows, config)
    served = as_served(child, config, fitting)
    most = MAX_ROWS if child.may_batch else 1
    has_one = fitting is not rows
    for indices in shape_groups(config, served.rows, min(most, config.max_batch_size or 1)):
        if time.monotonic() > stop_at:
            break
        for index, answer in zip(indices, compute(child, build, served, indices), strict=True):
            found[index] = answer if has_one else {n: each[0, ...] for n, each in answer.items()}
        num_done += len(indices)
        if told is not None:
            told(num_done)
    return found


@dataclass(frozen=True, slots=True)
class ServedRows:
    """Rows as a worker receives them: padded to their buckets if the model is padded."""

    rows: Sequence[Row]
    # Length of each row before padding; 0: not padded.
    lengths: Sequence[int]
    # Outputs that are cropped to that length.
    crops: Collection[Crop]


def as_served(child: TrialProcess, config: ModelConfig, rows: Sequence[Row]) -> ServedRows:
    lengths = [0] * len(rows)
    if child.is_padded:
        assert config.padding is not None
        pads, axes = Pads(config), config.padding.axes
        known = [length_of(row, axes) for row in rows]
        rows, lengths = _filled(config, rows, [pads.bucket(n) if n else None for n in known])
    # A postprocessing function receives outputs that are already cropped.
    return ServedRows(rows, lengths, () if config.postprocess else child.proof.crops)


def compute(
    child: TrialProcess, build: Build, served: ServedRows, indices: Sequence[int]
) -> list[dict[str, Array]]:
    """Run these rows, which have equal shapes, as one batch; return answers in the same order, each
    with a batch dimension of 1, cropped to its row's own length."""
    values = stacked(build.config, [served.rows[index] for index in indices])
    child.send(messages.Compute(values, len(indices), [served.lengths[index] for index in indices]))
    computed = child.expect(messages.Computed).rows
    if len(computed) != len(indices):
        raise BackendFailed(f"{build.candidate}: {len(computed)} answers to {len(indices)} rows")
    found: list[dict[str, Array]] = []
    for index, outputs in zip(indices, computed, strict=True):
        arrays = {each.name: each.array()[None] for each in outputs}
        if length := served.lengths[index]:
            arrays = {n: cropped(n, each, served.crops, length) for n, each in arrays.items()}
        found.append(arrays)
    return found


def times(
    build: Build,
    rows: Sequence[Row],
    num_instances: int,
    num_threads: int,
    longest_s: float = MAX_BATCH_S,
    rules: TrialLimits = NO_LIMITS,
) -> TimeTable:
    """Measure T(b) at 1, 8 and the largest batch size, by length if that varies, with all instances
    computing at once. Batches longer than `longest_s`, for which no SLO has room, are left out."""
    config = with_instances(build.config, num_instances, num_threads)
    with contextlib.ExitStack() as stack:
        # Each on its own device.
        seen = [config.of_worker(*worker) for worker in config.workers]
        children = [stack.enter_context(TrialProcess(each, ends_at=rules.ends_at)) for each in seen]
        for child in children:
            child.rules = rules
        _load_all(children)
        return TrialCrew(config, children, longest_s).table(rows, (num_instances, num_threads))


class TrialProcess:
    """A child process with one model; killed when the block ends, however it ends."""

    def __init__(
        self, config: ModelConfig, timeout_s: float = LOAD_TIMEOUT_S, ends_at: float = math.inf
    ) -> None:
        # Configuration that is loaded, or will be.
        self.config = config
        self._sock: socket.socket | None = None
        self._decoder = msgspec.msgpack.Decoder(messages.Answer)
        # Timeout of the next answer.
        self.timeout_s = timeout_s
        # Deadline of all answers, by the monotonic clock.
        self.ends_at = ends_at
        self.proof = Proof()
        self.rules = NO_LIMITS
        self.load_s = 0.0
        # An answer was not waited for: it would be taken for the next one.
        self._is_late = False

    def __enter__(self) -> Self:
        """Start the process unless it was started before."""
        if self._sock is None:
            self.start()
        return self

    def start(self) -> None:
        self._is_late = False
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = ToolProcess(
                "penstock.optimizer.trial_child",
                [str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                environment=devices.worker_environment(),
            )

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        assert self._sock is not None
        self._sock.close()
        self._process.kill()

    @property
    def is_well(self) -> bool:
        """Whether it can take further requests."""
        return self._process.is_running and not self._is_late

    @property
    def may_batch(self) -> bool:
        is_alone = self.rules.max_rows == 1 or bool(self.proof.unbatched)
        return self.config.max_batch_size > 1 and not is_alone

    @property
    def is_padded(self) -> bool:
        may_pad = self.rules.may_pad and not self.proof.unpadded
        return self.config.padding is not None and may_pad

    def load(self, run_timeout_s: float | None = None) -> messages.TrialLoaded:
        """Load the model. Later requests have this timeout; None: the default."""
        self.send(messages.LoadTrial(self.config))
        return self.expect_loaded(run_timeout_s)

    def expect_loaded(self, run_timeout_s: float | None = None) -> messages.TrialLoaded:
        loaded = self.expect(messages.TrialLoaded)
        self.proof, self.load_s = loaded.proof, loaded.load_s
        self.timeout_s = RUN_TIMEOUT_S if run_timeout_s is None else run_timeout_s
        return loaded

    def send(self, question: messages.Question) -> None:
        assert self._sock is not None
        self._sock.settimeout(self.timeout_s)
        try:
            framing.send(self._sock, msgspec.msgpack.encode(question))
        except OSError:
            raise self._ended() from None

    def expect(self, kind: type[A]) -> A:
        """Receive an answer; BackendFailed or ConfigError with what went wrong."""
        assert self._sock is not None
        timeout_s = min(self.timeout_s, max(MIN_TIMEOUT_S, self.ends_at - time.monotonic()))
        self._sock.settimeout(timeout_s)
        try:
            data = framing.receive(self._sock)
        except TimeoutError:
            self._is_late = True
            late = CutOff if timeout_s < self.timeout_s else TookTooLong
            raise late(f"no answer within {timeout_s:.3g} s{self._process.tail()}") from None
        except OSError:
            data = None
        if data is None:
            raise self._ended()
        answer: messages.Answer = self._decoder.decode(data)
        if isinstance(answer, messages.TrialFailed):
            if answer.is_config:
                raise ConfigError(answer.problems)
            raise BackendFailed("; ".join(answer.problems))
        assert isinstance(answer, kind), f"{answer!r}, expected {kind.__name__}"
        return answer

    def _ended(self) -> BackendFailed:
        return BackendFailed(f"the process of the model {self._process.describe_end()}")


def _load_all(children: Sequence[TrialProcess]) -> None:
    """Load all children in parallel, each with its own configuration."""
    for child in children:
        child.send(messages.LoadTrial(child.config))
    for child in children:
        child.expect_loaded()


@dataclass(slots=True)
class TrialCrew:
    """Children with the same model that compute at the same time."""

    config: ModelConfig
    children: Sequence[TrialProcess]
    longest_s: float
    # Batches in flight in each child; 0: as many as it has instances.
    num_slots: int = 0
    memory_bytes: int = 0
    # Tokens of each batch, by length and rows, for models that do not compute padding.
    tokens: dict[int, dict[int, float]] = field(default_factory=dict)
    # A batch larger than configured failed, so the state of the children is unknown.
    is_hurt: bool = False
    # The smallest batch that ran out of the GPU's memory; 0: none did.
    ran_out_at: int = 0
    # Share of the time in which the largest batch was computed, on a GPU.
    busy: float | None = None

    def table(self, rows: Sequence[Row], pair: tuple[int, int]) -> TimeTable:
        """Measure all lengths; the table is labelled with these instances and threads."""
        if not rows:
            raise ConfigError(["batch times: expected at least one row to measure with"])
        rows = fitted(rows, self.config)
        first = self.children[0]
        by_length = _by_length(self.config, first.is_padded, rows, first.rules.max_lengths)
        seconds = {length: self.times(chosen, length) for length, chosen in by_length.items()}
        if not self.is_on_gpu:
            seconds = undisturbed(seconds)
        load_s = max(child.load_s for child in self.children)
        table = TimeTable(*pair, seconds, self.memory_bytes, load_s, self.tokens)
        table.ran_out_at, table.busy = self.ran_out_at, self.busy
        return table

    def step_time(self, rows: Sequence[Row], num_rows: int) -> StepTime | None:
        """Profile one batch of the longest rows in the first child."""
        first, rows = self.children[0], fitted(rows, self.config)
        by_length = _by_length(self.config, first.is_padded, rows, first.rules.max_lengths)
        length = max(by_length)
        chosen, lengths = by_length[length], [0] * len(by_length[length])
        if first.is_padded:
            chosen, lengths = _filled(self.config, chosen, [length] * len(chosen))
        taken = _taken(0, num_rows if first.may_batch else 1, len(chosen))
        values = stacked(self.config, [chosen[each] for each in taken])
        first.send(messages.Hold(values, len(taken), [lengths[each] for each in taken]))
        first.expect(messages.TrialDone)
        first.send(messages.WatchBatch(NUM_WATCHED))
        return first.expect(messages.BatchWatched).time

    def times(self, rows: Sequence[Row], length: int) -> dict[int, float]:
        """Return seconds by number of rows: the mean over children of their medians. Rows are
        padded to this length if the model is padded."""
        lengths = [0] * len(rows)
        if self.children[0].is_padded:
            rows, lengths = _filled(self.config, rows, [length] * len(rows))
        growth = self._growth(rows[0])
        while (rung := growth.next()) is not None:
            found = growth.seconds
            if found and would_take_s(found, rung, is_on_gpu=self.is_on_gpu) > self.longest_s:
                break
            try:
                growth.worked(rung, self._time(rows, lengths, rung))
                if self.config.is_packed and all(lengths):
                    taken = (_taken(n, rung, len(rows)) for n in range(len(self.children)))
                    tokens = [sum(lengths[each] for each in chosen) for chosen in taken]
                    self.tokens.setdefault(length, {})[rung] = statistics.fmean(tokens)
            except (BackendFailed, ConfigError) as error:
                if self.is_on_gpu and rung > 1 and tells_of_no_memory(str(error), None):
                    growth.ran_out(rung)
                    self.ran_out_at = min(rung, self.ran_out_at or rung)
                    self._mend()
                    continue
                if rung <= max(1, self.config.max_batch_size):
                    raise
                # Larger than the model is configured for; failure is acceptable.
                self.is_hurt = True
                self._mend()
                break
        return growth.seconds

    def _mend(self) -> None:
        """Restart children that exited or hang."""
        unwell = [child for child in self.children if not child.is_well]
        for child in unwell:
            child.close()
            child.start()
            child.timeout_s = LOAD_TIMEOUT_S
        _load_all(unwell)

    @property
    def is_on_gpu(self) -> bool:
        return self.config.device != CPU

    def _growth(self, row: Row) -> BatchGrowth:
        if not self.children[0].may_batch:
            return BatchGrowth([1], 1)
        configured, accepted = self.config.max_batch_size, self.children[0].rules.max_rows
        most = max(configured, LARGEST_ON_GPU if self.is_on_gpu else LARGEST_RUNG)
        most = min(configured if self.is_hurt else most, accepted or most)
        more = MORE_ON_GPU if self.is_on_gpu else ()
        planned = {1, *(min(each, most) for each in (RUNG, configured, most, *more))}
        if self.is_on_gpu and not self.is_hurt:
            num_bytes = sum(np.asarray(row[each.name]).nbytes for each in self._inputs(row))
            most = max(most, min(accepted or LARGEST, MAX_HELD_BYTES // max(1, num_bytes)))
        return BatchGrowth(sorted(planned), most)

    def _inputs(self, row: Row) -> list[TensorSpec]:
        return [spec for spec in self.config.inputs if spec.name in row]

    def _time(self, rows: Sequence[Row], lengths: Sequence[int], rung: int) -> float:
        for index, child in enumerate(self.children):
            taken = _taken(index, rung, len(rows))
            values = stacked(self.config, [rows[each] for each in taken])
            child.send(messages.Hold(values, rung, [lengths[each] for each in taken]))
        self._heard(messages.TrialDone)
        for child in self.children:
            child.send(messages.Measure(POINT_S, self.num_slots))
        measured = self._heard(messages.TrialMeasured)
        if not self.ran_out_at:
            # After that, the peak is that of the batch that did not fit.
            self.memory_bytes = max(self.memory_bytes, *(each.memory_bytes for each in measured))
        shares = [each.busy for each in measured if each.busy is not None]
        self.busy = statistics.fmean(shares) if shares else None
        return statistics.fmean(statistics.median(each.seconds) for each in measured)

    def _heard(self, kind: type[A]) -> list[A]:
        """Receive all answers before raising: a later request must not get an old answer."""
        heard: list[A] = []
        problem: BackendFailed | ConfigError | None = None
        for child in self.children:
            try:
                heard.append(child.expect(kind))
            except (BackendFailed, ConfigError) as error:
                problem = problem or error
        if problem is not None:
            raise problem
        return heard


def _taken(number: int, rung: int, num_rows: int) -> list[int]:
    """Return the rows of a child's batch."""
    return [(number * rung + offset) % num_rows for offset in range(rung)]


def undisturbed(seconds: Mapping[int, Mapping[int, float]]) -> dict[int, dict[int, float]]:
    """Remove disturbances from times by length and rows. A batch that took longer than one with
    longer and more rows was disturbed: other load can only make a batch slower."""
    return {
        length: {
            rung: min(
                seconds[other][more]
                for other in seconds
                for more in seconds[other]
                if other >= length and more >= rung
            )
            for rung in seconds[length]
        }
        for length in seconds
    }


def would_take_s(found: Mapping[int, float], rung: int, *, is_on_gpu: bool) -> float:
    """Estimate the time of a batch size from measured ones. On a CPU time is proportional to rows.
    On a GPU small batches are dominated by kernel launches, so the line through the last two points
    is extrapolated; from a single point only a lower limit follows."""
    *_, last = sorted(found)
    if not is_on_gpu:
        return found[last] * rung / last
    if len(found) == 1:
        return found[last]
    before = sorted(found)[-2]
    slope = max(0.0, (found[last] - found[before]) / (last - before))
    return found[last] + slope * (rung - last)


# Rows to batches.


def stacked(config: ModelConfig, rows: Sequence[Row]) -> list[Values]:
    """Stack the model's inputs of rows with equal shapes; other fields are not sent."""
    values: list[Values] = []
    for spec in config.inputs:
        if spec.name not in rows[0]:
            if spec.is_optional:
                continue
            raise ConfigError([f"input '{spec.name}': missing; a row has {sorted(rows[0])}"])
        arrays = [np.asarray(row[spec.name]) for row in rows]
        array = np.stack(arrays) if config.max_batch_size else arrays[0]
        values.append(Values.of(spec.name, spec.datatype, array))
    return values


def shape_groups(config: ModelConfig, rows: Sequence[Row], most: int) -> list[list[int]]:
    """Group indices of rows with equal shapes, at most `most` per group."""
    by_shape: dict[object, list[int]] = {}
    names = [spec.name for spec in config.inputs]
    for index, row in enumerate(rows):
        key = tuple(np.shape(row[n]) if n in row else None for n in names)
        by_shape.setdefault(key, []).append(index)
    return [
        indices[begin : begin + most]
        for indices in by_shape.values()
        for begin in range(0, len(indices), most)
    ]


def _by_length(
    config: ModelConfig, is_padded: bool, rows: Sequence[Row], num_lengths: int
) -> dict[int, Sequence[Row]]:
    """Group rows by length, or by bucket if the model is padded; a few lengths, spread over those
    of the rows. 0 if rows have no length."""
    lengths = row_lengths(rows, config)
    if not lengths:
        # If shapes have no common length, use the most common shape.
        (most, *_) = sorted(shape_groups(config, rows, len(rows)), key=len, reverse=True)
        return {0: [rows[index] for index in most]}
    pads = Pads(config) if is_padded else None
    keys = [(pads.bucket(each) if pads else None) or each for each in lengths]
    found: dict[int, list[Row]] = {key: [] for key in _spread(keys, num_lengths)}
    for row, key in zip(rows, keys, strict=True):
        if key in found:
            found[key].append(row)
    return dict(found)


def _filled(
    config: ModelConfig, rows: Sequence[Row], buckets: Sequence[int | None]
) -> tuple[list[Row], list[int]]:
    """Pad rows to these lengths; also return their lengths before, 0 for those not padded."""
    assert config.padding is not None
    axes, pairs = config.padding.axes, list(zip(rows, buckets, strict=True))
    sent = [padded(config, row, bucket) if bucket else row for row, bucket in pairs]
    return sent, [(length_of(row, axes) or 0) if bucket else 0 for row, bucket in pairs]


def _spread(keys: Sequence[int], most: int) -> list[int]:
    """Return the shortest, the longest and some lengths between, at even quantiles."""
    if len(set(keys)) <= most:
        return sorted(set(keys))
    ordered = sorted(keys)
    last = len(ordered) - 1
    return sorted({ordered[last * i // (most - 1)] for i in range(most)})


def padded(config: ModelConfig, row: Row, length: int) -> Row:
    """Pad a row as the server does; rows of this length stay the same."""
    assert config.padding is not None
    if length_of(row, config.padding.axes) == length:
        return row
    pads = Pads(config)
    shapes = tuple(np.shape(row[spec.name]) for spec in config.inputs)
    full = pads.shapes(shapes, length)
    return {
        spec.name: pads.filled(index, np.asarray(row[spec.name])[None], full[index])[0]
        for index, spec in enumerate(config.inputs)
    }
