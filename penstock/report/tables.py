"""Tables, in a terminal and on a page: text on the left, figures on the right."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table on a page; the detail is in small letters."""

    text: str
    detail: str = ""
    style: str = ""


def figure_table(first: str, *others: str, words: Collection[str] = ()) -> Table:
    """Make a terminal table; besides the first column, those in `words` hold text."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column(Text(first), overflow="fold")
    for name in others:
        is_word = name in words
        table.add_column(Text(name), justify="left" if is_word else "right", no_wrap=True)
    return table
