"""Every page: small, self-contained, readable on a phone."""

import re
import tomllib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from benchmark import made_runs
from benchmark.made_runs import Server
from browser import CHROMIUM, on_phone
from optimizer import made_optimizations as made

from penstock.benchmark.comparison import Named
from penstock.benchmark.pacer import Closed
from penstock.benchmark.results import BenchRun
from penstock.optimizer.candidates import Candidate, Step
from penstock.optimizer.results import Optimization
from penstock.profiling.results import Profile
from penstock.report import bench, compare, figures, optimize, page, plots
from penstock.report import profile as profiles
from penstock.report.plots import Axis, Plot, Series

MAX_BYTES = 300_000
VOID = {"meta", "br", "img", "input", "hr"}


class Tags(HTMLParser):
    """The elements that are open; AssertionError for one that is closed out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def large_run() -> BenchRun:
    """200,000 requests at 20 levels, with a long recording of the machine."""
    levels = [
        made_runs.level(Closed(number), Server(median_s=0.0005), span_s=4.0, seed=number)
        for number in range(1, 21)
    ]
    for level in levels:
        level.windows = level.windows * 12
        level.system = [
            msgspec.structs.replace(level.system[i % len(level.system)], at_s=float(i))
            for i in range(600)
        ]
    return made_runs.run(levels)


def large_optimization() -> Optimization:
    """40 candidates, each with its gates and a long reason."""
    found = made.kept()
    tries = [
        msgspec.structs.replace(
            found.tries[index % len(found.tries)],
            candidate=Candidate((Step("onnx-export"), Step("half", {"number": str(index)}))),
            reason="a reason in many words " * 4,
        )
        for index in range(40)
    ]
    found.tries = [*found.tries, *tries]
    return found


def large_profile(profile: Profile) -> Profile:
    operators = profile.operators * 1000
    profile.operators = [
        msgspec.structs.replace(each, name=f"/encoder/layer.{index}/{each.name}")
        for index, each in enumerate(operators)
    ]
    return profile


@pytest.fixture(scope="module")
def runs() -> dict[str, BenchRun]:
    return {"large": large_run()}


def pages(profile: Profile, run: BenchRun) -> dict[str, str]:
    return {
        "bench": bench.page(run),
        "compare": compare.page([Named("a.json", run), Named("b.json", run)]),
        "optimize": optimize.page(large_optimization()),
        "profile": profiles.page(large_profile(profile)),
    }


@pytest.fixture(scope="module")
def made_once() -> dict[str, str]:
    return {}


@pytest.fixture
def large_pages(profile, runs, made_once: dict[str, str]) -> dict[str, str]:
    if not made_once:
        made_once |= pages(profile, runs["large"])
    return made_once


@pytest.mark.slow
def test_large_results_make_small_pages_that_are_well_formed(runs, large_pages) -> None:
    num_requests = sum(w.num_due for level in runs["large"].levels for w in level.windows)
    assert num_requests > 200_000
    for name, text in large_pages.items():
        assert len(text.encode()) <= MAX_BYTES, name
        tags = Tags()
        tags.feed(text)
        assert tags.open == [], name
        drawings = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
        assert drawings, name
        for each in drawings:
            ElementTree.fromstring(each)


def test_pages_name_no_address_to_load_from(large_pages) -> None:
    for name, text in large_pages.items():
        assert not re.search(r"""(src|href)\s*=|@import|url\(|fetch\(|XMLHttp""", text), name
        assert "default-src 'none'" in text


def test_levels_that_do_not_fit_are_counted(large_pages) -> None:
    text = large_pages["bench"]
    num_drawn = text.count("<div data-level=")
    assert 1 <= num_drawn <= 20
    if num_drawn < 20:
        assert f"{20 - num_drawn} further levels are left out" in text
    # The table has all of them.
    assert text.count("<tr><td>") >= 20


def test_no_paragraph_is_bold(large_pages) -> None:
    for name, text in large_pages.items():
        own = re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL)
        assert not re.search(r"<(b|strong)[ >]", own), name


@pytest.mark.parametrize("kind", ["bench", "compare", "optimize", "profile"])
def test_fragments_for_notebooks_hold_the_verdict_and_a_plot(kind: str, profile) -> None:
    run = made_runs.sweep("p99 < 20ms")
    makers: dict[str, Callable[[], str]] = {
        "bench": lambda: bench.fragment(run),
        "compare": lambda: compare.fragment([Named("a.json", run), Named("b.json", run)]),
        "optimize": lambda: optimize.fragment(made.kept()),
        "profile": lambda: profiles.fragment(profile),
    }
    text = makers[kind]()
    assert "<svg" in text and 'class="verdict' in text and "first" in text
    assert "<script" not in text and "<html" not in text
    assert len(text.encode()) < 100_000


def test_the_last_of_an_odd_number_of_plots_is_wide() -> None:
    plot = Plot(Axis(), Axis(), (Series("a", (0.0, 1.0), (0.0, 1.0), plots.BLUE),))
    words = {name: (name, "") for name in "abc"}
    found = page.drawn({"a": plot, "b": None, "c": plot}, words)
    assert [each.is_wide for each in found] == [False, False]
    found = page.drawn(dict.fromkeys("abc", plot), words)
    assert [each.is_wide for each in found] == [False, False, True]
    assert f'viewBox="0 0 {page.WIDE:.0f}' in found[2].svg
    assert f'viewBox="0 0 {figures.WIDTH:.0f}' in found[0].svg


def test_no_plotting_library_is_installed_with_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    everything = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.split(r"[^\w-]", each)[0] for group in everything for each in group}
    assert not names & {"plotly", "kaleido", "matplotlib", "bokeh", "altair"}


@pytest.mark.skipif(not CHROMIUM, reason="no chromium to look at the page with")
@pytest.mark.parametrize("kind", ["bench", "streams", "compare", "optimize", "text", "profile"])
def test_no_page_scrolls_sideways_on_a_phone(kind: str, profile, tmp_path: Path) -> None:
    run = made_runs.sweep("p99 < 20ms")
    makers: dict[str, Callable[[], str]] = {
        "bench": lambda: bench.page(run),
        "streams": lambda: bench.page(made_runs.streams()),
        "compare": lambda: compare.page([Named("a.json", run), Named("b.json", run)]),
        "optimize": lambda: optimize.page(made.kept()),
        "text": lambda: optimize.page(made.text()),
        "profile": lambda: profiles.page(profile, "penstock profile " + "models/encoder" * 9),
    }
    width, sticking_out = on_phone(makers[kind](), tmp_path)
    assert 0 < width <= 390 and sticking_out == ""
