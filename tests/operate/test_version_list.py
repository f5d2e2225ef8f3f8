"""The versions of a model, with what their evidence says."""

import shutil
from pathlib import Path

import pytest
from committed_versions import add_version, evidence

from penstock.errors import NotFound
from penstock.operate import version_list
from penstock.repository import versions


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    add_version(root)
    add_version(root, made=evidence(0.006, outcome="missed"))
    versions.promote(root, "model", "1")
    versions.promote(root, "model", "2")
    return root


def test_versions_are_listed_with_their_figures(root: Path) -> None:
    first, second = version_list.list_versions(root, "model", loaded=["1"])
    assert (first.model, first.version) == ("model", "1")
    assert (first.is_served, first.is_loaded, first.is_rollback_target) == (False, True, True)
    assert (second.is_served, second.is_loaded, second.is_rollback_target) == (True, False, False)
    assert (first.slo, first.outcome) == ("p99 < 20ms at 200/s poisson", "kept")
    assert (second.outcome, second.p99_s, second.throughput) == ("missed", 0.006, 200.0)
    assert (first.accuracy, first.metric, first.cost_per_million) == (0.91, "top-1", 0.5)
    assert first.hardware == "EPYC, 16 cores, 2 x H200" and first.created.startswith("20")
    files = [path for path in (root / "model" / "1").iterdir() if path.name != "manifest.json"]
    assert first.num_bytes == sum(path.stat().st_size for path in files)


def test_versions_made_by_hand_and_unreadable_ones_are_listed_too(root: Path) -> None:
    shutil.copytree(root / "model" / "1", root / "model" / "3")
    (root / "model" / "3" / "manifest.json").unlink()
    shutil.copytree(root / "model" / "1", root / "model" / "4")
    (root / "model" / "4" / "manifest.json").write_text("{")
    by_hand, damaged = version_list.list_versions(root, "model")[2:]
    assert (by_hand.created, by_hand.outcome, by_hand.p99_s, by_hand.problems) == ("", "", None, [])
    assert by_hand.num_bytes > 0
    assert "4/manifest.json: cannot be read" in damaged.problems[0]


def test_a_model_that_is_not_there_is_not_found(root: Path) -> None:
    with pytest.raises(NotFound):
        version_list.list_versions(root, "other")
