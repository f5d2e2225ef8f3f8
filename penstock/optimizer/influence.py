"""Check whether rows of a batch influence each other's answers: run examples alone and batched.

The check at load (`serving/proof`) uses random rows; this one uses examples and extreme ones among
them. An answer in a batch must equal the answer alone; padded, the answer without padding; and
repeated, the first answer. Runs in a trial's child process, called by the evaluator.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from penstock.config import CPU, ModelConfig
from penstock.optimizer import columns, trials
from penstock.optimizer.candidates import Build
from penstock.optimizer.extremes import choose_rows
from penstock.optimizer.facts import Facts
from penstock.optimizer.simulate import Row, fitted
from penstock.optimizer.trials import ServedRows, TrialProcess
from penstock.serving.proof import GPU_PADDING_TOLERANCE, PADDING_TOLERANCE, to_float64
from penstock.types import Array, TensorSpec

MAX_EXAMPLES = 32
MIN_EXAMPLES = 6
# Time for one check: slow models get fewer examples, very slow ones fewer batches as well.
CHECK_S = 6.0
MAX_CHECK_S = 20.0
# Limits of the survey, which finds rows of the rest that influence others but are not extreme.
SURVEY_S = 3.0
MAX_SURVEYED = 2000
# How often each example is computed: twice alone, padded, and in batches.
RUNS_PER_EXAMPLE = 8
SIZES = (2, 8, 32)
# Number of passes over the rows for each batch size, each in another order.
NUM_ORDERS = 2
# Minimum tolerance for builds below FP32: a value at the edge of a quantisation step falls to
# either side depending on the order of summation. The FP32 parent has a smaller tolerance.
ROUNDED_TOLERANCE = 0.05
# Rounding allowed in the output's own datatype, in units of the last place.
NUM_ULPS = 4
EPSILON = {"FP64": 2.0**-52, "FP32": 2.0**-23, "FP16": 2.0**-10, "BF16": 2.0**-7}
SEED = 12


def survey_order(num_rows: int, known: Collection[int]) -> list[int]:
    """Return the rows of a survey in random order: all but the known ones, up to MAX_SURVEYED."""
    left = set(range(num_rows)).difference(known)
    order = np.random.default_rng(SEED).permutation(num_rows)
    return [int(index) for index in order if int(index) in left][:MAX_SURVEYED]


class RowCheck(msgspec.Struct):
    """Result of the check; an empty text means no problem."""

    # Why rows must not share a batch.
    batching_problem: str = ""
    # Why sequences must not be padded.
    padding_problem: str = ""
    # The same row alone gives different answers each time; nothing else was checked then.
    repeat_problem: str = ""


class Moved(msgspec.Struct, frozen=True):
    """A changed answer: which output, and by how much of its column's range."""

    output: str
    share: float

    def text(self, example: int) -> str:
        by = f"by {self.share:.2g} of its range" if np.isfinite(self.share) else "beyond measure"
        return f"output '{self.output}' of example {example} moved {by}"


Answer = Mapping[str, Array]


def inspect(
    build: Build, rows: Sequence[Row], *, is_lossy: bool, ends_at: float = math.inf
) -> Facts:
    """Inspect, and check real rows: in the same process, unless that adds postprocessing."""
    model = replace(build, config=build.config.without_postprocess)
    with TrialProcess(build.config, ends_at=ends_at) as child:
        child.load()
        facts = trials.inspected(child, build)
        is_rounded = is_lossy or bool(facts.quantised)
        if build.config.postprocess is None:
            add_check(facts, check_rows(child, build, rows, is_rounded=is_rounded))
            return facts
    with TrialProcess(model.config, ends_at=ends_at) as child:
        child.load()
        add_check(facts, check_rows(child, model, rows, is_rounded=is_rounded))
    return facts


def add_check(facts: Facts, found: RowCheck) -> None:
    facts.batching_problem = facts.batching_problem or found.batching_problem
    facts.padding_problem = facts.padding_problem or found.padding_problem
    facts.repeat_problem = found.repeat_problem


def check_rows(
    child: TrialProcess, build: Build, rows: Sequence[Row], *, is_rounded: bool
) -> RowCheck:
    """Check a build that this child has loaded. `is_rounded`: it computes in less than FP32."""
    if not rows:
        return RowCheck()
    rules = child.rules
    try:
        return _Check(child, build, rows, is_rounded=is_rounded).run()
    finally:
        child.rules = rules


