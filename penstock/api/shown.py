"""Results as text and as HTML: what `print` and notebooks show of them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

Writer = TypeVar("Writer")
# Wide enough for all tables.
WIDTH = 110
STYLE = "font-family:monospace;line-height:1.25;overflow-x:auto"


def to_text(shown: RenderableType) -> str:
    """Render for `print`, without colours."""
    from rich.console import Console

    console = Console(width=WIDTH, file=io.StringIO(), force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(shown)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def to_html(shown: RenderableType) -> str:
    """Render for a notebook, as it looks in a terminal."""
    from rich.console import Console

    console = Console(width=WIDTH, file=io.StringIO(), record=True, force_jupyter=False)
    console.print(shown)
    form = '<pre style="' + STYLE + '">{code}</pre>'
    return console.export_html(inline_styles=True, code_format=form)


def writer_for(path: Path, writers: Mapping[str, Writer]) -> Writer:
    """Return the writer of a file by its name's ending; ConfigError for other endings."""
    if path.suffix in writers:
        return writers[path.suffix]
    raise ConfigError([f"{path}: expected a name that ends in {' or '.join(writers)}"])
