"""`penstock import triton`: served, different or refused, for every model."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import penstock.cli
from penstock.api.import_triton import import_triton
from penstock.errors import ConfigError

PYTHON = """
backend: "python" max_batch_size: 4 %s
input { name: "x" data_type: TYPE_FP32 dims: 3 } output { name: "y" data_type: TYPE_FP32 dims: 3 }
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, text in (
        ("fine", PYTHON % 'instance_group { profile: "0" }'),
        ("other", PYTHON % 'model_operations { op_library_filename: "ops.so" }'),
        ("graph", 'platform: "tensorflow_graphdef"'),
    ):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.py").write_text("def infer(x):\n    return {'y': x['x']}\n")
        (tmp_path / name / "config.pbtxt").write_text(text)
    return tmp_path


def test_every_model_is_in_the_report(repository: Path):
    found = import_triton(str(repository))
    fine, graph, other = found.models
    assert fine.refused == ()
    [version] = fine.versions
    assert version.served == "python; instances: 1 on cpu; each request alone"
    assert any("profile: has no effect" in text for text in version.differs)
    assert "python -m tf2onnx.convert --graphdef" in graph.refused[0]
    assert other.refused[0].startswith("model_operations: not supported")
    assert str(found).splitlines()[-1] == "1 of 3 models are served"


def test_the_command_fails_if_a_model_is_refused_and_writes_json(repository: Path):
    done = CliRunner().invoke(penstock.cli.main, ["import", "triton", str(repository)])
    assert done.exit_code == 1
    assert "other: refused" in done.stdout
    assert "2 of 3 models refused" in done.stderr
    done = CliRunner().invoke(
        penstock.cli.main, ["import", "triton", str(repository / "fine"), "--json", "-"]
    )
    assert done.exit_code == 0
    assert json.loads(done.stdout)["models"][0]["name"] == "fine"


def test_a_path_without_models_is_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such file or folder"):
        import_triton(str(tmp_path / "none"))