class _Check:
    def __init__(
        self, child: TrialProcess, build: Build, rows: Sequence[Row], *, is_rounded: bool
    ) -> None:
        self._child, self._build, self._data = child, build, rows
        # Indices into the data, used in messages.
        self._examples = choose_rows(rows, MAX_EXAMPLES)
        chosen = [rows[index] for index in self._examples]
        self._rows = list(fitted(chosen, build.config))
        self._is_rounded = is_rounded
        self._ends_at = time.perf_counter() + MAX_CHECK_S

    def run(self) -> RowCheck:
        config = self._build.config
        whole = _unpadded(self._rows)
        self._reduce(whole)
        self._alone = [self._run(whole, [index])[0] for index in self._indices]
        self._comparison = RowComparison(config, self._alone, is_rounded=self._is_rounded)
        if problem := self._repeat_problem(whole):
            return RowCheck(repeat_problem=problem)
        if not self._child.may_batch:
            return RowCheck()
        padding_problem = self._padding_problem() if self._child.is_padded else ""
        if padding_problem and self._build.candidate.steps:
            # A server would pad too, as configured, so rows must not be batched at all.
            return RowCheck(padding_problem, padding_problem)
        if padding_problem:
            self._child.rules = trials.TrialLimits(self._child.rules.max_rows, may_pad=False)
        served = trials.as_served(self._child, config, self._rows)
        problem = self._batching_problem(served)
        if problem or self._build.candidate.steps:
            return RowCheck(problem, padding_problem)
        found = self._survey()
        return RowCheck(found.batching_problem, padding_problem or found.padding_problem)

    def _survey(self) -> RowCheck:
        """Run the remaining examples, alone and in batches, as far as time allows."""
        ends_at = time.perf_counter() + SURVEY_S
        left = survey_order(len(self._data), self._examples)
        size = min(SIZES[-1], self._build.config.max_batch_size)
        found = RowCheck()
        for begin in range(0, len(left), size):
            if found != RowCheck() or time.perf_counter() > ends_at:
                break
            found = self._survey_batch(left[begin : begin + size])
        return found

    def _survey_batch(self, examples: Sequence[int]) -> RowCheck:
        config = self._build.config
        rows = list(fitted([self._data[index] for index in examples], config))
        served = trials.as_served(self._child, config, rows)
        alone = [self._run(_unpadded(rows), [index])[0] for index in range(len(rows))]
        for group in trials.shape_groups(config, served.rows, len(rows)):
            for index, answer in zip(group, self._run(served, group), strict=True):
                moved = self._comparison.difference(alone[index], answer)
                if moved is None:
                    continue
                text = moved.text(examples[index])
                padded = self._run(served, [index])[0] if served.lengths[index] else alone[index]
                if self._comparison.difference(alone[index], padded) is not None:
                    return RowCheck(padding_problem=f"padding changes answers: {text}")
                where = f"in a batch of {len(group)}"
                return RowCheck(f"answers depend on other rows in the batch: {text} {where}")
        return RowCheck()

    @property
    def _indices(self) -> range:
        return range(len(self._rows))

    def _reduce(self, whole: ServedRows) -> None:
        """Keep as many examples as there is time for, by the second run: the first may compile."""
        self._run(whole, [0])
        began = time.perf_counter()
        self._run(whole, [0])
        took_s = max(time.perf_counter() - began, 1e-6)
        limit = max(MIN_EXAMPLES, int(CHECK_S / (RUNS_PER_EXAMPLE * took_s)))
        self._rows, self._examples = self._rows[:limit], self._examples[:limit]

    def _run(self, served: ServedRows, indices: Sequence[int]) -> list[dict[str, Array]]:
        return trials.compute(self._child, self._build, served, indices)

    def _moved(self, served: ServedRows, batch: Sequence[int], index: int) -> str:
        """Describe how the answer to one row of a batch moved; empty if it did not."""
        answer = self._run(served, batch)[batch.index(index)]
        moved = self._comparison.difference(self._alone[index], answer)
        return "" if moved is None else moved.text(self._examples[index])

    def _repeat_problem(self, whole: ServedRows) -> str:
        """Repeat each row in reverse order: a stateful model has another state by now."""
        for index in reversed(self._indices):
            if text := self._moved(whole, [index], index):
                return f"{text} when it was asked again"
        return ""

    def _padding_problem(self) -> str:
        served = trials.as_served(self._child, self._build.config, self._rows)
        for index in self._indices:
            if served.lengths[index] and (text := self._moved(served, [index], index)):
                full = max(max(np.shape(each), default=0) for each in served.rows[index].values())
                sizes = f"{served.lengths[index]} elements filled up to {full}"
                return f"padding changes answers: {text} with {sizes}"
        return ""

    def _batching_problem(self, served: ServedRows) -> str:
        config = self._build.config
        for group in trials.shape_groups(config, served.rows, len(served.rows)):
            for place, batch in enumerate(batches(group, config.max_batch_size)):
                if place and time.perf_counter() > self._ends_at:
                    break
                problem = self._problem_in(served, batch)
                if problem:
                    return f"answers depend on other rows in the batch: {problem}"
        return ""

    def _problem_in(self, served: ServedRows, batch: Sequence[int]) -> str:
        answers = self._run(served, batch)
        found = {
            index: moved
            for index, answer in zip(batch, answers, strict=True)
            if (moved := self._comparison.difference(self._alone[index], answer)) is not None
        }
        if not found:
            return ""
        worst = max(found, key=lambda index: found[index].share)
        text = f"{found[worst].text(self._examples[worst])} in a batch of {len(batch)}"
        return self._next_to(served, batch, worst) or text

    def _next_to(self, served: ServedRows, batch: Sequence[int], index: int) -> str:
        """Describe the neighbour that moves this row the most; empty if it takes several."""
        found: list[tuple[float, str]] = []
        for other in (each for each in batch if each != index):
            pair = [each for each in batch if each in (index, other)]
            answer = self._run(served, pair)[pair.index(index)]
            moved = self._comparison.difference(self._alone[index], answer)
            if moved is not None:
                text = moved.text(self._examples[index])
                found.append((moved.share, f"{text} next to example {self._examples[other]}"))
        return max(found, default=(0.0, ""))[1]


