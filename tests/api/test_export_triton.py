"""`penstock export triton`: what is written answers like the original. Here Penstock loads it as a
Triton repository; tests/e2e/test_triton_export.py has a real Triton."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from exported_models import MODELS, add_models, inputs_of, triton_inputs_of

import penstock
import penstock.cli
from penstock.api.export_triton import export_triton
from penstock.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples" / "repository"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    add_models(root / "from")
    done = export_triton(str(root / "from"), str(root / "to"))
    assert done.problems == []
    return root / "from", root / "to"


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_python_model_answers_like_the_original(
    exported: tuple[Path, Path], name: str
) -> None:
    original, copy = exported
    with penstock.load(str(original / name)) as model:
        expected = model.infer(inputs_of(name))
    with penstock.load(str(copy / name)) as model:
        found = model.infer(triton_inputs_of(name))
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key].ravel().tolist() == values.ravel().tolist()


def test_files_beside_the_model_and_declarations_come_along(exported: tuple[Path, Path]) -> None:
    _, made = exported
    files = {each.name for each in (made / "declared" / "1").iterdir()} - {"__pycache__"}
    assert files == {"model.py", "penstock_model.py", "penstock.py", "helper.py"}
    assert not (made / "triton" / "1" / "penstock_model.py").exists()


def test_files_of_other_backends_are_copied_under_their_names(tmp_path: Path) -> None:
    done = export_triton(str(EXAMPLES), str(tmp_path / "to"))
    assert done.problems == []
    digits = tmp_path / "to" / "digits"
    assert (digits / "1" / "model.onnx").read_bytes() == (
        EXAMPLES / "digits" / "1" / "model.onnx"
    ).read_bytes()
    assert (digits / "labels.txt").read_text().splitlines()[:2] == ["zero", "one"]


def test_a_bare_file_becomes_a_repository(tmp_path: Path) -> None:
    export_triton(str(EXAMPLES / "digits" / "1" / "model.onnx"), str(tmp_path))
    assert (tmp_path / "model" / "1" / "model.onnx").is_file()
    assert 'platform: "onnxruntime_onnx"' in (tmp_path / "model" / "config.pbtxt").read_text()


def test_torchscript_is_copied_and_other_programs_are_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    config = (
        'backend: "pytorch" input { name: "x" data_type: TYPE_FP32 dims: 3 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 3 }'
    )
    for name in ("script", "program"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
    with pytest.warns(DeprecationWarning):
        torch.jit.save(torch.jit.trace(torch.nn.ReLU(), torch.ones(3)), tmp_path / "script.pt")
    (tmp_path / "script.pt").rename(tmp_path / "script" / "1" / "model.pt")
    program = torch.export.export(torch.nn.ReLU(), (torch.ones(3),))
    torch.export.save(program, tmp_path / "program" / "1" / "model.pt2")
    done = export_triton(str(tmp_path), str(tmp_path / "to"))
    [problem] = done.problems
    assert problem.startswith("program: model.pt2: Triton runs AOTInductor packages")
    assert not (tmp_path / "to" / "program").exists()
    text = (tmp_path / "to" / "script" / "config.pbtxt").read_text()
    assert 'platform: "pytorch_libtorch"' in text
    assert (tmp_path / "to" / "script" / "1" / "model.pt").is_file()


def test_models_of_an_earlier_export_are_replaced_and_others_kept(tmp_path: Path) -> None:
    export_triton(str(EXAMPLES / "digits"), str(tmp_path))
    (tmp_path / "digits" / "9").mkdir()
    export_triton(str(EXAMPLES / "digits"), str(tmp_path))
    assert not (tmp_path / "digits" / "9").exists()
    (tmp_path / "digits" / "config.pbtxt").write_text("max_batch_size: 1")
    with pytest.raises(ConfigError, match="digits: not written by penstock export triton"):
        export_triton(str(EXAMPLES / "digits"), str(tmp_path))


def test_versions_with_another_configuration_are_left_out_with_a_note(tmp_path: Path) -> None:
    add_models(tmp_path / "from")
    model = tmp_path / "from" / "arrays"
    (model / "2").mkdir()
    (model / "2" / "model.py").write_text((model / "1" / "model.py").read_text())
    text = (model / "config.pbtxt").read_text()
    (model / "2" / "config.pbtxt").write_text(
        text.replace("max_batch_size: 8", "max_batch_size: 4")
    )
    (model / "config.pbtxt").write_text(text + "version_policy { all { } }")
    [found] = export_triton(str(model), str(tmp_path / "to")).models
    assert any(note.startswith("version 1 is not exported: its") for note in found.notes)
    assert not (tmp_path / "to" / "arrays" / "1").exists()
    assert (tmp_path / "to" / "arrays" / "2" / "model.py").is_file()


def test_the_command_prints_files_notes_and_the_next_step(tmp_path: Path) -> None:
    typed = ["export", "triton", str(EXAMPLES / "digits"), "--out", str(tmp_path)]
    done = CliRunner().invoke(penstock.cli.main, typed)
    assert done.exit_code == 0, done.output
    assert f"{tmp_path}/digits/1/model.onnx" in done.stdout
    assert "  digits: the queue is unbounded" in done.stdout
    assert f"tritonserver --model-repository={tmp_path}" in done.stdout


def test_inputs_are_numpy_of_the_declared_types() -> None:
    for name in MODELS:
        assert all(isinstance(array, np.ndarray) for array in inputs_of(name).values())
