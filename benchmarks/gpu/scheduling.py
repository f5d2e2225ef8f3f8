"""In which order rows of several networks are measured, some of them at a time. Pure but for the
threads that wait for the children; `gpu_lock` keeps children out of each other's way."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from models import Technique

# Options whose kernels are chosen and kept for the rows that come later.
TUNED = ("penstock.fuse", "penstock.pack", "penstock.fp8")
AUTOTUNE = "max-autotune"
# What compiles or tunes goes first, so that others import and load meanwhile; what takes minutes
# goes last, so that the others are there when time is over.
FIRST, LATER, SERVED, LAST = range(4)


@dataclass(frozen=True, slots=True)
class Task:
    """A row of a network. `waits_for` names the row whose kernels it reads."""

    model: str
    name: str
    rank: int = LATER
    waits_for: str = ""
    # Whether it keeps its kernels for others.
    keeps: bool = False
    limit_s: float = 0.0


def kernels_of(technique: Technique) -> tuple[str, ...]:
    """Rows with the same need the same kernels; empty: none that are kept."""
    options = technique.options
    mode = options.get("penstock.compile", "")
    if mode:
        return ("compile", mode, options.get("penstock.dtype", ""))
    if any(key in options for key in TUNED):
        own = [options.get(key, "") for key in ("penstock.dtype", *TUNED)]
        return ("int8" if technique.is_int8 else "tuned", *own)
    return ()


def tasks_of(model: str, asked: Mapping[str, Technique]) -> list[Task]:
    """One for each row, in the order of the table. Of each kind of kernels the first row keeps
    them: a version's folder holds those of one."""
    tasks: list[Task] = []
    keepers: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name, technique in asked.items():
        kernels = kernels_of(technique)
        rank = FIRST if kernels else LATER
        waits_for, keeps = "", False
        if technique.num_clients:
            rank = SERVED
        elif AUTOTUNE in kernels:
            rank = LAST
        elif kernels and kernels[0] not in keepers:
            keepers[kernels[0]] = name, kernels
            keeps = True
        elif kernels and keepers[kernels[0]][1] == kernels:
            rank, waits_for = LATER, keepers[kernels[0]][0]
        tasks.append(Task(model, name, rank, waits_for, keeps, technique.limit_s))
    return tasks


def in_order(tasks: Sequence[Task]) -> list[Task]:
    """By rank, and networks in turns within one."""
    turns: dict[tuple[str, int], int] = {}
    keys = []
    for task in tasks:
        turn = turns[task.model, task.rank] = turns.get((task.model, task.rank), -1) + 1
        keys.append((task.rank, turn))
    return [task for _, task in sorted(zip(keys, tasks, strict=True), key=lambda each: each[0])]


def run_all(
    tasks: Sequence[Task],
    run: Callable[[Task], Any],
    done: Callable[[Task, Any], None],
    num_jobs: int,
    ends_at: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[Task]:
    """Run tasks, at most `num_jobs` at a time; `done` is called in this thread. Return those that
    were not begun before `ends_at`."""
    left, begun = in_order(tasks), {}
    pending = {(task.model, task.name) for task in left}
    with ThreadPoolExecutor(num_jobs) as pool:
        while left or begun:
            for task in _ready(left, pending)[: num_jobs - len(begun)]:
                if clock() >= ends_at:
                    break
                left.remove(task)
                begun[pool.submit(run, task)] = task
            if not begun:
                break
            ended: set[Future[Any]] = wait(begun, return_when=FIRST_COMPLETED).done
            for future in ended:
                task = begun.pop(future)
                pending.remove((task.model, task.name))
                done(task, future.result())
    return left


def _ready(left: Sequence[Task], pending: set[tuple[str, str]]) -> list[Task]:
    return [task for task in left if (task.model, task.waits_for) not in pending]
