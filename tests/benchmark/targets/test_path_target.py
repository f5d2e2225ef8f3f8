"""Which target a path stands for."""

import pytest
import text_server
from e2e.served import null_model

from penstock.benchmark.targets import TargetSpec
from penstock.benchmark.targets.in_process import InProcess
from penstock.benchmark.targets.in_process_text import InProcessText
from penstock.benchmark.targets.kinds import kind_of, open_target
from penstock.benchmark.targets.path_target import is_text


@pytest.fixture
def root(tmp_path):
    null_model(tmp_path, "m")
    text_server.write_model(tmp_path)
    return tmp_path


def test_a_language_model_takes_text(root):
    specs = [TargetSpec(str(root / "smol")), TargetSpec(str(root), model="smol")]
    for spec in specs:
        assert kind_of(spec) == "in process" and is_text(spec)
        assert isinstance(open_target(spec), InProcessText)


def test_a_gguf_file_is_one(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert is_text(TargetSpec(str(tmp_path / "x.gguf")))


def test_others_take_tensors_and_what_is_wrong_is_told_by_them(root):
    for spec in (
        TargetSpec(str(root / "m")),
        TargetSpec(str(root), model="m"),
        TargetSpec(str(root), model="none"),
        TargetSpec(str(root)),
    ):
        assert not is_text(spec) and isinstance(open_target(spec), InProcess)
