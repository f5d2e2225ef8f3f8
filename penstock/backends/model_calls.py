"""Calls of a model's code to other models of its server, from any of its threads and tasks.

The worker says with `use` where the calls of a batch go. Knows no socket and no form of models.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.backends.current import Current
from penstock.errors import NotReady
from penstock.types import Parameter, Tensor

NO_CALLS = (
    "models can call others only while they run a request in a server (`penstock serve`): not "
    "while they are loaded or closed, and not in-process (`penstock.load`)"
)


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A request of one model to another; without a version, to the one that clients get. With an
    `action` it is a management call, whose inputs are the files of a load."""

    model_name: str
    model_version: str = ""
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[str] = ()
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    action: str = ""


@dataclass(frozen=True, slots=True)
class CalledAnswer:
    """One answer to a call: outputs, whose memory is their own, or an error with its class;
    `is_empty`: there is none, only the end of those before."""

    outputs: Sequence[Tensor] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    error_kind: str = ""
    error: str = ""
    is_final: bool = True
    is_empty: bool = False


Deliver = Callable[[CalledAnswer], None]


class CallLine(Protocol):
    """Where the calls of one batch go."""

    def start(self, call: ModelCall, deliver: Deliver) -> Callable[[], None]:
        """Send a call; return what cancels it. Each answer is delivered, in any thread, until the
        final one or until it is cancelled. PenstockError if it cannot be sent."""


# Of the batch that runs.
_line: Current[CallLine] = Current("line")


def use(line: CallLine | None) -> None:
    """Send the calls of the batch that is about to start, and of what it starts, here."""
    _line.set(line)


def find_line() -> CallLine:
    """Return where calls go; NotReady if there is no server."""
    line = _line.get()
    if line is None:
        raise NotReady(NO_CALLS)
    return line


class CalledAnswers:
    """The answers to a call, as they come. Closing it cancels what is left."""

    def __init__(self, call: ModelCall) -> None:
        self._answers: queue.SimpleQueue[CalledAnswer] = queue.SimpleQueue()
        self._is_over = False
        self._cancel = find_line().start(call, self._answers.put)

    def __iter__(self) -> Iterator[CalledAnswer]:
        return self

    def __next__(self) -> CalledAnswer:
        if self._is_over:
            raise StopIteration
        answer = self._answers.get()
        self._is_over = answer.is_final
        return answer

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._cancel()


class AwaitedAnswers:
    """The same on the running event loop; a plain `for` blocks it until the next answer."""

    def __init__(self, call: ModelCall) -> None:
        self._answers: queue.SimpleQueue[CalledAnswer] = queue.SimpleQueue()
        self._woken = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._is_over = False
        self._cancel = find_line().start(call, self._deliver)

    def _deliver(self, answer: CalledAnswer) -> None:
        self._answers.put(answer)
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits.
            self._loop.call_soon_threadsafe(self._woken.set)

    def __iter__(self) -> Iterator[CalledAnswer]:
        return self

    def __next__(self) -> CalledAnswer:
        if self._is_over:
            raise StopIteration
        return self._take()

    def __aiter__(self) -> AsyncIterator[CalledAnswer]:
        return self

    async def __anext__(self) -> CalledAnswer:
        if self._is_over:
            raise StopAsyncIteration
        while self._answers.empty():
            self._woken.clear()
            await self._woken.wait()
        return self._take()

    def _take(self) -> CalledAnswer:
        answer = self._answers.get()
        self._is_over = answer.is_final
        return answer

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._cancel()
