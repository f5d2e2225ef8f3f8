import os
from pathlib import Path

import pytest

from penstock.system import cores


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_no_limit(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    assert cores.read_quota(tmp_path, missing) is None
    write(tmp_path, cpu__max="max 100000\n")
    assert cores.read_quota(tmp_path, missing) is None


def test_the_root_of_a_container(tmp_path: Path) -> None:
    write(tmp_path, cpu__max="150000 100000\n")
    assert cores.read_quota(tmp_path, tmp_path / "none") == 1.5


def test_the_lowest_of_nested_groups_counts(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b", cpu__max="800000 100000\n")
    write(tmp_path / "a", cpu__max="300000 100000\n")
    write(tmp_path / "other", cpu__max="100000 100000\n")
    membership = tmp_path / "membership"
    membership.write_text("0::/a/b\n")
    assert cores.read_quota(tmp_path, membership) == 3.0


def test_version_1(tmp_path: Path) -> None:
    place = tmp_path / "cpu" / "pod"
    write(place, cpu__cfs_quota_us="250000\n", cpu__cfs_period_us="100000\n")
    membership = tmp_path / "membership"
    membership.write_text("4:memory:/pod\n3:cpu,cpuacct:/pod\n")
    assert cores.read_quota(tmp_path, membership) == 2.5
    write(place, cpu__cfs_quota_us="-1\n")
    assert cores.read_quota(tmp_path, membership) is None


@pytest.mark.parametrize(("quota", "expected"), [(None, 6), (2.5, 2), (0.5, 1), (64.0, 6)])
def test_usable_cores(monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(cores, "read_quota", lambda: quota)
    assert cores.usable_cores() == expected
