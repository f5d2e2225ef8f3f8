"""The page of the GPU benchmarks: from the files that lie here, drawn in a real browser."""

import json
import re
import sys
from pathlib import Path

import pytest
from browser import CHROMIUM, LAPTOP, MEASURE, body_of, browse, console_lines, drawn

from penstock.errors import ConfigError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RESULTS = [BENCHMARKS / "results" / f"gpu_{name}.json" for name in ("resnet50", "bert-large")]
OPTIMIZED = {
    "chosen": {"steps": [{"pass_name": "half", "settings": {"datatype": "fp16"}}]},
    "phases": [
        {"label": "original", "max_rate": 100.0, "is_measured": True},
        {"label": "half", "max_rate": 180.0, "is_measured": False},
        {"label": "as served", "max_rate": 170.0, "is_measured": True},
    ],
    "tries": [
        {"candidate": {"steps": []}, "outcome": "kept", "reason": "it is the original"},
        {
            "candidate": {"steps": [{"pass_name": "torch-compile"}]},
            "outcome": "rejected",
            "reason": "<b>half as fast</b> as eager",
        },
    ],
}


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS / "gpu"), *sys.path])
    import page

    return page


@pytest.fixture
def optimized(tmp_path: Path) -> Path:
    path = tmp_path / "gpu_optimize_resnet50.json"
    path.write_text(json.dumps(OPTIMIZED))
    return path


def test_what_was_measured_and_claimed_is_on_the_page(page, optimized) -> None:
    text = page.page(page.read([*RESULTS, optimized]))
    own = text[: text.index("<script>")]
    for part in ("ResNet-50", "BERT-large", "NVIDIA H200", "half(datatype=fp16)", "torch-compile"):
        assert part in own
    assert "&lt;b&gt;half as fast" in own
    for claim in page.CLAIMS.values():
        assert claim.source in own


def test_files_of_others_are_named(page, tmp_path) -> None:
    other, broken = tmp_path / "other.json", tmp_path / "broken.json"
    other.write_text("[1]")
    broken.write_text("{")
    with pytest.raises(ConfigError) as caught:
        page.read([other, broken, tmp_path / "none.json", *RESULTS])
    assert len(caught.value.problems) == 3
    assert all("benchmarks/gpu/run.py" in problem for problem in caught.value.problems)


def test_a_file_without_a_row_makes_a_page_too(page, tmp_path) -> None:
    path = tmp_path / "gpu_vit-b.json"
    failed = {"fp32 eager": {"error": "Traceback\nRuntimeError: no memory"}}
    path.write_text(json.dumps({"model": "vit-b", "techniques": failed}))
    text = page.page(page.read([path]))
    assert "Nothing was measured" in text and "RuntimeError: no memory" in text


@pytest.mark.skipif(not CHROMIUM, reason="no chromium to look at the page with")
def test_every_plot_is_drawn_without_errors(page, optimized, tmp_path) -> None:
    html = page.page(page.read([*RESULTS, optimized])).replace("</body>", f"{MEASURE}</body>")
    done = browse(html, tmp_path, LAPTOP, "--dump-dom")
    plots = drawn(body_of(done.stdout))
    assert plots and all(plots.values()), plots
    for model in ("resnet50", "bert_large"):
        assert {f"{name}_{model}" for name in ("gains", "waterfall", "latency", "rates")} <= set(
            plots
        )
    assert "chosen_resnet50" in plots and "errors_bert_large" in plots
    assert console_lines(done) == []
    width = re.search(r"<title>(\d+)</title>", done.stdout)
    assert width is not None and 0 < int(width[1]) <= 1366
