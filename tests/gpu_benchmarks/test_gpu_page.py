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


def served_file(folder: Path) -> Path:
    rates = {"one by one": (910.0, 0.31), "in batches": (3614.0, 0.97)}
    rows = {
        f"fp16 graphs, served {name}": {
            "batches": {
                "128 clients": {
                    "clients": 128, "served_per_s": rate, "utilization": share, "mean_batch": 41.5,
                    "power_watts": 512.3, "p50_ms": 35.4, "p99_ms": 71.2,
                }
            }
        }
        for name, (rate, share) in rates.items()
    }  # fmt: skip
    path = folder / "gpu_detector.json"
    path.write_text(json.dumps({"model": "detector", "techniques": rows}))
    return path


def test_dynamic_batching_is_shown_with_how_busy_the_gpu_was(page, tmp_path) -> None:
    (section,) = page.read([served_file(tmp_path)])
    rows = [[cell.text for cell in row] for row in page.served_table(section.found)]
    assert [row[1:4] for row in rows] == [["128", "910", "31%"], ["128", "3,614", "97%"]]
    # Nothing but requests of clients: not among the figures of batches.
    assert list(page.table(section.found)) == []
    text = page.page([section])
    own = text[: text.index("<script>")]
    assert "YOLO-like detector" in own and "with dynamic batching" in own and "97%" in own


def test_networks_are_side_by_side(page, tmp_path) -> None:
    lines = page.markdown(page.read([*RESULTS, served_file(tmp_path)])).splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    titles = ["ResNet-50", "BERT-large", "YOLO-like detector, 640 x 640"]
    assert table[0] == ["technique", "guides claim", *titles]
    rows = {row[0]: row[1:] for row in table[2:]}
    assert rows["batching"][0] == "3.7x" and rows["batching"][3] == "3.97x (GPU busy 31% → 97%)"
    assert "batch" in rows["fused convolutions"][1] and rows["packing"][3] == page.units.UNKNOWN
    assert "batch" in rows["INT8"][1] and rows["INT8"][2] == page.units.UNKNOWN
    assert all("batch" in each for each in rows["torch.compile"][1:3])
    assert rows["torch.compile"][3] == page.units.UNKNOWN


def test_files_of_other_benchmarks_are_left_out(page, tmp_path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"rows": []}')
    assert len(page.read([other, *RESULTS])) == len(RESULTS)
    with pytest.raises(ConfigError, match=r"other\.json: expected what benchmarks/gpu/run.py"):
        page.read([other])


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


def more_of(path: Path, model: str, folder: Path) -> Path:
    """The same figures as those of another network."""
    copied = folder / f"gpu_{model}.json"
    copied.write_text(json.dumps(json.loads(path.read_text()) | {"model": model}))
    return copied


@pytest.mark.skipif(not CHROMIUM, reason="no chromium to look at the page with")
def test_every_plot_is_drawn_without_errors(page, optimized, tmp_path) -> None:
    others = [more_of(RESULTS[0], name, tmp_path) for name in ("efficientnet-b0", "mobilenet-v2")]
    files = [*RESULTS, optimized, served_file(tmp_path), *others]
    html = page.page(page.read(files)).replace("</body>", f"{MEASURE}</body>")
    done = browse(html, tmp_path, LAPTOP, "--dump-dom")
    plots = drawn(body_of(done.stdout))
    assert plots and all(plots.values()), plots
    for model in ("resnet50", "bert_large", "efficientnet_b0", "mobilenet_v2"):
        assert {f"{name}_{model}" for name in ("gains", "waterfall", "latency", "rates")} <= set(
            plots
        )
    assert "chosen_resnet50" in plots and "errors_bert_large" in plots
    assert console_lines(done) == []
    width = re.search(r"<title>(\d+)</title>", done.stdout)
    assert width is not None and 0 < int(width[1]) <= 1366
