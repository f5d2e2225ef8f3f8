"""What the benchmark needs to know of a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from overhead.process import Launch
from overhead.workload import Encoding, Model


class Server(Protocol):
    """variants are the settings to try, by name; prepare() comes before launch()."""

    name: ClassVar[str]
    title: ClassVar[str]

    @property
    def encodings(self) -> Sequence[Encoding]: ...

    @property
    def variants(self) -> Sequence[str]: ...

    def prepare(self) -> tuple[str, str]:
        """Installs what is missing. Returns the version and a note for readers, often empty."""
        ...

    def launch(self, variant: str, model: Model) -> Launch: ...
