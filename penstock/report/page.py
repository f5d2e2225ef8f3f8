"""The skeleton and the pieces of every self-contained HTML page: it needs no network and no other
file. A fragment is the same for notebooks, without a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.benchmark.findings import Severity
from penstock.report import figures
from penstock.report.figures import LegendKey
from penstock.report.plots import Plot
from penstock.report.tables import Cell

if TYPE_CHECKING:
    from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"
# Width of a plot that has a row of its own.
WIDE = 1160.0


@dataclass(frozen=True, slots=True)
class Card:
    """A figure in large letters. The first of a page says what came of it."""

    name: str
    value: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Remark:
    severity: Severity
    text: str
    place: str = ""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A plot on a page: its name, title and explanation, and the SVG."""

    name: str
    title: str
    text: str
    keys: tuple[LegendKey, ...]
    svg: Markup
    is_wide: bool = False


def drawn(
    plots: Mapping[str, Plot | None], words: Mapping[str, tuple[str, str]], *, has_wide: bool = True
) -> list[Drawn]:
    """Draw the plots that exist, in the order of their words: title and explanation by name. With
    `has_wide`, the last of an odd number has a row of its own."""
    from markupsafe import Markup

    known = [(name, plot) for name in words if (plot := plots.get(name)) is not None]
    found = []
    for index, (name, plot) in enumerate(known):
        is_wide = has_wide and len(known) % 2 == 1 and index == len(known) - 1
        keys, (title, text) = figures.legend(plot), words[name]
        svg = figures.draw(plot, title, WIDE if is_wide else figures.WIDTH)
        if is_wide:
            svg = svg.replace("<svg ", '<svg class="wide-plot" ', 1)
        shown = tuple(keys) if len(keys) > 1 else ()
        found.append(Drawn(name, title, text, shown, Markup(svg), is_wide))
    return found


def rendered(template: str, values: Mapping[str, object], folder: Path = TEMPLATES) -> str:
    """Render a template from `folder`; base templates are always here."""
    import jinja2
    from markupsafe import Markup

    shared = {"css": Markup(_text("style.css")), "script": Markup(_text("page.js"))}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(**values, **shared)


def render_fragment(
    headline: str,
    style: str,
    tiles: Sequence[Card],
    shown: Sequence[Drawn] = (),
    table: tuple[Sequence[str], Sequence[Sequence[Cell]]] = ((), ()),
) -> str:
    """Render the heart of a page for a notebook: the verdict, the tiles, plots and a table."""
    values = {"headline": headline, "style": style, "tiles": tiles, "head": table[0]}
    figures = [replace(each, is_wide=False) for each in shown]
    return rendered("fragment.html.jinja", {**values, "figures": figures, "rows": table[1]})


@cache
def _text(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8").strip()
