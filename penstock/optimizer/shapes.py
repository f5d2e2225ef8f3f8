"""The shape in which a model is served: how it is batched, on how many instances with how many
threads. Which shapes are worth measuring, by simulation from batch times. Pure.

Settings are the strings of a step: `mode` (off, fixed, slo), `max_batch`, `buckets`, `tokens`;
`instances`, `threads`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.config import CPU, SLO_OFF, ModelConfig, Padding, ladder
from penstock.optimizer.candidates import Step
from penstock.optimizer.simulate import (
    TimeTable,
    fitted,
    max_rate,
    row_lengths,
    shares_of,
    variable_axes,
)
from penstock.slo import Slo

if TYPE_CHECKING:
    from penstock.optimizer.passes import Situation

Settings = dict[str, str]
# Instances, and threads of each.
Pair = tuple[int, int]

# The option that says how many threads one instance computes with.
THREADS = {
    "onnxruntime": "intra_op_thread_count",
    "openvino": "inference_num_threads",
    "pytorch": "intra_op_thread_count",
}
MAX_BATCHES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
# On each GPU. Two take turns there, so that one is copied while the other is computed.
ON_GPU = (1, 2)
# Sizes, of the best in fixed mode, that slo mode is tried with.
NUM_SLO_SIZES = 2
# Every bucket is warmed up on every rung, so there are few.
NUM_BUCKETS = (4, 6)
# Kernels like whole vectors.
ROUND_TO = 8
# And products of matrices whole tiles of tokens.
TOKENS_ROUND_TO = 256
# Of the SLO, kept free when a budget of tokens is proposed.
ROOM = 0.1
# What is predicted to be worse than the best by more than the prediction may be off.
WORTH = 0.85
NO_TERMS = Slo(())


def with_instances(config: ModelConfig, num_instances: int, num_threads: int) -> ModelConfig:
    """So many instances with so many threads each; backends without the option keep their own. What
    was on several devices stays there, in turns."""
    options = dict(config.options)
    option = THREADS.get(config.backend)
    if option is not None:
        # Spellings in capitals are the same option.
        options = {key: value for key, value in options.items() if key.lower() != option}
        options[option] = str(num_threads)
    each = itertools.cycle(dict.fromkeys(config.devices))
    return replace(config.on(list(itertools.islice(each, num_instances))), options=options)


def threads_of(config: ModelConfig, num_cores: int) -> int:
    """How many threads one instance computes with, by its option or by the backends' default."""
    option = THREADS.get(config.backend, "")
    for key, value in config.options.items():
        if key.lower() == option and value.isdigit() and int(value):
            return int(value)
    return max(1, num_cores // config.num_instances)


def pairs(num_cores: int) -> list[Pair]:
    """Instances and threads to measure: those that use all cores (one instance, two, four, ... and
    one for each core), and one instance with one thread, which leaves the rest to the server and
    its clients."""
    full = [(count, num_cores // count) for count in ladder(num_cores)]
    return sorted({*full, (1, 1)}, key=lambda pair: (pair[0], -pair[1]))


def num_free_cores(pair: Pair, num_cores: int) -> int:
    """Cores that so many instances with so many threads each leave to the server."""
    return max(0, num_cores - pair[0] * pair[1])


def derived(times: Mapping[Pair, TimeTable], num_cores: int) -> list[TimeTable]:
    """Batch times of further arrangements that leave cores free, from those that were measured: one
    instance with half of the cores and with all but one (Amdahl's law between one thread and all of
    them), and one instance with one thread for each core but one (linear between one instance and
    all of them)."""
    alone, wide, many = (times.get(each) for each in ((1, 1), (1, num_cores), (num_cores, 1)))
    if alone is None or wide is None or many is None:
        return []
    found: dict[Pair, TimeTable] = {}
    for count in (num_cores // 2, num_cores - 1):
        part = (1 - 1 / count) / (1 - 1 / num_cores) if count > 1 else 0.0
        found[1, count] = _between(alone, wide, part, (1, count))
    part = (num_cores - 2) / (num_cores - 1) if num_cores > 1 else 0.0
    found[num_cores - 1, 1] = _between(alone, many, part, (num_cores - 1, 1))
    return [
        msgspec.structs.replace(table, num_free_cores=num_free_cores(pair, num_cores))
        for pair, table in found.items()
        if pair not in times and min(pair) > 0
    ]


def _between(one: TimeTable, other: TimeTable, part: float, pair: Pair) -> TimeTable:
    """Batches that both tables have, so far on the way from one to the other."""
    seconds = {
        bucket: {
            rows: each + part * (other.seconds[bucket][rows] - each)
            for rows, each in by_rows.items()
            if rows in other.seconds[bucket]
        }
        for bucket, by_rows in one.seconds.items()
        if bucket in other.seconds
    }
    return msgspec.structs.replace(
        one, num_instances=pair[0], num_threads=pair[1], seconds=seconds, tokens={}
    )


def arrangements(config: ModelConfig, num_cores: int) -> list[Pair]:
    """Instances and threads that are worth knowing, where the model is."""
    if config.device == CPU:
        return pairs(num_cores)
    num_devices = len(set(config.devices))
    return [(count * num_devices, num_cores) for count in ON_GPU]


def with_batching(config: ModelConfig, settings: Mapping[str, str], slo: Slo | None) -> ModelConfig:
    """As a step of the pass on batching says. Fixed mode says so even beside evidence, whose SLO
    would otherwise switch to slo mode."""
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
    batching = replace(batching, max_batch_size=most, preferred_batch_sizes=preferred)
    padding = config.padding
    if "buckets" in settings:
        axes = padding.axes if padding is not None else variable_axes(config)
        padding = Padding(axes, tuple(map(int, settings["buckets"].split(","))))
    max_tokens = int(settings["tokens"]) if "tokens" in settings else None
    if max_tokens is not None and padding is not None:
        # No row is longer than what is allowed together.
        max_tokens = max(max_tokens, padding.buckets[-1])
    batching = replace(batching, max_tokens=max_tokens)
    return replace(
        config,
        max_batch_size=most,
        batching=batching,
        padding=padding,
    )


def settings_of(config: ModelConfig) -> Settings:
    """How it is batched now, as settings."""
    if not config.batching.is_dynamic:
        return {"mode": "off"}
    mode = "fixed" if config.batching.slo_latency_s is None else "slo"
    found = {"mode": mode, "max_batch": str(config.max_batch_size)}
    if config.padding is not None:
        found["buckets"] = ",".join(map(str, config.padding.buckets))
    return found | tokens_of(config)


def tokens_of(config: ModelConfig) -> Settings:
    """The budget of tokens, if there is one."""
    most = config.batching.max_tokens
    return {} if most is None else {"tokens": str(most)}


# Tokens.


def token_budgets(table: TimeTable, longest: int, slo: Slo | None) -> list[int]:
    """Budgets that are worth a try, largest first: all that was measured; the most that leaves time
    to wait for a batch before, with room; half of that. None is less than the longest row, and
    there is none where time does not go by tokens."""
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
    """So many buckets, or fewer, with which these lengths are filled up least. The longest is one
    of them as it is: longer inputs may be more than the model can take."""
    longest = max(lengths)
    rounded = [min(longest, -(-each // ROUND_TO) * ROUND_TO) for each in lengths]
    ends, counts = np.unique(rounded, return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])
    num = len(ends)
    # cost[j]: fewest elements for the first j lengths with the buckets so far.
    cost = np.full(num + 1, np.inf)
    cost[0] = 0.0
    last: list[list[int]] = []
    for _ in range(min(num_buckets, num)):
        grown = np.full(num + 1, np.inf)
        grown[0] = 0.0
        came_from = [0] * (num + 1)
        for j in range(1, num + 1):
            totals = cost[:j] + (below[j] - below[:j]) * ends[j - 1]
            came_from[j] = int(np.argmin(totals))
            grown[j] = totals[came_from[j]]
        cost = grown
        last.append(came_from)
    chosen: list[int] = []
    j = num
    for came_from in reversed(last):
        if j:
            chosen.append(int(ends[j - 1]))
            j = came_from[j]
    return tuple(sorted(chosen))


# What is worth measuring.


@dataclass(frozen=True, slots=True)
class Shape:
    """One way to serve, and the highest rate that is predicted for it."""

    settings: Settings
    num_instances: int
    num_threads: int
    rate: float

    def __str__(self) -> str:
        listed = ", ".join(f"{key} {value}" for key, value in self.settings.items())
        return f"{listed}; {self.num_instances} x {self.num_threads} threads"


class Ranking:
    """Shapes of one model as it stands, by simulation."""

    def __init__(self, situation: Situation) -> None:
        self._config = situation.build.config
        self._facts = situation.facts
        if self._facts.padding_problem:
            # The server finds the same, and keeps lengths apart.
            self._config = replace(self._config, padding=None)
        self._slo = situation.plan.slo
        self._lengths = row_lengths(fitted(situation.rows, self._config), self._config)

    def rate(self, table: TimeTable, settings: Settings, above: float = 0.0) -> float:
        """0: below `above`, or never."""
        config = with_batching(self._config, settings, self._slo)
        shares = shares_of(self._lengths, config)
        return max_rate(table, config, self._slo or NO_TERMS, shares, above=above)

    def now(self, table: TimeTable) -> float:
        """Of the model as it is configured."""
        shares = shares_of(self._lengths, self._config)
        return max_rate(table, self._config, self._slo or NO_TERMS, shares)

    def batching(self, table: TimeTable) -> list[Shape]:
        """Best first; only what is near the best. Buckets are chosen first, with the largest batch;
        then sizes with those, in rows and in tokens, and slo mode with the best sizes."""
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
        batched = [shape for shape in found if shape.settings != off]
        slo = [{**shape.settings, "mode": "slo"} for shape in batched[:NUM_SLO_SIZES]]
        largest = {**fixed[-1], "mode": "slo"}
        if not slo or ("tokens" in largest and largest not in slo):
            # By tokens the SLO closes batches where it must; a budget need not.
            slo.append(largest)
        return self._near_best(table, slo, found)

    def _by_tokens(self, table: TimeTable, by_rows: list[Settings]) -> list[Settings]:
        """Also with budgets, where time goes by tokens; elsewhere the one that is configured stays,
        for its reasons may be others."""
        padding = self._config.padding
        budgets = token_budgets(table, padding.buckets[-1], self._slo) if padding else []
        if not budgets:
            return [each | tokens_of(self._config) for each in by_rows]
        largest = by_rows[-1]
        return by_rows + [{**largest, "tokens": str(each)} for each in reversed(budgets)]

    def _near_best(
        self, table: TimeTable, wanted: Sequence[Settings], known: Sequence[Shape] = ()
    ) -> list[Shape]:
        found = list(known)
        for settings in wanted:
            best = max((shape.rate for shape in found), default=0.0)
            rate = self.rate(table, settings, above=WORTH * best)
            found.append(Shape(settings, table.num_instances, table.num_threads, rate))
        best = max(shape.rate for shape in found)
        near = [shape for shape in found if shape.rate and shape.rate >= WORTH * best]
        return sorted(near, key=lambda shape: -shape.rate)

    @property
    def may_batch(self) -> bool:
        return self._config.max_batch_size > 0 and not self._facts.batching_problem

    def buckets(self) -> list[Settings]:
        """As it is, and what the lengths of the examples suggest."""
        kept = {}
        if self._config.padding is not None:
            kept = {"buckets": ",".join(map(str, self._config.padding.buckets))}
        found: list[Settings] = [kept]
        # What is filled up costs nothing where it is not computed.
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
        if len(options) == 1:
            return options[0]
        base = {"mode": "fixed", "max_batch": str(most)}
        return max(options, key=lambda each: self.rate(table, {**base, **each}))


def shapes(situation: Situation) -> list[tuple[tuple[Step, ...], float]]:
    """Steps of the passes on batching and instances over everything that batch times are known
    for, with the highest rate that is predicted for each; best first."""
    ranking = Ranking(situation)
    found: list[Shape] = []
    tables = [*situation.times.values()]
    if situation.build.config.device == CPU:
        tables += derived(situation.times, situation.machine.num_cores)
    for table in tables:
        found += ranking.batching(table)
    found.sort(key=lambda shape: -shape.rate)
    if not found and situation.times:
        # No rate keeps the SLO: what comes nearest is who answers a request alone the soonest.
        table = min(situation.times.values(), key=alone_s)
        found = [Shape({"mode": "off"}, table.num_instances, table.num_threads, 0.0)]
    return [(steps_of(shape), shape.rate) for shape in found]


def alone_s(table: TimeTable) -> float:
    """Of one row that shares with nobody; the longest, where lengths vary."""
    return table.batch_s(max(table.seconds), 1)


def steps_of(shape: Shape) -> tuple[Step, ...]:
    return (
        Step("batching", dict(shape.settings)),
        Step(
            "instances",
            {"instances": str(shape.num_instances), "threads": str(shape.num_threads)},
        ),
    )
