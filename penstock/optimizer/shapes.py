"""Serving shapes of a model: batching, instances and threads. Ranks those worth measuring by
simulation from batch times. Pure.

Settings are the strings of a step: `mode` (off, fixed, slo), `max_batch`, `buckets`, `tokens`, and
in fixed mode `delay_us` and `preferred`; `instances`, `threads`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.config import CPU, SLO_OFF, ModelConfig, Padding, ladder
from penstock.optimizer import simulate
from penstock.optimizer.candidates import Step
from penstock.optimizer.simulate import TimeTable
from penstock.slo import Slo

if TYPE_CHECKING:
    from penstock.optimizer.passes import PassContext

Settings = dict[str, str]
# Instances, and threads of each.
Pair = tuple[int, int]

# The backend option for the threads of one instance.
THREADS = {
    "onnxruntime": "intra_op_thread_count",
    "openvino": "inference_num_threads",
    "pytorch": "intra_op_thread_count",
}
MAX_BATCHES = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
# Instances per GPU of every candidate. Two take turns, so that one copies while the other computes.
ON_GPU = (1, 2)
# More of the best one (`further`): a third, so that both copies overlap with computation; then
# several streams with two instances each.
MORE_ON_GPU = (3, 4, 8)
PER_STREAM = 2
STREAMS = "penstock.streams"
# Options with kernels that run on one stream only.
ONE_STREAM = ("penstock.fuse", "penstock.pack")
# With two instances, computation for less than this share of the time leaves room for a third.
BUSY = 0.9
# Batches that spend more than this share on what does not grow with rows leave the GPU idle.
IDLE = 0.3
# Queue delays to try in fixed mode, as shares of the time of a full batch, and the largest share
# of the SLO's latency.
DELAYS = (0.25, 0.5, 1.0)
MAX_DELAY = 0.25
# Preferred sizes smaller than this gain nothing.
MIN_PREFERRED = 8
# A delay or preferred sizes must raise the predicted rate by this much.
MIN_GAIN = 0.03
# How many of the best sizes in fixed mode are also tried in slo mode.
NUM_SLO_SIZES = 2
# Every bucket is warmed up at every batch size, so there are few.
NUM_BUCKETS = (4, 6)
# Bucket sizes are multiples of this: kernels prefer whole vectors.
ROUND_TO = 8
# Token budgets are multiples of this: matmuls prefer whole tiles.
TOKENS_ROUND_TO = 256
# Share of the SLO's latency that a proposed token budget leaves free.
ROOM = 0.1
# Shapes predicted below this share of the best are dropped: predictions are off by less.
WORTH = 0.85
NO_TERMS = Slo(())


def with_instances(config: ModelConfig, num_instances: int, num_threads: int) -> ModelConfig:
    """Set instances, on the configured devices in turns, and threads where there is an option."""
    options = dict(config.options)
    option = THREADS.get(config.backend)
    if option is not None:
        # Option names are case-insensitive.
        options = {key: value for key, value in options.items() if key.lower() != option}
        options[option] = str(num_threads)
    if num_streams := streams_of(config, num_instances):
        options[STREAMS] = str(num_streams)
    each = itertools.cycle(dict.fromkeys(config.devices))
    return replace(config.on(list(itertools.islice(each, num_instances))), options=options)


def streams_of(config: ModelConfig, num_instances: int) -> int:
    """Return the compute streams of so many instances, where there are several; 0: as configured.
    Three take turns on one."""
    if config.engine != "pytorch" or config.device == CPU:
        return 0
    num_streams = num_instances // len(set(config.devices)) // PER_STREAM
    return num_streams if num_streams > 1 else 0


def further(config: ModelConfig, times: Mapping[Pair, TimeTable], num_cores: int) -> Pair | None:
    """Return the next larger number of instances on a GPU that may be faster than those timed: a
    third if computation does not fill the time, more with streams of their own if kernels leave the
    GPU idle. None: none is."""
    num_devices = len(set(config.devices))
    counts = {pair[0] // num_devices: table for pair, table in times.items()}
    if config.device == CPU or config.engine != "pytorch" or ON_GPU[-1] not in counts:
        return None
    two, most = counts[ON_GPU[-1]], max(counts)
    is_waiting = two.busy is not None and two.busy < BUSY
    may_overlap = two.idle_share > IDLE and not any(key in config.options for key in ONE_STREAM)
    for count in MORE_ON_GPU:
        is_wanted = may_overlap if count // PER_STREAM > 1 else is_waiting
        if count > most and is_wanted:
            return count * num_devices, num_cores
    return None


def threads_of(config: ModelConfig, num_cores: int) -> int:
    """Return the threads of one instance, by its option or by the backends' default."""
    option = THREADS.get(config.backend, "")
    for key, value in config.options.items():
        if key.lower() == option and value.isdigit() and int(value):
            return int(value)
    return max(1, num_cores // config.num_instances)


def pairs(num_cores: int) -> list[Pair]:
    """Return instances and threads to measure: those that use all cores (1, 2, 4, ... instances),
    and one instance with one thread, which leaves the rest to the server and its clients."""
    full = [(count, num_cores // count) for count in ladder(num_cores)]
    return sorted({*full, (1, 1)}, key=lambda pair: (pair[0], -pair[1]))


def num_free_cores(pair: Pair, num_cores: int) -> int:
    """Return the cores that these instances and threads leave to the server."""
    return max(0, num_cores - pair[0] * pair[1])


def derived(times: Mapping[Pair, TimeTable], num_cores: int) -> list[TimeTable]:
    """Derive batch times of further arrangements that leave cores free, from measured ones: one
    instance with half of the cores and with all but one (Amdahl's law between one thread and all),
    and one single-threaded instance for each core but one (linear between one instance and all)."""
    alone, wide, many = (times.get(each) for each in ((1, 1), (1, num_cores), (num_cores, 1)))
    if alone is None or wide is None or many is None:
        return []
    found: dict[Pair, TimeTable] = {}
    for count in (num_cores // 2, num_cores - 1):
        part = (1 - 1 / count) / (1 - 1 / num_cores) if count > 1 else 0.0
        found[1, count] = _between(alone, wide, part, (1, count))
    part = (num_cores - 2) / (num_cores - 1) if num_cores > 1 else 0.0
    found[num_cores - 1, 1] = _between(alone, many, part, (num_cores - 1, 1))
    new = [pair for pair in found if pair not in times and min(pair) > 0]
    free = {pair: num_free_cores(pair, num_cores) for pair in new}
    return [msgspec.structs.replace(found[pair], num_free_cores=free[pair]) for pair in new]


def _between(one: TimeTable, other: TimeTable, part: float, pair: Pair) -> TimeTable:
    """Interpolate batches that both tables have; `part` is 0 at one and 1 at the other."""
    seconds: dict[int, dict[int, float]] = {}
    for bucket in (each for each in one.seconds if each in other.seconds):
        low, high = one.seconds[bucket], other.seconds[bucket]
        both = [rows for rows in low if rows in high]
        seconds[bucket] = {rows: low[rows] + part * (high[rows] - low[rows]) for rows in both}
    changed = {"num_instances": pair[0], "num_threads": pair[1], "seconds": seconds, "tokens": {}}
    return msgspec.structs.replace(one, **changed)


def arrangements(config: ModelConfig, num_cores: int) -> list[Pair]:
    """Return the instances and threads worth measuring on the model's device."""
    if config.device == CPU:
        return pairs(num_cores)
    num_devices = len(set(config.devices))
    return [(count * num_devices, num_cores) for count in ON_GPU]


def with_batching(config: ModelConfig, settings: Mapping[str, str], slo: Slo | None) -> ModelConfig:
    """Apply the settings of a batching step. Fixed mode is written explicitly: an SLO in the
    evidence would otherwise switch to slo mode."""
    mode = settings["mode"]
    batching = replace(config.batching, is_dynamic=mode != "off", slo_latency_s=None)
    promised = "" if slo is None else SLO_OFF
    if mode == "slo":
        assert slo is not None and slo.latency_s is not None, "slo mode without a latency"
        batching = replace(batching, slo_latency_s=slo.latency_s)
        promised = str(slo)
    config = replace(config, slo=promised, is_slo_from_evidence=False)
    if mode == "off":
        return replace(config, batching=replace(batching, max_tokens=None), padding=None)
    most = int(settings["max_batch"])
    preferred = tuple(each for each in batching.preferred_batch_sizes if each <= most)
    if "preferred" in settings:
        preferred = tuple(map(int, settings["preferred"].split(",")))
    delay_s = batching.max_queue_delay_s
    if "delay_us" in settings:
        delay_s = int(settings["delay_us"]) / 1e6
    batching = replace(
        batching,
        max_batch_size=most,
        preferred_batch_sizes=preferred,
        max_queue_delay_s=delay_s,
    )
    padding = config.padding
    if "buckets" in settings:
        axes = padding.axes if padding is not None else simulate.variable_axes(config)
        padding = Padding(axes, tuple(map(int, settings["buckets"].split(","))))
    max_tokens = int(settings["tokens"]) if "tokens" in settings else None
    if max_tokens is not None and padding is not None:
        # The budget must allow the longest row.
        max_tokens = max(max_tokens, padding.buckets[-1])
    batching = replace(batching, max_tokens=max_tokens)
    return replace(config, max_batch_size=most, batching=batching, padding=padding)


def settings_of(config: ModelConfig) -> Settings:
    if not config.batching.is_dynamic:
        return {"mode": "off"}
    mode = "fixed" if config.batching.slo_latency_s is None else "slo"
    found = {"mode": mode, "max_batch": str(config.max_batch_size)}
    if config.padding is not None:
        found["buckets"] = ",".join(map(str, config.padding.buckets))
    return found | tokens_of(config)


def tokens_of(config: ModelConfig) -> Settings:
    """Return the token budget as settings, if there is one."""
    most = config.batching.max_tokens
    return {} if most is None else {"tokens": str(most)}


# Tokens.


def token_budgets(table: TimeTable, longest: int, slo: Slo | None) -> list[int]:
    """Return token budgets worth trying, largest first: all that was measured; the most that leaves
    time to wait for a previous batch, with headroom; half of that. None is less than the longest
    row. Empty if batch times do not depend on tokens."""
    times = table.by_tokens
    if not times:
        return []
    most = max(*times, longest)
    found = [most]
    if slo is not None and slo.latency_s is not None:
        limit_s = (1 - ROOM) * slo.latency_s / (1 + 1 / table.num_instances)
        fitting = most
        while fitting > longest and table.tokens_s(fitting) > limit_s:
            fitting -= TOKENS_ROUND_TO
        found += [fitting, fitting // 2]
    rounded = {max(longest, each // TOKENS_ROUND_TO * TOKENS_ROUND_TO) for each in found}
    return sorted(rounded, reverse=True)


# Buckets.


def best_buckets(lengths: Sequence[int], num_buckets: int) -> tuple[int, ...]:
    """Return at most `num_buckets` buckets that minimise padding of these lengths. The longest
    length is a bucket exactly as it is: longer inputs may exceed the model's limit."""
    longest = max(lengths)
    rounded = [min(longest, -(-each // ROUND_TO) * ROUND_TO) for each in lengths]
    ends, counts = np.unique(rounded, return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])
    num = len(ends)
    # cost[j]: fewest elements for the first j lengths with the buckets so far.
    cost = np.concatenate([[0.0], np.full(num, np.inf)])
    last: list[list[int]] = []
    for _ in range(min(num_buckets, num)):
        totals = [cost[:j] + (below[j] - below[:j]) * ends[j - 1] for j in range(1, num + 1)]
        last.append([0, *(int(np.argmin(each)) for each in totals)])
        cost = np.array([0.0, *(each.min() for each in totals)])
    chosen: list[int] = []
    j = num
    while j:
        chosen.insert(0, int(ends[j - 1]))
        j = last.pop()[j]
    return tuple(chosen)


# Ranking.


@dataclass(frozen=True, slots=True)
class ServingShape:
    """A serving configuration and its predicted highest rate."""

    settings: Settings
    num_instances: int
    num_threads: int
    rate: float

    @property
    def steps(self) -> tuple[Step, Step]:
        threads = {"instances": str(self.num_instances), "threads": str(self.num_threads)}
        return Step("batching", self.settings), Step("instances", threads)


class Ranking:
    """Ranks shapes of one model by simulation."""

    def __init__(self, context: PassContext) -> None:
        self._config = context.build.config
        self._facts = context.facts
        if self._facts.padding_problem:
            # The server detects this too, and batches equal lengths only.
            self._config = replace(self._config, padding=None)
        self._slo = context.plan.slo
        rows = simulate.fitted(context.rows, self._config)
        self._lengths = simulate.row_lengths(rows, self._config)

    def rate(self, table: TimeTable, settings: Settings, above: float = 0.0) -> float:
        """Return the predicted highest rate; 0 if it is below `above` or none keeps the SLO."""
        config = with_batching(self._config, settings, self._slo)
        shares = simulate.shares_of(self._lengths, config)
        return simulate.max_rate(table, config, self._slo or NO_TERMS, shares, above=above)

    def now(self, table: TimeTable) -> float:
        """Return the predicted rate of the current configuration."""
        shares = simulate.shares_of(self._lengths, self._config)
        return simulate.max_rate(table, self._config, self._slo or NO_TERMS, shares)

    def batching(self, table: TimeTable) -> list[ServingShape]:
        """Return the shapes near the best, best first. Buckets are chosen first, with the largest
        batch; then sizes, in rows and in tokens; then slo mode with the best sizes."""
        off: Settings = {"mode": "off"}
        if not self.may_batch or table.max_rows == 1:
            return self._near_best(table, [off])
        most = table.max_rows
        sizes = [size for size in MAX_BATCHES if size < most] + [most]
        buckets = self._best_buckets(table, most)
        fixed = [{"mode": "fixed", "max_batch": str(size), **buckets} for size in sizes]
        fixed = self._by_tokens(table, fixed)
        found = self._near_best(table, [*reversed(fixed), off])
        if self._slo is None or self._slo.latency_s is None:
            return found
        batched = [shape.settings for shape in found if shape.settings != off]
        slo = [{**settings, "mode": "slo"} for settings in batched[:NUM_SLO_SIZES]]
        largest = {**fixed[-1], "mode": "slo"}
        if not slo or ("tokens" in largest and largest not in slo):
            # With tokens, slo mode closes batches by itself and needs no small budget.
            slo.append(largest)
        return self._near_best(table, slo, found)

    def waiting(self, table: TimeTable, known: Sequence[ServingShape]) -> list[ServingShape]:
        """Return the best of the known sizes in fixed mode with a queue delay or preferred sizes,
        where that is better than without: sizes that the engine runs without padding, and waiting
        for them."""
        fixed = [shape for shape in known if shape.settings["mode"] == "fixed"]
        if not fixed:
            return []
        best = fixed[0]
        wanted = [{**best.settings, **each} for each in self._waits(table, best.settings)]
        above = (1 + MIN_GAIN) * best.rate
        rates = [self.rate(table, settings, above=above) for settings in wanted]
        pair = table.num_instances, table.num_threads
        found = [ServingShape(each, *pair, rate) for each, rate in zip(wanted, rates, strict=True)]
        return sorted((shape for shape in found if shape.rate), key=lambda shape: -shape.rate)

    def _waits(self, table: TimeTable, settings: Settings) -> list[Settings]:
        most = int(settings["max_batch"])
        sizes = [size for size in ladder(most) if size >= MIN_PREFERRED]
        preferred: Settings = {"preferred": ",".join(map(str, sizes))} if len(sizes) > 1 else {}
        full_s = table.batch_s(max(table.seconds), most)
        limit_s = None if self._slo is None else self._slo.latency_s
        delays = [share * full_s for share in DELAYS]
        if limit_s is not None:
            delays = [each for each in delays if each <= MAX_DELAY * limit_s]
        found: list[Settings] = [{"delay_us": str(round(each * 1e6))} for each in delays]
        if preferred:
            found += [{**preferred, **each} for each in found[:1]] + [preferred]
        if self._config.batching.max_queue_delay_s:
            found.append({"delay_us": "0"})
        return found

    def _by_tokens(self, table: TimeTable, by_rows: list[Settings]) -> list[Settings]:
        """Add token budgets if batch times depend on tokens, else keep the configured one."""
        padding = self._config.padding
        budgets = token_budgets(table, padding.buckets[-1], self._slo) if padding else []
        if not budgets:
            return [each | tokens_of(self._config) for each in by_rows]
        largest = by_rows[-1]
        return by_rows + [{**largest, "tokens": str(each)} for each in reversed(budgets)]

    def _near_best(
        self, table: TimeTable, wanted: Sequence[Settings], known: Sequence[ServingShape] = ()
    ) -> list[ServingShape]:
        found = list(known)
        for settings in wanted:
            best = max((shape.rate for shape in found), default=0.0)
            rate = self.rate(table, settings, above=WORTH * best)
            found.append(ServingShape(settings, table.num_instances, table.num_threads, rate))
        best = max(shape.rate for shape in found)
        near = [shape for shape in found if shape.rate and shape.rate >= WORTH * best]
        return sorted(near, key=lambda shape: -shape.rate)

    @property
    def may_batch(self) -> bool:
        return self._config.max_batch_size > 0 and not self._facts.batching_problem

    def buckets(self) -> list[Settings]:
        """Return the current buckets, and those that the lengths of the examples suggest."""
        kept = {}
        if self._config.padding is not None:
            kept = {"buckets": ",".join(map(str, self._config.padding.buckets))}
        found: list[Settings] = [kept]
        # Padding costs nothing in packed models, which do not compute it.
        is_free = bool(kept) and self._config.is_packed
        if is_free or self._facts.padding_problem or len(set(self._lengths)) < 2:
            return found
        for num in NUM_BUCKETS:
            text = ",".join(map(str, best_buckets(self._lengths, num)))
            if {"buckets": text} not in found:
                found.append({"buckets": text})
        return found

    def _best_buckets(self, table: TimeTable, most: int) -> Settings:
        options = self.buckets()
        base = {"mode": "fixed", "max_batch": str(most)}
        if len(options) == 1:
            return options[0]
        return max(options, key=lambda each: self.rate(table, {**base, **each}))


def shapes(
    context: PassContext, *, is_thorough: bool = False
) -> list[tuple[tuple[Step, ...], float]]:
    """Return batching and instances steps with their predicted highest rates, best first.
    `is_thorough`: with queue delays and preferred sizes too."""
    ranking = Ranking(context)
    found: list[ServingShape] = []
    tables = [*context.times.values()]
    if context.build.config.device == CPU:
        tables += derived(context.times, context.machine.num_cores)
    for table in tables:
        known = ranking.batching(table)
        found += known
        if is_thorough:
            found += ranking.waiting(table, known)
    found.sort(key=lambda shape: -shape.rate)
    if not found and context.times:
        # No rate keeps the SLO: use the arrangement with the lowest latency of a single request.
        table = min(context.times.values(), key=alone_s)
        found = [ServingShape({"mode": "off"}, table.num_instances, table.num_threads, 0.0)]
    return [(shape.steps, shape.rate) for shape in found]


def alone_s(table: TimeTable) -> float:
    """Return the time of a batch of one row; the longest row, if lengths vary."""
    return table.batch_s(max(table.seconds), 1)
