"""The skeleton of every self-contained HTML page, and the pieces pages are made of."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.benchmark.findings import Severity
from penstock.errors import ConfigError
from penstock.report import bench_figures

if TYPE_CHECKING:
    from markupsafe import Markup

HERE = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    value: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    detail: str = ""
    style: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    severity: Severity
    text: str
    place: str = ""


def rendered(
    template: str,
    values: Mapping[str, Any],
    figures: Mapping[str, Any],
    folder: Path | None = None,
) -> str:
    """Render a template from `folder`, or from here by default; base templates are always here."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder or HERE, HERE]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    scripts = {
        "plotly_js": Markup(_plotly_js()),
        "plots_json": _embedded(bench_figures.plain(figures)),
    }
    return environment.get_template(template).render(**values, **scripts)


def _embedded(value: Any) -> Markup:
    """Encode JSON that cannot close the element around it."""
    from markupsafe import Markup

    text = msgspec.json.encode(value).decode()
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)


def _plotly_js() -> str:
    # Located without importing plotly, which takes a second.
    spec = importlib.util.find_spec("plotly")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        path = Path(folder) / "package_data" / "plotly.min.js"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise ConfigError(["the page needs plotly, which is not installed: pip install plotly"])
