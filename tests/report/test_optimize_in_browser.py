"""An optimisation's page as a real browser sees it: drawn, without errors, the verdict first."""

import re
from pathlib import Path

import pytest
from browser import CHROMIUM, LAPTOP, MEASURE, body_of, browse, console_lines, drawn
from optimizer import made_optimizations as made

from penstock.report import optimize as optimize_report

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium to look at the page with")

STEPS = {"rate_steps", "latency_steps", "accuracy_steps", "cost_steps"}
TEXT = {"rate_steps", "latency_steps", "accuracy_steps", "pareto"}
TEXT |= {"ttft_curves", "tpot_curves"}
REST = {"pareto", "curves", "phases", "roofline"}


@pytest.mark.parametrize(
    ("name", "first", "plots"),
    [
        ("kept", "SLO kept: p99 11.8 ms", STEPS | REST),
        ("unknown-figures", "SLO missed by 34 %: p99 26.8 ms", STEPS | REST),
        ("refused", "Refused by the accuracy gate: all 2 candidates", REST),
        ("disturbed", "No verdict: load average 3.9 on 2 cores", STEPS | REST),
        ("text", "SLO kept: p99 ttft 180 ms", TEXT),
        ("already-met", "SLO kept by the original: p99 14.2 ms", {"curves", "phases"}),
    ],
)
def test_every_plot_is_drawn_without_errors(
    name: str, first: str, plots: set[str], tmp_path: Path
) -> None:
    html = optimize_report.page(made.MAKERS[name]()).replace("</body>", f"{MEASURE}</body>")
    done = browse(html, tmp_path, LAPTOP, "--dump-dom")
    body = body_of(done.stdout)
    seen = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", body)).strip()
    assert seen.startswith(first)
    assert drawn(body) == dict.fromkeys(plots, True)
    assert console_lines(done) == []
    width = re.search(r"<title>(\d+)</title>", done.stdout)
    assert width is not None and 0 < int(width[1]) <= 1366
