"""Tables of a terminal: words on the left, figures on the right."""

import io

from rich.console import Console

from penstock.report.tables import figure_table


def test_words_are_on_the_left_and_figures_on_the_right() -> None:
    table = figure_table("load", "type", "p99", words={"type"})
    table.add_row("concurrency 8", "a", "1")
    table.add_row("c", "long", "12.5")
    out = io.StringIO()
    Console(file=out, width=60).print(table)
    head, first, second = out.getvalue().splitlines()
    assert first.rstrip().endswith("   1") and second.rstrip().endswith("12.5")
    assert first.index("a") != first.index(" a") and head.startswith("load")
    assert first[14:].startswith("a ") and second[14:].startswith("long ")
