"""The page as a real browser sees it: drawn, without errors, the verdict first."""

import re
from pathlib import Path

import pytest
from benchmark import made_runs
from browser import CHROMIUM, LAPTOP, MEASURE, body_of, browse, console_lines, drawn
from PIL import Image

from penstock.report import bench, compare
from penstock.report.compare import Named

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium to look at the page with")


@pytest.mark.parametrize(
    ("name", "first", "plots"),
    [
        (
            "sweep",
            "SLO kept up to concurrency 16, then missed: p99 36.",
            {"curve", "cdf", "breakdown", "over_time", "samples", "utilisation"},
        ),
        (
            "streams",
            "SLO kept at every level: p99 ttft ",
            {"curve", "cdf", "over_time", "streams", "utilisation"},
        ),
        (
            "partial",
            "SLO missed: the server no longer answered after 10 s",
            {"cdf", "breakdown", "over_time", "samples", "utilisation"},
        ),
    ],
)
def test_every_plot_is_drawn_without_errors(
    name: str, first: str, plots: set[str], tmp_path: Path
) -> None:
    makers = {
        "sweep": lambda: made_runs.sweep("p99 < 20ms"),
        "streams": made_runs.streams,
        "partial": made_runs.partial,
    }
    html = bench.page(makers[name]()).replace("</body>", f"{MEASURE}</body>")
    done = browse(html, tmp_path, LAPTOP, "--dump-dom")
    body = body_of(done.stdout)
    seen = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", body)).strip()
    assert seen.startswith(first)
    assert drawn(body) == dict.fromkeys(plots, True)
    assert console_lines(done) == []
    width = re.search(r"<title>(\d+)</title>", done.stdout)
    assert width is not None and 0 < int(width[1]) <= 1366


def test_a_comparison_is_drawn(tmp_path: Path) -> None:
    runs = [Named("a.json", made_runs.sweep()), Named("b.json", made_runs.sweep())]
    done = browse(compare.page(runs), tmp_path, LAPTOP, "--dump-dom")
    assert drawn(body_of(done.stdout)) == {"cdf": True, "curve": True}
    assert console_lines(done) == []


def test_an_error_in_the_page_would_be_seen(tmp_path: Path) -> None:
    html = bench.page(made_runs.open_loop()).replace("draw();\n</script>", "drew();\n</script>")
    done = browse(html, tmp_path, LAPTOP, "--dump-dom")
    assert any("drew is not defined" in line for line in console_lines(done))


@pytest.mark.parametrize("is_dark", [False, True])
def test_a_picture_of_it_is_not_blank(is_dark: bool, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    flags = [f"--screenshot={picture}", "--window-size=1366,2400"]
    flags += ["--force-dark-mode"] if is_dark else []
    browse(bench.page(made_runs.sweep("p99 < 20ms")), tmp_path, *flags)
    with Image.open(picture) as image:
        assert image.size == (1366, 2400)
        counts = image.convert("RGB").getcolors(maxcolors=1 << 24)
    colours = {colour: count for count, colour in counts}
    most = max(colours, key=lambda colour: colours[colour])
    # The background is most of it, and far from all.
    assert 0.2 < colours[most] / (1366 * 2400) < 0.9
    assert len(colours) > 50
    assert (sum(most) < 3 * 64) is is_dark
