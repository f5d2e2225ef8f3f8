"""Which file each backend loads, and configurations worked out from those of torch and OpenVINO."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.config import ModelConfig
from penstock.repository.layout import read
from penstock.repository.pbtxt import describe, parse, resolve
from penstock.types import TensorSpec

WriteOnnx = Callable[..., Path]
TENSORS = """
input { name: "x" data_type: TYPE_FP32 dims: [ 3 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 3 ] }
"""


def add_version(root: Path, config: str | None = None, *files: str) -> Path:
    """`<root>/model/1` with empty files."""
    version = root / "model" / "1"
    version.mkdir(parents=True)
    if config is not None:
        (root / "model" / "config.pbtxt").write_text(config)
    for file in files:
        (version / file).touch()
    return version


def resolved(root: Path) -> ModelConfig:
    found = read(root)
    assert found.problems == {}
    [config] = found.configs
    return config


def problems(root: Path) -> list[str]:
    found = read(root)
    assert found.configs == []
    return found.problems["model"]


@pytest.mark.parametrize(
    ("backend", "files", "chosen"),
    [
        ("pytorch", ["module.py", "model.pt2"], "model.pt2"),
        ("pytorch", ["module.py", "model.safetensors"], "module.py"),
        ("openvino", ["model.onnx", "model.xml", "model.bin"], "model.xml"),
        ("openvino", ["model.onnx"], "model.onnx"),
    ],
)
def test_the_first_usual_file_that_exists_is_loaded(
    tmp_path: Path, backend: str, files: list[str], chosen: str
) -> None:
    version = add_version(tmp_path, f'backend: "{backend}"' + TENSORS, *files)
    assert Path(resolved(tmp_path).artifact) == version / chosen


@pytest.mark.parametrize(
    ("file", "backend"),
    [
        ("model.onnx", "onnxruntime"),
        ("model.py", "python"),
        ("model.pt2", "pytorch"),
        ("module.py", "pytorch"),
        ("model.xml", "openvino"),
    ],
)
def test_the_file_tells_the_backend(tmp_path: Path, file: str, backend: str) -> None:
    add_version(tmp_path, TENSORS, file)
    assert resolved(tmp_path).backend == backend


@pytest.mark.parametrize(("backend", "file"), [("pytorch", "model.pt2"), ("openvino", "model.xml")])
def test_missing_file_is_named(tmp_path: Path, backend: str, file: str) -> None:
    add_version(tmp_path, f'backend: "{backend}"' + TENSORS)
    assert problems(tmp_path) == [f"1/{file}: no such file"]


def test_module_without_tensors_shows_what_is_missing(tmp_path: Path) -> None:
    add_version(tmp_path, None, "module.py")
    [problem] = problems(tmp_path)
    assert problem.startswith("input, output: must be given for backend 'pytorch', for example: ")
    example = problem.partition("for example: ")[2]
    config = resolve(parse('backend: "pytorch" ' + example), "model", tmp_path / "model" / "1")
    assert [spec.name for spec in (*config.inputs, *config.outputs)] == ["x", "y"]


def write_script(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:  # as torch.jit.save lays it out
        for name in ("data.pkl", "constants.pkl", "code/__torch__.py", "version"):
            archive.writestr(f"model/{name}", b"")


@pytest.mark.parametrize("text", ['platform: "pytorch_libtorch"', 'backend: "pytorch"', ""])
def test_torchscript_is_served_with_a_warning(tmp_path: Path, text: str) -> None:
    add_version(tmp_path, text + TENSORS, "model.pt")
    write_script(tmp_path / "model" / "1" / "model.pt")
    config = resolved(tmp_path)
    assert (config.backend, config.platform) == ("pytorch", "pytorch_libtorch")
    [warning] = config.warnings
    assert warning.startswith("1/model.pt: is TorchScript, which PyTorch has deprecated")
    assert "torch.export.save" in warning


def test_torchscript_needs_its_tensors(tmp_path: Path) -> None:
    add_version(tmp_path, 'platform: "pytorch_libtorch"', "model.pt")
    write_script(tmp_path / "model" / "1" / "model.pt")
    [problem] = problems(tmp_path)
    assert problem.startswith("input, output: must be given for backend 'pytorch', for example: ")


def test_platform_of_compiled_packages_is_the_same_backend(tmp_path: Path) -> None:
    add_version(tmp_path, 'platform: "torch_aoti"' + TENSORS, "model.pt2")
    assert resolved(tmp_path).backend == "pytorch"


@pytest.mark.parametrize("file", ["model.pt", "weights.pth"])
def test_pickles_are_refused_with_the_way_out(tmp_path: Path, file: str) -> None:
    name = "" if file == "model.pt" else f'default_model_filename: "{file}"'
    add_version(tmp_path, f'backend: "pytorch" {name}' + TENSORS, file)
    [problem] = problems(tmp_path)
    assert problem.startswith(f"1/{file}: is no TorchScript archive, but perhaps a pickle")
    assert "torch.export.save as model.pt2" in problem


def test_options_of_torch_are_its_own(tmp_path: Path) -> None:
    options = "".join(
        f'parameters {{ key: "penstock.{key}" value {{ string_value: "{text}" }} }}'
        for key, text in {"factory": "build", "compile": "default", "dtype": "bf16"}.items()
    )
    add_version(tmp_path / "torch", 'backend: "pytorch"' + TENSORS + options, "module.py")
    assert resolved(tmp_path / "torch").options["penstock.dtype"] == "bf16"
    add_version(tmp_path / "onnx", 'backend: "onnxruntime"' + TENSORS + options, "model.onnx")
    # The others are for GPUs, where torch runs ONNX files too.
    (problem,) = problems(tmp_path / "onnx")
    assert problem.startswith("parameters.penstock.factory:")


def export(path: Path, max_rows: int | None) -> None:
    torch = pytest.importorskip("torch")
    dims = {0: torch.export.Dim("batch", min=1, max=max_rows)} if max_rows else {}
    program = torch.export.export(
        torch.nn.Linear(3, 2).eval(), (torch.zeros(2, 3),), dynamic_shapes=(dims,)
    )
    torch.export.save(program, path)


@pytest.mark.parametrize(("max_rows", "max_batch"), [(16, 16), (1000, 64)])
def test_exported_program_needs_no_configuration(
    tmp_path: Path, max_rows: int, max_batch: int
) -> None:
    export(add_version(tmp_path) / "model.pt2", max_rows)
    config = resolved(tmp_path)
    assert config.backend == "pytorch"
    assert config.inputs == (TensorSpec("input", "FP32", (3,)),)
    assert config.outputs == (TensorSpec("OUTPUT__0", "FP32", (2,)),)
    assert config.max_batch_size == max_batch
    assert config.batching.is_dynamic
    again = resolve(parse(describe(config)), "model", tmp_path / "model" / "1")
    assert again == config


def test_exported_program_of_one_size_has_no_batch_dimension(tmp_path: Path) -> None:
    export(add_version(tmp_path) / "model.pt2", None)
    config = resolved(tmp_path)
    assert config.inputs == (TensorSpec("input", "FP32", (2, 3)),)
    assert config.max_batch_size == 0


def test_broken_program_is_told_with_its_path(tmp_path: Path) -> None:
    add_version(tmp_path, None, "model.pt2")
    [problem] = problems(tmp_path)
    assert problem.startswith("1/model.pt2: cannot be read as .pt2: ")


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
def test_openvino_model_needs_only_its_backend(
    tmp_path: Path, write_identity: WriteOnnx, suffix: str
) -> None:
    version = add_version(tmp_path, 'backend: "openvino"')
    artifact = write_identity(version / "model.onnx", "INT32", ("batch", "length"))
    if suffix == ".xml":
        ov = pytest.importorskip("penstock.backends.openvino").ov
        ov.save_model(ov.Core().read_model(artifact), artifact.with_suffix(".xml"))
        artifact.unlink()
        (tmp_path / "model" / "config.pbtxt").unlink()
    config = resolved(tmp_path)
    assert config.backend == "openvino"
    assert config.artifact.endswith(suffix)
    assert config.inputs == (TensorSpec("x0", "INT32", (-1,)),)
    assert config.max_batch_size == 64


def test_broken_ir_is_told_with_its_path(tmp_path: Path) -> None:
    add_version(tmp_path, None, "model.xml")
    [problem] = problems(tmp_path)
    assert problem.startswith("1/model.xml: cannot be read as OpenVINO IR: ")
