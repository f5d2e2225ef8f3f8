"""Two versions side by side: configuration, files, evidence."""

from dataclasses import replace
from pathlib import Path

import pytest
from committed_versions import CONFIG, add_version, evidence

from penstock.errors import ConfigError, NotFound
from penstock.operate import version_diff
from penstock.repository import versions


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    add_version(root, b"one", old=b"o", same=b"s")
    add_version(root, b"second", new=b"nn", same=b"s", made=evidence(0.006))
    return root


def test_files_are_compared_by_digest(root: Path) -> None:
    found = version_diff.compare(root, "model", "1", "2")
    assert [(f.name, f.change, f.a_bytes, f.b_bytes) for f in found.files] == [
        ("new", "added", None, 2),
        ("old", "removed", 1, None),
        ("weights", "changed", 3, 6),
    ]
    assert (found.model, found.a, found.b, found.config, found.notes) == ("model", "1", "2", [], [])


def test_figures_have_ratios(root: Path) -> None:
    found = version_diff.compare(root, "model", "1", "2")
    rows = {row.name: (row.unit, row.a, row.b, row.ratio) for row in found.figures}
    assert rows["p99"] == ("s", 0.012, 0.006, 0.5)
    assert rows["max rate"][3] == pytest.approx(2.0)
    assert rows["accuracy"] == ("", 0.91, 0.91, 1.0)
    assert "GPU memory" not in rows, "neither has it"
    assert found.a_steps == found.b_steps == ["int8(granularity=tensor)", "fold"]


def test_configurations_are_compared_by_line(root: Path, tmp_path: Path) -> None:
    changed = replace(CONFIG, num_instances=3)
    versions.commit(root, "model", root / "model" / "1", changed, evidence())
    lines = version_diff.compare(root, "model", "1", "3").config
    assert lines[:2] == ["--- 1/config.pbtxt", "+++ 3/config.pbtxt"]
    assert any(line.startswith("+") and "3" in line for line in lines[2:])


def test_versions_that_cannot_be_compared_fairly_are_noted(root: Path) -> None:
    other = evidence(slo="p99 < 5ms", hardware={"cpu": "Xeon", "num_cores": 2})
    add_version(root, made=other)
    notes = version_diff.compare(root, "model", "1", "3").notes
    assert notes == [
        "hardware differs: EPYC, 16 cores, 2 x H200 for version 1, Xeon, 2 cores for version 3",
        "SLO differs: p99 < 20ms at 200/s poisson for version 1, p99 < 5ms for version 3",
    ]
    add_version(root, made={})
    assert version_diff.compare(root, "model", "1", "4").notes == ["version 4 has no evidence"]
    rows = version_diff.compare(root, "model", "1", "4").figures
    assert all(row.b is None and row.ratio is None for row in rows) and rows


def test_versions_made_by_hand_are_read(root: Path) -> None:
    for version in ("1", "2"):
        (root / "model" / version / "manifest.json").unlink()
    found = version_diff.compare(root, "model", "1", "2")
    assert [each.name for each in found.files] == ["new", "old", "weights"]


def test_a_version_is_equal_to_itself(root: Path) -> None:
    found = version_diff.compare(root, "model", "1", "1")
    assert (found.config, found.files, found.notes) == ([], [], [])
    assert {row.ratio for row in found.figures} == {1.0}


def test_files_outside_the_repository_are_not_shown(root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("name: 'secret'")
    config = root / "model" / "2" / "config.pbtxt"
    config.unlink()
    config.symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="model/2/config.pbtxt: a link that leads out") as caught:
        version_diff.compare(root, "model", "1", "2")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("a, b", [("1", "3"), ("0", "1"), ("../model/1", "2")])
def test_versions_that_are_not_there_are_not_found(root: Path, a: str, b: str) -> None:
    with pytest.raises(NotFound):
        version_diff.compare(root, "model", a, b)
