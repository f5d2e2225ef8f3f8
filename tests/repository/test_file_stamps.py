"""What says that a model's files were written."""

import os
from dataclasses import replace
from pathlib import Path

from penstock.config import BatchPolicy, ModelConfig
from penstock.repository.file_stamps import stamps_of

CONFIG = ModelConfig("echo", "1", "null", "", (), (), 0, BatchPolicy(0))


def test_a_version_is_stamped_without_its_configuration(tmp_path: Path) -> None:
    version = tmp_path / "1"
    version.mkdir()
    (tmp_path / "config.pbtxt").write_text("")
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "model.null").write_text("")
    (tmp_path / "warmup").mkdir()
    for name in ("1/model.null", "1/weights.bin", "warmup/first"):
        (tmp_path / name).write_text("x")
    config = replace(CONFIG, artifact=str(version / "model.null"))
    names = sorted(str(path.relative_to(tmp_path)) for path in stamps_of(config))
    assert names == ["1/model.null", "1/weights.bin", "warmup/first"]
    before = stamps_of(config)
    os.utime(version / "weights.bin", ns=(5, 5))
    assert stamps_of(config) != before


def test_of_a_lone_file_nothing_beside_it_counts(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("x")
    (tmp_path / "model.null").write_text("x")
    config = replace(CONFIG, artifact=str(tmp_path / "model.null"))
    assert list(stamps_of(config)) == [tmp_path / "model.null"]
    assert stamps_of(CONFIG) == {}
