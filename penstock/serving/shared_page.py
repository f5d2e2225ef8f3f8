"""One page of shared memory in which shards and workers show each other their load.

The core creates it; every process of the server maps it. It holds 8-byte floats, and each cell has
one writer. No cell guards another, so readers need no lock: a value is old or new, never half of
both. Everything in the page is a hint. Readers bound what they read, and a page of random bits can
only change what is refused, how batches are divided and when answers leave, never an answer.

    header       core          layout: version, shards, models, slots of a model
    shard        the shard     heartbeat, CPU seconds, clients, clients that move
    model
      queue      the shard     requests, rows, tokens, work by level; due, head, arrivals; when
                               its oldest request came, if answers have an order; requests
      limits     the shard     for each slot, when its oldest batch is overdue
      held       the shard     requests by API key and level
      slot       the worker    predicted end of the batch that runs in it (0: idle; infinity: it
                               does not exist), start, rows
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.serving.elsewhere import OtherShards, ShardLoad
from penstock.serving.paces import ARRIVALS_S
from penstock.serving.shares import Queued

VERSION = 1
CELL_BYTES = 8
# A cache line; blocks of different writers never share one.
LINE = 8
HEADER_CELLS = LINE
SHARD_CELLS = LINE
SLOT_CELLS = LINE
# Levels that are shown apart; lower ones count as the last.
NUM_LEVELS = 4
# Cells of a queue block.
REQUESTS, ROWS, TOKENS, WORK = 0, 4, 8, 12
DUE, HEAD_ROWS, HEAD_TOKENS, ARRIVALS, ARRIVED_AT, TARGET = 16, 17, 18, 19, 20, 21
OLDEST, ADMITTED = 22, 23
QUEUE_CELLS = 3 * LINE
# API keys that may have a share of a queue.
NUM_KEYS = 64
HELD_CELLS = NUM_KEYS * NUM_LEVELS
# Cells of a slot block.
ENDS_AT, STARTED, NUM_ROWS, NUM_BATCHES = 0, 1, 2, 3
# Cells of a shard block.
HEARTBEAT, CPU_S, CLIENTS, MOVING = 0, 1, 2, 3
# Larger values are not believed.
MAX_COUNT = 1e7
MAX_WORK_S = 3600.0
MAX_TIME_S = 1e10
# Figures are read again after this time, and arrival rates after that one. At 50 us, every arrival
# read them: a tenth of the CPU time of 8 shards at 120,000 requests/s (2026-11-18).
MAX_AGE_S = 0.0003
MAX_RATE_AGE_S = 0.001


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Where cells are. `max_slots`: of all workers of one model."""

    num_shards: int
    max_models: int = 256
    max_slots: int = 256

    @property
    def _limit_cells(self) -> int:
        return -(-self.max_slots // LINE) * LINE

    @property
    def shard_cells(self) -> int:
        """Cells of one shard in the block of a model."""
        return QUEUE_CELLS + self._limit_cells + HELD_CELLS

    @property
    def model_cells(self) -> int:
        return self.num_shards * self.shard_cells + self.max_slots * SLOT_CELLS

    @property
    def num_cells(self) -> int:
        return self.shard_at(self.num_shards) + self.max_models * self.model_cells

    def shard_at(self, shard: int) -> int:
        return HEADER_CELLS + shard * SHARD_CELLS

    def model_at(self, model: int) -> int:
        return self.shard_at(self.num_shards) + model * self.model_cells

    def queue_at(self, model: int, shard: int) -> int:
        return self.model_at(model) + shard * self.shard_cells

    def limits_at(self, model: int, shard: int) -> int:
        return self.queue_at(model, shard) + QUEUE_CELLS

    def held_at(self, model: int, shard: int) -> int:
        return self.limits_at(model, shard) + self._limit_cells

    def slot_at(self, model: int, slot: int) -> int:
        return self.model_at(model) + self.num_shards * self.shard_cells + slot * SLOT_CELLS


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A shard at the time `at`: CPU time of its loop so far; clients that sent something lately,
    and those of them that were asked to connect again."""

    at: float
    cpu_s: float
    num_clients: int
    num_moving: int = 0


class SharedPage:
    """The mapped page. `cells` is a view of floats."""

    def __init__(self, cells: memoryview[float], layout: PageLayout) -> None:
        self.cells = cells
        self.layout = layout

    @classmethod
    def in_memory(cls, layout: PageLayout) -> SharedPage:
        """Make a page that only this process has."""
        page = cls(memoryview(bytearray(layout.num_cells * CELL_BYTES)).cast("d"), layout)
        page._describe()
        return page

    @classmethod
    def create(cls, layout: PageLayout) -> tuple[SharedPage, int]:
        """Make a page for other processes; return it and its descriptor, which the caller owns. It
        is sealed: no process can shrink it under the others."""
        fd = os.memfd_create("penstock-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, layout.num_cells * CELL_BYTES)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        page = cls(memoryview(mmap.mmap(fd, layout.num_cells * CELL_BYTES)).cast("d"), layout)
        page._describe()
        return page, fd

    @classmethod
    def open(cls, fd: int) -> SharedPage:
        """Map a page that another process made; ConfigError if it has another layout."""
        num_bytes = os.fstat(fd).st_size
        cells = memoryview(mmap.mmap(fd, num_bytes)).cast("d")
        if len(cells) < HEADER_CELLS or cells[0] != VERSION:
            raise ConfigError(f"the shared page is not of version {VERSION}")
        shards, models, slots = (bounded(cells[i], MAX_COUNT) for i in (1, 2, 3))
        layout = PageLayout(int(shards), int(models), int(slots))
        if layout.num_cells != len(cells):
            raise ConfigError(
                f"the shared page has {len(cells)} cells; {layout.num_cells} were expected"
            )
        return cls(cells, layout)

    def _describe(self) -> None:
        layout = self.layout
        figures = (VERSION, layout.num_shards, layout.max_models, layout.max_slots)
        for index, figure in enumerate(figures):
            self.cells[index] = figure

    def close(self) -> None:
        """Unmap it; views that others still hold keep it."""
        with contextlib.suppress(BufferError):
            self.cells.release()

    def beat(self, shard: int, beat: Heartbeat) -> None:
        """Show that a shard is alive, and how busy."""
        at = self.layout.shard_at(shard)
        self.cells[at + CPU_S] = beat.cpu_s
        self.cells[at + CLIENTS] = beat.num_clients
        self.cells[at + MOVING] = beat.num_moving
        self.cells[at + HEARTBEAT] = beat.at

    def beats(self) -> list[Heartbeat]:
        """Return what the shards have shown; all 0 if one has not, or is dead."""
        found = []
        for shard in range(self.layout.num_shards):
            at = self.layout.shard_at(shard)
            when, cpu_s, *counts = self.cells[at : at + MOVING + 1].tolist()
            clients, moving = (int(bounded(count, MAX_COUNT)) for count in counts)
            times = bounded(when, MAX_TIME_S), bounded(cpu_s, MAX_TIME_S)
            found.append(Heartbeat(*times, clients, moving))
        return found

    def clear_shard(self, shard: int, models: Iterable[int] | None = None) -> None:
        """Remove what a dead shard has shown of these models, or of all. Only the core, before a
        successor starts."""
        layout = self.layout
        self._clear(layout.shard_at(shard), SHARD_CELLS)
        for model in range(layout.max_models) if models is None else models:
            self._clear(layout.queue_at(model, shard), layout.shard_cells)

    def clear_model(self, model: int) -> None:
        """Remove everything of a model that was unloaded. Only the core, before the next one uses
        the block."""
        self._clear(self.layout.model_at(model), self.layout.model_cells)

    def clear_slot(self, model: int, slot: int) -> None:
        """Remove what a dead worker has shown. Only the core."""
        self._clear(self.layout.slot_at(model, slot), SLOT_CELLS)

    def _clear(self, at: int, count: int) -> None:
        for index in range(at, at + count):
            self.cells[index] = 0.0

    # A worker's cells.

    def show_batch(self, model: int, slot: int, started: float, ends_at: float, rows: int) -> None:
        at = self.layout.slot_at(model, slot)
        self.cells[at + STARTED] = started
        self.cells[at + NUM_ROWS] = rows
        self.cells[at + NUM_BATCHES] += 1
        self.cells[at + ENDS_AT] = ends_at

    def show_idle(self, model: int, slot: int) -> None:
        self.cells[self.layout.slot_at(model, slot) + ENDS_AT] = 0.0

    def show_missing(self, model: int, slot: int) -> None:
        """Show that the worker has no such slot: it is never idle, and nothing runs in it."""
        self.cells[self.layout.slot_at(model, slot) + ENDS_AT] = math.inf

    def is_idle(self, model: int, slot: int) -> bool:
        return self.cells[self.layout.slot_at(model, slot) + ENDS_AT] == 0.0

    def is_unused(self, model: int, num_slots: int) -> bool:
        """Whether no shard shows a queued request, and no worker a batch in these slots."""
        layout, cells = self.layout, self.cells
        for slot in range(num_slots):
            if math.isfinite(ends := cells[layout.slot_at(model, slot) + ENDS_AT]) and ends:
                return False
        queues = (layout.queue_at(model, shard) + REQUESTS for shard in range(layout.num_shards))
        return not any(any(cells[at : at + NUM_LEVELS].tolist()) for at in queues)

    def last_started(self, model: int, num_slots: int) -> float:
        """Return when the last batch started in these slots."""
        at = (self.layout.slot_at(model, slot) + STARTED for slot in range(num_slots))
        return max(bounded(self.cells[each], MAX_TIME_S) for each in at)

    # A shard's cells.

    def show_queue(self, model: int, shard: int, load: ShardLoad, now: float) -> None:
        cells, at, queued = self.cells, self.layout.queue_at(model, shard), load.queued
        for start, values in (
            (REQUESTS, load.num_requests),
            (ROWS, queued.rows),
            (TOKENS, queued.tokens),
            (WORK, load.work_s),
        ):
            self._show_levels(at + start, values)
        cells[at + DUE] = queued.due
        cells[at + HEAD_ROWS] = queued.head_rows
        cells[at + HEAD_TOKENS] = queued.head_tokens
        cells[at + ARRIVALS] = queued.arrivals_per_s
        cells[at + ARRIVED_AT] = now
        cells[at + TARGET] = queued.target_size

    def show_held(self, model: int, shard: int, key: int, counts: Sequence[int]) -> None:
        self._show_levels(self.layout.held_at(model, shard) + key * NUM_LEVELS, counts)

    def _show_levels(self, at: int, values: Sequence[float]) -> None:
        if len(values) > NUM_LEVELS:
            values = (*values[: NUM_LEVELS - 1], sum(values[NUM_LEVELS - 1 :]))
        for level, value in enumerate(values):
            self.cells[at + level] = value

    def read_queue(self, model: int, shard: int, now: float) -> Queued:
        """Return what a shard shows; its geometry is not known here."""
        at = self.layout.queue_at(model, shard)
        block = self.cells[at : at + QUEUE_CELLS].tolist()
        rows, tokens = block[ROWS : ROWS + NUM_LEVELS], block[TOKENS : TOKENS + NUM_LEVELS]
        due, head_rows, head_tokens, rate, rate_at, target = block[DUE : TARGET + 1]
        return Queued(
            tuple([int(each) if 0.0 <= each <= MAX_COUNT else 0 for each in rows]),
            tuple([int(each) if 0.0 <= each <= MAX_COUNT else 0 for each in tokens])
            if any(tokens)
            else (),
            due if abs(due - now) <= MAX_WORK_S else now,
            int(head_rows) if 1.0 <= head_rows <= MAX_COUNT else 1,
            int(bounded(head_tokens, MAX_COUNT)),
            None,
            faded(rate, rate_at, now),
            int(bounded(target, MAX_COUNT)),
        )


class PageBlocks:
    """The page as the core has it: `fd` is for other processes. Each loaded model, or each stage of
    one, has a block of its own, which another gets when it is unloaded."""

    def __init__(self, layout: PageLayout) -> None:
        self.page, self.fd = SharedPage.create(layout)
        # The block that was used last comes last.
        self._free = deque(range(layout.max_models))
        self._used: set[int] = set()

    def take(self, nums_slots: Sequence[int]) -> tuple[int, ...]:
        """Return a block for each of these numbers of slots; ConfigError if there is no room."""
        layout = self.page.layout
        for num_slots in nums_slots:
            if num_slots > layout.max_slots:
                raise ConfigError(
                    f"the model has {num_slots} instances; with --shards, "
                    f"{layout.max_slots} are possible"
                )
        if len(nums_slots) > len(self._free):
            raise ConfigError(
                f"{len(self._used)} models and stages of models are loaded; with --shards, "
                f"{layout.max_models} are possible"
            )
        taken = tuple(self._free.popleft() for _ in nums_slots)
        self._used.update(taken)
        for block in taken:
            self.page.clear_model(block)
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        """Free the blocks of a model whose writers have ended."""
        for block in blocks:
            self._used.discard(block)
            self._free.append(block)

    def lose_shard(self, shard: int) -> None:
        """Remove what a dead shard has shown."""
        self.page.clear_shard(shard, self._used)

    def close(self) -> None:
        self.page.close()
        os.close(self.fd)


class PageElsewhere:
    """The other shards of one model, as the page shows them; has the interface `Elsewhere`. Figures
    are at most MAX_AGE_S old. `num_slots`: of all workers of the model."""

    def __init__(
        self,
        page: SharedPage,
        model: int,
        shard: int,
        num_slots: int,
        policy_levels: int = 1,
        has_budget: bool = False,
    ) -> None:
        self._page, self._model, self._shard = page, model, shard
        layout = page.layout
        if not 0 < num_slots <= layout.max_slots:
            raise ConfigError(
                f"a model has {num_slots} slots; the shared page has room for 1 to "
                f"{layout.max_slots}"
            )
        self._num_levels = min(NUM_LEVELS, policy_levels)
        # Levels whose cells stand for no other level.
        self._num_single = NUM_LEVELS - (policy_levels > NUM_LEVELS)
        self._size_cells = TOKENS if has_budget else ROWS
        self._others = OtherShards()
        self._looked_at = self._rates_at = -math.inf
        begin = layout.queue_at(model, 0)
        self._queues = page.cells[begin : layout.queue_at(model, layout.num_shards)]
        own = layout.queue_at(model, shard)
        self._own = page.cells[own : own + QUEUE_CELLS]
        self.use_slots(num_slots)
        self._stride = layout.shard_cells
        self._held_at = layout.held_at(model, 0) - begin

    def use_slots(self, num_slots: int) -> None:
        """Read the cells of so many slots."""
        layout, model = self._page.layout, self._model
        self._slots = self._page.cells[layout.slot_at(model, 0) : layout.slot_at(model, num_slots)]

    def look(self, now: float, *, is_fresh: bool = False) -> OtherShards:
        others = self._others
        if not is_fresh and 0 <= now - self._looked_at < MAX_AGE_S:
            return others
        self._looked_at = now
        others.num_requests = self._sums(REQUESTS, MAX_COUNT)
        others.sizes = self._sums(self._size_cells, MAX_COUNT)
        others.work_s = self._sums(WORK, MAX_WORK_S)
        ends = self._slots[ENDS_AT::SLOT_CELLS].tolist()
        others.ends = sorted(end for end in ends if end and abs(end - now) <= MAX_WORK_S)
        if not 0 <= now - self._rates_at < MAX_RATE_AGE_S:
            self._rates_at = now
            others.arrivals_per_s = self._arrivals_per_s(now)
        return others

    def publish(self, load: ShardLoad, now: float) -> None:
        self._page.show_queue(self._model, self._shard, load, now)

    def arrived(self, level: int, num_requests: int, size: int, due: float | None) -> None:
        if level < self._num_single:
            own = self._own
            if due is not None:
                own[DUE] = due
            own[self._size_cells + level] = size
            own[REQUESTS + level] = num_requests

    def show_oldest(self, came: float) -> None:
        self._own[OLDEST] = came

    def oldest(self, now: float) -> float | None:
        found = [came for came in self._column(OLDEST) if came and 0 <= now - came <= MAX_WORK_S]
        return min(found, default=None)

    def show_held(self, key: int, counts: Sequence[int]) -> None:
        self._page.show_held(self._model, self._shard, key, counts)

    def num_held(self, key: int, level: int) -> int:
        at = self._held_at + key * NUM_LEVELS
        columns = [self._column(at + each) for each in range(min(level + 1, self._num_levels))]
        return sum(int(bounded(count, MAX_COUNT)) for column in columns for count in column)

    def show_admitted(self, count: int) -> None:
        self._own[ADMITTED] = count

    def num_admitted(self) -> int:
        return sum(int(bounded(count, MAX_COUNT)) for count in self._column(ADMITTED))

    def has_idle(self, slots: range) -> bool:
        """Whether one of these slots, which are a worker's, seems to be idle."""
        cells = self._slots
        return any(cells[SLOT_CELLS * slot + ENDS_AT] == 0.0 for slot in slots)

    def busy_s(self, slots: range, now: float) -> float:
        """Return how long ago the last of these slots, which are a worker's, started its batch; 0
        if one seems to be idle."""
        if self.has_idle(slots):
            return 0.0
        return now - max(self._slots[SLOT_CELLS * slot + STARTED] for slot in slots)

    def num_batches(self, slots: range) -> float:
        """Return how many batches ran in these slots; not a number if the page is wrong."""
        return sum(self._slots[SLOT_CELLS * slot + NUM_BATCHES] for slot in slots)

    def _column(self, cell: int) -> Sequence[float]:
        """Return this cell of the other shards."""
        column = self._queues[cell :: self._stride].tolist()
        del column[self._shard]
        return column

    def _sums(self, cell: int, limit: float) -> list[float]:
        """Return sums over shards by level, each including the levels above; the last one stands
        for all below it as well."""
        sums: list[float] = []
        above = 0.0
        for level in range(self._num_levels):
            column = self._column(cell + level)
            total = sum(column)
            if not 0.0 <= total <= limit:
                total = sum(bounded(each, limit) for each in column)
            above += total
            sums.append(above)
        return sums

    def _arrivals_per_s(self, now: float) -> float:
        rates, times = self._column(ARRIVALS), self._column(ARRIVED_AT)
        return sum(faded(rate, at, now) for rate, at in zip(rates, times, strict=True))


def slots_of_workers(config: ModelConfig) -> list[range]:
    """Return the slots of each worker that a model can have, in its block of the page."""
    found: list[range] = []
    begin = 0
    for _, count in config.places:
        found.append(range(begin, begin + count))
        begin += count
    return found


def add_places(slots: list[range], number: int) -> None:
    """Give slots to the workers of further places; each has one."""
    while len(slots) < number:
        slots.append(range(slots[-1].stop, slots[-1].stop + 1))


def num_slots(config: ModelConfig) -> int:
    """Return the slots of all workers that a model can have."""
    return slots_of_workers(config)[-1].stop


def bounded(value: float, limit: float) -> float:
    """Return the value, or 0 if it is no number from 0 to the limit."""
    return value if 0.0 <= value <= limit else 0.0


def faded(rate: float, at: float, now: float) -> float:
    """Return an arrival rate that was `rate` at that time."""
    rate = bounded(rate, MAX_COUNT)
    return rate * math.exp(max(-MAX_WORK_S, min(0.0, at - now)) / ARRIVALS_S) if at == at else 0.0
