"""The benchmark of encoded images, with a tiny network on the CPU: does each way run?"""

import argparse
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("torch")
pytest.importorskip("safetensors")
SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    import images

    return images


def test_each_way_gives_figures_of_the_same_photos(images, tmp_path):
    args = argparse.Namespace(device="cpu", tiny=True, batches=[2])
    photos = [images.draw_sample(60, 40, seed=seed) for seed in range(3)]
    configs = {name: images.write(tmp_path, name, args) for name in images.WAYS}
    floats = [row["image"] for row in images.as_floats(configs["JPEG, GPU"], photos)]
    found = {}
    for name, config in configs.items():
        runner = images.loaded(config, [config.folder])
        given = images.inputs(name, photos, floats, 2)
        found[name] = images.of_batches(runner, given, 0.01)
        assert images.of_pixels(runner, photos) == {}
        runner.close()
        assert images.write_data(tmp_path / "data" / name, name, photos, floats).exists()
    sent = {name: round(each["kB each"] * 1e3) for name, each in found.items()}
    two = (len(photos[0]) + len(photos[1])) // 2
    assert sent["floats"] == 3 * 32 * 32 * 4 and abs(sent["JPEG, GPU"] - two) <= 1
    assert all(each["images/s"] > 0 for each in found.values())
    console = Console(file=io.StringIO(), width=120)
    images.show({"batches of 2": found, "pixels": {"JPEG, GPU": {"mean": 0.5}}}, console)
    assert "JPEG, CPU threads" in console.file.getvalue()
    assert "in steps of 255: mean 0.50" in console.file.getvalue()
