"""Links among the files of a model, and where they lead."""

from pathlib import Path

import pytest

from penstock.repository.links import find_outward, is_shared, leads_out, walk


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a file, a folder, and a secret outside."""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "root" / "inner").mkdir(parents=True)
    (tmp_path / "root" / "plain").write_text("plain")
    return tmp_path / "root"


def test_links_that_lead_out_are_found_wherever_they_are(root: Path) -> None:
    (root / "inside").symlink_to("plain")
    (root / "inner" / "up").symlink_to("../plain")
    (root / "inner" / "out").symlink_to("../../secret")
    (root / "folder").symlink_to("..")
    (root / "chain").symlink_to("inner/out")
    assert find_outward([root], root) == [root / "chain", root / "folder", root / "inner" / "out"]
    assert find_outward([root / "plain", root / "missing"], root) == []
    assert find_outward([root / "chain"], root) == [root / "chain"]


def test_a_link_to_itself_or_to_nothing_is_judged_by_its_place(root: Path) -> None:
    (root / "loop").symlink_to("loop")
    (root / "nothing").symlink_to("missing")
    assert not any(leads_out(root / name, root) for name in ("loop", "nothing"))
    assert find_outward([root / "nothing"], root) == []
    assert leads_out(root / ".." / "missing", root)


def test_linked_folders_are_not_entered(root: Path) -> None:
    (root / "inner" / "again").symlink_to("..")
    assert list(walk(root / "inner")) == [root / "inner", root / "inner" / "again"]
    assert list(walk(root / "inner" / "again")) == [root / "inner" / "again"]


def test_links_below_a_linked_folder_are_found(root: Path) -> None:
    (root / "inner" / "out").symlink_to("../../secret")
    (root / "version").symlink_to("inner")
    assert find_outward([root / "version"], root) == [root / "inner" / "out"]


def test_only_files_are_shared(root: Path) -> None:
    assert not any(map(is_shared, (root, root / "plain", root / "missing")))
    (root.parent / "twin").hardlink_to(root / "plain")
    assert is_shared(root / "plain")