def _unpadded(rows: Sequence[Row]) -> ServedRows:
    return ServedRows(rows, [0] * len(rows), ())


def batches(group: Sequence[int], max_rows: int) -> Iterator[list[int]]:
    """Yield mixed batches of these rows, largest first. Each row is in several batches of each
    size, at different positions and next to different rows."""
    random = np.random.default_rng(SEED)
    sizes = sorted({min(size, max_rows, len(group)) for size in SIZES}, reverse=True)
    for size in sizes:
        for _ in range(NUM_ORDERS if size > 1 else 0):
            order = [group[index] for index in random.permutation(len(group))]
            # The last batch is filled up with rows of the first.
            whole = order + order[: -len(order) % size]
            yield from (whole[begin : begin + size] for begin in range(0, len(whole), size))


class RowComparison:
    """Compares answers with those of the same rows alone."""

    def __init__(self, config: ModelConfig, alone: Sequence[Answer], *, is_rounded: bool) -> None:
        self._specs = config.outputs
        self._is_on_gpu = config.device != CPU
        by_datatype = GPU_PADDING_TOLERANCE if self._is_on_gpu else PADDING_TOLERANCE
        granted = config.tolerance
        if is_rounded:
            granted = max(granted or 0.0, ROUNDED_TOLERANCE)
        # TF32 kernels for other batch sizes round by up to 0.8 % (ResNet-50, H200, 2026-11).
        least = max(granted or 0.0, ROUNDED_TOLERANCE if self._is_on_gpu else 0.0)
        self._tolerances = {each: max(known, least) for each, known in by_datatype.items()}
        # If floats are rounded, integers computed from them may differ.
        self._has_exact = granted is None
        self._scales = {
            spec.name: self._scales_of(spec, [answer[spec.name] for answer in alone])
            for spec in config.outputs
            if alone and spec.datatype in self._tolerances
        }

    def _scales_of(self, spec: TensorSpec, arrays: Sequence[Array]) -> columns.ColumnScales:
        tables = columns.as_tables([to_float64(spec, array) for array in arrays])
        table = np.concatenate(tables)
        finite = np.where(np.isfinite(table), np.abs(table), 0.0)
        rounding = NUM_ULPS * EPSILON[spec.datatype] * finite.max(axis=0, initial=0.0)
        # TF32 rounding is relative to values, not ranges; it alone must stay within the tolerance.
        own_floor = 1.0 if self._is_on_gpu else columns.FLOOR
        scales = columns.column_scales(table, own_floor)
        return scales.widened(rounding / self._tolerances[spec.datatype])

    def difference(self, before: Answer, answer: Answer) -> Moved | None:
        """Return the output that moved the most, if any moved by more than its tolerance."""
        found = [
            Moved(spec.name, share)
            for spec in self._specs
            if (share := self._share(spec, before[spec.name], answer[spec.name]))
            > self._tolerances.get(spec.datatype, 0.0)
        ]
        return max(found, key=lambda each: each.share, default=None)

    def _share(self, spec: TensorSpec, before: Array, after: Array) -> float:
        if spec.datatype not in self._tolerances:
            if self._has_exact and not np.array_equal(before, after):
                return float("inf")
            return 0.0
        if before.shape != after.shape:
            return float("inf")
        scales = self._scales[spec.name]
        one, other = columns.as_tables([to_float64(spec, each) for each in (before, after)])
        if one.shape[1] != len(scales.spreads):
            # Rows have no columns in common: treat all values as one column.
            one, other = one.reshape(-1, 1), other.reshape(-1, 1)
        return float(columns.scaled_differences(one, other, scales).max(initial=0.0))
