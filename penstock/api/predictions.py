"""Offline runs over a whole data set: rows in, the outputs of all of them out, in order. Batches
are kept in flight, so that the model never waits for the caller."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.config import ModelConfig
from penstock.data import InputSpec, RequestForm
from penstock.data.datasets import read_dataset
from penstock.data.example_sets import Columns, from_arrays
from penstock.data.files import read_rows as read_file_rows
from penstock.data.prompts import samples_from_rows
from penstock.errors import InvalidRequest, PenstockError, PromptsFailed
from penstock.types import Array

if TYPE_CHECKING:
    from penstock.api.local_text import TextEvent
    from penstock.serving.local import LocalModel

Advance = Callable[[int], None]
# Batches in flight: enough that one waits while another runs.
NUM_IN_FLIGHT = 4


@contextmanager
def show_bar(num_rows: int, is_shown: bool, what: str = "predict") -> Iterator[Advance]:
    """Show a progress bar on stderr, in terminals and notebooks, if it is wanted. Yield the
    function that takes the number of rows that are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (what, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        task = progress.add_task(what, total=num_rows)
        yield lambda num_done: progress.advance(task, num_done)


def read_rows(dataset: object, config: ModelConfig) -> Columns:
    """Return the examples of a file, a folder or arrays; ConfigError if they do not fit."""
    has_batch = config.max_batch_size > 0
    form = RequestForm(kind="tensors", inputs=tuple(config.inputs), has_batch=has_batch)
    if isinstance(dataset, str | os.PathLike):
        return read_dataset(InputSpec(path=os.fspath(dataset)), form).columns
    if isinstance(dataset, Mapping):
        arrays = {name: np.asarray(values) for name, values in dataset.items()}
    elif len(config.inputs) == 1:
        arrays = {config.inputs[0].name: np.asarray(dataset)}
    else:
        names = ", ".join(spec.name for spec in config.inputs)
        raise InvalidRequest(f"'{config.name}' has several inputs; give them by name: {names}")
    if not all(len(values) for values in arrays.values() if values.ndim):
        raise InvalidRequest("the data set has no rows; expected one or more")
    return from_arrays(form, arrays, "dataset")


def read_prompts(dataset: object) -> list[Any]:
    """Return prompts: texts, or lists of messages."""
    if isinstance(dataset, np.ndarray) and dataset.ndim == 1:
        return list(dataset)
    if not isinstance(dataset, str | os.PathLike):
        assert isinstance(dataset, Sequence)
        return list(dataset)
    path = Path(dataset)
    samples = samples_from_rows(RequestForm(kind="prompt"), read_file_rows(path), path.name)
    return [sample.fields["prompt"] for sample in samples]


def run(model: LocalModel, columns: Columns, batch_size: int, advance: Advance) -> dict[str, Array]:
    """Run all rows and return the outputs by name."""
    has_batch = model.config.max_batch_size > 0
    parts: list[dict[str, Array]] = []
    waiting: deque[tuple[int, Future[dict[str, Array]]]] = deque()

    def take() -> None:
        num_rows, future = waiting.popleft()
        parts.append(future.result())
        advance(num_rows)

    try:
        for num_rows, tensors in _batches(columns, model.config, batch_size):
            if len(waiting) == NUM_IN_FLIGHT:
                take()
            waiting.append((num_rows, model.submit(tensors)))
        while waiting:
            take()
    finally:
        for _, future in waiting:
            future.cancel()
    return {name: _join([part[name] for part in parts], has_batch) for name in parts[0]}


class Answers:
    """Answers of several prompts, as their pieces come."""

    def __init__(self, num_prompts: int) -> None:
        self._pieces: list[list[str]] = [[] for _ in range(num_prompts)]
        self._errors: dict[int, PenstockError] = {}

    def take(self, event: TextEvent) -> int:
        """Return how many answers ended with this event: 0 or 1."""
        number, piece = event
        if isinstance(piece, str):
            self._pieces[number].append(piece)
            return 0
        if piece is not None:
            self._errors[number] = piece
        return 1

    def texts(self) -> list[str]:
        """Return all answers; PromptsFailed if some have none."""
        texts = ["".join(pieces) for pieces in self._pieces]
        if self._errors:
            whole = [None if n in self._errors else text for n, text in enumerate(texts)]
            raise PromptsFailed(whole, self._errors)
        return texts


def pieces_of(events: Generator[TextEvent], num_prompts: int) -> Iterator[tuple[int, str]]:
    """Yield the pieces of all answers, then raise PromptsFailed if some failed; the error itself if
    there is one prompt."""
    answers = Answers(num_prompts)
    with contextlib.closing(events):
        for number, piece in events:
            answers.take((number, piece))
            if isinstance(piece, str):
                yield number, piece
            elif piece is not None and num_prompts == 1:
                raise piece
    answers.texts()


def _batches(
    columns: Columns, config: ModelConfig, batch_size: int
) -> Iterator[tuple[int, dict[str, Array]]]:
    """Yield the rows as requests. Rows of different shapes are requests of their own."""
    if batch_size > max(1, config.max_batch_size):
        limit = config.max_batch_size or "one row, without a batch dimension"
        raise InvalidRequest(f"batch_size {batch_size}: the model takes at most {limit}")
    is_even = all(isinstance(column, np.ndarray) for column in columns.by_name.values())
    size = batch_size or config.max_batch_size if config.max_batch_size and is_even else 1
    for start in range(0, columns.num_examples, size):
        end = min(start + size, columns.num_examples)
        tensors: dict[str, Array] = {}
        for name, column in columns.by_name.items():
            rows = [each for each in column[start:end] if each is not None]
            if rows:
                tensors[name] = np.stack(rows) if config.max_batch_size else np.asarray(rows[0])
        yield end - start, tensors


def _join(arrays: Sequence[Array], has_batch: bool) -> Array:
    """Join the outputs of all requests; an array of arrays where their shapes differ."""
    rows = [row for array in arrays for row in array] if has_batch else list(arrays)
    if len({np.shape(row) for row in rows}) == 1:
        return np.concatenate(arrays) if has_batch else np.stack(rows)
    joined: Array = np.empty(len(rows), dtype=np.object_)
    joined[:] = rows
    return joined
