"""Tables, in a terminal and on a page: text on the left, figures on the right."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

# Styles of a terminal for the styles of headlines and cells on pages.
TERMINAL_STYLES = {
    "kept": "bold green",
    "missed": "bold red",
    "mixed": "bold yellow",
    "plain": "bold",
    "kept-text": "green",
    "missed-text": "red",
    "quiet-text": "dim",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table; on a page the detail is in small letters."""

    text: str
    detail: str = ""
    style: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.detail})" if self.detail else self.text


def section(title: str) -> Text:
    return Text.assemble("\n", (title, "bold cyan"))


def bar(part: float, whole: float, width: int, least: str = "█") -> Text:
    """Draw a share of a full bar's `width`, or `least` if it would not be visible."""
    return Text("█" * (round(width * part / whole) if whole else 0) or least, style="cyan")


def figure_table(first: str, *others: str, words: Collection[str] = ()) -> Table:
    """Make a terminal table; besides the first column, those in `words` hold text."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column(Text(first), overflow="fold")
    for name in others:
        table.add_column(Text(name), justify="left" if name in words else "right", no_wrap=True)
    return table


def terminal_table(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Table:
    """Show a page's table in a terminal."""
    table = figure_table(*head)
    for row in rows:
        table.add_row(*(Text(str(cell), TERMINAL_STYLES.get(cell.style, "")) for cell in row))
    return table
