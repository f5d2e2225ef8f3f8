"""A value that belongs to the model whose code runs, for functions that its code calls."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Current(Generic[Value]):
    """Threads and tasks see what was set in their context. Threads that a model starts have none,
    and see what was set last: a worker process has one model."""

    def __init__(self, name: str) -> None:
        self._value: ContextVar[Value | None] = ContextVar(name, default=None)
        self._last: Value | None = None

    def set(self, value: Value | None) -> None:
        self._value.set(value)
        self._last = value

    def get(self) -> Value | None:
        value = self._value.get()
        return self._last if value is None else value
