"""How far a server is between its start and its end: one object, shared by all who ask."""

from __future__ import annotations


class Lifecycle:
    """The state of one server process. While draining, accepted requests finish and new ones are
    refused; a server never leaves this state."""

    __slots__ = ("is_draining", "is_loading")

    def __init__(self, is_loading: bool = False) -> None:
        self.is_loading = is_loading
        self.is_draining = False

    def drain(self) -> None:
        self.is_draining = True
